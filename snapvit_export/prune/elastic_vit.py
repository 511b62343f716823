"""`ElasticViT`: a model that becomes any sparsity and comes back, with the interface of the released code's.

Whatever it becomes is cut from the dense weights, so nothing is lost on the way and no order of calls matters. These
weights are not among its own parameters: `state_dict`, `.to(device)` and `.parameters()` are of the model that it has
become.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..allocation.planner import Planner
from ..calibration.images import Images
from ..correction.cholesky import Factors
from ..correction.moments import Damping
from ..elastic.folder import Elastic
from ..errors import SnapvitError, UsageError
from ..model.plan import Plan
from ..model.ranking import Ranking
from ..progress import Progress
from .blocks.timm_blocks import blocks_of
from .correct.elastic import correct_module, make_factors
from .importance_scores import ElasticImportanceScores, as_ranking
from .models.load import Model, as_model
from .models.slicing import shrink
from .pack import factors_of
from .stats.loader import images_of
from .stats.observe import Inputs, observe

CorrectionSource = Elastic | Factors | Images | Iterable[Any]


class ElasticViT(nn.Module):
    """One set of dense weights, any sparsity: `prune` goes up and down without reading weights again.

    `model` is what `load_model` returned, a timm module, or a function that makes one of them. `scores` is a Ranking,
    or what `ElasticImportanceScores.load` returned.

    >>> elastic = ElasticViT(model, ranking)
    >>> half, nearly_all = elastic.prune(0.5)(inputs), elastic.prune(0.1)(inputs)
    >>> published = elastic.prune(mlp_pruning_ratio=0.35, head_pruning_ratio=0.2)(inputs)
    """

    source: Model  # what it was made from; its module has all weights
    model: Any  # the module that it is now

    def __init__(
        self,
        model: Model | nn.Module | Callable[[], Model | nn.Module],
        scores: Ranking | ElasticImportanceScores,
    ) -> None:
        super().__init__()
        made = model if isinstance(model, (Model, nn.Module)) else model()
        self.__dict__["source"] = as_model(made)  # not registered: see above
        self.ranking = as_ranking(scores)
        self.anatomy = self.source.anatomy
        self.planner = Planner(self.ranking, self.anatomy, self.ranking.protection)
        self.factors: Factors | None = None  # that `apply_correction` was given or has made
        self.corrected = False  # the present weights
        self.training = self.dense.training
        self.plan = Plan.dense(self.anatomy)
        self.model = self.dense

    @property
    def dense(self) -> nn.Module:
        """The module with all its weights, on the CPU and never changed here."""
        return self.source.module

    def prune(
        self,
        to: Plan | float | None = None,
        *,
        mlp_pruning_ratio: float | None = None,
        head_pruning_ratio: float | None = None,
        apply_correction: bool = False,
        correction_data_loader: CorrectionSource | None = None,
        damping: Damping | str = Damping(),
    ) -> ElasticViT:
        """Become the model of a Plan, of a sparsity, or of two ratios of neurons and heads to cut.

        With `apply_correction` the weights are corrected, by the factors that are here or from the data given.
        """
        if correction_data_loader is not None and not apply_correction:
            raise UsageError("correction_data_loader is for a correction. Give apply_correction=True too")
        plan = self._plan(to, mlp_pruning_ratio, head_pruning_ratio)
        if apply_correction and correction_data_loader is not None:
            self._take(correction_data_loader, Damping.parse(damping) if isinstance(damping, str) else damping, None)
        self._become(plan, apply_correction)
        return self

    def apply_correction(
        self,
        source: CorrectionSource | None = None,
        damping: Damping | str = Damping(),
        progress: Progress | None = None,
    ) -> ElasticViT:
        """Correct the weights of what it is now, and keep the factors, which correct any other Plan without data.

        `source`: an Elastic folder of this model with its factors, Factors, or data to observe the dense model on:
        Images, or batches that are ready for the model, such as a DataLoader gives. None: the factors that are here.
        Factors are of the dense model with all its tokens. `damping` is for data; a folder has its own.
        """
        if source is not None:
            self._take(source, Damping.parse(damping) if isinstance(damping, str) else damping, progress)
        self._become(self.plan, corrected=True)
        return self

    def reset(self) -> ElasticViT:
        """Become the dense model again. Factors stay: they are of the dense weights."""
        self._become(Plan.dense(self.anatomy), corrected=False)
        return self

    def _plan(self, to: Plan | float | None, mlp: float | None, head: float | None) -> Plan:
        if to is None:
            return self.planner.pair(mlp or 0.0, head or 0.0)
        if mlp is not None or head is not None:
            raise UsageError("a Plan or a sparsity, and mlp_pruning_ratio or head_pruning_ratio, both say what to cut")
        return to if isinstance(to, Plan) else self.planner.sparsity(to)

    def _take(self, source: CorrectionSource, damping: Damping, progress: Progress | None) -> None:
        if isinstance(source, Elastic):
            self.factors = factors_of(source, self.source, self.ranking)
        elif isinstance(source, Factors):
            source.check_made_for(self.ranking)
            self.factors = source
        else:
            images: Inputs = source if isinstance(source, Images) else images_of(source, self.source)
            self.factors = make_factors(self.source, self.ranking, observe(self.source, images, progress), damping)

    def _become(self, plan: Plan, corrected: bool) -> None:
        if corrected and self.factors is None:
            raise SnapvitError(
                "a correction needs data or factors. Give images, a loader, or sv.Elastic.load(FOLDER) of this model"
            )
        if plan == Plan.dense(self.anatomy):
            small = self.dense
        else:
            small = shrink(self.dense, self.ranking, plan)
            if corrected and self.factors is not None:
                correct_module(small, self.ranking, plan, self.factors)
        self.model = self._placed(small)
        self.plan, self.corrected = plan, corrected and small is not self.dense

    def _placed(self, small: nn.Module) -> nn.Module:
        """Return a module where the present one is, in its type and mode; never the dense one changed."""
        now, new = next(self.model.parameters()), next(small.parameters())
        if small is self.dense and (
            (now.device, now.dtype) != (new.device, new.dtype) or self.training != small.training
        ):
            small = copy.deepcopy(small)
        if small is not self.dense:
            small = small.to(device=now.device, dtype=now.dtype).train(self.training)
        return small

    def _own(self) -> None:
        """Replace the dense module by a copy before it is changed: all later models are cut from it."""
        if self.model is self.dense:
            self.model = copy.deepcopy(self.dense)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._own()
        super()._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Any:
        if mode != self.dense.training:
            self._own()
        super().train(mode)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self._own()
        return super().load_state_dict(state_dict, strict, assign)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the tokens after the last norm, (B, T, E)."""
        return self.model.forward_features(images)

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits, or the embedding that the head reads, of the tokens of `forward_features`."""
        return self.model.forward_head(tokens, pre_logits=pre_logits)

    @property
    def blocks(self) -> list[Any]:
        """The blocks as they are now, first to last."""
        return blocks_of(self.model)

    @property
    def head(self) -> nn.Module:
        """The classifier, or an Identity."""
        return self.model.head

    @property
    def num_features(self) -> int:
        """The width of the embedding; no pruning changes it."""
        return int(self.model.num_features)

    embed_dim = num_features
