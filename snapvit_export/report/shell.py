"""What all pages share: templates that escape, one style, one script, and a policy that allows nothing else.

No string becomes markup: the templates escape all that they print; specifications are JSON in a script element in which
`<`, `>` and `&` are written as escapes; plots show names as values of rows, and tooltips are text nodes. A
Content-Security-Policy backs this up: nothing may be fetched, and only one script and one style run, by their hash.
Vega's expressions are interpreted, not compiled (`ast`), so `unsafe-eval` is not needed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import needs
from ..visible import visible
from .charts.style import DARK, LIGHT, Chart
from .draw import as_data, inline_svg, javascript

if TYPE_CHECKING:
    from markupsafe import Markup

HALF_WIDTH = 520  # pixels of a plot that stands beside another
LONGEST_LIST = 12  # values of a list that are written out; plots show the longer ones


def render(template: str, charts: Sequence[Chart], side_by_side: Collection[str], **parts: Any) -> str:
    """Return a page: a template with its charts, the style and the script. Charts named in `side_by_side` are small."""
    with needs("reports", extra="report"):
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from markupsafe import Markup

    loader = FunctionLoader(_read)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, loader=loader, auto_reload=False
    )
    style, source = _style(), script()
    return environment.get_template(template).render(
        policy=_policy(style, source),
        style=Markup(style),
        script=Markup(source),
        specs=Markup(as_data({chart.name: chart.spec for chart in charts})),
        plots={
            c.name: _plot(c, Markup(inline_svg(c, *([HALF_WIDTH] if c.name in side_by_side else [])))) for c in charts
        },
        version=__version__,
        **parts,
    )


def _plot(chart: Chart, still: Markup) -> dict[str, Any]:
    return {"chart": chart, "still": still}


@cache
def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _style() -> str:
    def variables(colours: dict[str, str]) -> str:
        return ":root{" + "".join(f"{name}:{value};" for name, value in colours.items()) + "}"

    dark = f"@media (prefers-color-scheme: dark) {{{variables(DARK)}}}"
    paper = f"@media print {{{variables(LIGHT)}}}"
    return "\n".join([variables(LIGHT), dark, paper, _read("page.css")])


@cache
def script() -> str:
    """Return libraries and our own script as one, in which nothing can end the script element early."""
    text = f"{javascript()}\n{_read('page.js')}".replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(style: str, source: str) -> str:
    def sha(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = {
        "default-src": "'none'",
        "img-src": "data:",
        "script-src": sha(source),
        "style-src": sha(style),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def tight(text: str) -> str:
    """Keep numbers and their units on one line."""
    return re.sub(r"(?<=[0-9±]) (?=ms|±|%|[0-9M])|(?<=%) (?=width)", "\u00a0", text).replace("top-1", "top\u20111")


def facts(title: str, found: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a part of the provenance: a title, and names with values."""
    return {"title": title, "facts": [(visible(name), visible(value)) for name, value in found]}


def brief(recipe: dict[str, Any]) -> dict[str, Any]:
    """Shorten the long lists of a recipe, which the plots show."""

    def short(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: short(value) for name, value in part.items()}
        if isinstance(part, list) and len(part) > LONGEST_LIST:
            return f"({len(part)} values)"
        return [short(item) for item in part] if isinstance(part, list) else part

    return {name: short(value) for name, value in recipe.items()}


def plain_json(value: object) -> str:
    """Write indented JSON as plain text."""
    return "\n".join(visible(line) for line in json.dumps(value, indent=1, ensure_ascii=False).splitlines())
