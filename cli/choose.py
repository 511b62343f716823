"""`snapvit choose`: the most faithful variant of a family that meets a budget on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from . import options
from .output import print_json


def choose(
    family: Annotated[Path, typer.Argument(help="A family folder; the choice goes into its manifest.")],
    budget: Annotated[
        str, typer.Option(help="To meet: 10ms, 60% (of dense) or 100fps; energy of a run, 15mJ; or both, 10ms,15mJ.")
    ],
    at: Annotated[str, typer.Option(help="Percentile that must meet the budget: p50, p90 or p99.")] = "p50",
    max_size: Annotated[Optional[str], typer.Option(help="Also at most this size, graph and weights: 12MB.")] = None,
    max_params: Annotated[Optional[str], typer.Option(help="Also at most so many parameters: 3.5M.")] = None,
    elastic: Annotated[
        Optional[Path], typer.Option(help="Elastic folder of the same ranking: cut new variants from it.")
    ] = None,
    tokens: Annotated[
        Optional[str],
        typer.Option(help="With --elastic, also cut variants that merge to these fractions of the patches: 0.75,0.5"),
    ] = None,
    resolution: Annotated[
        Optional[str], typer.Option(help="With --elastic, also cut variants of smaller images: 192,160 or 192x160.")
    ] = None,
    levers: Annotated[
        Optional[str],
        typer.Option(help="With --elastic, what new variants may use: some of precision,tokens,width,depth; all."),
    ] = None,
    data: Annotated[
        Optional[str],
        typer.Option(help=f"Images to compare variants on, not those calibrated on: {options.SOURCES}."),
    ] = None,
    prefer: Annotated[
        str, typer.Option(help="Of what fits: the best 'fidelity' to the dense model, or 'accuracy' by labels.")
    ] = "fidelity",
    profile: Annotated[
        Optional[Path], typer.Option(help="Latencies that `snapvit profile` took here, instead of timing them again.")
    ] = None,
    strict: options.Strict = False,
    runtime: options.Runtime = None,
    threads: options.Threads = None,
    batch: options.Batch = None,
    pause: options.Pause = 0.0,
    pin: options.Pin = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest instead of a table.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Choose the best variant of a family on this machine.

    Times it here, and writes the choice with its proof into the manifest.
    """
    from ..allocation.levers import parse_levers
    from ..budget import Budget
    from ..errors import UsageError
    from ..runtimes.device import pin_to
    from ..selection.known_profiles import FamilyProfile
    from ..selection.on_device import TimingOptions, choose_in_family
    from ..target import check_runtime
    from . import parsing
    from .progress import shown

    limits, wanted = parsing.limits(at, max_size, max_params), Budget.parse(budget)
    merged, sizes = parsing.fractions(tokens, "--tokens"), parsing.resolutions(resolution, "--resolution")
    used, preferred = None if levers is None else parse_levers(levers), parsing.preference(prefer)
    timing = TimingOptions(None if runtime is None else check_runtime(runtime), threads, batch, pause)
    known = None if profile is None else FamilyProfile.load(profile)
    if pin is not None and known is not None and known.target.device.accelerator is not None:
        raise UsageError("--pin is for timing here, and the --profile of a GPU decides alone. Leave --pin out")
    pin_to(pin)
    with shown(quiet) as progress:
        manifest = choose_in_family(
            family, wanted, limits, timing, progress, elastic, known, merged, sizes, used, data, preferred, strict
        )
    if as_json:
        print_json(manifest)
        return
    from ..report.terminal import print_family

    print_family(manifest, folder=family)
