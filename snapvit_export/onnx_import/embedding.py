"""From the patches to the first block: prefix tokens, positions, a norm. Light: numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .nodes import Array, Misfit
from .values import Base, Norm, Patches, Tokens


@dataclass(frozen=True, eq=False)
class Embedding:
    """The tokens that go into the first block."""

    patches: Patches
    prefix: Array | None  # (prefix tokens, E)
    positions: Array | None  # (patches, E)
    pre_norm: Norm | None

    @property
    def prefix_tokens(self) -> int:
        return 0 if self.prefix is None else len(self.prefix)


def read_embedding(start: Base, batch: int) -> Embedding:
    """Return what the residual stream begins with: the prefix, where the gain is zero; the offset has positions."""
    pre_norm = start if isinstance(start, Norm) else None
    base = start if pre_norm is None else pre_norm.x
    if isinstance(base, Patches):
        return Embedding(base, None, None, pre_norm)
    if not isinstance(base, Tokens) or not isinstance(base.form.base, Patches):
        raise Misfit(base.node, "the residual stream was expected to begin with the patch embedding")
    patches, term, shape = base.form.base, base.form.terms[0], (batch, base.rows // batch, base.width)  # (B, T, E)
    gain = np.broadcast_to(np.float32(1) if term.gain is None else term.gain, base.form.shape).reshape(shape)
    given = np.float32(0) if base.form.offset is None else base.form.offset
    offset = np.broadcast_to(given, base.form.shape).reshape(shape)
    index = term.indices(base.form.shape).reshape(shape)
    prefix = shape[1] - patches.rows // batch
    in_order = np.arange(patches.rows * patches.width).reshape(batch, -1, patches.width)
    if prefix < 0 or gain[:, :prefix].any() or (gain[:, prefix:] != 1).any() or (index[:, prefix:] != in_order).any():
        raise Misfit(base.node, "tokens of the class and registers were expected first, then all patches in order")
    if (offset != offset[:1]).any():
        raise Misfit(base.node, "the same positions for every image were expected")
    positions = offset[0, prefix:]
    return Embedding(patches, offset[0, :prefix] if prefix else None, positions if positions.any() else None, pre_norm)
