"""The parameters that a recovery trains, by name.

    norms    norms, biases and LayerScale: kilobytes of a variant's own, beside weights that all share
    linear   proj and fc2 too, which correction has made a variant's own already
    all      everything, tokens and positions too: a variant with weights of its own

A graph has LayerScale folded into the layer before it. So with `norms` it is trained only where that layer is the
variant's own anyway: elsewhere a vector would cost a matrix. The bias of the patches is folded into the positions, and
stays for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...model.plan import Part
from ..blocks.timm_blocks import PARTS, blocks_of, output_of
from .settings import Train

LAYER_SCALES: dict[Part, tuple[str, ...]] = {"attention": ("ls1.gamma", "gamma_1"), "mlp": ("ls2.gamma", "gamma_2")}
OUTPUT_LAYERS = ("attn.proj.weight", "mlp.fc2.weight")
OUTSIDE = ("norm.", "norm_pre.", "fc_norm.", "head.", "head_dist.")  # whose vectors are trained with those of blocks


def trained(module: nn.Module, train: Train, dense: nn.Module | None) -> dict[str, nn.Parameter]:
    """Return the parameters of a cut module to train, by name.

    `dense`: what it was cut from; None: all that it has is its own.

    >>> trained(model.module, "norms", None)["norm.weight"].shape
    torch.Size([48])
    """
    named = dict(module.named_parameters())
    if train == "all":
        return named
    frozen = set() if dense is None else _shared_layer_scales(module, dense)
    return {name: tensor for name, tensor in named.items() if name not in frozen and _is_trained(name, tensor, train)}


def _is_trained(name: str, tensor: Tensor, train: Train) -> bool:
    if not name.startswith("blocks."):
        return tensor.ndim == 1 and name.startswith(OUTSIDE)
    return tensor.ndim == 1 or (train == "linear" and name.endswith(OUTPUT_LAYERS))


def _shared_layer_scales(module: nn.Module, dense: nn.Module) -> set[str]:
    """Return the names of LayerScales behind layers that the variant shares with the dense model."""
    found = set()
    for i, (cut, whole) in enumerate(zip(blocks_of(module), blocks_of(dense))):
        for part in PARTS:
            own, shared = output_of(cut, part), output_of(whole, part)
            if own is not None and shared is not None and torch.equal(own.weight, shared.weight):
                found |= {f"blocks.{i}.{name}" for name in LAYER_SCALES[part]}
    return found


def copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the values of parameters."""
    return {name: tensor.detach().clone() for name, tensor in parameters.items()}


@torch.no_grad()
def put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give parameters these values."""
    for name, tensor in parameters.items():
        tensor.copy_(values[name])
