"""Measure each attention and each MLP: its effect on the residual stream, and the output divergence without it.

| symbol | meaning                                            | shape     |
|--------|----------------------------------------------------|-----------|
| x      | the dense stream before the sub-layer              | (N, T, E) |
| f(x)   | what the sub-layer adds to it, after LayerScale    | (N, T, E) |
| m      | the mean of f(x) over images and tokens            | (E,)      |

    divergence = E |f(x)| / E |x + f(x)|,    turned = E [1 - cos(x, x + f(x))],

and the damage is the output divergence (`output_divergence`) of the model in which m is added instead of f(x): with m
in the bias of the layer before, that is the model without the sub-layer. Tokens are weighted as in all statistics here.

Where only the class token is read, it gets nothing more of the image after the last attention. So `onward` is the
damage without this attention and all later ones: tokens no longer mix then, and only those that are read are computed.

One pass goes through the blocks; at every sub-layer the rest of the model is run once more without it, which is as much
work as running the whole model once for each block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from ...calibration.images import Images
from ...errors import SnapvitError
from ...model.plan import Part
from ...model.sublayer import SubLayer
from ...progress import Progress, Silent
from ..blocks.functional import pooled
from ..blocks.timm_blocks import BRANCHES, PARTS, blocks_of, output_of
from ..models.load import Model
from .output_divergence import DivergenceName, OutputDivergence, default_divergence
from .single_thread import single_thread
from .stream import Stream
from .token_weights import as_read


@torch.no_grad()
def measure_sublayers(
    model: Model,
    images: Images,
    divergence: DivergenceName | None = None,  # None: the best that the model allows
    progress: Progress | None = None,
    device: str = "cpu",
) -> tuple[SubLayer, ...]:
    """Return the measurements of all sub-layers in the order of the computation.

    >>> [s.damage for s in measure_sublayers(model, images.first(64))]
    """
    if not len(images):
        raise SnapvitError("sub-layers are measured on images. Give --data")
    progress = progress or Silent()
    module: Any = model.module
    blocks, weights = blocks_of(module), as_read(model.anatomy)
    stream = Stream.of(model, images)
    module.to(device)
    try:
        chunks = [chunk.to(device) for chunk in stream.chunks]
        extra = {name: tensor.to(device) for name, tensor in stream.extra.items()}
        rest = _Remainder(module, blocks, extra)
        dense = rest.embedding(chunks, 0, "attention")
        with single_thread():
            diverged = OutputDivergence(divergence or default_divergence(model), model, dense)
        progress.phase("measuring sub-layers", 2 * len(blocks))
        found, read, means = [], [], []
        reads_token, tokens = model.anatomy.reads_token, model.anatomy.read_tokens
        for i, block in enumerate(blocks):
            if reads_token:
                read.append([chunk[:, :tokens].clone() for chunk in chunks])  # a view would keep the whole stream
            for part in PARTS:
                after = [BRANCHES[part](block, chunk, extra) for chunk in chunks]
                mean, effect = _effect(chunks, after, weights[i])
                damage = 0.0
                if output_of(block, part) is None:  # removed already, so that nothing more can be lost
                    effect = dict.fromkeys(effect, 0.0)
                else:
                    without = rest.embedding([chunk + mean for chunk in chunks], *_next(i, part))
                    with single_thread():
                        damage = float(diverged(without, slice(0, len(without))).mean())
                found.append(SubLayer(block=i, part=part, damage=max(damage, 0.0), **effect))
                means += [mean] if part == "attention" else []
                chunks = after
                progress.advance()
        if reads_token:
            for i in range(len(blocks)):
                with single_thread():  # products of so few rows are split along their sums, by the number of threads
                    without = rest.embedding_of_read(read[i], i, means)
                    damage = float(diverged(without, slice(0, len(without))).mean())
                found[2 * i] = replace(found[2 * i], onward=max(damage, 0.0))
    finally:
        module.to("cpu")
    return tuple(found)


class _Remainder:
    """The model from any sub-layer onwards."""

    def __init__(self, module: Any, blocks: list[Any], extra: dict[str, Tensor]) -> None:
        self.module, self.blocks, self.extra = module, blocks, extra

    def embedding(self, chunks: list[Tensor], block: int, part: Part) -> Tensor:
        """Return the embedding from the stream before this sub-layer: (N, E)."""
        return torch.cat([self._run(chunk, block, part) for chunk in chunks]).float()

    def embedding_of_read(self, chunks: list[Tensor], block: int, means: list[Tensor]) -> Tensor:
        """Return the embedding from the tokens that are read, if all attentions from here on only add their means."""
        made = []
        for x in chunks:
            for each, mean in zip(self.blocks[block:], means[block:]):
                x = BRANCHES["mlp"](each, x + mean, self.extra)
            made.append(pooled(self.module, x))
        return torch.cat(made).float()

    def _run(self, x: Tensor, block: int, part: Part) -> Tensor:
        for i in range(block, len(self.blocks)):
            for each in PARTS:
                if (i, PARTS.index(each)) >= (block, PARTS.index(part)):
                    x = BRANCHES[each](self.blocks[i], x, self.extra)
        return pooled(self.module, x)


def _next(block: int, part: Part) -> tuple[int, Part]:
    return (block, "mlp") if part == "attention" else (block + 1, "attention")


def _effect(before: list[Tensor], after: list[Tensor], weights: Tensor | None) -> tuple[Tensor, dict[str, float]]:
    """Return the mean of what the sub-layer adds, (E,), and the measures of its effect on the stream."""
    w = torch.ones(before[0].shape[1]) if weights is None else weights
    w = (w / w.sum()).to(before[0].device).double()  # (T,)
    images = sum(len(chunk) for chunk in before)
    mean = torch.zeros(before[0].shape[2], dtype=torch.float64, device=w.device)
    own = whole = turned = 0.0
    for x, y in zip(before, after):
        f = y - x
        mean += torch.einsum("t,bte->e", w, f.double())
        own += float((f.norm(dim=-1).double() @ w).sum())
        whole += float((y.norm(dim=-1).double() @ w).sum())
        turned += float(((1 - F.cosine_similarity(x, y, dim=-1)).double() @ w).sum())
    effect = {"divergence": own / whole if whole else 0.0, "turned": turned / images}
    return (mean / images).to(before[0]), effect
