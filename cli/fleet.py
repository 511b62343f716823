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
        str, typer.Option(help="Device and latency: cpu=40ms,orin.json=10ms. A file of `snapvit profile`, or cpu.")
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

    columns = ("device", "budget ms", "variant", f"{at} ms", "verdict", "compared", "next better", "ms")
    rows = [
        (
            pick.device,
            f"{pick.budget_ms:.2f}",
            pick.variant,
            f"{pick.latency_ms:.2f}",
            pick.verdict,
            {True: "yes", False: "not compared", None: "-"}[pick.compared],
            pick.next_denser or "-",
            "-" if pick.next_denser_ms is None else f"{pick.next_denser_ms:.2f}",
        )
        for pick in picks
    ]
    print_rows(columns, rows, left={"device", "variant", "verdict", "compared", "next better"})
    for pick in picks:
        for name in pick.left_out:
            say(f"{pick.device}: {name} is left out, since it does not answer there as its graph does.")
