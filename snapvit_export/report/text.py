"""How a report says its numbers: units, intervals, and the sentence with the answer. Light."""

from __future__ import annotations

from ..family.evaluation import TITLES, Measure
from .data import Numbers, Point

UNKNOWN = "–"


def ms(value: float | None) -> str:
    """Milliseconds with the digits that mean something."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def interval(between: tuple[float, float] | None) -> str:
    if between is None:
        return UNKNOWN
    digits = 2 if between[1] < 100 else 0
    return f"{between[0]:.{digits}f} to {between[1]:.{digits}f}"


def latency(value: float | None, between: tuple[float, float] | None) -> str:
    return ms(value) if between is None else f"{ms(value)} ({interval(between)})"


def budget(value: float) -> str:
    return f"{value:.4g} ms"


def quality(measure: Measure | None, value: float | None, error: float | None) -> str:
    """A share in per cent with its standard error; a cosine as it is."""
    if value is None:
        return UNKNOWN
    if measure == "cosine":
        return f"{value:.4f} ± {error:.4f}" if error else f"{value:.4f}"
    return f"{100 * value:.1f} ± {100 * error:.1f} %" if error else f"{100 * value:.1f} %"


def millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def gflops(count: int) -> str:
    return f"{count / 1e9:.2f}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def small(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1e}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def cosine(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"


def measure_title(numbers: Numbers) -> str:
    return TITLES[numbers.measure] if numbers.measure else "FLOPs kept"


def headline(numbers: Numbers) -> str:
    """The answer in one or two sentences."""
    if numbers.chosen is not None:
        return _choice(numbers)
    timed = [p for p in numbers.own if p.latency_ms is not None]
    dense = next(p for p in numbers.own if p.is_dense)
    if not timed:
        return f"{len(numbers.own)} variants of {numbers.model}, none of them timed yet."
    if numbers.budget_ms is None:
        fast = min(timed, key=lambda p: p.latency_ms or 0)
        ends = [f"{p.name}, {latency(p.latency_ms, p.between_ms)}" for p in (dense, fast)]
        several = f"{len(numbers.own)} variants of {numbers.model}: from {ends[0]}, to {ends[1]}"
        return f"{several}{_against(fast, dense, numbers)}." if len(timed) > 1 else f"One variant, {ends[0]}."
    best = answer(numbers)
    if best is None:
        return f"No variant surely keeps {budget(numbers.budget_ms)}."
    return (
        f"{best.name} is the densest variant that keeps {budget(numbers.budget_ms)}: "
        f"{latency(best.latency_ms, best.between_ms)}{_against(best, dense, numbers)}. No choice was proved."
    )


def answer(numbers: Numbers) -> Point | None:
    """The chosen variant; without a choice the densest that surely keeps the budget, if there is one."""
    if numbers.chosen is not None:
        return numbers.point(numbers.chosen)
    limit = numbers.budget_ms
    fits = [p for p in numbers.own if limit is not None and p.between_ms is not None and p.between_ms[1] <= limit]
    return min(fits, key=lambda p: p.sparsity, default=None)


def _choice(numbers: Numbers) -> str:
    assert numbers.chosen is not None
    assert numbers.budget_ms is not None
    chosen = numbers.point(numbers.chosen)
    dense = next(p for p in numbers.own if p.is_dense)
    at = "" if numbers.at == "p50" else f" at {numbers.at}"
    text = (
        f"{chosen.name} takes {latency(chosen.latency_ms, chosen.between_ms)}{at} and fits {budget(numbers.budget_ms)}"
    )
    if chosen.is_dense:
        return f"{text}: it is the dense model, nothing had to be cut."
    return f"{text}{_against(chosen, dense, numbers)}."


def _against(point: Point, dense: Point, numbers: Numbers) -> str:
    """How good it is, beside the dense model."""
    if point.quality is None or point is dense:
        return ""
    text = f", with {measure_title(numbers)} {quality(numbers.measure, point.quality, point.error)}"
    known = dense.quality is not None and numbers.measure not in ("agreement", "cosine")
    return f"{text} where the dense model has {quality(numbers.measure, dense.quality, dense.error)}" if known else text


def missing(numbers: Numbers) -> list[str]:
    """What the report cannot show, and the command that gives it."""
    notes = []
    if all(point.latency_ms is None for point in numbers.own):
        notes.append("No latency was measured. This measures it: snapvit choose FAMILY --budget 10ms")
    if numbers.measure is None:
        text = "Accuracy is missing: the picture shows the share of FLOPs kept instead."
        notes.append(f"{text} This measures it: snapvit validate FAMILY --data DIR")
    return notes
