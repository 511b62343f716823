"""`snapvit pack`: writes a model in rank order, from which any sparsity is cut without torch, corrected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..visible import say, visible
from . import options
from .output import print_json


def pack(
    model: Annotated[str, typer.Option(help=options.MODEL)] = "bundled",
    checkpoint: Annotated[Optional[Path], typer.Option(help="Local weights: .safetensors or .pth.")] = None,
    model_arg: options.ModelArg = None,
    pool: options.Pool = None,
    image_size: options.ImageSize = None,
    output: options.Output = None,
    preprocessing: options.Preprocessing = None,
    mean: options.Mean = None,
    std: options.Std = None,
    resize: options.Resize = None,
    classes: options.ClassNames = None,
    ranking: Annotated[Optional[Path], typer.Option(help="Use this ranking instead of ranking anew.")] = None,
    data: Annotated[
        Optional[list[str]],
        typer.Option(help=f"Images to rank and correct by: {options.SOURCES}."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write; replaced if it is an Elastic.")] = Path("snapvit-elastic"),
    recipe: Annotated[
        str, typer.Option(help="Of the ranking: default, paper (as published), local, idap or a baseline.")
    ] = "default",
    no_correct: Annotated[bool, typer.Option("--no-correct", help="Pack weights only, without factors.")] = False,
    no_fidelity: Annotated[
        bool,
        typer.Option("--no-fidelity", help="Measure no table of fidelity, by which devices without images choose."),
    ] = False,
    damping: Annotated[
        Optional[str], typer.Option(help="Of the statistics: mean:0.01, max:0.1 or percentile:0.01.")
    ] = None,
    images: Annotated[Optional[int], typer.Option(min=1, max=10**7, help="Images to calibrate on.")] = None,
    seed: Annotated[Optional[int], typer.Option(min=0, max=2**32 - 1, help="For the choice of images.")] = None,
    evaluations: Annotated[
        Optional[int], typer.Option(min=0, max=10**6, help="Of the search, the longest part; 0 for none.")
    ] = None,
    device: options.Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and progress as lines of JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")] = False,
) -> None:
    """Pack a model so that devices cut it without torch.

    Writes its Elastic folder: weights in rank order, so that every plan is a prefix of them.

    With factors beside them, which correct any plan without images and without torch.
    """
    from msgspec import UNSET

    from ..allocation.recipe import correcting_settings
    from ..workflows.pack import PackRequest, pack_model
    from . import parsing
    from .progress import shown

    request = PackRequest(
        model=model,
        checkpoint=checkpoint,
        model_arguments=parsing.model_arguments(model_arg, pool, image_size),
        onnx=parsing.onnx_options(output, preprocessing, mean, std, resize, classes),
        ranking=ranking,
        data=data or None,
        out=out,
        settings=correcting_settings(
            recipe, not no_correct, damping=damping, images=images, seed=seed, evaluations=evaluations
        ),
        correct=not no_correct,
        fidelity=not no_fidelity,
        device=device,
    )
    with shown(quiet, as_json) as progress:
        packed = pack_model(request, progress)
    correction = packed.correction
    if as_json:
        summary = {
            "folder": visible(str(out)),
            "model": packed.model,
            "blocks": len(packed.anatomy.blocks),
            "tensors": len(packed.weights.tensors),
            "weights_bytes": packed.weights.size_bytes,
            "correction_bytes": correction.buffer.size_bytes if correction else 0,
            "corrected": correction is not None,
            "fidelity_plans": 0 if packed.fidelity is UNSET else len(packed.fidelity.values),
        }
        print_json(summary)
        return
    size = f"{packed.weights.size_bytes / 1e6:.1f} MB"
    corrected = f"correction {correction.buffer.size_bytes / 1e6:.1f} MB" if correction else "no correction"
    say(f"{out}: {packed.model}, {len(packed.anatomy.blocks)} blocks, {len(packed.weights.tensors)} tensors, {size}")
    table = "no table" if packed.fidelity is UNSET else f"of {len(packed.fidelity.values)} Plans"
    say(f"  {corrected}, fidelity {table}")
