"""Prepares an ONNX file of another tool for an export, without torch: recognised, compared, ranked, ready to be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import UNSET

from ..allocation.tokens import DEFAULT, SCHEDULES
from ..calibration.source import Source
from ..correction.moments import Damping
from ..errors import UsageError
from ..model.ranking import Ranking
from ..onnx_rank.cutter import TensorCutter
from ..onnx_rank.rank import check_settings, check_weights, choose_schedule, factors_for, in_rank_order, rank
from ..progress import Stages
from ..storage.temporary import scratch_folder
from .export_request import Request
from .onnx_model import load_onnx, require_same, warn_of_preprocessing
from .prepared import PreparedModel, provenance_of, read_parts
from .requested_plans import planner_of, refuse_early, requested_plans


def prepare(request: Request, given: Ranking | None, split: Sequence[Source], progress: Stages) -> PreparedModel:
    """Recognise the file, compare what we make of it with the file itself, and rank unless a ranking was given."""
    if request.checkpoint is not None or request.model_arguments:
        raise UsageError(
            f"{request.model} has its own weights. Leave --checkpoint, --model-arg, --pool and --image-size out"
        )
    check_settings(request.settings)
    if request.settings.correction == "refit":  # which fits modules, in torch
        request = replace(request, settings=replace(request.settings, correction="elastic"))
        progress.note("what is cut is corrected from factors; a refit, which keeps more, needs the model in torch")
    with progress.stage("starting"):
        file = load_onnx(request.model, request.onnx, progress)
    model = file.blueprint
    anatomy, has_one_size = model.anatomy, model.anatomy.rope != "none" and model.wiring.rotary is UNSET
    if given is not None:
        check_weights(given, model, f"{request.ranking}: ")
    refuse_early(request, given, anatomy, model.model, has_one_size)
    images = read_parts(split, model.preprocessing, request, progress)
    require_same(file, images.calibration, progress)
    warn_of_preprocessing(file, images.calibration, progress)
    ranking, factors = given, None
    if ranking is None:
        progress.step("ranking")
        with progress.stage("ranking"):
            ranking, factors = rank(model, images.calibration, request.settings, progress)
    ranked = in_rank_order(model, ranking)
    require_same(file, images.calibration, progress, ranked)
    corrects = request.settings.correction is not None
    if corrects and factors is None:
        factors = factors_for(model, ranking, images.calibration, Damping.parse(request.settings.damping), progress)
    planner = planner_of(request, ranking, anatomy)
    provenance = provenance_of(request, given, ranking, images.calibration)
    merging = SCHEDULES[DEFAULT]
    if request.merges:
        progress.step("merging")
        with progress.stage("schedules of merging"), scratch_folder() as folder:
            merging, provenance["token_schedule"] = choose_schedule(model, images.calibration, folder, progress)
    return PreparedModel(
        name=model.model,
        anatomy=anatomy,
        preprocessing=model.preprocessing,
        labels=model.labels,
        images=images,
        ranking=ranking,
        planner=planner,
        plans=requested_plans(request, planner, merging),
        merging=merging,
        provenance=provenance,
        cutter=TensorCutter(ranked, factors if corrects else None),
        has_one_size=has_one_size,
    )
