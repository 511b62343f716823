"""The factors of all layers of a model: everything that correction at any Plan needs. Light: numpy."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SnapvitError
from ..model.ranking import Ranking
from .cholesky import Factor
from .damping import Damping


@dataclass(frozen=True, eq=False)
class Factors:
    """The Factor of proj and of fc2 of every block, for one order of the structures."""

    proj: tuple[Factor, ...]
    fc2: tuple[Factor, ...]
    order_sha256: str  # of the ranking's order, `Ranking.order_sha256`
    damping: Damping
    images: int  # that the statistics were taken from

    def check_made_for(self, ranking: Ranking) -> None:
        """Refuse a ranking of another order: its kept columns would get the weights of other columns."""
        if ranking.order_sha256 != self.order_sha256:
            raise SnapvitError(
                "the factors were made for another order of heads and neurons than this ranking has. "
                "Make them again for this ranking"
            )
