"""Draws Vega-Lite specifications as SVG and PNG, without a browser or a network (vl-convert). Light.

A page holds the SVG of every plot inline, for readers without JavaScript and for paper. It is
reduced to known elements and attributes, and its ids get a prefix, since two plots of one page would otherwise share
them.
"""

from __future__ import annotations

import copy
import json
import struct
import zlib
from typing import Any
from xml.etree import ElementTree

from ..errors import needs
from .charts.style import FONT, INK, LIGHT, PLOT_WIDTH, Chart, Spec

VERSION = "6.1"  # of Vega-Lite, in files and in pages
SCALE = 2  # of a PNG, for dense screens
MADE_BY = "made by snapvit"  # in every file of a report, which may then be replaced by the next one
_AFTER_HEADER = 33  # bytes of a PNG: signature and first chunk
_TEXT = b"tEXt" + b"Software\0" + MADE_BY.encode()
_SIGNED = (
    struct.pack(">I", len(_TEXT) - 4) + _TEXT + struct.pack(">I", zlib.crc32(_TEXT))
)  # a chunk: length, contents, sum
_DATA = ("values", "domain")  # keys under which strings are data: a variant may be called var(--ink)
_SVG = "{http://www.w3.org/2000/svg}"
_ELEMENTS = {"svg", "g", "path", "rect", "line", "text", "tspan", "defs", "clipPath", "linearGradient", "stop"}
_ATTRIBUTES = frozenset(
    """width height viewBox fill stroke stroke-width stroke-dasharray stroke-linecap stroke-linejoin stroke-miterlimit
    opacity fill-opacity stroke-opacity transform d x y x1 x2 y1 y2 dx dy text-anchor font-family font-size font-weight
    font-style clip-path id offset stop-color display version""".split()  # noqa: SIM905
)


def svg(chart: Chart) -> bytes:
    """Draw a plot as an SVG file, on white."""
    return f"{_convert().vegalite_to_svg(_fixed(chart, LIGHT), vl_version=VERSION)}\n<!-- {MADE_BY} -->\n".encode()


def png(chart: Chart) -> bytes:
    """Draw a plot as a PNG file, on white."""
    drawn = _convert().vegalite_to_png(_fixed(chart, LIGHT), vl_version=VERSION, scale=SCALE)
    return drawn[:_AFTER_HEADER] + _SIGNED + drawn[_AFTER_HEADER:]


def inline_svg(chart: Chart, width: int = PLOT_WIDTH) -> str:
    """Draw a plot for a page: in the page's own colours, and without active content."""
    text = _convert().vegalite_to_svg(_fixed(chart, {}, width), vl_version=VERSION)
    root = ElementTree.fromstring(text)
    _clean(root, f"{chart.name}-")
    root.set("aria-hidden", "true")  # the figure around it has the alternative text
    root.set("focusable", "false")
    return ElementTree.tostring(root, encoding="unicode")


def javascript() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script for a page."""
    return str(_convert().javascript_bundle(vl_version=VERSION))


def _fixed(chart: Chart, colours: dict[str, str], width: int = PLOT_WIDTH) -> Spec:
    """Return the specification in a fixed width, with these colours in place of variables."""
    spec = copy.deepcopy(chart.spec)
    spec["width"] = width
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    if colours:
        spec["background"] = colours["--paper"]
        spec["padding"] = 16
        spec["title"] = {
            "text": chart.title,
            "anchor": "start",
            "color": INK,
            "font": FONT,
            "fontSize": 15,
            "offset": 14,
        }
    return _replaced(spec, {f"var({name})": value for name, value in colours.items()})


def _replaced(part: Any, words: dict[str, str]) -> Any:
    if isinstance(part, dict):
        return {key: value if key in _DATA else _replaced(value, words) for key, value in part.items()}
    if isinstance(part, list):
        return [_replaced(item, words) for item in part]
    return words.get(part, part) if isinstance(part, str) else part


def _clean(element: ElementTree.Element, prefix: str) -> None:
    """Keep only drawing elements and attributes, prefix ids, and drop the namespace."""
    element.tag = element.tag.removeprefix(_SVG)
    for child in list(element):
        if not isinstance(child.tag, str) or child.tag.removeprefix(_SVG) not in _ELEMENTS:
            element.remove(child)
        else:
            _clean(child, prefix)
    for name, value in list(element.attrib.items()):
        if name not in _ATTRIBUTES:
            del element.attrib[name]
        elif name == "id":
            element.set(name, prefix + value)
        elif value.startswith("url(#"):
            element.set(name, f"url(#{prefix}{value[5:]}")
        elif "url(" in value:
            del element.attrib[name]


def _convert() -> Any:
    with needs("reports", extra="report"):
        import vl_convert
    return vl_convert


def check_there() -> None:
    """Refuse at once if vl-convert or jinja2 is not installed."""
    _convert()
    with needs("reports", extra="report"):
        import jinja2  # noqa: F401


def as_data(value: object) -> str:
    """Encode JSON for a script element: no markup in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
