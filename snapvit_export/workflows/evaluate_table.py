"""`snapvit evaluate` of several sizes, data sets or seeds: a table that is kept result by result, and can be resumed.

Importing this is light; torch is loaded when the work begins. Of every seed the dense model comes first, then each size
on all data sets. What is cut may be corrected; the images for that, and for a ranking that is made here, are never
among those that are evaluated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..allocation.planner import Planner, check_reach
from ..allocation.recipe import ADDS_BIASES, protection_of
from ..calibration.dataset import ROLES, Dataset, open_dataset, open_to_calibrate
from ..calibration.hub import Sample
from ..calibration.images import Images, calibration_and_held_out, evenly, read_images
from ..calibration.sampling import places_of, without_images
from ..calibration.source import Source, UnreadableImage
from ..correction.moments import Damping
from ..errors import SnapvitError, UsageError, needs
from ..evaluate.comparison import sizes_of
from ..evaluate.evaluator import Evaluator, splits_for
from ..evaluate.options import Metric
from ..evaluate.results_table import (
    DENSE,
    EVALUATION,
    CellResult,
    CutSize,
    EvaluationTable,
    SeedInputs,
    TableReport,
    results_table,
)
from ..family.evaluation import TITLES, Evaluation, Measure
from ..model.plan import Plan
from ..model.ranking import Ranking
from ..progress import Progress, Silent
from ..storage.atomic import write_atomically
from .inputs import checkpoint_of, load_model_of, resumable, settings_for
from .table_request import MARKDOWN, TableRequest, check_out, check_request, check_seeds

if TYPE_CHECKING:
    from ..correction.cholesky import Factors
    from ..prune.correct.policy import Corrector
    from ..prune.models.load import Model

LOOKED_AT = 8  # images of each split whose pixels tell if a data set is the same
MEASURE_OF: dict[Metric, Measure] = {
    "head": "top1",
    "knn": "knn",
    "linear": "linear",
    "segment": "miou",
    "in-context": "in_context",
}


def evaluate_table(request: TableRequest, progress: Progress | None = None) -> TableReport:
    """Evaluate the dense model and every size on all data sets, but what was found before; write numbers and table."""
    progress = progress or Silent()
    rankings = check_request(request)
    with needs("evaluating a model", extra="prune"):
        from ..prune.models.load import check_device
    check_device(request.device)
    progress.phase("finding images")
    opened = {seed: SeedData.opened(request, seed) for seed in request.seeds}
    check_seeds(request, any(data.unsplit for found in opened.values() for data in found.sets.values()))
    model = load_model_of(request, progress)
    request = replace(request, recipe=settings_for(request.settings, model, progress))
    runs = [SeedRun(request, seed, model, data, rankings.get(seed), progress) for seed, data in opened.items()]
    for run in runs:
        run.check_sizes()
    check_out(request)
    start = EvaluationTable(
        model=model.name,
        weights_sha256=model.weights_sha256,
        anatomy=model.anatomy,
        settings=request.described(),
        inputs={str(run.seed): run.inputs for run in runs},
    )
    found = start if request.force else _continued(start, request)
    found.save(request.out)
    with resumable(request.out / EVALUATION):
        for run in runs:
            found = run.fill(found)
    report = _report(found, request)
    from ..report.results import results_markdown

    write_atomically(request.out / MARKDOWN, results_markdown(report).encode())
    return report


def _measures(request: TableRequest) -> list[Measure]:
    return [MEASURE_OF[metric] for metric in request.metrics]


def _continued(start: EvaluationTable, request: TableRequest) -> EvaluationTable:
    """Add what an earlier run with the same inputs has found; refuse the results of others."""
    before = EvaluationTable.load(request.out)
    if before is None:
        return start
    if difference := start.difference(before):
        where = request.out / EVALUATION
        raise SnapvitError(f"{where}: is of {difference}. Choose another --out, or give --force to begin anew")
    return start.joined(before, _measures(request))


def _report(found: EvaluationTable, request: TableRequest) -> TableReport:
    """Return the tables that were asked for; the file keeps the results of earlier runs besides."""
    sizes = (DENSE, *request.sizes)
    tables = tuple(results_table(found, name, sizes, request.data, request.seeds) for name in _measures(request))
    asked = [r for r in found.results if r.size in sizes and r.data in request.data and r.seed in request.seeds]
    return TableReport(evaluation=msgspec.structs.replace(found, results=tuple(asked)), tables=tables)


@dataclass(frozen=True)
class SeedData:
    """The data sets as one seed splits them, and the images to calibrate on, none of which is evaluated."""

    sets: dict[str, Dataset]
    calibration: Source | None  # None: nothing is ranked or corrected

    @staticmethod
    def opened(request: TableRequest, seed: int) -> SeedData:
        """Open the data sets of a request."""
        roles = set(splits_for(request.metrics))
        first = roles | {"train"} if request.needs_images and request.calibrate is None else roles
        wanted = {name: first if name == request.data[0] else roles for name in request.data}
        sets = {
            name: open_dataset(name, seed, tuple(role for role in ROLES if role in some))
            for name, some in wanted.items()
        }
        return SeedData(sets, _to_calibrate(request, seed, sets) if request.needs_images else None)

    def identity(self, name: str) -> dict[str, Any]:
        """Return what tells if a data set is the same, by split."""
        return {split: _identity(source) for split, source in self.sets[name].splits.items()}


def _to_calibrate(request: TableRequest, seed: int, sets: Mapping[str, Dataset]) -> Source:
    """Return the images to rank and correct on, by seed."""
    by_head = set(request.metrics) <= {"head"}  # then all images of an unsplit data set are evaluated
    evaluated = set().union(*(places_of(data.whole().test if by_head else data.test) for data in sets.values()))

    def unevaluated(name: str) -> Source:
        few = Sample(request.settings.images, seed), Sample(0, seed)
        source = open_to_calibrate(name, *few) if request.calibrate is not None else sets[name].train
        if source is None:
            raise UsageError(f"{name} has no training images to calibrate on. Give --calibrate SOURCE")
        rest = without_images(replace(source, held_out=None), evaluated)
        if not rest.count:
            raise SnapvitError(
                f"{name}: all of its images are evaluated, so none may calibrate. Give --calibrate others"
            )
        return rest

    name = request.calibrate if request.calibrate is not None else request.data[0]
    return calibration_and_held_out(name, request.settings.images, seed, 0, opens=unevaluated)[0]


def _identity(source: Source) -> dict[str, Any]:
    """Return the number of images and a hash of their names and classes, and of the pixels of some of them."""
    digest = hashlib.sha256()
    for i in range(source.count):
        label = "" if source.labels is None else source.labels[i]
        digest.update(f"{source.title(i).removeprefix(source.name)}\0{label}\0".encode(errors="surrogateescape"))
    for i in evenly(range(source.count), LOOKED_AT):
        try:
            digest.update(np.asarray(source.open(i)).tobytes())
        except UnreadableImage:
            digest.update(b"unreadable")
    return {"source": source.name, "images": source.count, "sha256": digest.hexdigest()}


@dataclass(frozen=True, eq=False)
class SeedRun:
    """All sizes on all data sets with one seed."""

    request: TableRequest
    seed: int
    model: Model
    data: SeedData
    given: Ranking | None
    progress: Progress

    @cached_property
    def inputs(self) -> SeedInputs:
        """What its results come from."""
        calibration = self.data.calibration
        return SeedInputs(
            ranking=None if self.given is None else _scores_sha256(self.given),
            calibration=None if calibration is None else _identity(calibration),
            data={name: self.data.identity(name) for name in self.data.sets},
        )

    def check_sizes(self) -> None:
        """Refuse a given ranking of another model, and sizes that it does not reach."""
        from ..prune.models.load import check_same_weights

        if self.given is not None:
            check_same_weights(self.given, self.model, f"{self.request.ranking_of(self.seed)}: ")
            planner = self._planner(self.given)
            for size in self.request.sizes:
                size.plan(planner)
        elif self.request.sizes:
            self._check_reach()

    def _check_reach(self) -> None:
        """Refuse sizes that no ranking of these settings reaches, before one is made."""
        settings, anatomy, sizes = self.request.settings, self.model.anatomy, self.request.sizes
        protection = protection_of(settings)
        check_reach(
            anatomy,
            protection,
            sparsity=[size.sparsity for size in sizes if size.sparsity is not None],
            flops=[size.flops for size in sizes if size.flops is not None],
            corrected=settings.correction in ADDS_BIASES,
        )
        flat = Planner(Ranking.flat(anatomy), anatomy, msgspec.structs.replace(protection, sublayers=True))
        for size in sizes:
            if size.pair is not None:
                size.plan(flat)

    def fill(self, found: EvaluationTable) -> EvaluationTable:
        """Evaluate what is missing, and save each result at once."""
        for size in (DENSE, *self.request.sizes):
            names = [name for name in self.data.sets if found.found(size, self.seed, name) is None]
            if not names:
                self.progress.note(f"{self._title(size)}: known from before")
            for result in self._results(size, names, found):
                found = found.adding(result)
                found.save(self.request.out)
                self._tell(result)
        return found

    def _results(self, size: CutSize, names: list[str], found: EvaluationTable) -> Iterator[CellResult]:
        """Yield the results of one size on these data sets: the model is cut once."""
        from ..prune.models.extractor import cut_extractor

        if not names:
            return
        plan, correction, module = Plan.dense(self.model.anatomy), None, self.model.module
        if size != DENSE:
            plan = size.plan(self._planner(self._corrector.ranking))
            self.progress.phase(f"cutting {self._title(size)}")
            module, correction = self._corrector.kept(plan)
        extractor, anatomy = cut_extractor(module, self.model, self.request.device), self.model.anatomy
        cut = {"size": size, "flops": anatomy.flops(plan), **sizes_of(plan, anatomy, correction)}
        for name in names:
            evaluation = self._of_another_seed(name, found) if size == DENSE else None
            if evaluation is None:
                options = self.request.options_of(self.seed)
                evaluator = Evaluator.prepare(extractor, self.data.sets[name], options, self.progress)
                evaluation = evaluator.evaluate(extractor, self.progress)
            yield CellResult(seed=self.seed, data=name, evaluation=evaluation, **cut)

    def _of_another_seed(self, name: str, found: EvaluationTable) -> Evaluation | None:
        """Return the dense model's evaluation by another seed, where the seed decides nothing of it."""
        is_drawn = self.data.sets[name].unsplit is not None or self.request.options.images is not None
        if is_drawn or not set(self.request.metrics) <= {"head", "knn"}:
            return None
        own = self.inputs.data[name]
        same = (r for r in found.results if r.size == DENSE and r.data == name)
        return next((r.evaluation for r in same if found.inputs[str(r.seed)].data[name] == own), None)

    @cached_property
    def _corrector(self) -> Corrector:
        """Cuts and corrects; its factors are made once, for all sizes."""
        from ..prune.correct.policy import Corrector

        images = self._images
        ranking, factors = (self.given, None) if self.given is not None else self._ranked(images)
        settings = self.request.settings
        damping = Damping.parse(settings.damping)
        device = self.request.device
        return Corrector(self.model, ranking, settings.correction, images, self.progress, factors, damping, device)

    @cached_property
    def _images(self) -> Images:
        """The images to rank and correct on; none where nothing needs them."""
        preprocessing = self.model.preprocessing
        if self.data.calibration is None:
            return Images(np.zeros((0, *self.model.anatomy.image, 3), np.uint8), None, preprocessing, "none")
        return read_images([self.data.calibration], preprocessing, self.progress)[0]

    def _ranked(self, images: Images) -> tuple[Ranking, Factors | None]:
        """Return the ranking that is made here, or was made by an earlier run, and factors that came with it."""
        from ..prune.models.load import check_same_weights
        from ..prune.rank.distributed import alone
        from ..prune.rank.rank import rank_and_factor

        path = self.request.ranking_of(self.seed)
        if path.is_file() and not self.request.force:
            ranking = Ranking.load(path)
            check_same_weights(ranking, self.model, f"{path}: ")
            return ranking, None
        settings = replace(self.request.settings, seed=self.seed)
        with resumable(checkpoint_of(path)):
            ranking, factors = rank_and_factor(
                self.model,
                images,
                settings,
                checkpoint=checkpoint_of(path),
                processes=alone(self.request.device),
                progress=self.progress,
            )
        ranking.save(path)
        checkpoint_of(path).unlink(missing_ok=True)
        return ranking, factors

    def _planner(self, ranking: Ranking) -> Planner:
        corrected = self.request.correction in ADDS_BIASES
        return Planner(ranking, self.model.anatomy, ranking.protection, corrected=corrected)

    def _title(self, size: CutSize) -> str:
        return size.title if len(self.request.seeds) == 1 else f"{size.title}, seed {self.seed}"

    def _tell(self, result: CellResult) -> None:
        measures = _measures(self.request)
        values = ", ".join(f"{TITLES[measure]} {result.evaluation.value(measure):.3f}" for measure in measures)
        self.progress.note(f"{self._title(result.size)} on {result.data}: {values}")


def _scores_sha256(ranking: Ranking) -> str:
    """Return a hash of everything in a ranking that decides a Plan."""
    kinds = ("mixed",) if ranking.is_mixed else ()
    digest = hashlib.sha256(repr((ranking.protection, ranking.sublayers, *kinds)).encode())
    for name, array in sorted(ranking.arrays().items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()
