"""`snapvit recover`: short training of cut variants, with the dense model as their teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from . import options
from .output import print_json


def recover(
    what: Annotated[Path, typer.Argument(help="A family folder, or a ranking from which one is exported first.")],
    data: Annotated[
        Optional[list[str]],
        typer.Option(help=f"Images to learn from: {options.SOURCES}. No labels needed."),
    ] = None,
    variant: Annotated[
        Optional[list[str]], typer.Option(help="Of the family; the chosen one by default. May be repeated.")
    ] = None,
    budget: Annotated[
        Optional[str], typer.Option(help="The most faithful cut variant within it; of a ranking: to export for.")
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="All cut variants learn together, and share one weight file.")
    ] = False,
    minutes: Annotated[
        Optional[float], typer.Option(min=0, max=10**6, help="Of each training, on this machine; 10 by default.")
    ] = None,
    epochs: Annotated[Optional[float], typer.Option(min=0, max=10**6, help="Passes over the images instead.")] = None,
    train: Annotated[
        Optional[str],
        typer.Option(help="norms (kilobytes a variant), linear (also proj and fc2) or all; linear by default."),
    ] = None,
    recipe: Annotated[str, typer.Option(help="short, or finetune-paper: 300 epochs with labels, for GPUs.")] = "short",
    labels: Annotated[bool, typer.Option("--labels", help="Learn from labels of the model's classes too.")] = False,
    rate: Annotated[
        Optional[float],
        typer.Option(
            min=1e-9, max=10, help="Largest step size of AdamW; by default what suits --train and the images."
        ),
    ] = None,
    batch: Annotated[
        Optional[int], typer.Option(min=1, max=65536, help="Images of one step, of all processes.")
    ] = None,
    crop: Annotated[
        Optional[float],
        typer.Option(
            min=0.01, max=1, help="Share of its picture that the smallest crop has; by recipe, 0.8 for short."
        ),
    ] = None,
    model: Annotated[
        Optional[str], typer.Option(help="What the family was made from: a timm name or a folder.")
    ] = None,
    checkpoint: Annotated[Optional[Path], typer.Option(help="Its weights: .safetensors or .pth.")] = None,
    model_arg: options.ModelArg = None,
    pool: options.Pool = None,
    image_size: options.ImageSize = None,
    out: Annotated[
        Optional[Path], typer.Option(help="Family to write, of a ranking; snapvit-family by default.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="For crops and the order of the images.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    autocast: Annotated[
        Optional[str], typer.Option(help="none, bf16 or fp16; a GPU takes what it has without it.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute activations again on the way back, in far less memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and progress as lines of JSON.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Train cut variants back, without labels.

    They are written into their family if they got better, and stay as they were if not. Interrupted, the same command
    goes on where it was.

    Several processes share the work: torchrun --nproc-per-node 2 -m snapvit_export.cli recover ...
    """
    from ..errors import UsageError
    from ..workflows.recover import RecoverRequest
    from ..workflows.recover import recover as run
    from . import parsing
    from .progress import shown

    if out is not None and what.is_dir():
        raise UsageError("--out is for a family that is exported from a ranking, and this one is there. Leave it out")
    request = RecoverRequest(
        what,
        data=data,
        variants=variant or (),
        budget=budget,
        elastic=elastic,
        minutes=minutes,
        epochs=epochs,
        train=train,
        recipe=recipe,
        labels=labels,
        device=device,
        seed=seed,
        rate=rate,
        batch=batch,
        crop=crop,
        recompute=recompute,
        autocast=autocast,
        model=model,
        checkpoint=checkpoint,
        model_arguments=parsing.model_arguments(model_arg, pool, image_size),
        out=Path("snapvit-family") if out is None else out,
    )
    with shown(quiet, as_json) as progress:
        manifest = run(request, progress)
    if manifest is None:  # another process of the run writes and prints
        return
    if as_json:
        print_json(manifest)
    else:
        from ..report.terminal import print_recovered

        print_recovered(manifest)
