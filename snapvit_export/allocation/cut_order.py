"""The order in which structures of all blocks are cut by their scores: one kind, or heads and neurons mixed. Light."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, UsageError


class CutOrder:
    """The order in which all structures are cut, the smallest scores first; protected ones are not in it.

    `scores`: of each block; for a mixed order, the heads of all blocks and then their neurons. `kept`: how many of each
    are protected, the best ones.
    """

    def __init__(self, scores: Sequence[npt.NDArray[np.float32]], kept: Sequence[int]) -> None:
        self.sizes = np.array([len(block) for block in scores])
        self.total = int(self.sizes.sum())
        best_first = [np.argsort(-block, kind="stable")[least:] for block, least in zip(scores, kept)]
        blocks = np.repeat(np.arange(len(scores)), [len(rows) for rows in best_first])
        rows = np.concatenate(best_first)
        values = np.concatenate([block[chosen] for block, chosen in zip(scores, best_first)])
        # Falling score, then rising (block, index), read backwards: equal scores are cut from the last block on.
        self.blocks = blocks[np.lexsort((rows, blocks, -values))][::-1]

    @property
    def removable(self) -> int:
        """The number of structures that are not protected."""
        return len(self.blocks)

    def clipped(self, ratio: float) -> int:
        return min(int(self.total * ratio), self.removable)

    def counts(self, cut: int) -> tuple[int, ...]:
        """Return how many each block keeps after the first `cut` are gone."""
        removed = np.bincount(self.blocks[:cut], minlength=len(self.sizes))
        return tuple(int(n) for n in self.sizes - removed)

    def counts_at_ratio(self, ratio: float, kind: str, also: str = "") -> tuple[int, ...]:
        """Return how many each block keeps after int(total * ratio) are gone."""
        check_ratio(kind, ratio)
        cut = int(self.total * ratio)
        if cut > self.removable:
            raise SnapvitError(
                f"cutting {ratio:g} of the {kind} leaves less than the protected part of each block{also}. "
                f"The largest ratio possible is {self._largest_ratio():.4f}"
            )
        return self.counts(cut)

    def _largest_ratio(self) -> float:
        return int(self.removable / self.total * 1e4) / 1e4  # rounded down, so that it works when typed in


def check_ratio(kind: str, ratio: float) -> None:
    """Refuse a number that is not a ratio of structures to cut."""
    if not 0 <= ratio < 1:
        raise UsageError(f"a ratio of {ratio:g} of the {kind} is not a fraction from 0 to below 1")
