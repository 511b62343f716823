"""Chart of requests over time: latency by variant against the deadline, misses, and the load behind them."""

from __future__ import annotations

from collections import Counter

from ...family.trace import Trace
from ...visible import visible
from .. import text as words
from .style import BUDGET, GRID, HEAT, INK, MUTED, Chart, Spec, axis, base, legend_below, tips

HEIGHT = 320
MOST_DRAWN = 4000  # requests; of more every second, third and so on, and all misses
BEYOND = 1.6  # deadlines: what took longer is drawn there
MISSED = "missed"
BEHIND = " Behind them, in grey, other work on the machine."


def deadlines(trace: Trace | None) -> Chart | None:
    """Draw the requests of a trace; None if there is none."""
    if trace is None or not trace.requests:
        return None
    rows = _rows(trace)
    most = BEYOND * trace.deadline_ms
    y = axis([0.0, most], pad=0.0)
    end = max(max(row["at"] for row in rows), max((load.to_s for load in trace.loads), default=0.0))
    x = {
        "type": "quantitative",
        "scale": {"domain": [0, end], "nice": False},
        "axis": {"title": "seconds", "grid": False, "tickCount": 8},
    }
    encoding: Spec = {
        "x": {"field": "at", **x},
        "y": {
            "field": "ms",
            "type": "quantitative",
            "scale": y.scale,
            "axis": {"title": "from arrival to answer, ms", "values": list(y.ticks)},
        },
        "tooltip": tips(("variant", "variant"), ("text", "latency"), ("time", "after"), ("machine", "the machine")),
    }
    layers = [*_load_layers(trace, x), _points(trace), _misses(), *_deadline(trace)]
    counts = Counter(request.variant for request in trace.requests)
    return Chart(
        name="deadlines",
        title=f"Answers before a deadline: {visible(trace.title)}",
        caption=f"Every point is a request, its colour the variant that answered: dark for the most faithful. "
        f"{words.share(trace.hit_rate)} of {len(trace.requests)} were in time. Crosses were late, those at the upper "
        f"edge by more than is drawn.{BEHIND if trace.loads else ''}",
        alt=f"Latency of {len(trace.requests)} requests over {end:.0f} seconds, {100 * trace.hit_rate:.1f} per cent of "
        f"them within {trace.deadline_ms:.4g} ms.",
        spec=base(HEIGHT, data={"values": rows}, encoding=encoding, layer=layers),
        columns=("variant", "requests", "in time"),
        rows=tuple(
            (visible(name), str(counts[name]), str(sum(r.met for r in trace.requests if r.variant == name)))
            for name in trace.variants
        ),
    )


def _rows(trace: Trace) -> list[Spec]:
    every = -(-len(trace.requests) // MOST_DRAWN)
    shown = [r for i, r in enumerate(trace.requests) if i % every == 0 or not r.met]
    most = BEYOND * trace.deadline_ms
    return [
        {
            "at": request.at_s,
            "ms": min(most if request.latency_ms is None else request.latency_ms, most),
            "variant": visible(request.variant or "none"),
            "state": "in time" if request.met else MISSED,
            "text": "no answer" if request.latency_ms is None else f"{request.latency_ms:.4g} ms",
            "time": f"{request.at_s:.2f} s",
            "machine": "" if request.slowness is None else f"{request.slowness:.2f} x as slow as at rest",
        }
        for request in shown
    ]


def _points(trace: Trace) -> Spec:
    names = [visible(name) for name in trace.variants]
    count = max(len(names) - 1, 1)
    shades = [HEAT[round((len(HEAT) - 1) - i * (len(HEAT) - 4) / count)] for i in range(len(names))]
    colour = {
        "field": "variant",
        "type": "nominal",
        "scale": {"domain": names, "range": shades},
        "legend": legend_below(names, most=6, title="answered by", symbolType="circle"),
    }
    return {
        "transform": [{"filter": {"field": "state", "equal": "in time"}}],
        "mark": {"type": "point", "filled": True, "size": 14, "opacity": 0.85},
        "encoding": {"color": colour},
    }


def _misses() -> Spec:
    return {
        "transform": [{"filter": {"field": "state", "equal": MISSED}}],
        "mark": {"type": "point", "shape": "cross", "filled": True, "size": 60, "color": BUDGET, "opacity": 1},
        "encoding": {},
    }


def _deadline(trace: Trace) -> list[Spec]:
    data = {"values": [{"deadline": trace.deadline_ms, "name": f"deadline {trace.deadline_ms:.4g} ms"}]}
    y = {"field": "deadline", "type": "quantitative"}
    line: Spec = {
        "data": data,
        "mark": {"type": "rule", "color": INK, "strokeDash": [6, 4], "strokeWidth": 1.5},
        "encoding": {"x": None, "y": y, "tooltip": None},
    }
    mark = {"type": "text", "color": INK, "fontWeight": 600, "align": "left", "baseline": "bottom", "dx": 4, "dy": -3}
    name: Spec = {
        "data": data,
        "mark": mark,
        "encoding": {"x": {"value": 0}, "y": y, "tooltip": None, "text": {"field": "name", "type": "nominal"}},
    }
    return [line, name]


def _load_layers(trace: Trace, x: Spec) -> list[Spec]:
    if not trace.loads:
        return []
    values = [{"from": load.from_s, "to": load.to_s, "what": visible(load.what)} for load in trace.loads]
    band: Spec = {
        "data": {"values": values},
        "mark": {"type": "rect", "color": GRID, "opacity": 0.9},
        "encoding": {"x": {"field": "from", **x}, "x2": {"field": "to"}, "y": None, "tooltip": None},
    }
    mark = {"type": "text", "color": MUTED, "align": "left", "baseline": "top", "dx": 3, "dy": 3, "fontSize": 11}
    name: Spec = {
        "data": {"values": values},
        "mark": mark,
        "encoding": {
            "x": {"field": "from", **x},
            "y": {"value": 0},
            "tooltip": None,
            "text": {"field": "what", "type": "nominal"},
        },
    }
    return [band, name]
