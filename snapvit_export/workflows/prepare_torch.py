"""Prepares a model that torch loads for an export: loaded, ranked unless a ranking is given, ready to be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import UNSET

from ..allocation.tokens import DEFAULT, SCHEDULES
from ..calibration.source import Source
from ..correction.moments import Damping
from ..model.ranking import Ranking
from ..progress import Stages
from .export_request import Request
from .inputs import checkpoint_of, load_model_of, settings_for
from .prepared import PreparedModel, provenance_of, read_parts
from .requested_plans import planner_of, refuse_early, requested_plans


def prepare(request: Request, given: Ranking | None, split: Sequence[Source], progress: Stages) -> PreparedModel:
    """Load the model, read the images, and rank unless a ranking was given."""
    from ..prune.build import ModuleCutter
    from ..prune.correct.policy import Corrector
    from ..prune.models.class_names import class_names
    from ..prune.models.load import check_same_weights
    from ..prune.pack import read_wiring
    from ..prune.rank.distributed import alone
    from ..prune.rank.rank import rank_and_factor
    from ..prune.stats.schedules import choose_schedule

    processes = alone(request.device)
    with progress.stage("starting"):
        model = load_model_of(request, progress, request.onnx.classes)
    request = replace(request, settings=settings_for(request.settings, model, progress))
    anatomy = model.anatomy
    has_one_size = anatomy.rope != "none" and read_wiring(model.module, anatomy).rotary is UNSET
    if given is not None:
        check_same_weights(given, model, f"{request.ranking}: ")
    refuse_early(request, given, anatomy, model.name, has_one_size)
    images = read_parts(split, model.preprocessing, request, progress)
    ranking, factors = given, None
    if ranking is None:
        progress.step("ranking")
        with progress.stage("ranking"):
            ranking, factors = rank_and_factor(
                model,
                images.calibration,
                request.settings,
                checkpoint=checkpoint_of(request.out),
                processes=processes,
                progress=progress,
            )
    planner = planner_of(request, ranking, anatomy)
    provenance = provenance_of(request, given, ranking, images.calibration)
    merging = SCHEDULES[DEFAULT]
    if request.merges:
        progress.step("merging")
        with progress.stage("schedules of merging"):
            merging, provenance["token_schedule"] = choose_schedule(model, images.calibration, progress)
    settings = request.settings
    corrector = Corrector(
        model,
        ranking,
        settings.correction,
        images.calibration,
        progress,
        factors,
        Damping.parse(settings.damping),
        request.device,
    )
    return PreparedModel(
        name=model.name,
        anatomy=anatomy,
        preprocessing=model.preprocessing,
        labels=class_names(model),
        images=images,
        ranking=ranking,
        planner=planner,
        plans=requested_plans(request, planner, merging),
        merging=merging,
        provenance=provenance,
        cutter=ModuleCutter(model, corrector),
        has_one_size=has_one_size,
    )
