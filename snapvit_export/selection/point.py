"""A point of the space that a budget is met in: a Plan in a precision. Light."""

from __future__ import annotations

from dataclasses import dataclass

from ..allocation.levers import Lever, in_order
from ..allocation.resolution import shown
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..target import Precision

SHORT: dict[Precision, str] = {"int8-dynamic": "int8", "int8-static": "int8s"}  # in names


@dataclass(frozen=True)
class Point:
    """What is cut of a model, and the precision that the rest computes in."""

    plan: Plan
    precision: Precision

    def levers(self, anatomy: Anatomy, own: Precision) -> tuple[Lever, ...]:
        """Return the levers that make it cheaper than the dense model in the family's own precision."""
        plan, dense = self.plan, Plan.dense(anatomy)
        removed = len(plan.removed) > len(dense.removed)
        counts = zip(plan.heads + plan.neurons, anatomy.heads + anatomy.neurons)
        used = {
            "precision": self.precision != own,
            "tokens": plan.changes_tokens,
            "width": any(0 < kept < there for kept, there in counts),
            "depth": removed,
        }
        return in_order([lever for lever, is_used in used.items() if is_used])

    def name(self, anatomy: Anatomy, own: Precision) -> str:
        """Return a name that tells its levers: `res192-tokens57-w85-int8`; several points may share one.

        `tokens57`: 57 % of the patch tokens are left at the end. `w85`: 85 % of the prunable parameters are kept.
        """
        plan, parts = self.plan, []
        if plan.grid is not None:
            parts.append(f"res{shown(anatomy.image_of(plan))}")
        if any(plan.merged):
            parts.append(f"tokens{round(100 * (1 - sum(plan.merged) / anatomy.patches_of(plan)))}")
        if (sparsity := plan.sparsity(anatomy)) > 0:
            parts.append(f"w{round(100 * (1 - sparsity))}")
        if not parts:
            parts.append("dense")
        if self.precision != own:
            parts.append(SHORT.get(self.precision, self.precision))
        return "-".join(parts)
