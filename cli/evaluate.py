"""`snapvit evaluate`: the quality of a model on a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from . import options as shared
from .output import print_json


def evaluate(
    model: Annotated[str, typer.Argument(help=shared.MODEL)] = "bundled",
    by: Annotated[
        Optional[str],
        typer.Option(help="head, knn, linear, segment, in-context, or several: knn,linear. Default: what suits."),
    ] = None,
    data: Annotated[
        Optional[str],
        typer.Option(help=f"Dataset, in splits or to be split: {shared.SOURCES}."),
    ] = None,
    checkpoint: Annotated[Optional[Path], typer.Option(help="Local weights: .safetensors or .pth.")] = None,
    model_arg: shared.ModelArg = None,
    pool: shared.Pool = None,
    image_size: shared.ImageSize = None,
    classes: Annotated[
        Optional[Path], typer.Option(help="Names of the head's classes: line i, or its first word, is class i.")
    ] = None,
    ranking: Annotated[Optional[Path], typer.Option(help="Prune along this ranking, without correction.")] = None,
    sparsity: Annotated[Optional[float], typer.Option(help="Fraction of prunable parameters to cut.")] = None,
    flops: Annotated[Optional[float], typer.Option(help="Fraction of the blocks' FLOPs to keep.")] = None,
    features: Annotated[
        Optional[Path],
        typer.Option(help="Keep features in this file, and reuse them if weights and images are the same."),
    ] = None,
    images: Annotated[Optional[int], typer.Option(min=1, max=10**7, help="Images of each split at most.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="For splits, the choice of images and probes.")] = 0,
    merge_train_valid: Annotated[
        Optional[bool],
        typer.Option(
            "--merge-train-valid/--no-merge-train-valid",
            help="Learn from validation images too, or not. By default k-NN does, unless a .pt file says otherwise.",
        ),
    ] = None,
    segmenter: Annotated[
        str, typer.Option(help="How --by segment learns: quick, from fixed images; paper, from random crops.")
    ] = "quick",
    bank_patches: Annotated[
        int, typer.Option(min=1, max=10**8, help="Patches of training images that --by in-context compares with.")
    ] = 1_960_000,
    ignore: Annotated[str, typer.Option(help="Values of masks that count for no class: 255,3")] = "255",
    runtime: Annotated[
        Optional[str], typer.Option(help="Runs an exported file: onnxruntime, openvino, ... as in export.")
    ] = None,
    output: shared.Output = None,
    preprocessing: shared.Preprocessing = None,
    mean: shared.Mean = None,
    std: shared.Std = None,
    resize: shared.Resize = None,
    device: shared.Device = "cpu",
    force: shared.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    quiet: shared.Quiet = False,
) -> None:
    """Measure the quality of a model or a file.

    By its own head, nearest neighbours, a linear probe or segmentation, with standard errors.
    """
    from ..evaluate.options import EvalOptions, parse_ignored, parse_metrics, parse_segmenter
    from ..target import check_runtime
    from ..workflows.evaluate import EvaluateRequest, evaluate_model
    from . import parsing
    from .progress import shown

    metrics, ignored = parse_metrics(by), parse_ignored(ignore)
    way = parse_segmenter(segmenter)
    options = EvalOptions(metrics, classes, features, images, seed, ignored, merge_train_valid, way, bank_patches)
    used = None if runtime is None else check_runtime(runtime)
    onnx = parsing.onnx_options(output, preprocessing, mean, std, resize)
    given = parsing.model_arguments(model_arg, pool, image_size)
    cut = (ranking, sparsity, flops)
    request = EvaluateRequest(model, checkpoint, data, *cut, options, used, force, onnx, given, device)
    with shown(quiet) as progress:
        found = evaluate_model(request, progress)
    if as_json:
        print_json(found)
        return
    from ..report.terminal import print_evaluation

    print_evaluation(found)
