"""A request for a table of evaluations: sizes, data sets and seeds of one model, and what is refused early. Light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..allocation.recipe import CORRECTIONS, DEFAULT, Settings, make_settings
from ..correction.moments import Damping
from ..errors import SnapvitError, UsageError
from ..evaluate.exported_model import SUFFIXES
from ..evaluate.options import EvalOptions, Metric, check_options
from ..evaluate.results_table import EVALUATION, CutSize, EvaluationTable
from ..model.ranking import KIND as RANKING
from ..model.ranking import Ranking
from ..storage.atomic import sha256
from ..storage.checksummed import is_checksummed
from ..storage.json import as_builtins
from ..storage.places import check_output, is_json_of
from .evaluate_features import is_feature_file
from .inputs import BUNDLED_MODEL, refuse_foreign_checkpoint

MARKDOWN = "evaluation.md"  # beside the numbers
SEED = "{seed}"  # in the name of a ranking: each seed has its own


@dataclass(frozen=True)
class TableRequest:
    """A model, the sizes that it is cut to, and the data sets that it is evaluated on.

    >>> sizes = [CutSize(pair=(0.35, 0.2)), CutSize(flops=0.6)]
    >>> ranking = Path("ranking.safetensors")
    >>> evaluate_table(TableRequest("my-vit", data=["path/to/pets"], sizes=sizes, ranking=ranking)).tables[0].rows[0]
    """

    model: str = BUNDLED_MODEL
    checkpoint: Path | None = None
    model_arguments: Mapping[str, Any] | None = None  # for timm, beside a timm name
    data: Sequence[str] = ()
    sizes: Sequence[CutSize] = ()  # beside the dense model
    ranking: Path | None = None  # with {seed} in its name: one of each seed
    recipe: Settings = field(default_factory=lambda: make_settings(DEFAULT))  # ranks where no ranking is given
    correction: str | None = None
    damping: str | None = None  # None: that of the recipe
    calibrate: str | None = None  # images to correct and rank on; None: the training split of the first data set
    calibration_images: int | None = None  # None: as many as the recipe takes
    seeds: Sequence[int] = (0,)
    options: EvalOptions = field(default_factory=EvalOptions)
    out: Path = Path("snapvit-evaluation")
    force: bool = False  # begin anew, over whatever is there
    device: str = "cpu"  # where a model computes

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of the table: k-NN, as in the published one, if none are named."""
        return tuple(self.options.by) if self.options.by is not None else ("knn",)

    @property
    def ranks(self) -> bool:
        """True if a ranking is made here."""
        return bool(self.sizes) and self.ranking is None

    @property
    def needs_images(self) -> bool:
        """True if something is ranked or corrected."""
        return self.ranks or (bool(self.sizes) and self.correction is not None)

    @property
    def settings(self) -> Settings:
        """The settings of a ranking and of the correction, whatever the seed."""
        changed: dict[str, Any] = {"correction": self.correction}
        if self.damping is not None:
            changed["damping"] = self.damping
        if self.calibration_images is not None:
            changed["images"] = self.calibration_images
        return replace(self.recipe, **changed, given=self.recipe.given | (changed.keys() - {"correction"}))

    def options_of(self, seed: int) -> EvalOptions:
        """Return how data sets are evaluated with a seed."""
        return replace(self.options, by=self.metrics, seed=seed)

    def ranking_of(self, seed: int) -> Path:
        """Return the file of a seed's ranking: as it is given, or where it is kept that is made here."""
        if self.ranking is None:
            return self.out / f"ranking-{seed}.safetensors"
        return Path(str(self.ranking).replace(SEED, str(seed)))

    def described(self) -> dict[str, Any]:
        """Return the settings that decide results, whatever the seed, as the file has them."""
        options, settings = self.options, self.settings
        return {
            "by": list(self.metrics),
            "images": options.images,
            "ignore": list(options.ignore),
            "merge_train_valid": options.merge,
            "segmenter": options.segmenter if "segment" in self.metrics else None,
            "bank_patches": options.bank_patches if "in-context" in self.metrics else None,
            "classes": None if options.classes is None else sha256(options.classes),
            "correction": self.correction,
            "damping": settings.damping if self.correction is not None else None,
            "recipe": {**as_builtins(settings), "seed": None, "given": None} if self.ranks else None,
        }


def check_request(request: TableRequest) -> dict[int, Ranking]:
    """Refuse what can be refused before any work; return the given rankings, by seed."""
    if Path(request.model).suffix.lower() in SUFFIXES or is_feature_file(request.model):
        raise UsageError(f"{request.model}: a table is of a model in torch. Evaluate files on one --data at a time")
    check_options(request.options_of(0))
    if request.options.features is not None:
        raise UsageError("--features keeps those of one model on one data set, and a table has more. Leave it out")
    if not request.data or not request.seeds:
        raise UsageError("nothing to evaluate on. Give --data cifar10,pets")
    _refuse_twice("--data", request.data)
    _refuse_twice("--seeds", request.seeds)
    if request.correction is not None and request.correction not in CORRECTIONS:
        raise UsageError(f"no correction is called '{request.correction}'. Known: none, {', '.join(CORRECTIONS)}")
    Damping.parse(request.settings.damping)
    if request.ranking is not None and not request.sizes:
        raise UsageError("--ranking tells in which order to cut, not how far. Give --pair 0.35:0.2 too")
    if request.ranking is None:
        return {}
    return {seed: Ranking.load(request.ranking_of(seed)) for seed in request.seeds}


def check_seeds(request: TableRequest, is_split_by_seed: bool) -> None:
    """Refuse several seeds where all would give the same; `is_split_by_seed`: a data set has no splits of its own."""
    varies = is_split_by_seed or request.needs_images or request.options.images is not None
    varies = varies or not set(request.metrics) <= {"head", "knn"} or SEED in str(request.ranking)
    if len(request.seeds) > 1 and not varies:
        raise UsageError(
            "--seeds would all give the same: the ranking is given, nothing is corrected and all images are evaluated. "
            f"Give a --ranking with {SEED} in its name, --recipe in its place, --correction, or one --seed"
        )


def _refuse_twice(option: str, values: Sequence[object]) -> None:
    if twice := [value for value in values if list(values).count(value) > 1]:
        raise UsageError(f"{option} names {twice[0]} twice. Name each once")


def check_out(request: TableRequest) -> None:
    """Refuse, before any work, a folder whose files of these names are not of an evaluation."""
    out, inputs = request.out, [request.checkpoint, request.options.classes, request.ranking]
    if out.exists() and not out.is_dir():
        raise SnapvitError(f"{out}: exists and is not a folder. Choose another --out")
    check_output(out / EVALUATION, "an evaluation", is_json_of(EvaluationTable), inputs, request.force)
    has_numbers = (out / EVALUATION).is_file()
    check_output(out / MARKDOWN, "of an evaluation", lambda _: has_numbers, inputs, request.force)
    for seed in request.seeds if request.ranks else ():
        path = request.ranking_of(seed)
        check_output(
            path, "of an evaluation", lambda path: has_numbers and is_checksummed(path, RANKING), inputs, request.force
        )
        refuse_foreign_checkpoint(path)
