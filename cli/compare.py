"""`snapvit compare`: pruning methods side by side, on the user's own model and images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..visible import say
from . import options
from .output import print_json


def compare(
    recipes: Annotated[
        str, typer.Option(help="Recipes or criteria, corrections, options: default,snip+elastic,paper:search-over=mlp")
    ] = "default,snapvit,snip,lamp,magnitude,random",
    sparsity: Annotated[Optional[str], typer.Option(help="Fractions of prunable parameters to cut: 0.1,0.3")] = None,
    flops: Annotated[Optional[str], typer.Option(help="Or fractions of the blocks' FLOPs to keep: 0.72,0.5")] = None,
    model: Annotated[str, typer.Option(help=options.MODEL)] = "bundled",
    checkpoint: Annotated[Optional[Path], typer.Option(help="Local weights: .safetensors or .pth.")] = None,
    model_arg: options.ModelArg = None,
    pool: options.Pool = None,
    image_size: options.ImageSize = None,
    data: Annotated[
        Optional[list[str]], typer.Option(help="Images to calibrate on, as in export. May be repeated.")
    ] = None,
    on: Annotated[
        Optional[str], typer.Option(help="Dataset to evaluate on, as in evaluate; without it, what calibration left.")
    ] = None,
    by: Annotated[Optional[str], typer.Option(help="head, knn, linear, or several. By default what suits.")] = None,
    classes: Annotated[
        Optional[Path], typer.Option(help="Names of the head's classes: line i, or its first word, is class i.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, max=10**7, help="To calibrate on, the same for all.")] = 256,
    judged: Annotated[
        Optional[int], typer.Option(min=1, max=10**7, help="Images of each split to evaluate on, at most.")
    ] = None,
    evaluations: Annotated[
        Optional[int], typer.Option(min=1, max=10**6, help="Of recipes that search; otherwise as they have it.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="For the choice of images, splits and probes.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder to write; a run that was stopped goes on there.")] = Path(
        "snapvit-comparison"
    ),
    device: options.Device = "cpu",
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers instead of a table.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare pruning methods at the same sizes.

    Evaluates all on the same images, and draws a chart.
    """
    from ..evaluate.evaluator import EvalOptions, parse_metrics
    from ..workflows.compare import CompareRequest, run_comparison
    from . import parsing
    from .progress import shown

    request = CompareRequest(
        model,
        checkpoint,
        data or None,
        on,
        [name.strip() for name in recipes.split(",") if name.strip()],
        "sparsity" if flops is None else "flops",
        parsing.fractions(sparsity, "--sparsity") if flops is None else parsing.fractions(flops, "--flops"),
        out,
        images,
        seed,
        evaluations,
        EvalOptions(parse_metrics(by), classes, images=judged, seed=seed),
        force,
        parsing.model_arguments(model_arg, pool, image_size),
        device,
    )
    with shown(quiet) as progress:
        found = run_comparison(request, progress)
    if as_json:
        print_json(found)
        return
    from ..report.markdown import print_comparison

    print_comparison(found)
    say(f"Written to {out}: compare.json, compare.md, compare.svg, compare.png")
