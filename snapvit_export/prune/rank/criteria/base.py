"""What a criterion is: contributions of batches that add up, and a last step that turns the sums into Scores.

The criterion never sees more than one batch. Who owns the loop (one process or many, with or without a checkpoint)
adds the contributions; since they are plain sums, neither the number of processes nor an interruption can change the
result. Randomness must depend on the batch's number, not on what came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from ....model.scores import Scores

Need = Literal["nothing", "images", "labels"]


@dataclass(frozen=True)
class Batch:
    """Preprocessed images, their labels where known, and the number of this batch in the whole pass."""

    images: Tensor  # (B, 3, H, W)
    labels: Tensor | None  # (B,)
    number: int


class Criterion(Protocol):
    """A way to score structures. `needs` says what it must be shown."""

    @property
    def needs(self) -> Need: ...

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that changes the scores, as JSON: goes into the ranking, and a checkpoint is bound to it."""
        ...

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        """What one batch adds: float tensors of the same shapes for every batch."""
        ...

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        """Scores from the sums over all batches; `images` were seen in all. Without images, `sums` is empty."""
        ...
