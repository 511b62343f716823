"""Labels become class numbers: names in alphabetical order, numbers as they are."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SnapvitError

MOST_CLASSES = 100_000  # a larger number is an identity or a mistake, not a class


def by_name(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Number the classes in alphabetical order, as training sets in folders do: (labels, classes)."""
    classes = sorted(set(names))
    numbers = {name: number for number, name in enumerate(classes)}
    return [numbers[name] for name in names], classes


def by_number(numbers: Sequence[int], where: str) -> tuple[list[int], list[str]]:
    """Take the labels as the class numbers they are: (labels, classes)."""
    smallest, largest = min(numbers), max(numbers)
    if smallest < 0 or largest >= MOST_CLASSES:
        wrong = smallest if smallest < 0 else largest
        raise SnapvitError(f"{where}: label {wrong} is not a class number. Labels count from 0 to {MOST_CLASSES - 1}")
    return [int(number) for number in numbers], [str(number) for number in range(largest + 1)]
