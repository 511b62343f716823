"""`snapvit rank --rounds ... --recover`: rounds that train what they cut, their ranking and the trained model.

Importing this is light; torch is loaded when the work begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..allocation.recipe import Rounds, Settings
from ..calibration.images import Images, calibration_and_held_out, read_images
from ..calibration.sampling import shuffled
from ..calibration.source import Source
from ..errors import UsageError
from ..model.ranking import Ranking
from ..progress import Progress
from ..selection.image_meter import columns_of
from ..storage.atomic import refuse_foreign, settle
from .inputs import checkpoint_of, refuse_own_folder, resumable
from .recover import FEW, LABELS

if TYPE_CHECKING:
    from ..prune.models.load import Model
    from ..prune.recover.in_rounds import Lessons
    from ..prune.recover.settings import TrainingSettings

EPOCHS = 5.0  # of each round


@dataclass(frozen=True)
class RecoverInRounds:
    """How rounds are trained, and how much they may lose."""

    max_drop: float | None = None  # None: the default of `in_rounds.Limit`
    epochs: float | None = None  # None: EPOCHS
    train: str | None = None  # norms, linear or all; None: all, as a cut model has weights of its own anyway
    labels: bool = False  # train on labels too, and count accuracy that is lost

    def settings(self, seed: int) -> TrainingSettings:
        """Return the settings of a training, but for its steps and its rate."""
        from ..prune.recover.settings import TRAINS, TrainingSettings

        train = self.train or "all"
        if train not in TRAINS:
            raise UsageError(f"nothing is called '{train}' to train. Known: {', '.join(TRAINS)}")
        if self.epochs is not None and self.epochs <= 0:
            raise UsageError("a recovery takes some time. Give --epochs above 0")
        return TrainingSettings(train=train, seed=seed, labels=LABELS if self.labels else 0.0)


def folder_beside(out: Path) -> Path:
    """Return the folder of the trained model: `ranking-recovered` beside `ranking.safetensors`."""
    return out.parent / f"{out.stem}-recovered"


def refuse_early(out: Path, asked: RecoverInRounds) -> None:
    """Refuse, before any work, what makes no sense, and a folder that holds other files than a model of ours."""
    from ..prune.models.load import MODEL_FILES
    from ..prune.recover.in_rounds import Limit

    asked.settings(0)
    if asked.max_drop is not None:
        Limit(asked.max_drop)
    folder = folder_beside(out)
    refuse_own_folder(folder)
    settle(folder)
    refuse_foreign(folder, MODEL_FILES)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A run of recovering rounds that is ready to begin."""

    model: Model
    lessons: Lessons
    rounds: Rounds
    settings: Settings
    training: TrainingSettings
    limit: Any
    made: dict[str, Any]  # that decides it

    def run(self, out: Path, device: str, progress: Progress) -> Ranking:
        """Go through the rounds, and write the trained model beside the ranking's place."""
        from ..prune.models.load import save_model
        from ..prune.recover.in_rounds import rank_and_recover

        checkpoint = checkpoint_of(out)
        with resumable(checkpoint):
            ranking, trained = rank_and_recover(
                self.model,
                self.lessons,
                self.rounds,
                self.settings,
                self.training,
                self.limit,
                made=self.made,
                checkpoint=checkpoint,
                device=device,
                progress=progress,
            )
        if trained is self.model:
            progress.note("no round stayed within --max-drop, so no model is written. Give a larger one")
        else:
            save_model(trained.module, self.model.description, folder_beside(out))
        return ranking


def prepare(
    model: Model, data: Any, rounds: Rounds, settings: Settings, asked: RecoverInRounds, progress: Progress
) -> Prepared:
    """Read the images in three parts, and say how they are trained on."""
    from ..prune.rank.iterative import made_by
    from ..prune.recover.augment import Pictures
    from ..prune.recover.in_rounds import Lessons, Limit

    source, _ = calibration_and_held_out(data, settings.images, settings.seed, most_held_out=0)
    parts = _three_parts(source, settings.seed)
    if parts[0].count < FEW:
        progress.note(
            f"{source.name}: {parts[0].count} images to train on are few: expect little, and give --images of {FEW} or "
            "more if you can"
        )
    fitted, stopping, measured = read_images(parts, model.preprocessing, progress)
    training = asked.settings(settings.seed)
    preprocessing, crop = model.preprocessing, training.crop
    pictures = Pictures(parts[0], preprocessing, crop, training.seed, training.mixup, training.flip)
    pictures.decode(progress)
    count = len(pictures)
    epochs = EPOCHS if asked.epochs is None else asked.epochs
    training = training.for_images(count, near=False).for_epochs(epochs, count)  # most recipes cut without a refit
    columns = _columns(model, measured, asked.labels, progress)
    limit = Limit(by_labels=asked.labels) if asked.max_drop is None else Limit(asked.max_drop, asked.labels)
    rounds = Rounds(rounds.flops, float("inf"))  # how far outputs may move is said by the limit
    made = made_by(model, _joined(fitted, stopping, measured), settings, rounds)
    described = {
        "held_back": len(measured),
        "stopping": len(stopping),
        "recover": {**vars(training), "crop": list(training.crop)},
        "max_drop": limit.most,
        "by": "top-1" if limit.by_labels else "agreement",
    }
    made["rounds_settings"] = {**made["rounds_settings"], **described}
    return Prepared(
        model, Lessons(pictures, fitted, stopping, measured, columns), rounds, settings, training, limit, made
    )


def _three_parts(source: Source, seed: int) -> tuple[Source, Source, Source]:
    """Return the images to train on, those that decide when to stop, and those that measure, by seed."""
    from ..prune.recover.in_rounds import LEAST_IMAGES, MEASURED, STOPPING

    count = source.count
    if count < LEAST_IMAGES:
        raise UsageError(
            f"{source.name}: {count} images are too few for rounds that recover, which hold three eighths back. "
            f"Give {LEAST_IMAGES} or more, better 1000"
        )
    order, first = shuffled(count, seed), count // MEASURED
    second = first + count // STOPPING
    measured, stopping, fitted = order[:first], order[first:second], order[second:]
    return source.subset(sorted(fitted)), source.subset(sorted(stopping)), source.subset(sorted(measured))


def _joined(*parts: Images) -> Images:
    """Return all images as one set, for what a ranking says of them."""
    unreadable = tuple(name for part in parts for name in part.unreadable)
    pixels = np.concatenate([part.pixels for part in parts])
    has_labels = all(part.labels is not None for part in parts)
    labels = np.concatenate([part.labels for part in parts if part.labels is not None]) if has_labels else None
    return replace(parts[0], pixels=pixels, labels=labels, unreadable=unreadable, again=None)


def _columns(model: Model, images: Images, needed: bool, progress: Progress) -> npt.NDArray[np.int64] | None:
    """Return the output of each class, where labels are known; refuse images without, if they are needed."""
    from ..prune.models.class_names import class_names

    try:
        return columns_of(images, model.anatomy, class_names(model), "accuracy" if needed else "fidelity", progress)
    except UsageError as error:
        raise UsageError(f"--labels needs labels of the model's classes: {str(error).partition(': ')[2]}") from error
