"""The table of a report as Markdown, for a README: the answer, the picture, the variants. Light."""

from __future__ import annotations

import re
from urllib.parse import quote

from . import text as words
from .data import Numbers
from .variants import variant_table


def markdown(numbers: Numbers, plot: str | None) -> str:
    """The report in Markdown; `plot` is the name of the picture beside it, if there is one."""
    table = variant_table(numbers)
    lines = [f"**{text(words.headline(numbers))}**", ""]
    lines += [f"{text(note)}\n" for note in words.missing(numbers)]
    if numbers.doubt:
        lines += [f"Not decided: {text(numbers.doubt)}.", ""]
    if plot is not None:
        title = f"{words.measure_title(numbers)} against latency of {numbers.model}"
        lines += [f"![{text(title)}](<{quote(plot)}>)", ""]
    columns = table["columns"]
    lines.append(line([text(column["title"]) for column in columns]))
    lines.append(line(["---" if column["words"] else "--:" for column in columns]))
    for row in table["rows"]:
        cells = [text(cell["text"]) for cell in row["cells"]]
        lines.append(line([f"**{cell}**" if row["chosen"] else cell for cell in cells]))
    return "\n".join([*lines, "", text(table["caption"]), ""])


def line(cells: list[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def text(said: str) -> str:
    """Words that Markdown and the HTML it becomes leave as they are."""
    escaped = said.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#!$])", r"\\\1", escaped)
