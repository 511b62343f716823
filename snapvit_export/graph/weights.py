"""Weights as a graph reads them: an Elastic's tensors with all constant operations folded in. Light.

Folded is what is the same for all Plans:

| folded                           | into                       | holds if                                         |
|----------------------------------|----------------------------|--------------------------------------------------|
| 1 / sqrt(h) of attention         | q                          | no norm runs over q                              |
| LayerScale                       | proj, fc2 and their biases | always                                           |
| bias of the patch embedding      | positions                  | there are positions                              |
| neighbouring rotary pairs        | q, k and the tables        | always: both are permuted alike within each head |
| mean and deviation of the pixels | patch embedding            | the graph takes pixels as bytes                  |

Two biases vanish as well: that of k, since softmax ignores what is the same for all keys (not where keys are rotated or
normed); and that of v, which passes through attention unchanged, since its weights sum to one, into the bias of proj
(not where a norm stands between). The bias of proj then depends on the heads that are kept, so it belongs to a variant.

All of it is exact but for the rounding of float32. Heads and neurons stay along axis 0 in rank order: any Plan is a
prefix, and ten variants share one file. So they do where q, k and v are one matrix (`with_fused_qkv`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..calibration.preprocessing import Preprocessing
from ..elastic.format import Wiring
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..model.tensor_names import weight_shapes

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]
FOLDED = ("pool.latent", "pool.q.weight", "pool.q.bias", "pool.k.weight", "pool.k.bias", "pool.v.bias")
SCALES = (".scale1", ".scale2")
_QKV = re.compile(r"blocks\.\d+\.[qkv]\.(weight|bias)")
ADDED = "added"  # the bias that removed sub-layers before all others add to every token
REPLACEMENT = ".added"  # after the name of a removed proj or fc2: the vector added in its place, after LayerScale
BYTES = ".bytes"  # after the name of a tensor that takes bytes / 256
# Tensors that can hold a vector for all patches, of which the first that exists is used; and the prefix tokens.
EMBEDDING = (f"positions{BYTES}", "positions", f"patch.bias{BYTES}", "patch.bias", "prefix")
OF_RESOLUTION = (f"positions{BYTES}", "positions", "rope.sin", "rope.cos")  # tensors that depend on it


def has_patch_bias(anatomy: Anatomy) -> bool:
    """Return True if the patch embedding keeps its own bias: without positions no other tensor can hold it."""
    return anatomy.patch_bias and not anatomy.positions


def drops_key_bias(anatomy: Anatomy, block: int) -> bool:
    """Return True if the bias of k has no effect."""
    return anatomy.rope == "none" and not anatomy.blocks[block].qk_norm


def moves_value_bias(anatomy: Anatomy, block: int) -> bool:
    """Return True if the bias of v can be added after attention."""
    return not anatomy.blocks[block].attn_norm


def prepare(dense: Mapping[str, npt.NDArray[np.float32]], anatomy: Anatomy, wiring: Wiring) -> Tensors:
    """Return the tensors that all variants share, from the dense model's by canonical name (`model.tensor_names`)."""
    found = prepare_outside(dense, anatomy, wiring)
    for i in range(len(anatomy.blocks)):
        found |= _prepared_block(dense, anatomy, wiring, i)
    return found


def prepare_outside(dense: Mapping[str, npt.NDArray[np.float32]], anatomy: Anatomy, wiring: Wiring) -> Tensors:
    """Return those tensors outside the blocks: patches, tokens, positions, rotary tables, pooling, classifiers."""
    found = {name: tensor for name, tensor in dense.items() if not name.startswith("blocks.")}
    found |= _embedding(dense, anatomy) | _rotary(dense, anatomy, wiring) | _pool(dense, anatomy)
    return {name: tensor for name, tensor in found.items() if name not in FOLDED}


def with_fused_qkv(prepared: Mapping[str, Array], anatomy: Anatomy) -> Tensors:
    """Return prepared tensors with q, k and v of each block in one, in the order (heads, 3, h): heads stay a prefix."""
    found = {name: tensor for name, tensor in prepared.items() if not _QKV.fullmatch(name)}
    for i, block in enumerate(anatomy.blocks):
        for kind in ("weight", "bias"):
            own = [prepared.get(f"blocks.{i}.{part}.{kind}") for part in "qkv"]
            there = next((tensor for tensor in own if tensor is not None), None)
            if there is not None:
                parts = [np.zeros_like(there) if tensor is None else tensor for tensor in own]
                by_head = [part.reshape(-1, block.head_dim, *part.shape[1:]) for part in parts]  # (heads, h, ...)
                found[f"blocks.{i}.qkv.{kind}"] = np.stack(by_head, axis=1).reshape(-1, *there.shape[1:])
    return found


def own_tensors(
    dense: Mapping[str, Array],
    anatomy: Anatomy,
    plan: Plan,
    corrected: Mapping[str, Array],
    wiring: Wiring,
    fused_qkv: bool = False,
) -> Tensors:
    """Return a variant's own tensors: proj and fc2 where they were corrected, and the bias of proj where v has one.

    `dense` are the canonical tensors of the dense model; `corrected` those of the variant that differ from them. A
    removed sub-layer only adds its bias, so the one before it adds that as well; or the replacement that `corrected`
    has for it: the bias of a proj or fc2 without rows, or `REPLACEMENT`. `fused_qkv`: as `with_fused_qkv` has them.
    """
    found = _all_own(dense, anatomy, plan, corrected)
    for i in sorted({int(name.split(".")[1]) for name in corrected if _is_trained(name)}):
        ours, theirs = _trained_block(dense, anatomy, plan, corrected, wiring, i)
        if fused_qkv:
            ours, theirs = with_fused_qkv(ours, anatomy), with_fused_qkv(theirs, anatomy)
        changed = {name: tensor for name, tensor in ours.items() if not _same_rows(tensor, theirs.get(name))}
        found = _without_layers(found, plan, i) | changed
    return _without_removed(found, dense, anatomy, plan)


def _is_trained(name: str) -> bool:
    """Return True for a tensor of a block beside proj and fc2, which training alone changes."""
    return name.startswith("blocks.") and name.split(".")[2] not in ("proj", "fc2")


def _without_layers(found: Tensors, plan: Plan, block: int) -> Tensors:
    """Leave out the proj and the fc2 of a block, unless they are removed and only add a vector."""
    kept = [f"blocks.{block}.{layer}." for layer, keep in (("proj", plan.heads), ("fc2", plan.neurons)) if keep[block]]
    return {name: tensor for name, tensor in found.items() if not name.startswith(tuple(kept))}


def _trained_block(
    dense: Mapping[str, Array], anatomy: Anatomy, plan: Plan, corrected: Mapping[str, Array], wiring: Wiring, i: int
) -> tuple[Tensors, Tensors]:
    """Return the tensors of a trained block, with as many rows as a Plan keeps, and those of the dense one."""
    prefix = f"blocks.{i}."
    shapes = {
        name: shape for name, shape in weight_shapes(anatomy.with_counts(plan)).items() if name.startswith(prefix)
    }
    own = {name: dense[name][: shape[0]] for name, shape in shapes.items()}
    own |= {
        name: array for name, array in corrected.items() if name.startswith(prefix) and not name.endswith(REPLACEMENT)
    }
    return _prepared_block(own, anatomy, wiring, i), _prepared_block(dense, anatomy, wiring, i)


def _prepared_block(tensors: Mapping[str, Array], anatomy: Anatomy, wiring: Wiring, i: int) -> Tensors:
    """Return the tensors of a block as a graph reads them."""
    prefix = f"blocks.{i}."
    found = {prefix + name: tensor for name, tensor in _block(_named(tensors, prefix), anatomy, wiring, i).items()}
    for layer in ("proj", "fc2"):
        if f"{prefix}{layer}.weight" in tensors:
            found |= _output_layer(tensors, tensors, anatomy, i, layer)
        else:
            found.pop(f"{prefix}{layer}.bias", None)  # the layer before holds it
    return {name: tensor for name, tensor in found.items() if not name.endswith(SCALES)}


def _named(tensors: Mapping[str, Array], prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _same_rows(tensor: Array, shared: Array | None) -> bool:
    return shared is not None and np.array_equal(tensor, shared[: len(tensor)])


def _without_removed(found: Tensors, dense: Mapping[str, Array], anatomy: Anatomy, plan: Plan) -> Tensors:
    """Move the biases of sub-layers without heads or neurons to the last layer before them, or to `ADDED`."""
    held = ADDED
    for i in range(len(anatomy.blocks)):
        for layer, keep in (("proj", plan.heads[i]), ("fc2", plan.neurons[i])):
            name = f"blocks.{i}.{layer}.bias"
            if keep:
                held = name
                continue
            found.pop(f"blocks.{i}.{layer}.weight", None)
            bias = found.pop(name, None)
            bias = _shared_bias(dense, anatomy, i, layer) if bias is None else bias
            if bias is not None:
                before = found.get(held)
                if before is None and held != ADDED:
                    _, number, of, _ = held.split(".")
                    before = _shared_bias(dense, anatomy, int(number), of)
                found[held] = bias if before is None else before + bias
    return found


def into_embedding(own: Tensors, embedding: Tensors, anatomy: Anatomy) -> Tensors:
    """Let the embedding add what removed sub-layers before all others leave; a norm or no bias at all prevents that."""
    rest = {name: tensor for name, tensor in own.items() if name != ADDED}
    if not own[ADDED].any():
        return rest
    holders = [name for name in EMBEDDING[:-1] if name in embedding]
    if anatomy.pre_norm or not holders:
        return own
    tokens = [name for name in (holders[0], EMBEDDING[-1]) if name in embedding]
    return rest | {name: embedding[name] + own[ADDED] for name in tokens}


def _shared_bias(dense: Mapping[str, Array], anatomy: Anatomy, block: int, layer: str) -> Array | None:
    """Return the bias of a layer that a variant shares with the dense model, also of a layer that the model lacks."""
    if f"blocks.{block}.{layer}.weight" not in dense:
        return dense.get(f"blocks.{block}.{layer}.bias")
    return _output_layer(dense, dense, anatomy, block, layer).get(f"blocks.{block}.{layer}.bias")


def _all_own(dense: Mapping[str, Array], anatomy: Anatomy, plan: Plan, corrected: Mapping[str, Array]) -> Tensors:
    found: Tensors = {}
    for i, block in enumerate(anatomy.blocks):
        for layer, rows in (("proj", plan.heads[i] * block.head_dim), ("fc2", plan.neurons[i])):
            name = f"blocks.{i}.{layer}"
            if name + REPLACEMENT in corrected:
                found[f"{name}.bias"] = corrected[name + REPLACEMENT]
            elif f"{name}.weight" in corrected:
                found |= _output_layer(dense, corrected, anatomy, i, layer)
            elif layer == "proj" and f"blocks.{i}.v.bias" in dense and moves_value_bias(anatomy, i):
                kept = {**dense, f"{name}.weight": dense[f"{name}.weight"][:rows]}
                found[f"{name}.bias"] = _output_layer(dense, kept, anatomy, i, layer)[f"{name}.bias"]
    return found


def _output_layer(
    dense: Mapping[str, Array], weights: Mapping[str, Array], anatomy: Anatomy, block: int, layer: str
) -> Tensors:
    """Return proj or fc2 with LayerScale folded in, and in proj the bias of v."""
    prefix = f"blocks.{block}."
    name = prefix + layer
    layer_scale = dense.get(prefix + ("scale1" if layer == "proj" else "scale2"), np.float32(1))
    weight = weights[f"{name}.weight"].astype(np.float64)  # (in, E)
    bias = weights.get(f"{name}.bias")
    values = dense.get(f"{prefix}v.bias") if layer == "proj" and moves_value_bias(anatomy, block) else None
    found = {f"{name}.weight": np.ascontiguousarray(weight * layer_scale, np.float32)}
    if bias is not None or values is not None:
        added = 0.0 if values is None else values[: len(weight)].astype(np.float64) @ weight
        total = (added + (0.0 if bias is None else bias)) * layer_scale
        found[f"{name}.bias"] = np.ascontiguousarray(total, np.float32)
    return found


def takes_bytes(prepared: Tensors, preprocessing: Preprocessing) -> Tensors:
    """Replace the patch embedding for normalised pixels by one for bytes / 256."""
    mean, std = (np.array(values, np.float64) for values in (preprocessing.mean, preprocessing.std))
    weight = prepared["patch.weight"].astype(np.float64)  # (E, C, ph, pw)
    bias = prepared.get("patch.bias", np.zeros(len(weight))) if "positions" not in prepared else np.zeros(len(weight))
    bias = bias - (weight * (mean / std)[:, None, None]).sum((1, 2, 3))
    scaled = weight * (256 / (255 * std))[:, None, None]
    holder = "positions" if "positions" in prepared else "patch.bias"
    held = (prepared.get("positions", 0.0) + bias).astype(np.float32)
    rest = {name: tensor for name, tensor in prepared.items() if name not in ("patch.weight", "patch.bias", holder)}
    return {f"patch.weight{BYTES}": scaled.astype(np.float32), f"{holder}{BYTES}": held, **rest}


def _embedding(dense: Mapping[str, Array], anatomy: Anatomy) -> Tensors:
    """Return positions with the bias of the patches in them; the convolution then has none."""
    if "positions" not in dense or "patch.bias" not in dense:
        return {}
    positions = dense["positions"].astype(np.float64) + dense["patch.bias"]
    return {"positions": positions.astype(np.float32)}


def _rotary(dense: Mapping[str, Array], anatomy: Anatomy, wiring: Wiring) -> Tensors:
    """Return tables for all tokens and for pairs half a head apart: x cos + (x with its halves swapped) sin."""
    if anatomy.rope == "none":
        return {}
    order = _pairs_apart(dense["rope.sin"].shape[1], wiring)
    sin, cos = dense["rope.sin"][:, order], dense["rope.cos"][:, order]  # (patches, h)
    half = sin.shape[1] // 2
    sin = np.concatenate([-sin[:, :half], sin[:, half:]], axis=1)
    prefix = anatomy.prefix  # tokens that are not rotated
    unrotated = np.zeros((prefix, 2 * half), np.float32), np.ones((prefix, 2 * half), np.float32)
    return {
        "rope.sin": np.concatenate([unrotated[0], sin]).astype(np.float32),  # (T, h)
        "rope.cos": np.concatenate([unrotated[1], cos]).astype(np.float32),
    }


def _pairs_apart(head_dim: int, wiring: Wiring) -> npt.NDArray[np.int64]:
    """Return the order of a head's features in which rotary partners lie half a head apart."""
    order = np.arange(head_dim)
    return order if wiring.rotate_half else np.concatenate([order[::2], order[1::2]])


def _block(own: Tensors, anatomy: Anatomy, wiring: Wiring, i: int) -> Tensors:
    block = anatomy.blocks[i]
    for name in ("q", "k"):
        if anatomy.rope != "none":
            own |= _reordered(own, name, block.head_dim, _pairs_apart(block.head_dim, wiring))
    if not block.qk_norm:
        scale = np.float32(block.head_dim**-0.5)
        own |= {name: tensor * scale for name, tensor in own.items() if name in ("q.weight", "q.bias")}
    if drops_key_bias(anatomy, i):
        own.pop("k.bias", None)
    if moves_value_bias(anatomy, i):
        own.pop("v.bias", None)
    return own


def _reordered(own: Tensors, name: str, head_dim: int, order: npt.NDArray[np.int64]) -> Tensors:
    """Return the rows of every head of q or k, and their norm, in another order."""
    found: Tensors = {}
    for part in ("weight", "bias"):
        if (tensor := own.get(f"{name}.{part}")) is not None:
            heads = tensor.reshape(-1, head_dim, *tensor.shape[1:])
            found[f"{name}.{part}"] = np.ascontiguousarray(heads[:, order]).reshape(tensor.shape)
        if (norm := own.get(f"{name}_norm.{part}")) is not None:
            found[f"{name}_norm.{part}"] = norm[order]
    return found


def _pool(dense: Mapping[str, Array], anatomy: Anatomy) -> Tensors:
    """Return the folded attention pooling: its query is the same for every image, so q W_k is computed here."""
    if anatomy.attention_pool is None:
        return {}
    size = anatomy.embed_dim // anatomy.attention_pool.heads
    names = ("latent", "q.weight", "q.bias", "k.weight", "v.bias", "proj.weight", "proj.bias")
    latent, weight, bias, keys, values, proj, added = (dense[f"pool.{name}"].astype(np.float64) for name in names)
    query = (latent @ weight.T + bias) * size**-0.5  # (1, E)
    asked = np.einsum("nh,nhe->ne", query.reshape(-1, size), keys.reshape(-1, size, keys.shape[1]))
    return {
        "pool.asked": asked[None].astype(np.float32),  # (1, heads, E)
        "pool.proj.bias": (added + values @ proj).astype(np.float32),
    }
