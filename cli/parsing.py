"""Options that hold several numbers: `0.1,0.3` and `0.35:0.2`."""

from __future__ import annotations

from ..errors import UsageError


def fractions(text: str | None, option: str) -> list[float]:
    """Parse `0.1,0.3`; what the numbers may be is for the Planner to say."""
    if text is None:
        return []
    return [_number(part, option, "0.1,0.3") for part in text.split(",")]


def pairs(text: str | None, option: str) -> list[tuple[float, float]]:
    """Parse `0.35:0.2,0.65:0.5`: the ratio of neurons and of heads to cut."""
    if text is None:
        return []
    found = []
    for part in text.split(","):
        mlp, colon, head = part.partition(":")
        if not colon:
            raise UsageError(f"{option} '{part}' is not a pair. Write the ratio of neurons and of heads as 0.35:0.2")
        found.append((_number(mlp, option, "0.35:0.2"), _number(head, option, "0.35:0.2")))
    return found


def _number(text: str, option: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option} '{text}' is not a number. Write it like {example}") from None
