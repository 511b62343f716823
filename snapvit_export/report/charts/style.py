"""The style that all plots share: named colours, one configuration, axes around the data instead of zero.

Colours are CSS variables (`var(--ink)`) in every specification: a page sets them for light, dark and paper and no plot
has to be drawn again; for a PNG or an SVG of its own they are replaced by the light ones. Colours of families are those
of Okabe and Ito, darkened to three to one against white; a shape goes with each, so that colour is never the only
difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Spec = dict[str, Any]

LIGHT = {
    "--paper": "#ffffff",
    "--ink": "#1b1f24",
    "--muted": "#57606a",
    "--grid": "#e4e7eb",
    "--budget": "#a8324a",
    "--fits": "#2f7d5b",
    "--c1": "#0072b2",
    "--c2": "#c04e00",
    "--c3": "#00795a",
    "--c4": "#a3457e",
    "--c5": "#8a6200",
    "--c6": "#5a55b5",
    "--h1": "#eef4fa",
    "--h2": "#d9e7f4",
    "--h3": "#c0d8ec",
    "--h4": "#a2c6e4",
    "--h5": "#80b2d9",
    "--h6": "#5c9acd",
    "--h7": "#3e82bc",
    "--h8": "#256ba7",
    "--h9": "#14548d",
    "--h10": "#0a3d6e",
}
DARK = {
    "--paper": "#14181d",
    "--ink": "#e9edf1",
    "--muted": "#a3adb8",
    "--grid": "#2c343d",
    "--budget": "#ff8fa3",
    "--fits": "#63c69b",
    "--c1": "#62b6ee",
    "--c2": "#ff9a57",
    "--c3": "#4fcfa4",
    "--c4": "#e79ac7",
    "--c5": "#e6bd4f",
    "--c6": "#aaa6f5",
    "--h1": "#18222c",
    "--h2": "#1a2e3f",
    "--h3": "#1c3c56",
    "--h4": "#1e4b6e",
    "--h5": "#235d89",
    "--h6": "#2d73a7",
    "--h7": "#468bc0",
    "--h8": "#68a6d6",
    "--h9": "#91c1e7",
    "--h10": "#bfdcf5",
}
FAMILY_COLOURS = tuple(f"var(--c{i})" for i in range(1, 7))
FAMILY_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
HEAT = tuple(f"var(--h{i})" for i in range(1, 11))
INK, MUTED, GRID, PAPER, BUDGET, FITS = (
    f"var(--{name})" for name in ("ink", "muted", "grid", "paper", "budget", "fits")
)
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
PLOT_WIDTH = 720  # pixels of a plot in a file of its own
LEGEND_WIDTH = 640  # pixels of a legend that stands below its plot
LETTER, SYMBOL = 7, 30  # pixels of a name's letter, and of what stands before and after it
_TEXT = {"labelFont": FONT, "titleFont": FONT, "labelColor": MUTED, "titleColor": INK, "labelFontSize": 12}
_CONFIG: Spec = {
    "view": {"stroke": None},
    "font": FONT,
    "axis": {
        **_TEXT,
        "titleFontSize": 12,
        "titleFontWeight": 600,
        "titlePadding": 10,
        "domainColor": GRID,
        "tickColor": GRID,
        "gridColor": GRID,
        "labelPadding": 6,
        "labelLimit": 110,
    },
    "legend": {**_TEXT, "titleFontSize": 12, "titleFontWeight": 600, "labelLimit": 260, "symbolStrokeWidth": 2},
    "text": {"font": FONT, "fontSize": 12, "color": INK},
}


@dataclass(frozen=True)
class Chart:
    """A plot, with alternative text and a table for readers who cannot see it."""

    name: str
    title: str
    caption: str
    alt: str  # alternative text in one sentence, for screen readers
    spec: Spec
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = field(default=())


def legend_below(names: Sequence[str], most: int = 4, **parts: Any) -> Spec:
    """Return a legend below the plot, with as many names beside each other as fit, `most` at most."""
    fitting = LEGEND_WIDTH // (LETTER * max(map(len, names), default=0) + SYMBOL)
    return {
        "orient": "bottom",
        "title": None,
        "columns": max(1, min(most, fitting)),
        "labelLimit": LEGEND_WIDTH,
        "symbolOpacity": 1,
        **parts,
    }


def base(height: int, **parts: Any) -> Spec:
    """Return the specification of a plot as wide as its container."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": None,
        "padding": 4,
        "config": _CONFIG,
        **parts,
    }


@dataclass(frozen=True)
class Axis:
    """The range of an axis and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @property
    def scale(self) -> Spec:
        return {"domain": [self.low, self.high], "nice": False, "zero": False}

    def at(self, value: float) -> float:
        """Return the position of a value, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def axis(
    values: list[float], least: float = 0.0, pad: float = 0.07, floor: float = -math.inf, most: float = math.inf
) -> Axis:
    """Make an axis around the values, at least `least` long, not below `floor`; ticks do not exceed `most`."""
    low, high = min(values), max(values)
    length = max(high - low, least, 1e-9)
    middle = (low + high) / 2
    low, high = middle - length * (0.5 + pad), middle + length * (0.5 + pad)
    if low < floor:
        low = floor
    step = _step((high - low) / 6)
    first = math.ceil(low / step - 1e-9)
    ticks = (round(i * step, 10) for i in range(first, first + 40))
    return Axis(low, high, tuple(tick for tick in ticks if tick <= min(high, most) + step * 1e-9))


def _step(about: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least as long as `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about * 0.999)


def budget_layers(budget_ms: float | None, x_axis: Axis, dy: int = -4, unit: str = "ms") -> list[Spec]:
    """Draw the budget as a dashed line with its name at the top; nothing if it lies outside the axis."""
    if budget_ms is None or not x_axis.low <= budget_ms <= x_axis.high:
        return []
    text = f"budget {budget_ms:.4g} {unit}"
    align = "left" if x_axis.at(budget_ms) < 0.25 else "right" if x_axis.at(budget_ms) > 0.75 else "center"
    data = {"values": [{"budget": budget_ms, "text": text}]}
    x = {"field": "budget", "type": "quantitative"}
    line: Spec = {
        "data": data,
        "mark": {"type": "rule", "color": BUDGET, "strokeDash": [6, 4], "strokeWidth": 1.5},
        "encoding": {"x": x, "y": None, "tooltip": None},
    }
    mark = {"type": "text", "color": BUDGET, "fontWeight": 600, "align": align, "baseline": "bottom", "dy": dy}
    name: Spec = {
        "data": data,
        "mark": mark,
        "encoding": {"x": x, "y": {"value": 0}, "tooltip": None, "text": {"field": "text", "type": "nominal"}},
    }
    return [line, name]


def tips(*fields: tuple[str, str]) -> list[Spec]:
    """Return the tooltip: fields of the row, which hold text, under these titles."""
    return [{"field": field, "title": title, "type": "nominal"} for field, title in fields]


def with_halo(layer: Spec) -> list[Spec]:
    """Draw text over a halo in the colour of the paper, so that lines behind it do not cross it."""
    mark = {**layer["mark"], "color": PAPER, "stroke": PAPER, "strokeWidth": 4, "strokeJoin": "round", "aria": False}
    return [{**layer, "mark": mark}, layer]
