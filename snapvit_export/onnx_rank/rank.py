"""Ranks a model by the default recipe without torch: statistics in ONNX Runtime, then orders and damage curves. Light.

Gradients, searches and refits need torch. What is left is the most of the default recipe: the same statistics, orders,
damage curves and factors, so that any Plan is allocated and corrected as on a workstation, but for the refit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from ..allocation.recipe import Settings, uses_scores
from ..allocation.schedule_choice import IMAGES as SCHEDULE_IMAGES
from ..allocation.schedule_choice import Diverged, chosen, measure
from ..allocation.tokens import Schedule
from ..calibration.images import Images
from ..correction.cholesky import Factor, Factors, columns_of, make_factor, no_factor
from ..correction.moments import Damping, Moments, Statistics
from ..correction.ordering import MOST_AT_ONCE, OutputLayer, Parts, check_order, in_parallel, ordered_part, ranking_of
from ..errors import SnapvitError, UsageError
from ..graph.writer import Blueprint, GraphWriter
from ..model.plan import Plan, Protection
from ..model.ranking import Ranking
from ..model.sublayer import KEY
from ..model.tensor_names import TRANSPOSED
from ..model.timing import KEY as TIMING
from ..model.timing import PhaseClock
from ..progress import Progress
from ..runtimes.device import usable_cores
from ..storage.json import as_builtins
from .observe import observe
from .sublayers import diverged, measure_sublayers, outputs_of

OF_HEADS = ("q", "k", "v", "proj", "attn_norm")  # layers whose rows belong to heads
OF_NEURONS = ("fc1", "gate", "up", "fc2", "mlp_norm")
Tensors = Mapping[str, npt.NDArray[np.float32]]


def check_settings(settings: Settings) -> None:
    """Refuse settings that need torch."""
    without = "an ONNX file is ranked without torch"
    if settings.allocation != "joint" or uses_scores(settings):
        raise UsageError(f"{without}, so by the default recipe alone: others need gradients. Leave --recipe out")
    if settings.evaluations:
        raise UsageError(f"{without}, and a search needs it. Leave --evaluations out")
    if settings.correction not in (None, "elastic", "refit"):
        raise UsageError(f"{without}, and so is its correction. Leave --correction out, or give elastic")


def rank(blueprint: Blueprint, images: Images, settings: Settings, progress: Progress) -> tuple[Ranking, Factors]:
    """Rank the heads and neurons of a model; return the ranking and the factors that correct any Plan of it.

    >>> ranking, factors = rank(blueprint, images, make_settings("default"), Silent())
    """
    check_settings(settings)
    damping = Damping.parse(settings.damping)
    described, clock = provenance_of(blueprint, images, settings), PhaseClock(threads=usable_cores())
    with clock("statistics"):
        statistics = observe(blueprint, images, progress)
    progress.phase("ordering heads and neurons")
    with clock("ordering"):
        parts = _ordered(blueprint, statistics, settings.order, damping)
        ranking, factors = ranking_of(parts, blueprint.anatomy, blueprint.model, damping, statistics, described)
    with clock("sub-layers"):
        sublayers = measure_sublayers(blueprint, images, statistics, progress)
    timed = {KEY: as_builtins(sublayers), TIMING: clock.in_plain_values()}
    return replace(ranking, provenance={**described, **timed}), factors


def factors_for(
    blueprint: Blueprint, ranking: Ranking, images: Images, damping: Damping, progress: Progress
) -> Factors:
    """Return the factors that correct any Plan of a ranking that was made before."""
    statistics, embed = observe(blueprint, images, progress), blueprint.anatomy.embed_dim
    made: dict[str, list[Factor]] = {"proj": [], "fc2": []}
    for i, block in enumerate(blueprint.anatomy.blocks):
        units = {"proj": block.head_dim, "fc2": 1}
        orders = {"proj": ranking.head_order(i), "fc2": ranking.neuron_order(i)}
        for layer, moments in (("proj", statistics.proj[i]), ("fc2", statistics.fc2[i])):
            own = _layer(blueprint, i, layer, moments)
            made[layer].append(
                no_factor(units[layer], embed)
                if own is None
                else make_factor(own.weight, moments, orders[layer], own.unit, damping, own.layer_scale)
            )
    return Factors(tuple(made["proj"]), tuple(made["fc2"]), ranking.order_sha256, damping, statistics.images)


def provenance_of(blueprint: Blueprint, images: Images, settings: Settings) -> dict[str, Any]:
    """Return all that decides the ranking."""
    described: dict[str, Any] = {"allocation": "joint", "order": settings.order, "damping": settings.damping}
    if settings.depth:
        described["protection"] = as_builtins(Protection(sublayers=False))
    return described | {
        "seed": settings.seed,
        "model": blueprint.model,
        "weights_sha256": weights_sha256(blueprint.dense),
        "data": images.fingerprint,
        "runtime": "onnxruntime",
    }


def weights_sha256(dense: Tensors) -> str:
    """Return a hash of all tensors by canonical name: the same model gives the same."""
    digest = hashlib.sha256()
    for name in sorted(dense):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(dense[name]).tobytes())
    return digest.hexdigest()


def check_weights(ranking: Ranking, blueprint: Blueprint, where: str) -> None:
    """Refuse a ranking of another model, or one whose provenance names other weights; `where` begins the error."""
    try:
        ranking.check_fits(blueprint.anatomy)
    except SnapvitError as error:
        raise SnapvitError(f"{where}{error}") from error
    made_from = ranking.provenance.get("weights_sha256")
    if made_from not in (None, weights_sha256(blueprint.dense)):
        raise SnapvitError(
            f"{where}the ranking was made from other weights of {ranking.model}, or from a model in torch. Rank the "
            "file first: snapvit rank FILE.onnx"
        )


def _ordered(blueprint: Blueprint, statistics: Statistics, order: str, damping: Damping) -> Sequence[Parts]:
    """Return the ordered attention and MLP of every block."""
    check_order(order, has_scores=False)

    def ordered(i: int) -> Parts:
        found = [
            ordered_part(_layer(blueprint, i, layer, moments), moments, order, None, damping)
            for layer, moments in (("proj", statistics.proj[i]), ("fc2", statistics.fc2[i]))
        ]
        return found[0], found[1]

    # Each block on one thread: the number of cores must not decide between two structures that are nearly equal.
    with threadpool_limits(limits=1):
        return in_parallel(ordered, len(blueprint.anatomy.blocks), min(MOST_AT_ONCE, usable_cores()))


def _layer(blueprint: Blueprint, i: int, layer: str, moments: Moments) -> OutputLayer | None:
    """Return the proj or fc2 of a block as orders read it; None for one that the model lacks."""
    if not moments.width:
        return None
    dense, name = blueprint.dense, f"blocks.{i}.{layer}"
    scale = dense.get(f"blocks.{i}.{'scale1' if layer == 'proj' else 'scale2'}")
    unit = blueprint.anatomy.blocks[i].head_dim if layer == "proj" else 1
    return OutputLayer(
        dense[f"{name}.weight"].T.astype(np.float64), unit, None if scale is None else scale.astype(np.float64)
    )


def in_rank_order(blueprint: Blueprint, ranking: Ranking) -> Blueprint:
    """Return the model with the heads and neurons of every block best first, as graphs and Elastic folders have it."""
    return replace(blueprint, dense=dict(reordered(blueprint, ranking)))


def reordered(blueprint: Blueprint, ranking: Ranking) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield all tensors in rank order, one after the other."""
    for name, tensor in blueprint.dense.items():
        rows = _rows(blueprint, ranking, name)
        yield name, tensor if rows is None else np.ascontiguousarray(tensor[rows])


def _rows(blueprint: Blueprint, ranking: Ranking, name: str) -> npt.NDArray[np.int64] | None:
    """Return the rows of a tensor in rank order; None for one that no structure owns rows of."""
    if not name.startswith("blocks."):
        return None
    _, number, layer, *kind = name.split(".")
    if not kind or (layer in TRANSPOSED and kind == ["bias"]):
        return None
    i = int(number)
    if layer in OF_HEADS:
        return columns_of(ranking.head_order(i), blueprint.anatomy.blocks[i].head_dim)
    return ranking.neuron_order(i) if layer in OF_NEURONS else None


def choose_schedule(
    blueprint: Blueprint, images: Images, folder: Path, progress: Progress
) -> tuple[Schedule, Mapping[str, Any]]:
    """Return the schedule of merging that suits a model, and the choice as it is recorded; `folder` for graphs."""
    anatomy, few = blueprint.anatomy, images.first(SCHEDULE_IMAGES)

    def compared() -> Diverged:
        writer, plan = GraphWriter(blueprint, folder), Plan.dense(anatomy)
        dense = outputs_of(writer, plan, few)
        return lambda merged: diverged(anatomy, outputs_of(writer, plan.with_tokens(merged), few), dense)

    return chosen(measure(anatomy, compared, progress), progress)
