"""`snapvit evaluate`: the quality of a model on a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..visible import say
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
        typer.Option(help=f"Dataset, in splits or to be split: {shared.SOURCES}. Several, with commas: a table."),
    ] = None,
    checkpoint: Annotated[Optional[Path], typer.Option(help="Local weights: .safetensors or .pth.")] = None,
    model_arg: shared.ModelArg = None,
    pool: shared.Pool = None,
    image_size: shared.ImageSize = None,
    classes: Annotated[
        Optional[Path], typer.Option(help="Names of the head's classes: line i, or its first word, is class i.")
    ] = None,
    ranking: Annotated[
        Optional[Path], typer.Option(help="Prune along this ranking; with {seed} in its name, one of each seed.")
    ] = None,
    recipe: Annotated[
        Optional[str], typer.Option(help="Rank by this recipe instead, as in rank; 'default' if nothing is given.")
    ] = None,
    pair: Annotated[
        Optional[str], typer.Option(help="Ratios of neurons and of heads to cut: 0.35:0.2,0.45:0.3")
    ] = None,
    sparsity: Annotated[Optional[str], typer.Option(help="Fractions of prunable parameters to cut: 0.1,0.3")] = None,
    flops: Annotated[Optional[str], typer.Option(help="Fractions of the blocks' FLOPs to keep: 0.72,0.5")] = None,
    correction: Annotated[
        Optional[str], typer.Option(help="Of what is cut: none, refit, elastic, sequential or sparsegpt.")
    ] = None,
    damping: Annotated[Optional[str], typer.Option(help="Of the statistics, as in export: mean:0.01, max:0.1")] = None,
    calibrate: Annotated[
        Optional[str],
        typer.Option(help="Images to correct and rank on; without it, the training split of the first dataset."),
    ] = None,
    calibration_images: Annotated[
        Optional[int], typer.Option(min=1, max=10**7, help="So many of them; as the recipe says, 256, without it.")
    ] = None,
    features: Annotated[
        Optional[Path],
        typer.Option(help="Keep features in this file, and reuse them if weights and images are the same."),
    ] = None,
    images: Annotated[Optional[int], typer.Option(min=1, max=10**7, help="Images of each split at most.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="For splits, the choice of images and probes.")] = 0,
    seeds: Annotated[Optional[str], typer.Option(help="Several, for means with deviations: 0,13,42")] = None,
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
    out: Annotated[
        Optional[Path], typer.Option(help="Folder of a table; snapvit-evaluation without it. A run goes on there.")
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

    By its own head, nearest neighbours, a linear probe or segmentation, with standard errors. Several sizes, datasets
    or seeds give a table, which is kept while it is made.
    """
    from ..allocation.recipe import DEFAULT, make_settings
    from ..evaluate.options import EvalOptions, parse_ignored, parse_metrics, parse_segmenter
    from ..target import check_runtime
    from ..workflows.evaluate import EvaluateRequest, data_of_evaluation, evaluate_model
    from ..workflows.evaluate_table import evaluate_table
    from ..workflows.table_request import TableRequest
    from . import parsing
    from .progress import shown

    sets = parsing.names(data, "--data")
    pairs = parsing.pairs(pair, "--pair")
    by_share = parsing.fractions(sparsity, "--sparsity"), parsing.fractions(flops, "--flops")
    metrics, ignored = parse_metrics(by), parse_ignored(ignore)
    way = parse_segmenter(segmenter)
    options = EvalOptions(metrics, classes, features, images, seed, ignored, merge_train_valid, way, bank_patches)
    used = None if runtime is None else check_runtime(runtime)
    onnx = parsing.onnx_options(output, preprocessing, mean, std, resize)
    given = parsing.model_arguments(model_arg, pool, image_size)
    of_table = (pair, recipe, correction, damping, calibrate, calibration_images, seeds, out)
    if all(len(several) <= 1 for several in (sets, *by_share)) and all(option is None for option in of_table):
        size, share = (next(iter(fractions), None) for fractions in by_share)
        cut = (ranking, size, share)
        request = EvaluateRequest(model, checkpoint, data, *cut, options, used, force, onnx, given, device)
        with shown(quiet) as progress:
            found = evaluate_model(request, progress)
        if as_json:
            print_json(found)
            return
        from ..report.terminal import print_evaluation

        print_evaluation(found)
        return
    parsing.refuse_in_table(used, onnx)
    table = TableRequest(
        model,
        checkpoint,
        given,
        sets or [data_of_evaluation(model, None)],
        parsing.cut_sizes(pairs, *by_share),
        ranking,
        make_settings(recipe or DEFAULT),
        None if correction == "none" else correction,
        damping,
        calibrate,
        calibration_images,
        parsing.seeds(seeds, seed),
        options,
        out or TableRequest.out,
        force,
        device,
    )
    with shown(quiet) as progress:
        report = evaluate_table(table, progress)
    if as_json:
        print_json(report)
        return
    from ..report.results import print_results

    print_results(report)
    say(f"Written to {table.out}: evaluation.json, evaluation.md")
