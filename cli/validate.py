"""`snapvit validate`: accuracy, fidelity and latency of every variant of a family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from . import options
from .output import print_json


def validate(
    family: Annotated[Path, typer.Argument(help="A family folder; the results go into its manifest.")],
    data: Annotated[
        Optional[str],
        typer.Option(help=f"Dataset, in splits or to be split: {options.SOURCES}."),
    ] = None,
    by: Annotated[Optional[str], typer.Option(help="head, knn, linear, or several. By default what suits.")] = None,
    classes: Annotated[
        Optional[Path], typer.Option(help="Names of the head's classes: line i, or its first word, is class i.")
    ] = None,
    min_accuracy: Annotated[
        Optional[str], typer.Option(help="Exit with 1 if a variant falls below: 0.7 or 70%.")
    ] = None,
    profile: Annotated[
        Optional[Path], typer.Option(help="Latencies that `snapvit profile` took, instead of the manifest's.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time all variants again.")] = False,
    seconds: Annotated[
        Optional[float], typer.Option(min=0.1, max=3600, help="Of each variant, if they are timed; 1 by default.")
    ] = None,
    images: Annotated[Optional[int], typer.Option(min=1, max=10**7, help="Images of each split at most.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="For splits, the choice of images and probes.")] = 0,
    model: Annotated[
        Optional[str], typer.Option(help="What the family was made from, to compare with torch: a model folder.")
    ] = None,
    checkpoint: Annotated[Optional[Path], typer.Option(help="Its weights, for a timm model.")] = None,
    model_arg: options.ModelArg = None,
    pool: options.Pool = None,
    image_size: options.ImageSize = None,
    runtime: options.Runtime = None,
    threads: options.Threads = None,
    batch: options.Batch = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest instead of a table.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure the quality of every variant of a family.

    On real images in its runtime, next to its latency; exit 1 below --min-accuracy.
    """
    from ..evaluate.evaluator import EvalOptions, parse_metrics
    from ..selection.known_profiles import FamilyProfile
    from ..selection.on_device import TimingOptions
    from ..target import check_runtime
    from ..workflows.validate import ValidateRequest, require_accuracy
    from ..workflows.validate import validate as run
    from . import parsing
    from .progress import shown

    least = parsing.share(min_accuracy, "--min-accuracy")
    request = ValidateRequest(
        family,
        data,
        EvalOptions(parse_metrics(by), classes, images=images, seed=seed),
        TimingOptions(None if runtime is None else check_runtime(runtime), threads, batch),
        None if profile is None else FamilyProfile.load(profile),
        measure,
        seconds,
        model,
        checkpoint,
        parsing.model_arguments(model_arg, pool, image_size),
        needs_labels=least is not None,
    )
    with shown(quiet) as progress:
        manifest = run(request, progress)
    if as_json:
        print_json(manifest)
    else:
        from ..report.terminal import print_validation

        print_validation(manifest)
    if least is not None:
        require_accuracy(family, manifest, least)
