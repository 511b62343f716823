"""`snapvit fleet`: one variant of a family for each of many devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..visible import say
from . import options
from .output import print_json


def fleet(
    budget: Annotated[
        str, typer.Option(help="Device and budget: cpu=40ms,orin.json=15mJ. A file of `snapvit profile`, or cpu.")
    ],
    family: Annotated[Path, typer.Argument(help="A family folder.")] = Path("snapvit-family"),
    at: Annotated[str, typer.Option(help="Percentile that must meet the budget: p50, p90 or p99.")] = "p50",
    strict: options.Strict = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Pick the best variant for each of many devices.

    By the latencies that were taken there.
    """
    from ..family.folder import read_family
    from ..profiling.profile import check_percentile
    from ..selection.known_profiles import parse_budgets, pick_all

    percentile, budgets = check_percentile(at), parse_budgets(budget)
    picks = pick_all(read_family(family), budgets, percentile, strict)
    if as_json:
        print_json(picks)
        return
    from ..report.terminal import print_rows

    joules = any(pick.budget_mj is not None for pick in picks)
    columns = ("device", "budget ms", "variant", f"{at} ms", "verdict", "compared", "next better", "ms")
    beside = ("budget mJ", "mJ", "next, mJ") if joules else ()
    rows = [
        (
            pick.device,
            _number(pick.budget_ms),
            pick.variant,
            f"{pick.latency_ms:.2f}",
            pick.verdict,
            {True: "yes", False: "not compared", None: "-"}[pick.compared],
            pick.next_denser or "-",
            _number(pick.next_denser_ms),
            *(map(_number, (pick.budget_mj, pick.energy_mj, pick.next_denser_mj)) if joules else ()),
        )
        for pick in picks
    ]
    print_rows((*columns, *beside), rows, left={"device", "variant", "verdict", "compared", "next better"})
    for pick in picks:
        for name in pick.left_out:
            say(f"{pick.device}: {name} is left out, since it does not answer there as its graph does.")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
