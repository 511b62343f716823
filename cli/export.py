"""`snapvit export`: from a model and images to a family folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..visible import say
from . import options
from .output import print_json


def export(
    budget: Annotated[Optional[str], typer.Option(help="Latency to meet: 10ms, 60% (of dense) or 100fps.")] = None,
    at: Annotated[str, typer.Option(help="Percentile that must meet the budget: p50, p90 or p99.")] = "p50",
    max_size: Annotated[
        Optional[str], typer.Option(help="Also at most this size, graph and weights: 12MB, 500kB or 1.5GB.")
    ] = None,
    max_params: Annotated[Optional[str], typer.Option(help="Also at most so many parameters: 3.5M, 800k.")] = None,
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
    data: Annotated[
        Optional[list[str]],
        typer.Option(help=f"Images to calibrate on: {options.SOURCES}. May be repeated."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write; replaced if it is a family.")] = Path("snapvit-family"),
    sparsity: Annotated[Optional[str], typer.Option(help="Fractions of prunable parameters to cut: 0.1,0.3")] = None,
    flops: Annotated[Optional[str], typer.Option(help="Fractions of the blocks' FLOPs to keep: 0.72,0.5")] = None,
    params: Annotated[Optional[str], typer.Option(help="Fractions of all parameters to keep: 0.7,0.5")] = None,
    pair: Annotated[Optional[str], typer.Option(help="Ratios of neurons and heads to cut: 0.35:0.2")] = None,
    tokens: Annotated[
        Optional[str],
        typer.Option(help="Fractions of the patch tokens left at the end, the others merged: 0.75,0.5"),
    ] = None,
    resolution: Annotated[
        Optional[str], typer.Option(help="Pixels of smaller input images: 192,160 or 192x160.")
    ] = None,
    levers: Annotated[
        Optional[str],
        typer.Option(help="What a budget, or --flops, may use: some of precision,tokens,width,depth; a budget: all."),
    ] = None,
    prefer: Annotated[
        str, typer.Option(help="Of what fits: the best 'fidelity' to the dense model, or 'accuracy' by labels.")
    ] = "fidelity",
    strict: options.Strict = False,
    ranking: Annotated[Optional[Path], typer.Option(help="Use this ranking instead of scoring anew.")] = None,
    for_device: Annotated[
        Optional[str],
        typer.Option("--for", help="Make a spread of variants for another device, which chooses: jetson-orin-nano."),
    ] = None,
    card: Annotated[Optional[str], typer.Option(help="Kind of this device: cpu (if left out), rtx-4090, ...")] = None,
    threads: Annotated[
        Optional[int], typer.Option(min=1, max=1024, help="CPU threads the model may use; 1 on the card cpu.")
    ] = None,
    batch: Annotated[Optional[int], typer.Option(min=1, max=65536, help="Images per run; 1 on all cards.")] = None,
    recipe: Annotated[
        str, typer.Option(help="default, paper (as published), local, idap, or a baseline (docs/method.md).")
    ] = "default",
    no_correct: Annotated[
        bool, typer.Option("--no-correct", help="Leave the weights of what is kept as they are.")
    ] = False,
    correction: Annotated[
        Optional[str],
        typer.Option(help="refit, elastic, sequential, sparsegpt or mean; otherwise as the recipe has it."),
    ] = None,
    damping: Annotated[
        Optional[str], typer.Option(help="Of the statistics: mean:0.01, max:0.1 or percentile:0.01.")
    ] = None,
    images: Annotated[Optional[int], typer.Option(min=1, max=10**7, help="Images to calibrate on.")] = None,
    seed: Annotated[
        Optional[int], typer.Option(min=0, max=2**32 - 1, help="For the choice of images and crops.")
    ] = None,
    evaluations: Annotated[
        Optional[int], typer.Option(min=0, max=10**6, help="Of the search, the longest part; 0 for none.")
    ] = None,
    depth: Annotated[
        Optional[bool],
        typer.Option("--depth/--no-depth", help="Whole sub-layers may be removed too, where that pays."),
    ] = None,
    runtime: Annotated[
        Optional[str],
        typer.Option(help="onnxruntime, openvino, tensorrt, onnxruntime-cuda or onnxruntime-tensorrt; as the card."),
    ] = None,
    precision: Annotated[
        Optional[str],
        typer.Option(
            help="Precision to compute in: fp32, fp16, fp8 (TensorRT), int8 (the runtime's kind), int8-dynamic, "
            "int8-static; or auto: a budget takes what is best."
        ),
    ] = None,
    flavour: Annotated[
        Optional[str],
        typer.Option(
            help="ort (ONNX Runtime 1.23 or newer), tensorrt (opset 19) or portable (opset 17); "
            "otherwise what suits the runtime."
        ),
    ] = None,
    static_batch: Annotated[
        bool, typer.Option("--static-batch", help="Graphs take exactly --batch images instead of any number.")
    ] = False,
    takes_bytes: Annotated[
        bool, typer.Option("--uint8-input", help="Graphs take (B, H, W, 3) bytes and normalise them.")
    ] = False,
    build_only: Annotated[
        bool, typer.Option("--build-only", help="TensorRT engines for a GPU that is not here: built, never timed.")
    ] = False,
    single_file: Annotated[
        bool, typer.Option("--single-file", help="Put the weights into each graph instead of one shared file.")
    ] = False,
    device: options.Device = "cpu",
    reference: Annotated[
        Optional[bool],
        typer.Option(
            "--reference/--no-reference",
            help="Put eight of the images into the folder, for other runtimes to be compared; as these need it.",
        ),
    ] = None,
    save_torch: Annotated[
        bool,
        typer.Option("--save-torch", help="Also write what is chosen, or all variants without a budget, for timm."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest instead of a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")] = False,
) -> None:
    """Make the most faithful model that fits a budget.

    It is timed on this machine, and the proof lies beside it.
    """
    import msgspec

    from .. import profiles
    from ..allocation.levers import parse_levers
    from ..allocation.recipe import DEFAULT, correcting_settings
    from ..target import check_runtime, faster_than
    from ..workflows.export import Request
    from ..workflows.export import export as run
    from . import parsing
    from .progress import shown

    known = profiles.load(for_device or card or "cpu")
    used = known.target.runtime if runtime is None else check_runtime(runtime)
    free = precision in (None, "auto")
    named = None if levers is None else parse_levers(levers)
    chooses = budget is not None and ("precision" in named if named is not None else recipe == DEFAULT)
    target = msgspec.structs.replace(
        known.target,
        batch=batch or known.target.batch,
        threads=threads or known.target.threads,
        runtime=used,
        precision=parsing.own_precision(precision, known.target.precision, used, chooses),
    )
    known.check_precision(target)
    is_spread = build_only or for_device is not None  # has the same widths in all precisions
    others = faster_than(target.precision, used, known.precisions_for(used)) if is_spread else ()
    settings = correcting_settings(
        recipe,
        not no_correct,
        correction=correction,
        damping=damping,
        images=images,
        seed=seed,
        evaluations=evaluations,
        depth=depth,
    )
    request = Request(
        command=parsing.command_line(),
        model=model,
        checkpoint=checkpoint,
        model_arguments=parsing.model_arguments(model_arg, pool, image_size),
        onnx=parsing.onnx_options(output, preprocessing, mean, std, resize, classes),
        data=data or None,
        out=out,
        budget=budget,
        sparsity=parsing.fractions(sparsity, "--sparsity"),
        flops=parsing.fractions(flops, "--flops"),
        params=parsing.fractions(params, "--params"),
        pairs=parsing.pairs(pair, "--pair"),
        tokens=parsing.fractions(tokens, "--tokens"),
        resolution=parsing.resolutions(resolution, "--resolution"),
        target=target,
        width_multiple=max(map(known.width_multiple, (target.precision, *others))),
        card_precisions=known.precisions_for(used),
        least_heads=known.least_heads_for(target),
        clock=known.clock,
        settings=settings,
        depth=depth,
        levers=named,
        mixes_precisions=free,
        prefer=parsing.preference(prefer),
        strict=strict,
        ranking=ranking,
        flavour=flavour,
        single_file=single_file,
        static_batch=static_batch,
        takes_bytes=takes_bytes,
        build_only=build_only,
        device=device,
        reference=reference,
        save_torch=save_torch,
        elsewhere=for_device is not None,
        limits=parsing.limits(at, max_size, max_params),
    )
    with shown(quiet) as progress:
        manifest = run(request, progress)
    if as_json:
        print_json(manifest)
        return
    from ..report.terminal import print_family

    print_family(manifest, folder=out)
    files = [variant.file for variant in manifest.variants] + [weights.file for weights in manifest.weights]
    say(f"Written to {out}: {', '.join(files)}, manifest.json")
    if manifest.reference is not None:
        count = manifest.reference.images
        say(f"It holds {count} of the images, to compare answers with; --no-reference leaves them out")
    if save_torch:
        say(f"For torch: {out / 'torch'}, see load.py and README.txt there")
    if for_device is not None:
        for line in parsing.next_on_device(known, out):
            say(line)
