"""Pack a model into an Elastic folder: every tensor in rank order under its canonical name, usable without torch.

`functional.block_weights` already gives the blocks of every family under uniform names, for any list of heads and
neurons; here the list is all of them, best first. Tensors outside the blocks are stored as the module uses them: tokens
with their positions added, rotary tables at the model's own input size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import UNSET, UnsetType
from timm.models.eva import Eva
from torch import Tensor, nn

from ..allocation.tokens import Schedule
from ..correction.cholesky import Factors, columns_of
from ..elastic.fidelity_table import FidelityTable
from ..elastic.folder import Elastic
from ..elastic.format import Description, Wiring
from ..elastic.write import write_elastic
from ..errors import ModelNotUnderstood, SnapvitError
from ..graph.weights import REPLACEMENT
from ..graph.writer import Blueprint
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..model.positions import Rotary
from ..model.ranking import Ranking
from ..model.tensor_names import TRANSPOSED, stored_shapes
from ..progress import Progress, Silent
from ..storage.mapped import Array
from .blocks.functional import ACTIVATIONS, Weights, block_weights, rotates_half, stand_ins
from .blocks.pruned_block import added_by
from .blocks.timm_blocks import PARTS, blocks_of
from .correct.elastic import layers_of
from .models.load import Model, as_model
from .models.read_anatomy import activation_name, norm_kind, read_anatomy

SAME_TABLES = 1e-4  # timm computes angles of up to some tens in float32; another way to make them differs by far more


def pack(
    model: Model | nn.Module,
    ranking: Ranking,
    folder: Path | str,
    factors: Factors | None = None,
    progress: Progress | None = None,
    merging: Schedule | None = None,
    measure: Callable[[Elastic], FidelityTable | None] | None = None,
) -> Description:
    """Write the Elastic folder of a model; with `factors` of the same ranking it can correct its weights.

    `merging`: the schedule by which devices merge tokens; None: the default one. `measure`: gives the fidelity of some
    Plans, which devices without images choose by.

    A timm module gets its name and preprocessing from timm's configuration (`as_model`).

    >>> pack(model, ranking, "elastic", factors)
    """
    model = as_model(model)
    if any(model.anatomy.merges):
        raise SnapvitError(f"{model.name} merges tokens already. Pack the model that it was made from")
    wiring = read_wiring(model.module, model.anatomy)
    return write_elastic(
        Path(folder),
        model=model.name,
        anatomy=model.anatomy,
        preprocessing=model.preprocessing,
        labels=model.description.labels,
        wiring=wiring,
        ranking=ranking,
        weights=_weights(model, ranking, progress or Silent()),
        factors=factors,
        merging=merging,
        measure=measure,
    )


def blueprint(model: Model, ranking: Ranking, progress: Progress | None = None) -> Blueprint:
    """Return the model in rank order, in memory: graphs are made from it without a folder between."""
    return Blueprint(
        model=model.name,
        anatomy=model.anatomy,
        wiring=read_wiring(model.module, model.anatomy),
        preprocessing=model.preprocessing,
        labels=model.description.labels,
        dense=dict(_weights(model, ranking, progress or Silent())),
    )


def factors_of(elastic: Elastic, model: Model, ranking: Ranking) -> Factors:
    """Return the Factors of an Elastic folder; its ranking and its weights must be those of the model.

    >>> factors_of(Elastic.load("elastic"), model, ranking).images
    24
    """
    blocks, made = blocks_of(model.module), elastic.description.correction
    if made is None or elastic.ranking.order_sha256 != ranking.order_sha256:
        lacks = "has no factors" if made is None else "is of another ranking"
        raise SnapvitError(f"{elastic.folder}: {lacks}. Pack this model and ranking with images: snapvit pack")
    for i, block in enumerate(blocks):
        for name, layer in zip((f"blocks.{i}.proj.weight", f"blocks.{i}.fc2.weight"), layers_of(block, ranking, i)):
            if layer is None:
                continue
            own = _stored(name, layer.linear.weight[:, columns_of(layer.order, layer.unit)])
            if not np.array_equal(own, elastic.dense[name]):
                raise SnapvitError(f"{elastic.folder}: has other weights than {model.name}. Pack this model")
    proj = tuple(elastic.factor(i, "proj") for i in range(len(blocks)))
    fc2 = tuple(elastic.factor(i, "fc2") for i in range(len(blocks)))
    return Factors(proj, fc2, made.order_sha256, made.damping, made.images)


def corrected_layers(module: nn.Module, ranking: Ranking, plan: Plan, dense: Mapping[str, Array]) -> dict[str, Array]:
    """Return the proj and fc2 of a cut module that differ from the `dense` ones, under their canonical names.

    A removed sub-layer is represented by the vector that its block still adds: zeros where the layer before adds it.
    """
    found: dict[str, Array] = {}
    embed = len(dense["patch.weight"])
    for i, block in enumerate(blocks_of(module)):
        parts = zip(("proj", "fc2"), PARTS, layers_of(block, ranking, i), (plan.heads[i], plan.neurons[i]))
        for name, part, layer, keep in parts:
            named = f"blocks.{i}.{name}"
            if layer is None:
                left = added_by(block, part)
                found[named + REPLACEMENT] = np.zeros(embed, np.float32) if left is None else _array(left)
                continue
            columns = columns_of(np.argsort(np.argsort(layer.order[:keep])), layer.unit)  # from original to rank order
            made = {f"{named}.weight": np.ascontiguousarray(_array(layer.linear.weight)[:, columns].T)}
            made |= {} if layer.linear.bias is None else {f"{named}.bias": _array(layer.linear.bias)}
            if any(not np.array_equal(array, dense.get(key, np.zeros(0))[: len(array)]) for key, array in made.items()):
                found |= made
    return found


def own_weights(
    module: nn.Module, start: nn.Module, ranking: Ranking, plan: Plan, dense: Mapping[str, Array]
) -> dict[str, Array]:
    """Return all tensors that a trained module has of its own, under their canonical names and in rank order.

    Beside what `corrected_layers` returns, those that training has changed: `start` is the module before it.
    """
    found = corrected_layers(module, ranking, plan, dense)
    before = _named_weights(start, ranking, plan)
    for name, array in _named_weights(module, ranking, plan).items():
        if not np.array_equal(array, before[name]):
            found[name] = array
    return found


def _named_weights(module: Any, ranking: Ranking, plan: Plan) -> dict[str, Array]:
    """Return the tensors of a cut module under their canonical names, what it keeps in rank order."""
    anatomy = read_anatomy(module, ranking.model or "model")
    tensors = dict(_outside(module, anatomy))
    for i, block in enumerate(blocks_of(module)):
        orders = (ranking.head_order(i)[: plan.heads[i]], ranking.neuron_order(i)[: plan.neurons[i]])
        heads, neurons = (torch.from_numpy(np.argsort(np.argsort(order))) for order in orders)  # in rank order
        block_tensors = _split(block_weights(block, heads, neurons, split_query=True))
        tensors |= {f"blocks.{i}.{name}": tensor for name, tensor in block_tensors.items()}
    names = stored_shapes(anatomy)
    return {name: _stored(name, tensor) for name, tensor in tensors.items() if name in names}


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().float().numpy()


def read_wiring(module: Any, anatomy: Anatomy) -> Wiring:
    """Return the details of a module's computation that its Anatomy leaves open."""
    pool = module.attn_pool
    used = {block.activation for block in anatomy.blocks} | (
        {activation_name(pool.mlp.act)} if pool is not None else set()
    )
    if unknown := sorted(used - set(ACTIVATIONS)):
        raise ModelNotUnderstood(f"activation {unknown[0]} has no name that a graph could be made from")
    return Wiring(
        rotate_half=rotates_half(module),
        pool_prefix=pool is not None if isinstance(module, Eva) else bool(module.pool_include_prefix),
        pool_activation=None if pool is None else activation_name(pool.mlp.act),
        eps={name: eps for name, eps in _all_eps(module, anatomy).items() if eps != anatomy.norm_eps},
        rotary=_rotary(module, anatomy),
    )


def _rotary(module: Any, anatomy: Anatomy) -> Rotary | UnsetType:
    """Return what the rotary tables are made from; nothing for tables of the model's own that are made otherwise."""
    if anatomy.rope == "none":
        return UNSET
    rope: Any = module.rope
    if rope.temperature is None:  # of periods that are given by their ends
        return UNSET
    reference = getattr(rope, "ref_feat_shape", None)
    found = Rotary(
        kind=anatomy.rope,
        temperature=float(rope.temperature),
        offset=float(rope.grid_offset),
        column_first=rope.grid_indexing == "xy",
        reference=None if reference is None else (reference[0], reference[1]),
        divisor=getattr(rope, "normalize_coords", "separate"),
    )
    made = found.tables(anatomy.grid, anatomy.blocks[0].head_dim, rotates_half(module))
    used = _tokens(module, anatomy)
    own = _array(used["rope.sin"]), _array(used["rope.cos"])  # (patches, head_dim) each
    return found if all(np.allclose(a, b, rtol=0, atol=SAME_TABLES) for a, b in zip(own, made)) else UNSET


def _all_eps(module: Any, anatomy: Anatomy) -> dict[str, float]:
    """Return the eps of every norm by canonical name; refuse a norm of another kind than the Anatomy's."""
    norms = {"pre_norm": module.norm_pre, "final_norm": module.norm, "fc_norm": module.fc_norm}
    if module.attn_pool is not None:
        norms["pool.norm"] = module.attn_pool.norm
    for i, block in enumerate(blocks_of(module)):
        parts: dict[str, Any] = {}
        if block.attn is not None:
            parts |= {"norm1": block.norm1, "attn_norm": block.attn.norm}
            parts |= {"q_norm": block.attn.q_norm, "k_norm": block.attn.k_norm}
        if block.mlp is not None:
            parts |= {"norm2": block.norm2, "mlp_norm": block.mlp.norm}
        norms |= {f"blocks.{i}.{name}": norm for name, norm in parts.items()}
    found = {}
    for name, norm in norms.items():
        if isinstance(norm, nn.Identity):
            continue
        if norm_kind(norm, name) != anatomy.norm:
            raise ModelNotUnderstood(f"{name}: {type(norm).__name__} is not a {anatomy.norm} norm like the others")
        found[name] = float(norm.eps if norm.eps is not None else torch.finfo(torch.float32).eps)
    return found


def _weights(model: Model, ranking: Ranking, progress: Progress) -> Iterator[tuple[str, Array]]:
    """Yield all tensors in the order of the computation, one block at a time."""
    anatomy = model.anatomy
    names, outside = list(stored_shapes(anatomy)), _outside(model.module, anatomy)
    first = next(n for n, name in enumerate(names) if name.startswith("blocks."))
    yield from ((name, _stored(name, outside[name])) for name in names[:first])
    progress.phase("packing blocks", len(anatomy.blocks))
    for i, block in enumerate(blocks_of(model.module)):
        heads, neurons = (torch.from_numpy(order) for order in (ranking.head_order(i), ranking.neuron_order(i)))
        tensors = stand_ins(block, anatomy.embed_dim, True) | block_weights(block, heads, neurons, split_query=True)
        tensors = _split(tensors)
        prefix = f"blocks.{i}."
        for name in names:
            if name.startswith(prefix):
                yield name, _stored(name, tensors[name.removeprefix(prefix)])
        progress.advance()
    after = (name for name in names[first:] if not name.startswith("blocks."))
    yield from ((name, _stored(name, outside[name])) for name in after)


def _split(weights: Weights) -> Weights:
    """Split the tensors that hold keys and values together."""
    for part in ("weight", "bias"):
        if (both := weights.pop(f"kv.{part}", None)) is not None:
            weights[f"k.{part}"], weights[f"v.{part}"] = both.chunk(2)
    return weights


def _outside(module: Any, anatomy: Anatomy) -> Weights:
    """Return the tensors outside the blocks by canonical name; callers use only those that the Anatomy has."""
    tensors = _members("patch", module.patch_embed.proj) | _tokens(module, anatomy)
    for name, norm in (("pre_norm", module.norm_pre), ("final_norm", module.norm), ("fc_norm", module.fc_norm)):
        tensors |= _members(name, norm)
    tensors |= _members("head", module.head) | _members("distillation_head", getattr(module, "head_dist", None))
    pool = module.attn_pool
    if pool is not None:
        for name in ("q", "proj", "norm"):
            tensors |= _members(f"pool.{name}", getattr(pool, name))
        for part, tensor in _members("kv", pool.kv).items():
            keys, values = tensor.chunk(2)
            tensors |= {f"pool.{part.replace('kv', 'k')}": keys, f"pool.{part.replace('kv', 'v')}": values}
        tensors |= _members("pool.fc1", pool.mlp.fc1) | _members("pool.fc2", pool.mlp.fc2)
        tensors["pool.latent"] = pool.latent[0]
    return tensors


def _tokens(module: Any, anatomy: Anatomy) -> Weights:
    """Return prefix tokens, positions and rotary tables: what the module adds to patches that are all zero.

    timm adds positions before or after the tokens are joined, with or without rows for them, and may resample. Its own
    code runs here, so a reader of the folder only joins `prefix` and patches + `positions`.
    """
    with torch.no_grad():
        patches = module.patch_embed(torch.zeros(1, anatomy.channels, *anatomy.image))
        found = module._pos_embed(torch.zeros_like(patches))
    x, rope = found if isinstance(found, tuple) else (found, None)
    count = anatomy.prefix
    tensors = {"prefix": x[0, :count], "positions": x[0, count:]}
    if rope is not None:
        tensors["rope.sin"], tensors["rope.cos"] = rope.chunk(2, dim=-1)  # (patches, head_dim) each
    return tensors


def _members(name: str, module: Any) -> Weights:
    found = {f"{name}.{part}": getattr(module, part, None) for part in ("weight", "bias")}
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


def _stored(name: str, tensor: Tensor) -> Array:
    """Return a tensor as the folder stores it: float32, the weights of proj and fc2 transposed."""
    array = _array(tensor)
    layer, _, part = name.rpartition(".")
    return np.ascontiguousarray(array.T if part == "weight" and layer.rpartition(".")[2] in TRANSPOSED else array)
