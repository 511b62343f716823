"""Everything that the variants of an export are built from, whatever the model came as. Light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..allocation.planner import Planner
from ..allocation.tokens import Schedule
from ..calibration.images import Images, calibration_and_held_out, in_two_parts, read_images
from ..calibration.preprocessing import Preprocessing
from ..calibration.source import Source
from ..errors import UsageError
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..model.ranking import Ranking
from ..model.sublayer import KEY as SUBLAYERS
from ..model.timing import untimed_part
from ..progress import Stages
from ..selection.image_meter import LEAST_IMAGES, MOST_RACED, MOST_REPORTED
from ..selection.variant_builder import Cutter
from .export_request import Request
from .inputs import MOST_HELD_OUT, data_of


@dataclass(frozen=True, eq=False)
class ImageParts:
    """The images of an export; no image is in two parts, unless there are too few for the last two."""

    calibration: Images
    race: Images  # on which candidates are compared
    held_out: Images  # on which the best of them, and what was asked for, are reported


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A ranked model, what was asked for of it, and what cuts it."""

    name: str
    anatomy: Anatomy
    preprocessing: Preprocessing
    labels: tuple[str, ...]  # names of the classes, if they are known
    images: ImageParts
    ranking: Ranking
    planner: Planner
    plans: Mapping[str, Plan]  # that were requested, by name
    merging: Schedule
    provenance: Mapping[str, object]
    cutter: Cutter
    has_one_size: bool  # True: it takes images of one size alone


def split_images(request: Request) -> tuple[Source, ...]:
    """Return the images to calibrate on, those of the race and those of the report; the last two may be the same."""
    settings = request.settings
    least = LEAST_IMAGES if request.races else 0  # a published method calibrates on all images that it asks for
    calibration, held_out = calibration_and_held_out(
        data_of(request), settings.images, settings.seed, MOST_HELD_OUT, least
    )
    if request.races and not held_out.count:
        raise UsageError(
            f"{held_out.name}: has no image left to compare candidates on. Give more images, or --levers width,depth"
        )
    if not request.races:
        return calibration, held_out, held_out
    return calibration, *in_two_parts(held_out, (MOST_RACED, MOST_REPORTED), LEAST_IMAGES)


def read_parts(split: Sequence[Source], preprocessing: Preprocessing, request: Request, progress: Stages) -> ImageParts:
    """Decode every image once."""
    distinct = split if split[1] is not split[2] else split[:2]
    with progress.stage("reading images"):
        calibration, race, *rest = read_images(
            distinct, preprocessing, progress, in_many_sizes="tokens" in request.used_levers
        )
    return ImageParts(calibration, race, rest[0] if rest else race)


def provenance_of(request: Request, given: Ranking | None, ranking: Ranking, calibration: Images) -> dict[str, object]:
    """Return the provenance of this export; a given ranking keeps its own apart.

    Without how long it took to rank, so that two exports of the same command write the same graphs.
    """
    done = {"correction": request.settings.correction, "damping": request.settings.damping}
    if given is None:
        return {"name": request.settings.recipe, **done, **untimed_part(ranking.provenance)}
    here = {"seed": request.settings.seed, "data": calibration.fingerprint}
    before = {key: value for key, value in untimed_part(ranking.provenance).items() if key != SUBLAYERS}
    measured = {SUBLAYERS: ranking.provenance[SUBLAYERS]} if SUBLAYERS in ranking.provenance else {}
    return {"name": "given", **done, **here, **measured, "ranking": before}
