"""The table of a report as Markdown, for a README: the answer, the picture, the variants. Light."""

from __future__ import annotations

import re
from urllib.parse import quote

from . import words
from .numbers import Numbers
from .variants import variant_table


def markdown(numbers: Numbers, plot: str | None) -> str:
    """The report in Markdown; `plot` is the name of the picture beside it, if there is one."""
    table = variant_table(numbers)
    lines = [f"**{_text(words.headline(numbers))}**", ""]
    lines += [f"{_text(note)}\n" for note in words.missing(numbers)]
    if numbers.doubt:
        lines += [f"Not decided: {_text(numbers.doubt)}.", ""]
    if plot is not None:
        title = f"{words.measure_title(numbers)} against latency of {numbers.model}"
        lines += [f"![{_text(title)}](<{quote(plot)}>)", ""]
    columns = table["columns"]
    lines.append(_line([_text(column["title"]) for column in columns]))
    lines.append(_line(["---" if column["words"] else "--:" for column in columns]))
    for row in table["rows"]:
        cells = [_text(cell["text"]) for cell in row["cells"]]
        lines.append(_line([f"**{cell}**" if row["chosen"] else cell for cell in cells]))
    return "\n".join([*lines, "", _text(table["caption"]), ""])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """Words that Markdown and the HTML it becomes leave as they are."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#!$])", r"\\\1", escaped)
