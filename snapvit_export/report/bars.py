"""Bars for the terminal: eighths of a block where the stream can write them, `#` where it cannot. Light."""

from __future__ import annotations

import io
from typing import TextIO

EIGHTHS = " ▏▎▍▌▋▊▉█"
WIDTH = 12  # characters


def can_write(file: TextIO, text: str = EIGHTHS) -> bool:
    """Whether the stream's encoding has these characters."""
    if isinstance(file, io.StringIO):
        return True
    try:
        text.encode(getattr(file, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar(share: float, width: int = WIDTH, ascii_only: bool = False) -> str:
    """A bar of that share of the width, from 0 to 1, padded with spaces.

    >>> bar(0.5, 4)
    '██  '
    """
    inside = min(max(share, 0.0), 1.0)
    if ascii_only:
        return ("#" * round(inside * width)).ljust(width)
    eighths = round(inside * width * 8)
    last = EIGHTHS[eighths % 8] if eighths % 8 else ""
    return ("█" * (eighths // 8) + last).ljust(width)


def bars(
    values: list[float | None], limit: float | None = None, width: int = WIDTH, ascii_only: bool = False
) -> list[str]:
    """A bar for each value, in the same scale, the longest full; `limit` is marked in each of them, as a budget is."""
    known = [value for value in values if value is not None]
    most = max([*known, limit or 0.0], default=0.0) or 1.0
    found = ["" if value is None else bar(value / most, width, ascii_only) for value in values]
    if limit is None:
        return found
    at = min(width - 1, int(limit / most * width))
    mark = "|" if ascii_only else "┊"
    return [text and f"{text[:at]}{mark}{text[at + 1 :]}" if _is_short(text, at) else text for text in found]


def spread_bars(values: list[float | None], width: int = WIDTH, ascii_only: bool = False) -> list[str]:
    """Bars that begin below the least value, so that small differences show; for shares that are all near one."""
    known = [value for value in values if value is not None]
    if not known:
        return ["" for _ in values]
    room = max(max(known) - min(known), 0.02)
    scaled = [None if value is None else 1 - (max(known) - value) / (1.25 * room) for value in values]
    return ["" if share is None else bar(share, width, ascii_only) for share in scaled]


def _is_short(text: str, at: int) -> bool:
    """Whether the bar ends before the mark, which then stands in free space."""
    return bool(text) and text[at] == " "
