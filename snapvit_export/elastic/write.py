"""Write an Elastic folder from arrays in rank order; it appears whole or not at all. Light: numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import UNSET

from ..allocation.tokens import Schedule
from ..calibration.preprocessing import Preprocessing
from ..correction.cholesky import Factor, Factors
from ..errors import SnapvitError
from ..model.anatomy import Anatomy, Block
from ..model.ranking import Ranking
from ..model.tensor_names import stored_shapes
from ..storage.atomic import settle, sha256, staged_folder
from ..storage.mapped import Array, write_buffer
from .fidelity_table import FidelityTable
from .folder import Elastic
from .format import (
    CORRECTION,
    RANKING,
    STORED,
    WEIGHTS,
    Correction,
    Description,
    RankingFile,
    Wiring,
    own_files,
    pack_factor,
    write_description,
)


def write_elastic(
    folder: Path,
    *,
    model: str,
    anatomy: Anatomy,
    preprocessing: Preprocessing,
    labels: tuple[str, ...],
    wiring: Wiring,
    ranking: Ranking,
    weights: Iterable[tuple[str, Array]],
    factors: Factors | None,
    merging: Schedule | None = None,
    measure: Callable[[Elastic], FidelityTable | None] | None = None,
) -> Description:
    """Write the folder; `weights` come one by one under their canonical names, in rank order.

    `measure`: gives the fidelity of some Plans, from the folder as devices will read it.
    """
    ranking.check_fits(anatomy)
    if factors is not None:
        check_factors(factors, ranking, anatomy)
    settle(folder)
    with staged_folder(folder, replaceable=own_files(folder)) as stage:
        ranking.save(stage / RANKING)
        description = Description(
            model=model,
            anatomy=anatomy,
            preprocessing=preprocessing,
            labels=labels,
            wiring=wiring,
            ranking=RankingFile(file=RANKING, sha256=sha256(stage / RANKING)),
            weights=write_buffer(stage / WEIGHTS, _as_named(weights, anatomy), "float32"),
            correction=None if factors is None else _write_factors(stage, factors),
            merging=UNSET if merging is None else merging,
        )
        write_description(stage, description)
        measured = None if measure is None else measure(Elastic.load(stage))
        if measured is not None:
            description = msgspec.structs.replace(description, fidelity=measured)
            write_description(stage, description)
    return description


def check_factors(factors: Factors, ranking: Ranking, anatomy: Anatomy) -> None:
    """Refuse factors that are in another order than the weights would be, or of another model."""
    if factors.order_sha256 != ranking.order_sha256:
        raise SnapvitError("the correction factors were made for another ranking. Make them again for this one")
    for layer, of in (("proj", factors.proj), ("fc2", factors.fc2)):
        if [_size(factor) for factor in of] != [_needed(block, layer, anatomy.embed_dim) for block in anatomy.blocks]:
            raise SnapvitError(f"the correction factors of {layer} are of another model. Make them again for this one")


def _size(factor: Factor) -> tuple[int, ...]:
    return (factor.unit, len(factor.mean), *factor.lower.shape, *factor.projected.shape)


def _needed(block: Block, layer: str, e: int) -> tuple[int, ...]:
    unit, d = (block.head_dim, block.heads * block.head_dim) if layer == "proj" else (1, block.hidden)
    return (unit, d, d, d, e, d)


def _as_named(weights: Iterable[tuple[str, Array]], anatomy: Anatomy) -> Iterator[tuple[str, Array]]:
    """Yield the weights, and refuse them unless all are there in the shapes that a reader requires."""
    shapes = stored_shapes(anatomy)
    for name, array in weights:
        if shapes.pop(name, None) != array.shape:
            raise ValueError(f"{name} of shape {array.shape} is not a tensor of this model")
        yield name, array
    if shapes:
        raise ValueError(f"not written: {', '.join(shapes)}")


def _write_factors(stage: Path, factors: Factors) -> Correction:
    return Correction(
        damping=factors.damping,
        images=factors.images,
        order_sha256=factors.order_sha256,
        buffer=write_buffer(stage / CORRECTION, _arrays(factors), STORED),
    )


def _arrays(factors: Factors) -> Iterator[tuple[str, Array]]:
    for i, (proj, fc2) in enumerate(zip(factors.proj, factors.fc2)):
        for layer, factor in (("proj", proj), ("fc2", fc2)):
            for part, array in pack_factor(factor).items():
                yield f"blocks.{i}.{layer}.{part}", array
