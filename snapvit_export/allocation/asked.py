"""Lists of targets that a user asks for, such as fractions: named as variants are, and no two of them alike. Light."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError

Target = float | tuple[float, float] | tuple[int, int]  # a fraction or pixels; a pair of ratios; height and width


def percent(fraction: float) -> str:
    """Return a fraction as the names of variants have it.

    >>> percent(0.5), percent(0.125)
    ('50', '12.5')
    """
    return f"{100 * fraction:g}"


def refuse_same(option: str, targets: Sequence[Target]) -> None:
    """Refuse targets that would get one name, of which all but the last would be lost: 0.5 and 0.50000001."""
    seen: dict[str, Target] = {}
    for target in targets:
        name = _name(target)
        if name in seen:
            raise UsageError(f"{option} has {_shown(seen[name])} and {_shown(target)}, which are one variant. Give one")
        seen[name] = target


def _name(target: Target) -> str:
    if isinstance(target, tuple):
        first, second = target
        return f"{first}x{second}" if isinstance(first, int) else f"{percent(first)}:{percent(second)}"
    return f"{target}x{target}" if isinstance(target, int) else percent(target)


def _shown(target: Target) -> str:
    if not isinstance(target, tuple):
        return str(target)
    return ("x" if isinstance(target[0], int) else ":").join(map(str, target))
