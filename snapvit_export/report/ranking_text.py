"""The wording of the report of a ranking: its result in a sentence, its main figures, and how it was made. Light."""

from __future__ import annotations

from collections.abc import Sequence

from ..visible import visible
from . import text as words
from .ranking_data import DENSE, PlanRow, RankingReport

Fact = tuple[str, str]
PLAN_COLUMNS = ("plan", "sparsity", "FLOPs of the blocks", "parameters", "heads", "neurons")


def headline(report: RankingReport) -> str:
    """Write what the sparsest Plan that is shown keeps of each block, from the least to the most."""
    shown = report.widths[-1]
    if shown.name == DENSE:
        return f"No size that is usual for {report.model} is within reach."
    parts = [
        _range("neurons", shown.neurons, report.dense_neurons),
        _range("heads", shown.heads, report.dense_heads),
    ]
    return f"At {shown.name}, blocks keep {' and '.join(part for part in parts if part)}."


def _range(kind: str, kept: Sequence[int], whole: Sequence[int]) -> str:
    shares = {i: k / n for i, (k, n) in enumerate(zip(kept, whole)) if n}
    if not shares:
        return ""
    least, most = min(shares, key=lambda i: shares[i]), max(shares, key=lambda i: shares[i])
    if shares[least] == shares[most]:
        return f"{100 * shares[most]:.0f} % of their {kind}"
    return (
        f"from {100 * shares[least]:.0f} % (block {least}) to {100 * shares[most]:.0f} % (block {most}) of their {kind}"
    )


def tiles(report: RankingReport) -> list[tuple[str, str, str]]:
    """Return the main figures: a title, a value and a detail of each."""
    made = report.provenance
    found = [("blocks", str(len(report.dense_heads)), _per_block(report))]
    by = made.get("criterion") if made.get("allocation") != "joint" else "damage curves"
    if isinstance(by, str):
        found.append(("ranked by", visible(by), ""))
    data = made.get("data")
    if isinstance(data, dict) and "images" in data:
        found.append(("images", visible(str(data["images"])), visible(str(data.get("source", "")))))
    if (search := report.search) is not None and search.best_fitness is not None:
        start = "" if search.start_fitness is None else f"{search.start_fitness:.4g} at the start"
        evaluations = search.history[-1].evaluations
        found.append((f"fitness after {evaluations}", f"{search.best_fitness:.4g}", start))
    if report.timings:
        total = sum(timing.total for timing in report.timings)
        found.append(("took", _duration(total), _processes(report)))
    return found


def _per_block(report: RankingReport) -> str:
    heads, neurons = (_few(counts) for counts in (report.dense_heads, report.dense_neurons))
    return f"{heads} heads, {neurons} neurons each"


def _few(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.3g} s"


def _processes(report: RankingReport) -> str:
    counts = sorted({timing.processes for timing in report.timings})
    return f"{' and '.join(map(str, counts))} process{'es' if counts != [1] else ''}"


def notes(report: RankingReport) -> list[tuple[str, str]]:
    """Return what a reader must know before trusting the plots."""
    found = []
    if report.out_of_reach:
        found.append(f"Out of reach, since a part of every block is never cut: {', '.join(report.out_of_reach)}.")
    if report.scores_are_places:
        found.append(
            "The model was scored again after each cut, and scores of two models cannot be compared. So the scores "
            "shown are places in the order of removal, 0 first: they tell what goes before what, not by how much."
        )
    return [("Note", sentence) for sentence in found]


def plan_cells(plan: PlanRow) -> tuple[str, ...]:
    """Return the cells of a Plan's row, in the order of `PLAN_COLUMNS`."""
    cut = "" if plan.name == DENSE else f"{100 * plan.sparsity:.1f} %"
    return (
        plan.name,
        cut,
        f"{100 * plan.flops_ratio:.1f} %",
        words.millions(plan.params),
        str(plan.heads),
        str(plan.neurons),
    )


def facts_of(report: RankingReport) -> list[Fact]:
    """Return how the ranking was made, of what its provenance says."""
    made = report.provenance
    named = ("name", "allocation", "criterion", "order", "damping", "views", "reduction", "seed", "weights_sha256")
    found = [("model", report.model)]
    found += [(name.replace("_", " "), str(made[name])) for name in named if isinstance(made.get(name), str | int)]
    for name, title in (("data", "images"), ("search_settings", "search")):
        if isinstance(part := made.get(name), dict):
            found.append((title, ", ".join(f"{key.replace('_', ' ')} {_short(value)}" for key, value in part.items())))
    return found


def _short(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(":".join(map(str, each)) if isinstance(each, list) else str(each) for each in value)
    return words.UNKNOWN if value is None else str(value)
