"""All that decides a ranking: what cannot work is refused before any work, the rest described for its provenance."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from ...allocation.planner import Planner, check_reach
from ...allocation.recipe import Settings, in_shots, protection_of, uses_scores
from ...calibration.images import Images
from ...errors import SnapvitError, UsageError
from ...model.plan import Protection
from ...model.ranking import Ranking
from ...storage.json import as_builtins
from ..models.class_names import as_outputs
from ..models.load import Model
from ..stats.output_divergence import DivergenceName, check_divergence, default_divergence
from .criteria import make_criterion
from .criteria.base import Criterion
from .search.cka import MOST_IMAGES
from .search.fitness import SearchedOver, check_enough_images

BATCH = 16  # images, as in the released code; the sum over batches makes scores depend on it


def searched_over(settings: Settings) -> SearchedOver:
    """Return what the factors of a search belong to."""
    return "mlp" if settings.search_over == "mlp" else "all"


def cka_images(settings: Settings) -> int:
    """Return how many images the first covariance is computed from, at most."""
    return MOST_IMAGES if settings.cka_images is None else settings.cka_images


def criterion_of(settings: Settings) -> Criterion:
    """Return the criterion of these settings."""
    return make_criterion(settings.criterion, views=settings.views, reduction=settings.reduction, seed=settings.seed)


def needs_images(settings: Settings) -> bool:
    """Return True if these settings use any image: magnitude and its like do not, unless a search follows."""
    joint = settings.allocation == "joint"
    return joint or settings.depth or make_criterion(settings.criterion).needs != "nothing" or settings.evaluations > 0


def corrects(settings: Settings) -> bool:
    """Return True if the search corrects its candidates: as they will be used."""
    return settings.correction not in (None, "sparsegpt", "mean")


def divergence_of(settings: Settings, model: Model) -> DivergenceName:
    """Return the name of the output divergence: of the settings, or the best that the model allows."""
    name = default_divergence(model) if settings.divergence is None else settings.divergence
    check_divergence(name, model)
    return name  # type: ignore[return-value]


def check(criterion: Criterion, model: Model, images: Images, settings: Settings) -> None:
    """Refuse what these settings cannot do with this model and these images, before any work."""
    if needs_images(settings) and not len(images):
        what = "joint allocation" if settings.allocation == "joint" else f"criterion {settings.criterion}"
        raise SnapvitError(f"{what} needs images. Give --data")
    if uses_scores(settings) and criterion.needs == "labels":
        if images.labels is None:
            raise SnapvitError(f"criterion {settings.criterion} needs labels: one sub-folder of images per class")
        as_outputs(images, model, settings.criterion)  # refuses classes that are not the head's
    if settings.evaluations < 0:
        raise UsageError(f"{settings.evaluations} evaluations make no sense. Give 0 for no search")
    if settings.allocation == "joint":
        divergence_of(settings, model)
        if settings.evaluations:
            check_reach(model.anatomy, Protection(sublayers=not settings.depth), flops=settings.flops)
    elif settings.evaluations:
        check_enough_images(len(images), settings.pca, model.anatomy.embed_dim)
        planner = Planner(Ranking.flat(model.anatomy), model.anatomy)
        for mlp, head in settings.pairs:
            planner.pair(mlp, head)  # refuses what protection does not allow


def provenance_of(
    model: Model,
    images: Images,
    settings: Settings,
    criterion: Criterion,
    how: dict[str, Any],
    of_cka: Images | None = None,
) -> dict[str, Any]:
    """Return all that decides the ranking; `how`: engine, device and precision of the search's candidates.

    `of_cka`: the images of the first covariance, where they are not those that calibrate.
    """
    described: dict[str, Any] = {"allocation": settings.allocation}
    if settings.allocation == "joint":
        described |= {"order": settings.order, "damping": settings.damping}
    elif settings.damping != Settings().damping:  # no part of the scores, but of the recipe: for whoever corrects
        described["damping"] = settings.damping
    if (protection := protection_of(settings)) != Protection():
        described["protection"] = as_builtins(protection)
    if in_shots(settings):
        described |= {"shots": settings.shots, "step": settings.step}
    if uses_scores(settings):
        described |= {"criterion": settings.criterion, **criterion.settings, "batch": BATCH}
        if criterion.needs == "labels":
            described["labels_sha256"] = _labels_fingerprint(as_outputs(images, model, settings.criterion))
    described |= {
        "seed": settings.seed,
        "model": model.name,
        "weights_sha256": model.weights_sha256,
        "data": images.fingerprint,
    }
    if settings.evaluations:
        own = ("flops", "search_images") if settings.allocation == "joint" else ("pairs", "pca", "cka")
        described["search_settings"] = {
            name: as_builtins(getattr(settings, name))
            for name in ("evaluations", "optimiser", "population", "racing", *own)
        } | how
        if settings.search_over != "all":
            described["search_settings"]["search_over"] = settings.search_over
        if settings.cka_images is not None:
            found = (of_cka or images).first(settings.cka_images).fingerprint
            described["search_settings"]["cka_images"] = {name: found[name] for name in ("images", "sha256")}
        if settings.allocation == "joint":
            described["search_settings"]["divergence"] = divergence_of(settings, model)
            described["search_settings"]["corrected"] = corrects(settings)
    return described


def _labels_fingerprint(images: Images) -> str:
    """Return a hash of the labels: that of the images covers only their pixels."""
    labels = np.zeros(0) if images.labels is None else images.labels
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()
