"""The correction of each variant of an export: from factors for a probe, by the chosen method for what is kept.

All corrections change the same weights, so none of them changes the latency. The search for a budget therefore uses
probes that are corrected from factors at no cost, and only what will be shipped is fitted on the images, along the
stream with the tokens that it has.

A variant of smaller images is fitted to the dense model on images of that size: what it is to make up for is the cut,
not the resolution, whose patches are other ones. Where nothing else was done to the model, there is nothing to correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torch import nn

from ...allocation.recipe import CORRECTIONS
from ...calibration.images import Images
from ...correction.cholesky import WIDTHS_KEPT, Array32, Factors
from ...correction.moments import Damping, Statistics
from ...errors import UsageError
from ...model.plan import Plan
from ...model.ranking import Ranking
from ...progress import Progress
from ..models.load import Model
from ..models.slicing import shrink
from ..models.tokens import with_tokens
from ..stats.free_cores import on_free_cores
from ..stats.observe import observe, warn_of_few
from ..stats.token_weights import as_read
from .elastic import Correction, correct_module, make_factors
from .mean import shift_means
from .refit import refit
from .sequential import correct_in_sequence

WITHOUT_FACTORS = (None, "sparsegpt", "mean")


class Corrector:
    """Makes the cut and corrected module of any Plan, by one correction or none.

    >>> module, how = Corrector(model, ranking, "refit", images, progress).kept(plan)
    """

    def __init__(
        self,
        model: Model,
        ranking: Ranking,
        correction: str | None,
        images: Images,
        progress: Progress,
        factors: Factors | None = None,  # None: made when first needed
        damping: Damping = Damping(),
        device: str = "cpu",  # that takes the statistics of factors; a refit is made on the CPU
    ) -> None:
        if correction is not None and correction not in CORRECTIONS:
            raise UsageError(f"no correction is called '{correction}'. Known: {', '.join(CORRECTIONS)}")
        self.model, self.ranking, self.correction = model, ranking, correction
        self.images, self.progress, self.damping, self.device = images, progress, damping, device
        self._probed: dict[Plan, dict[str, Array32]] = {}  # by width: probes of a width differ in their tokens
        self._all_tokens = (Plan.dense(model.anatomy).merged, None)
        self._factors: dict[object, Factors] = {} if factors is None else {self._all_tokens: factors}
        if correction not in (None, "mean") and factors is None:
            warn_of_few(model, len(images), as_read(model.anatomy), progress)

    def factors(self, plan: Plan) -> Factors:
        """Return factors from statistics of the tokens that a Plan has, made once for Plans that follow each other."""
        tokens = (plan.merged, plan.grid)
        if tokens not in self._factors:
            for other in [key for key in self._factors if key != self._all_tokens]:
                del self._factors[other]  # they are large, and variants of the same tokens follow each other
            model = with_tokens(self.model, *tokens)
            images = self.images.at(model.anatomy.image)
            statistics = observe(model, images, self.progress, self.device, warn=False)  # __init__ has warned already
            self._factors[tokens] = make_factors(model, self.ranking, statistics, self.damping)
        return self._factors[tokens]

    def probe(self, plan: Plan) -> tuple[nn.Module, str | None]:
        """Return the module of a Plan that is only a probe, and the name of its correction.

        Its factors are those of all tokens: a probe is timed, not kept.
        """
        return self._from_factors(plan, plan.with_tokens())

    def probe_layers(self, plan: Plan, dense: Mapping[str, Array32]) -> dict[str, Array32] | None:
        """Return the corrected layers of a probe for its graph, without making a module; None: nothing to correct."""
        if self.correction in WITHOUT_FACTORS or plan.with_tokens() == Plan.dense(self.model.anatomy):
            return None
        widths = plan.with_tokens()
        if widths not in self._probed:
            if len(self._probed) == WIDTHS_KEPT:
                del self._probed[next(iter(self._probed))]  # the oldest
            self._probed[widths] = self.factors(widths).corrected_layers(widths, dense)
        return self._probed[widths]

    def kept(self, plan: Plan) -> tuple[nn.Module, str | None]:
        """Return the module of a Plan that is kept, and the name of its correction."""
        if self.correction in (None, "elastic") or plan.with_tokens() == Plan.dense(self.model.anatomy):
            return self._from_factors(plan, plan)
        if self.correction == "mean":
            return shift_means(self.model, self.ranking, plan, self._means), "mean"
        given = (self.model, self.ranking, plan, self.images.at(self.model.anatomy.image_of(plan)))
        with on_free_cores():
            if self.correction == "refit":
                return refit(*given, damping=self.damping, progress=self.progress), "refit"
            of_layer: Correction = "sparsegpt" if self.correction == "sparsegpt" else "elastic"
            small = correct_in_sequence(*given, damping=self.damping, correction=of_layer, progress=self.progress)
        return small, self.correction

    @cached_property
    def _means(self) -> Statistics:
        """Statistics of the dense model in which all tokens count the same."""
        alike = [None] * len(self.ranking.heads)
        return observe(self.model, self.images, self.progress, self.device, token_weights=alike, warn=False)

    def _from_factors(self, plan: Plan, observed: Plan) -> tuple[nn.Module, str | None]:
        """Return the module of a Plan, corrected by statistics of the tokens that another one has."""
        small = shrink(self.model.module, self.ranking, plan)
        if self.correction in WITHOUT_FACTORS or plan.with_tokens() == Plan.dense(self.model.anatomy):
            return small, None  # where nothing is cut, factors have nothing to correct, whatever the tokens
        correct_module(small, self.ranking, plan, self.factors(observed))
        return small, "elastic"
