"""`snapvit pack`: from a model, its ranking and images to an Elastic folder.

Importing this is light; torch is loaded when the work begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..allocation.recipe import DEFAULT, Settings, make_settings
from ..calibration.images import calibration_and_held_out, evenly, read_images
from ..calibration.source import Source
from ..correction.moments import Damping
from ..elastic.format import Description, own_files
from ..errors import UsageError, needs
from ..model.ranking import Ranking
from ..progress import Progress, Silent
from ..selection.measure_table import LEAST_IMAGES, measure_table
from ..storage.atomic import check_writable, settle
from ..storage.temporary import scratch_folder
from .inputs import (
    BUNDLED_MODEL,
    checkpoint_of,
    data_of,
    is_onnx,
    load_model_of,
    refuse_device,
    refuse_foreign_checkpoint,
    refuse_own_folder,
    settings_for,
)
from .onnx_model import OnnxOptions, load_onnx, refuse_without_onnx, require_same, warn_of_preprocessing

MOST_MEASURED = 64  # images that the table of fidelity is measured on: 60 Plans of a DeiT-Tiny in half a minute
LEAST_MEASURED = 32  # are held out, or a quarter of all if that is fewer


@dataclass(frozen=True)
class PackRequest:
    """A model to pack, its ranking, and the folder to write."""

    model: str = BUNDLED_MODEL
    checkpoint: Path | None = None
    ranking: Path | None = None  # None: ranked anew
    data: str | Sequence[str] | None = None  # None: the bundled digits, for the bundled model
    out: Path = Path("snapvit-elastic")
    settings: Settings = field(default_factory=lambda: make_settings(DEFAULT))
    correct: bool = True  # False: no factors; only uncorrected weights come out
    fidelity: bool = True  # False: no table of it, so devices need images to choose among all levers
    onnx: OnnxOptions = field(default_factory=OnnxOptions)  # what an ONNX file does not say itself
    model_arguments: Mapping[str, Any] | None = None  # for timm, beside a timm name
    device: str = "cpu"  # where torch ranks and takes statistics

    def __post_init__(self) -> None:
        if not self.correct:  # then candidates of a search are not corrected either
            object.__setattr__(self, "settings", replace(self.settings, correction=None))


def pack_model(request: PackRequest, progress: Progress | None = None) -> Description:
    """Rank if no ranking is given, observe, factor, choose a schedule of merging, write, and measure fidelity."""
    progress = progress or Silent()
    settings = request.settings
    ranking = _check(request)
    if is_onnx(request.model):
        refuse_device(request.device, request.model)
        return _pack_onnx(request, ranking, progress)
    refuse_without_onnx(request.onnx, request.model)
    with needs("packing", extra="prune"):
        import torch  # noqa: F401
    needs_images = ranking is None or request.correct
    if request.fidelity and needs_images:
        with needs("measuring fidelity (leave it out with --no-fidelity)", extra="ort"):
            import onnxruntime  # noqa: F401
    from ..prune.correct.elastic import make_factors
    from ..prune.models.load import check_same_weights
    from ..prune.pack import pack
    from ..prune.rank.distributed import alone
    from ..prune.rank.rank import rank_and_factor
    from ..prune.stats.observe import observe
    from ..prune.stats.schedules import choose_schedule

    processes = alone(request.device)
    split = _split(request) if needs_images else []
    model = load_model_of(request, progress, request.onnx.classes)
    settings = settings_for(settings, model, progress)
    if ranking is not None:
        check_same_weights(ranking, model, f"{request.ranking}: ")
    images = read_images(split, model.preprocessing, progress)
    factors = None
    if ranking is None:
        ranking, factors = rank_and_factor(
            model,
            images[0],
            settings,
            checkpoint=checkpoint_of(request.out),
            processes=processes,
            progress=progress,
        )
    if request.correct and factors is None:
        statistics = observe(model, images[0], progress, request.device)
        factors = make_factors(model, ranking, statistics, Damping.parse(settings.damping))
    merging = choose_schedule(model, images[0], progress)[0] if images else None
    if merging is None:
        progress.note("no images, so devices merge tokens by the default schedule")
    measure = None
    if len(images) > 1:
        measure = partial(measure_table, images=images[1], progress=progress)
    elif request.fidelity:
        progress.note("no images to measure fidelity on, so devices need some to choose among all levers")
    packed = pack(model, ranking, request.out, factors if request.correct else None, progress, merging, measure)
    if request.ranking is None:
        checkpoint_of(request.out).unlink(missing_ok=True)
    return packed


def _pack_onnx(request: PackRequest, ranking: Ranking | None, progress: Progress) -> Description:
    """Do the same with an ONNX file of another tool, without torch."""
    from ..elastic.write import write_elastic
    from ..onnx_rank.rank import (
        check_settings,
        check_weights,
        choose_schedule,
        factors_for,
        in_rank_order,
        rank,
        reordered,
    )

    if request.checkpoint is not None or request.model_arguments:
        raise UsageError(
            f"{request.model} has its own weights. Leave --checkpoint, --model-arg, --pool and --image-size out"
        )
    settings, factors = request.settings, None
    check_settings(settings)
    split = _split(request) if ranking is None or request.correct else []
    file = load_onnx(request.model, request.onnx, progress)
    model = file.blueprint
    if ranking is not None:
        check_weights(ranking, model, f"{request.ranking}: ")
    images = read_images(split, model.preprocessing, progress) if split else []
    merging = measure = None
    if images:
        require_same(file, images[0], progress)
        warn_of_preprocessing(file, images[0], progress)
    else:
        progress.note(
            "no images, so our graph was not compared with the file, and tokens merge by the default schedule"
        )
    if ranking is None:
        ranking, factors = rank(model, images[0], settings, progress)
    if request.correct and factors is None:
        factors = factors_for(model, ranking, images[0], Damping.parse(settings.damping), progress)
    if images:
        require_same(file, images[0], progress, in_rank_order(model, ranking))
        with scratch_folder() as folder:
            merging, _ = choose_schedule(model, images[0], folder, progress)
    if len(images) > 1:
        measure = partial(measure_table, images=images[1], progress=progress)
    elif request.fidelity:
        progress.note("no images to measure fidelity on, so devices need some to choose among all levers")
    return write_elastic(
        request.out,
        model=model.model,
        anatomy=model.anatomy,
        preprocessing=model.preprocessing,
        labels=model.labels,
        wiring=model.wiring,
        ranking=ranking,
        weights=reordered(model, ranking),
        factors=factors if request.correct else None,
        merging=merging,
        measure=measure,
    )


def _split(request: PackRequest) -> list[Source]:
    """Return the images to calibrate on and, if there are enough for it, others to measure fidelity on."""
    split = partial(calibration_and_held_out, data_of(request), request.settings.images, request.settings.seed)
    if request.fidelity:
        calibration, others = split(MOST_MEASURED, LEAST_MEASURED)
        if others.count >= LEAST_IMAGES:
            return [calibration, others.subset(evenly(range(others.count), MOST_MEASURED))]
    return [split(0)[0]]


def _check(request: PackRequest) -> Ranking | None:
    """Refuse what can be refused before any work; return the ranking that was given, if one was."""
    refuse_own_folder(request.out)
    settle(request.out)
    if request.ranking is None and not is_onnx(request.model):
        refuse_foreign_checkpoint(request.out)
    check_writable(request.out, own_files(request.out))
    return None if request.ranking is None else Ranking.load(request.ranking)
