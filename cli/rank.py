"""`snapvit rank`: score the heads and neurons of a model, once for every sparsity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ..visible import say, visible
from . import options
from .output import print_json

if TYPE_CHECKING:
    from ..model.ranking import Ranking
    from ..model.sublayer import SubLayer


def rank(
    model: Annotated[str, typer.Argument(help=options.MODEL)] = "bundled",
    data: Annotated[
        Optional[list[str]],
        typer.Option(help=f"Images: {options.SOURCES}. Repeat to mix in equal parts."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Ranking to write.")] = Path("ranking.safetensors"),
    checkpoint: Annotated[Optional[Path], typer.Option(help="Local weights: .safetensors or .pth.")] = None,
    model_arg: options.ModelArg = None,
    pool: options.Pool = None,
    image_size: options.ImageSize = None,
    output: options.Output = None,
    preprocessing: options.Preprocessing = None,
    mean: options.Mean = None,
    std: options.Std = None,
    resize: options.Resize = None,
    recipe: Annotated[
        str, typer.Option(help="default, paper (as published), local, idap, or a baseline (docs/method.md).")
    ] = "default",
    allocation: Annotated[
        Optional[str], typer.Option(help="joint (by damage curves); by scores: pairs, mixed, uniform or summed.")
    ] = None,
    order: Annotated[
        Optional[str],
        typer.Option(help="Joint: order within a layer: backward, pivoted, variance, criterion or product."),
    ] = None,
    depth: Annotated[
        Optional[bool], typer.Option("--depth/--no-depth", help="Whole sub-layers may be removed too, where that pays.")
    ] = None,
    criterion: Annotated[
        Optional[str], typer.Option(help="Criterion that scores structures; see docs/method.md.")
    ] = None,
    views: Annotated[Optional[str], typer.Option(help="Crops: paired (as released) or distinct.")] = None,
    reduction: Annotated[Optional[str], typer.Option(help="Gradients: summed (as released) or per_sample.")] = None,
    damping: Annotated[
        Optional[str], typer.Option(help="Joint: of the statistics: mean:0.01, max:0.1 or percentile:0.01.")
    ] = None,
    images: Annotated[Optional[int], typer.Option(min=1, max=10**7, help="Images to calibrate on.")] = None,
    evaluations: Annotated[Optional[int], typer.Option(min=0, help="Evaluations of the search; 0: none.")] = None,
    optimiser: Annotated[Optional[str], typer.Option(help="xnes or snes-log.")] = None,
    population: Annotated[Optional[int], typer.Option(help="Candidates per generation.")] = None,
    pairs: Annotated[Optional[str], typer.Option(help="Ratios the search evaluates: 0.15:0,0.35:0.2")] = None,
    flops: Annotated[Optional[str], typer.Option(help="Joint: sizes the search evaluates at, such as 0.72,0.5")] = None,
    divergence: Annotated[
        Optional[str], typer.Option(help="Joint: what search and rounds compare: predictions, neighbours or cosine.")
    ] = None,
    search_images: Annotated[
        Optional[int], typer.Option(min=1, help="Joint: images to evaluate candidates on.")
    ] = None,
    pca: Annotated[Optional[int], typer.Option(min=1, help="Dimensions in which embeddings are compared.")] = None,
    cka: Annotated[bool, typer.Option("--cka", help="First covariance from the similarity of structures.")] = False,
    cka_images: Annotated[
        Optional[int], typer.Option(min=2, max=10**4, help="Images of --cka: 256 by default, such as 2500.")
    ] = None,
    cka_file: Annotated[
        Optional[Path], typer.Option(help="Keep the covariance of --cka here, and use it if it is there: .safetensors.")
    ] = None,
    search_over: Annotated[
        Optional[str], typer.Option(help="Pairs: factors for none (no search), mlp (one per MLP) or all (heads too).")
    ] = None,
    racing: Annotated[bool, typer.Option("--racing", help="Drop weak candidates early.")] = False,
    seed: Annotated[Optional[int], typer.Option(min=0, max=2**32 - 1, help="For images, crops and the search.")] = None,
    rounds: Annotated[
        Optional[str],
        typer.Option(help="Cut to these FLOPs in turn, measure again, rank what is kept again: 0.85,0.7,0.55"),
    ] = None,
    most_moved: Annotated[
        Optional[float],
        typer.Option(help="Rounds: stop at a larger output divergence than this; 0.5 (cosine: 0.3) by default."),
    ] = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="Rounds: train what is left after each cut, with the model as teacher.")
    ] = False,
    max_drop: Annotated[
        Optional[float],
        typer.Option(
            min=0, max=1, help="Recover: stop where more is lost, of the answers or, with --labels, of top-1; 0.05."
        ),
    ] = None,
    epochs: Annotated[
        Optional[float], typer.Option(min=0, max=10**6, help="Recover: passes over the images in each round; 5.")
    ] = None,
    train: Annotated[Optional[str], typer.Option(help="Recover: norms, linear or all; all by default.")] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Recover: learn from labels too, and count the top-1 that is lost.")
    ] = False,
    device: options.Device = "cpu",
    engine: Annotated[Optional[str], typer.Option(help="What evaluates candidates: torch or onnxruntime.")] = None,
    autocast: Annotated[Optional[str], typer.Option(help="none, bf16 or fp16; a GPU measures without it.")] = None,
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and progress as lines of JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")] = False,
) -> None:
    """Rank heads and neurons without labels.

    Interrupted, the same command goes on where it was.

    Several processes share the work: torchrun --nproc-per-node 2 -m snapvit_export.cli rank ...
    """
    from ..allocation.recipe import make_settings
    from ..errors import UsageError
    from ..workflows.rank import RankRequest, rank_model
    from ..workflows.recovering_rounds import RecoverInRounds
    from . import parsing
    from .progress import shown

    settings = make_settings(
        recipe,
        rounds is not None,
        criterion=criterion,
        views=views,
        reduction=reduction,
        images=images,
        evaluations=evaluations,
        optimiser=optimiser,
        population=population,
        pairs=tuple(parsing.pairs(pairs, "--pairs")) or None,
        allocation=allocation,
        order=order,
        depth=depth,
        damping=damping,
        flops=tuple(parsing.fractions(flops, "--flops")) or None,
        divergence=divergence,
        search_images=search_images,
        pca=pca,
        cka=cka or None,
        cka_images=cka_images,
        search_over=search_over,
        racing=racing or None,
        seed=seed,
    )
    if damping is not None and settings.allocation != "joint":
        raise UsageError("--damping has no part in a ranking by scores alone. Give --allocation joint, or leave it out")
    in_rounds = parsing.fractions(rounds, "--rounds")
    onnx = parsing.onnx_options(output, preprocessing, mean, std, resize)
    given = parsing.model_arguments(model_arg, pool, image_size)
    training = RecoverInRounds(max_drop, epochs, train, labels) if recover else None
    where = (device, engine, autocast)
    request = RankRequest(
        model,
        data,
        out,
        checkpoint,
        settings,
        *where,
        in_rounds,
        most_moved,
        force,
        onnx,
        given,
        training,
        cka_file,
    )
    with shown(quiet, as_json) as progress:
        ranking = rank_model(request, progress)
    if ranking is not None:  # otherwise another process of the run writes and prints
        _print_result(ranking, out, as_json)


def _print_result(ranking: Ranking, out: Path, as_json: bool) -> None:
    if as_json:
        print_json({"file": visible(str(out)), "model": ranking.model, **ranking.provenance})
        return
    from ..report.terminal import print_ranking, print_rounds, print_rows
    from ..workflows.recovering_rounds import folder_beside

    rows = [
        (str(s.block), s.part, f"{s.divergence:.3f}", f"{s.turned:.4f}", f"{s.damage:.4f}", _of_all_later(s))
        for s in ranking.sublayers or ()
    ]
    if rows:
        columns = ("block", "sub-layer", "divergence", "turned", "damage without", "and all later ones")
        print_rows(columns, rows, left={"sub-layer"})
    print_ranking(ranking, out)
    if "before_rounds" in ranking.provenance:
        print_rounds(ranking)
        if any(step["kept"] for step in ranking.provenance["rounds"]):
            say(f"The trained model of the last round: {folder_beside(out)}")


def _of_all_later(sublayer: SubLayer) -> str:
    """Format the damage without this attention and all later ones, where that was measured."""
    return "" if sublayer.onward is None else f"{sublayer.onward:.4f}"
