"""What the benchmarks of a choice share: rows that survive an interruption, sections of a page, words for the CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PAGE = "benchmarks.md"
CPU_INFO = Path("/proc/cpuinfo")


class Rows:
    """Rows in a file of JSON lines, added as they are measured; those that exist are not measured again."""

    def __init__(self, folder: Path, name: str, keys: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.keys = folder / name, tuple(keys)

    def all(self) -> list[Row]:
        """Return all rows, in the order in which they were measured."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def has(self, **key: object) -> bool:
        """Return True if there is a row with these values of the keys."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.all())

    def add(self, row: Row) -> Row:
        """Append a row."""
        assert all(name in row for name in self.keys), f"a row needs {self.keys}"
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        return row


def write_section(docs: Path, marker: str, heading: str, text: str) -> None:
    """Put text between the markers of a page of the docs.

    Without markers it becomes the section of that heading, in the place of an older one, or at the end of the page.
    """
    page = docs / PAGE
    before = page.read_text()
    if f"<!-- {marker} -->" in before:
        put_between(page, marker, text)
        return
    section = f"## {heading}\n\n{_marked(marker, text)}\n"
    at = before.find(f"\n## {heading}\n")
    if at < 0:
        page.write_text(f"{before.rstrip()}\n\n{section}")
        return
    after = before.find("\n## ", at + 1)
    page.write_text(before[: at + 1] + section + ("" if after < 0 else before[after:]))


def put_between(page: Path, marker: str, text: str) -> None:
    """Put text between the markers of a page."""
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, begun, rest = page.read_text().partition(start)
    _, ended, tail = rest.partition(end)
    if not begun or not ended:
        raise SystemExit(f"{page}: {start} or {end} is missing. Put it back")
    page.write_text(head + _marked(marker, text) + tail)


def _marked(marker: str, text: str) -> str:
    return f"<!-- {marker} -->\n\n{text.strip()}\n\n<!-- /{marker} -->"


def cpu_words() -> str:
    """Return the name of this CPU and if it has int8 dot products."""
    from snapvit_export.runtimes.device import this_device

    has = has_vnni()
    return f"{this_device('').cpu}, " + ("VNNI unknown" if has is None else "with VNNI" if has else "without VNNI")


def has_vnni() -> bool | None:
    """Return True if the CPU multiplies bytes by dot products, which decides what int8 gains; None: not an x86."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), None)
    return None if flags is None else bool({"avx512_vnni", "avx_vnni"} & set(flags))


def share_error(share: float, images: int) -> float:
    """Return the standard error of a share of images."""
    return math.sqrt(share * (1 - share) / images)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [line(columns), "|---" * len(columns) + "|", *map(line, rows)]
    return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
