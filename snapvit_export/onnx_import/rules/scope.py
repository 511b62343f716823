"""What rules know beside the inputs of a node, and the tokens that the residual stream begins with. Light: numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..nodes import Array, Misfit, Node
from ..values import Base, Form, Patches, Rows, Tokens, arange, into_parts, rows_of, same_form


@dataclass(eq=False)
class Scope:
    """The images that a graph is gone through with, and what was met on the way."""

    shape: tuple[int, int, int, int]  # (B, C, H, W)
    opset: int
    position_rows: int = 0  # of what was added to the patches: some of them may be of the prefix
    patches: int = 0  # of each image
    tokens: list[Tokens] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return self.shape[0]

    def rows(self, node: Node, form: Form) -> Rows:
        """Return a form as rows of a base; patches with prefix and positions become the tokens of the first block."""
        found = rows_of(form)
        if found is not None and not (isinstance(found.base, Patches) and not found.is_plain):
            return into_parts(found)
        if not isinstance(form.base, Patches) or len(form.terms) != 1:
            raise Misfit(node, "whole tokens were expected here")
        flat = form.reshaped(-1, form.shape[-1])
        base = next((known for known in self.tokens if same_form(known.form, flat)), None)
        if base is None:
            base = Tokens(node, flat.shape[0], flat.shape[1], flat)
            self.tokens.append(base)
        return Rows(base, arange(base.rows).reshape(form.shape[:-1]))


def with_rows(base: Base, rows: Array) -> Form:
    """Return whole rows of a base as a form."""
    index = None
    if rows.size != base.rows or not np.array_equal(rows.reshape(-1), arange(base.rows)):
        index = rows[..., None] * base.width + arange(base.width)
    return Form.of(base, (*rows.shape, base.width), index)
