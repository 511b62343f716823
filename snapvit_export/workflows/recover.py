"""`snapvit recover`: short training of a family's variants, with the dense model as their teacher.

The images are in three parts: most are trained on, some decide when to stop, and the rest report what it brought. None
of the last two was trained on, nor was the family calibrated on them if they are of the same source. A variant is
written into its family only if its file is nearer to the dense model on the last part than the one that was there.

Importing this is light; torch is loaded when the work begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..allocation.recipe import make_settings
from ..budget import Budget
from ..calibration.digits import BUNDLED as BUNDLED_IMAGES
from ..calibration.images import Images, calibration_and_held_out, read_images
from ..calibration.source import Source
from ..correction.moments import Damping
from ..errors import SnapvitError, UsageError, needs
from ..family.folder import own_files, read_family
from ..family.layout import MANIFEST, RANKING
from ..family.manifest import Manifest, Variant
from ..model.plan import Plan
from ..model.ranking import KIND as RANKING_KIND
from ..model.ranking import Ranking
from ..progress import Progress, Silent
from ..selection.image_meter import columns_of
from ..selection.mixes import SPREAD
from ..storage.atomic import refuse_foreign, settle
from ..storage.checksummed import is_checksummed
from ..storage.json import is_name
from .export import export
from .export_request import Request
from .inputs import BUNDLED_MODEL, BUNDLED_NAME, load_model_of, refuse_own_folder, resumable
from .recovered_family import Done, write_recovered

if TYPE_CHECKING:
    from ..prune.models.load import Model
    from ..prune.rank.distributed import Processes
    from ..prune.recover.settings import Autocast, TrainingSettings

MINUTES = 10.0  # of each variant, unless something else is asked for
MOST_STOPPING, MOST_REPORTED = 128, 256  # held-out images that decide when to stop, and that report
FEW = 200  # images to train on: with fewer little is to be expected
LEAST = 16  # images in all
CALIBRATED = 256  # of those that are trained on, which correct the start
LABELS = 0.5  # weight of labels where they are asked for


@dataclass(frozen=True)
class RecoverRequest:
    """Variants of a family to train, and how; or a ranking, from which the family is exported first.

    >>> request = RecoverRequest(Path("snapvit-family"), data="path/to/images", model="my-vit", minutes=5)
    """

    what: Path  # a family folder, or a ranking file
    data: str | Sequence[str] | None = None  # None: the bundled digits, for the bundled model
    variants: Sequence[str] = ()  # none: the chosen one
    budget: str | None = None  # the most faithful variant within it; of a ranking: that of the export
    elastic: bool = False  # all variants that are cut learn together
    minutes: float | None = None  # None: MINUTES, unless `epochs` says how long
    epochs: float | None = None
    train: str | None = None  # norms, linear or all; None: as the recipe has it
    recipe: str = "short"
    labels: bool = False
    device: str = "auto"
    seed: int = 0
    rate: float | None = None  # None: what suits `train`
    batch: int | None = None
    crop: float | None = None  # share of its picture that the smallest crop has; None: as the recipe has it
    recompute: bool = False
    autocast: str | None = None
    model: str | None = None  # what the family was made from, if its manifest's name is not enough
    checkpoint: Path | None = None  # its weights
    model_arguments: Mapping[str, Any] | None = None
    out: Path = Path("snapvit-family")  # of a family that is exported here
    steps: int | None = None  # from Python: exactly so many, instead of minutes or epochs
    changes: Mapping[str, Any] = field(default_factory=dict)  # from Python: other fields of the settings


def recover(request: RecoverRequest, progress: Progress) -> Manifest | None:
    """Train variants and write those that got better; None in a process that only helps another."""
    _check(request)
    with needs("recovering", extra="all"):
        import torch
    from ..prune.models.load import check_device
    from ..prune.rank.distributed import join

    device = request.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(device)
    with join(device) as processes:
        speaking = progress if processes.is_first else Silent()
        folder = _family(request, processes, speaking)
        return _recover_in(folder, request, processes, speaking)


def _check(request: RecoverRequest) -> None:
    """Refuse what can be refused before anything is read."""
    from ..prune.recover.settings import RECIPES, TRAINS

    if request.recipe not in RECIPES:
        raise UsageError(f"no recipe of a recovery is called '{request.recipe}'. Known: {', '.join(RECIPES)}")
    if request.train is not None and request.train not in TRAINS:
        raise UsageError(f"nothing is called '{request.train}' to train. Known: {', '.join(TRAINS)}")
    asked = [request.minutes, request.epochs, request.steps]
    if sum(value is not None for value in asked) > 1:
        raise UsageError("--minutes and --epochs both say how long. Give one of them")
    if any(value is not None and value <= 0 for value in asked):
        raise UsageError("a recovery takes some time. Give --minutes or --epochs above 0")
    chosen = [bool(request.variants), request.budget is not None and request.what.is_dir(), request.elastic]
    if sum(chosen) > 1:
        raise UsageError("--variant, --budget and --elastic each say what to recover. Give one of them")
    if request.recompute and request.elastic:
        raise UsageError("--recompute is for one variant, and --elastic trains several at once. Leave --recompute out")
    if request.budget is not None:
        Budget.parse(request.budget)


def _family(request: RecoverRequest, processes: Processes, progress: Progress) -> Path:
    """Return the family folder: the one that was given, or one that is exported from the ranking first."""
    if request.what.is_dir():
        return request.what
    if not request.what.is_file() or not is_checksummed(request.what, RANKING_KIND):
        raise UsageError(f"{request.what}: neither a family folder nor a ranking. Give one of them")
    if request.model is None:
        raise UsageError(f"{request.what}: a ranking has no weights. Give --model, and --checkpoint where it has one")
    if request.variants:
        raise UsageError("--variant names one of a family, and a ranking has none yet. Give --budget 10ms or --elastic")
    if request.budget is None and not request.elastic:
        raise UsageError("a ranking is of every size. Give --budget 10ms, or --elastic for several sizes at once")

    def exported() -> bool:
        assert request.model is not None
        export(
            Request(
                model=request.model,
                checkpoint=request.checkpoint,
                model_arguments=request.model_arguments,
                data=request.data,
                ranking=request.what,
                budget=request.budget,
                flops=() if request.budget is not None else SPREAD,
                settings=make_settings("default", seed=request.seed, images=_calibrated(request)),
                out=request.out,
            ),
            progress,
        )
        return True

    processes.from_first(exported)
    return request.out


def _calibrated(request: RecoverRequest) -> int:
    """Return how many images an export may calibrate on, so that enough are left to hold out."""
    assert request.model is not None
    data = request.data if request.data is not None else BUNDLED_IMAGES
    wanted = MOST_STOPPING + MOST_REPORTED
    return min(CALIBRATED, calibration_and_held_out(data, 10**9, request.seed, wanted, wanted)[0].count)


def _recover_in(folder: Path, request: RecoverRequest, processes: Processes, progress: Progress) -> Manifest | None:
    from ..prune.models.load import check_same_weights
    from ..prune.recover.augment import Pictures

    manifest = read_family(folder)
    refuse_own_folder(folder)
    if processes.is_first:
        settle(folder)
        refuse_foreign(folder, own_files(folder))
    variants = _variants(request, folder, manifest)
    ranking = _ranking(folder)
    model = _model(request, folder, manifest, progress)
    check_same_weights(ranking, model, f"{folder / RANKING}: ")
    settings = _settings(request)
    split = _split(request, manifest)
    _warn_of_few(split[0], progress)
    corrected = split[0].subset(range(min(split[0].count, CALIBRATED)))
    calibration, stopping, reported = read_images(
        (corrected, split[1], split[2]), model.preprocessing, progress, in_many_sizes=True
    )
    pictures = Pictures(split[0], model.preprocessing, settings.crop, settings.seed, settings.mixup, settings.flip)
    pictures.decode(progress)
    settings = settings.for_images(len(pictures), near=not request.elastic)
    columns = _columns(settings, model, reported, progress)
    parts = _Parts(model, ranking, manifest, calibration, stopping, reported, pictures, columns)
    trainer = _Trainer(folder, request, settings, parts, processes, progress)
    done = trainer.together(variants) if request.elastic else trainer.one_by_one(variants)
    if not processes.is_first:
        return None
    recovered = write_recovered(folder, manifest, done, calibration, stopping, reported, progress)
    for path in trainer.checkpoints:
        path.unlink(missing_ok=True)
    return recovered


def _variants(request: RecoverRequest, folder: Path, manifest: Manifest) -> list[Variant]:
    """Return the variants to recover; refuse those that cut nothing."""
    dense = Plan.dense(manifest.anatomy)
    cut = [variant for variant in manifest.variants if manifest.plan(variant) != dense]
    if not cut:
        raise SnapvitError(
            f"{folder / MANIFEST}: no variant is cut, and what a precision loses is not trained back. Nothing to do"
        )
    if request.elastic:
        return cut
    if request.variants:
        known = {variant.name: variant for variant in manifest.variants}
        if unknown := [name for name in request.variants if name not in known]:
            raise UsageError(f"{folder / MANIFEST}: no variant is called '{unknown[0]}'. Known: {', '.join(known)}")
        names = list(dict.fromkeys(request.variants))
    elif request.budget is not None and request.what.is_dir():
        names = [_within(Budget.parse(request.budget), folder, manifest, cut).name]
    elif manifest.choice is not None:
        names = [manifest.choice.variant]
    else:
        raise UsageError(f"{folder}: nothing was chosen in it. Give --variant {cut[-1].name}, --budget or --elastic")
    found = [manifest.variant(name) for name in names]
    if whole := [variant.name for variant in found if variant not in cut]:
        raise UsageError(
            f"{whole[0]} cuts nothing, so there is nothing to train back. Give --variant {cut[-1].name}, or --elastic"
        )
    return found


def _within(budget: Budget, folder: Path, manifest: Manifest, cut: Sequence[Variant]) -> Variant:
    """Return the most faithful of the cut variants that were timed to fit a budget."""
    dense = manifest.latency(manifest.dense)
    if dense is None:
        raise SnapvitError(f"{folder / MANIFEST}: its variants were not timed. Give --variant NAME, or --elastic")
    limit = budget.to_ms(dense[0], manifest.target.batch)
    timed = {variant.name: manifest.latency(variant.name) for variant in cut}
    fits = [v for v in cut if (found := timed[v.name]) is not None and found[1][1] <= limit]
    if not fits:
        raise SnapvitError(f"{folder / MANIFEST}: no cut variant was timed to fit {budget}. Export one for that budget")
    return min(fits, key=lambda v: (np.inf if v.fidelity is None else v.fidelity.divergence, -v.flops))


def _ranking(folder: Path) -> Ranking:
    if not (folder / RANKING).is_file():
        raise SnapvitError(f"{folder / RANKING}: missing, and a variant is cut by it. Copy or export the family again")
    return Ranking.load(folder / RANKING)


@dataclass(frozen=True)
class _Named:
    """A model as `load_model_of` takes it."""

    model: str
    checkpoint: Path | None
    model_arguments: Mapping[str, Any] | None


def _model(request: RecoverRequest, folder: Path, manifest: Manifest, progress: Progress) -> Model:
    """Load the dense model that the family was made from: the teacher, and the weights to cut."""
    name = request.model or (BUNDLED_MODEL if manifest.model == BUNDLED_NAME else None)
    if name is None and request.checkpoint is not None and is_name(manifest.model):
        name = manifest.model
    if name is None:
        raise UsageError(
            f"{folder}: has no weights for torch, only graphs. Give --model the one that it was made from, "
            f"and --checkpoint where it had one"
        )
    model = load_model_of(_Named(name, request.checkpoint, request.model_arguments), progress)
    if model.anatomy != manifest.anatomy:
        raise SnapvitError(
            f"{name}: is another model than {folder} was made from. Give that one, and --pool, --image-size and "
            f"--model-arg as the export had them"
        )
    return model


def _settings(request: RecoverRequest) -> TrainingSettings:
    """Return the settings that a request asks for; how many steps is known once the images are counted."""
    from ..prune.rank.search.engine import check_autocast
    from ..prune.recover.settings import recipe_of

    found = recipe_of(request.recipe)
    asked: dict[str, Any] = {"seed": request.seed, "recompute": request.recompute}
    asked |= {} if request.train is None else {"train": request.train}
    asked |= {} if request.rate is None else {"rate": request.rate}
    asked |= {} if request.batch is None else {"batch": request.batch, "micro": min(found.micro, request.batch)}
    asked |= {} if request.crop is None else {"crop": (request.crop, 1.0)}
    asked |= {} if request.autocast is None else {"autocast": check_autocast(request.autocast)}
    asked |= {"labels": LABELS} if request.labels and not found.labels else {}
    asked |= {} if request.steps is None else {"steps": request.steps}
    return replace(found, **{**asked, **request.changes})


def _split(request: RecoverRequest, manifest: Manifest) -> tuple[Source, Source, Source]:
    """Return the images to train on, those that decide when to stop, and those that report.

    Images that the family was calibrated on are among the first: its variants look better on them than they are.
    """
    data = request.data
    used, known = dict(manifest.recipe.get("data", {})), manifest.recipe.get("seed")
    if data is None:
        if used.get("source") != BUNDLED_IMAGES:
            raise UsageError(f"{manifest.model} needs images to be trained on. Give --data FOLDER")
        data = BUNDLED_IMAGES
    seed = known if isinstance(known, int) else request.seed
    wanted = MOST_STOPPING + MOST_REPORTED
    train, held_out = calibration_and_held_out(data, 10**9, seed, wanted, wanted)
    calibrated = int(used.get("images", 0)) + int(used.get("unreadable", 0))
    if used.get("source") == train.name and train.count < calibrated and train.held_out is None:
        left = train.count + held_out.count - calibrated
        if left < LEAST:
            raise SnapvitError(
                f"{train.name}: the family was calibrated on all but {left} of its images, so too few are left that "
                f"could tell what training brings. Give others, or export again with --images {train.count}"
            )
        train, held_out = calibration_and_held_out(data, 10**9, seed, wanted, left)
    if train.count < LEAST or held_out.count < 4:
        raise SnapvitError(
            f"{train.name}: {train.count + held_out.count} images are too few to train on and to hold some out. "
            f"Give {2 * LEAST} or more, better {FEW}"
        )
    first, second = range(0, held_out.count, 2), range(1, held_out.count, 2)
    return train, held_out.subset(first[:MOST_STOPPING]), held_out.subset(second[:MOST_REPORTED])


def _warn_of_few(train: Source, progress: Progress) -> None:
    if train.count < FEW:
        progress.note(
            f"{train.name}: {train.count} images to train on are few: expect little, and give {FEW} or more if you can"
        )


def _columns(
    settings: TrainingSettings, model: Model, images: Images, progress: Progress
) -> npt.NDArray[np.int64] | None:
    """Return the output of each class, where labels are read."""
    if not settings.labels:
        return None
    from ..prune.models.class_names import class_names

    try:
        return columns_of(images, model.anatomy, class_names(model), "accuracy", progress)
    except UsageError as error:
        reason = str(error).partition(": ")[2]
        raise UsageError(f"labels of the model's classes are needed: {reason}") from error


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a training is made from."""

    model: Model
    ranking: Ranking
    manifest: Manifest
    calibration: Images
    stopping: Images
    reported: Images
    pictures: Any
    columns: npt.NDArray[np.int64] | None


class _Trainer:
    """Trains variants in turn or together, each run with a checkpoint beside the family."""

    def __init__(
        self,
        folder: Path,
        request: RecoverRequest,
        settings: TrainingSettings,
        parts: _Parts,
        processes: Processes,
        progress: Progress,
    ) -> None:
        from ..prune.correct.policy import Corrector
        from ..prune.recover.student import DTYPES, Teacher

        self.folder, self.request, self.settings, self.parts = folder, request, settings, parts
        self.processes, self.progress = processes, progress
        self.checkpoints: list[Path] = []
        recipe = parts.manifest.recipe
        corrections = {variant.correction for variant in parts.manifest.variants if variant.correction is not None}
        self.correction = "refit" if "refit" in corrections else next(iter(corrections), None)
        self.damping = Damping.parse(str(recipe.get("damping", "mean:0.01")))
        self.corrector = Corrector(
            parts.model, parts.ranking, self.correction, parts.calibration, progress, damping=self.damping
        )
        autocast = DTYPES[self._autocast()]
        self.teacher = Teacher(parts.model, parts.stopping, processes.device, autocast)

    def _autocast(self) -> Autocast:
        """Return the precision of matrix products: what was asked for, or bf16 on a GPU that has it."""
        if self.request.autocast is not None or self.processes.device.type == "cpu":
            return self.settings.autocast
        import torch

        kind: Autocast = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        self.settings = replace(self.settings, autocast=kind)
        return kind

    def one_by_one(self, variants: Sequence[Variant]) -> Done:
        """Train each Plan once, whatever the precisions of its variants."""
        import copy

        from ..prune.recover.cutter import RecoveredCutter, Trained
        from ..prune.recover.student import Student

        plans = {self.parts.manifest.plan(variant): variant for variant in reversed(variants)}
        trained, outcomes = {}, {}
        for plan, variant in reversed(plans.items()):
            module, correction = self.corrector.kept(plan)
            start = copy.deepcopy(module)
            student = Student(module, self.teacher, self.settings, self.parts.columns)
            outcomes[plan] = self._train(student, variant.name)
            trained[plan] = Trained(student.close(), start, correction)
        cutter = RecoveredCutter(self.parts.model, self.corrector, trained)
        return Done(variants, cutter, cutter, outcomes, *self._described())

    def together(self, variants: Sequence[Variant]) -> Done:
        """Train all Plans as nested ones, which share their weights."""
        import copy

        from ..prune.build import ModuleCutter
        from ..prune.correct.policy import Corrector
        from ..prune.recover.cutter import RecoveredCutter
        from ..prune.recover.elastic import NestedStudents, factors_after
        from ..prune.stats.observe import observe

        parts = self.parts
        plans = list(dict.fromkeys(parts.manifest.plan(variant) for variant in variants))
        statistics = observe(parts.model, parts.calibration, self.progress, warn=False)
        own = replace(parts.model, module=copy.deepcopy(parts.model.module))
        learner = NestedStudents(
            own, parts.ranking, plans, self.teacher, self.settings, statistics, self.damping, parts.columns
        )
        outcome = self._train(learner, f"{len(plans)} sizes together")
        learnt = learner.close()
        factors = factors_after(learnt, parts.ranking, statistics, self.damping)
        corrector = Corrector(learnt, parts.ranking, "elastic", parts.calibration, self.progress, factors, self.damping)
        cutter = RecoveredCutter(learnt, corrector, nested=True)
        reference = ModuleCutter(parts.model, self.corrector)
        return Done(variants, cutter, reference, dict.fromkeys(plans, outcome), *self._described(), together=True)

    def _train(self, learner: Any, name: str) -> Any:
        """Train one learner, going on where an earlier run was stopped."""
        from ..prune.recover.loop import begun_steps, checkpoint_at, steps_within, train
        from ..prune.recover.settings import EPOCHS

        parts, request, settings = self.parts, self.request, self.settings
        epochs, minutes = request.epochs, request.minutes
        if epochs is None and minutes is None and request.steps is None:
            epochs, minutes = EPOCHS.get(request.recipe), None if request.recipe in EPOCHS else MINUTES
        if epochs is not None:
            settings = settings.for_epochs(epochs, len(parts.pictures))
        kind = name if is_name(name) else "together"
        path = self.folder.parent / f"{self.folder.name}.recover-{kind}.checkpoint"
        self.checkpoints.append(path)
        made_from = {
            "weights": parts.model.weights_sha256,
            "variant": name,
            "images": len(parts.pictures),
            "calibration": parts.calibration.fingerprint["sha256"],
            "held_out": parts.stopping.fingerprint["sha256"],
        }
        checkpoint = checkpoint_at(path, settings, made_from, minutes)
        if minutes is not None:
            begun = self.processes.from_first(lambda: begun_steps(checkpoint))
            if begun is None:
                settings = steps_within(minutes, learner, parts.pictures, settings, self.processes)
            else:
                settings = replace(settings, steps=begun[0], looks=begun[1])
        with resumable(path):
            return train(
                learner,
                parts.pictures,
                settings,
                name=name,
                checkpoint=checkpoint,
                processes=self.processes,
                progress=self.progress,
            )

    def _described(self) -> tuple[TrainingSettings, str, int, str]:
        parts = self.parts
        return self.settings, self.request.recipe, len(parts.pictures), parts.pictures.name
