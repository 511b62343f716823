"""`snapvit rank` and `snapvit import-scores`: from a model and images, or from released scores, to a ranking file.

Importing this is light; torch is loaded when the work begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..allocation.recipe import Rounds, Settings
from ..calibration.images import Images, calibration_and_held_out, read_images
from ..errors import FileFormatError, SnapvitError, UsageError, needs
from ..family.folder import parts_beside
from ..model.ranking import KIND, Ranking
from ..progress import Progress, Silent
from ..storage.checksummed import is_checksummed
from ..storage.json import as_builtins
from ..storage.places import check_output
from .inputs import (
    BUNDLED_MODEL,
    checkpoint_of,
    data_of,
    is_onnx,
    load_model_of,
    refuse_foreign_checkpoint,
    resumable,
    settings_for,
)
from .onnx_model import OnnxOptions, load_onnx, refuse_without_onnx, require_same, warn_of_preprocessing
from .recovering_rounds import RecoverInRounds

ADVICE = "Choose another --out, or give --force to replace it"
DECIDES = (
    "criterion",
    "protection",
    "shots",
    "step",
    "damping",
    "search_settings",
    "rounds_settings",
)  # in provenance, where they have a part
CKA = "snapvit-cka"  # the kind of a file with a covariance
WHERE = ("engine", "device", "autocast", "source")  # decide nothing: where candidates were evaluated and images lay


@dataclass(frozen=True)
class RankRequest:
    """A model to rank, images to rank it on, and the file to write."""

    model: str = BUNDLED_MODEL
    data: str | Sequence[str] | None = None
    out: Path = Path("ranking.safetensors")
    checkpoint: Path | None = None
    settings: Settings = field(default_factory=Settings)
    device: str = "cpu"
    engine: str | None = None
    autocast: str | None = None
    rounds: Sequence[float] = ()  # FLOPs after each: prune a little, refit, rank what is kept again
    most_moved: float | None = None  # rounds end beyond this output divergence; None: the default of `Rounds`
    force: bool = False  # write over a file of something else, or a ranking of another model or other settings
    onnx: OnnxOptions = field(default_factory=OnnxOptions)  # what an ONNX file does not say itself
    model_arguments: Mapping[str, Any] | None = None  # for timm, beside a timm name
    recover: RecoverInRounds | None = None  # rounds train what they cut; None: they refit it
    cka_file: Path | None = None  # keeps the first covariance; read if it is there


def rank_model(request: RankRequest, progress: Progress) -> Ranking | None:
    """Rank a model and write the file; None in a process that only helps another."""
    rounds = _rounds(request)
    _check_place(request.out, [request.checkpoint, Path(request.model)], request.force)
    _check_cka_file(request)
    if is_onnx(request.model):
        return _rank_onnx(request, progress)
    refuse_without_onnx(request.onnx, request.model)
    refuse_foreign_checkpoint(request.out)
    if not request.settings.evaluations and (request.engine or request.autocast):
        idle = "--engine" if request.engine else "--autocast"
        raise UsageError(f"{idle} is for candidates of a search. Give --evaluations 100 too, or leave it out")
    with needs("ranking", extra="prune"):
        import torch  # noqa: F401
    from ..prune.models.load import check_device
    from ..prune.rank.distributed import join
    from ..prune.rank.iterative import made_by, rank_in_rounds
    from ..prune.rank.provenance import needs_images
    from ..prune.rank.rank import rank
    from ..prune.rank.search.covariance import CkaInputs
    from ..prune.rank.search.engine import check_autocast, check_engine
    from .recovering_rounds import refuse_early

    if request.recover is not None:
        refuse_early(request.out, request.recover)
    settings = request.settings
    check_device(request.device)
    engine, autocast = check_engine(request.engine), check_autocast(request.autocast)
    with join(request.device) as processes:
        if rounds is not None and not processes.is_first:
            return None  # each round needs the one before: one process does them all
        speaking = progress if processes.is_first else Silent()
        if rounds is not None and request.recover is not None:
            return _rank_and_recover(request, rounds, request.recover, str(processes.device), speaking)
        speaking.phase("finding images")
        source = None
        if rounds is not None or needs_images(settings):
            source, _ = calibration_and_held_out(data_of(request), settings.images, settings.seed, most_held_out=0)
        elif request.data is not None:
            raise UsageError(f"--criterion {settings.criterion} reads no images as it is asked for. Leave --data out")
        model = load_model_of(request, speaking)
        settings = settings_for(settings, model, speaking)
        none = Images(np.zeros((0, *model.anatomy.image, 3), np.uint8), None, model.preprocessing, "none")
        images = none if source is None else read_images((source,), model.preprocessing, speaking)[0]
        of_cka = _images_of_cka(request, images, speaking)
        checkpoint = checkpoint_of(request.out)
        if request.out.is_file() and not request.force:
            _refuse_other(request.out, made_by(model, images, settings, rounds, of_cka))
        with resumable(checkpoint):
            if rounds is not None:
                ranking = rank_in_rounds(
                    model,
                    images,
                    rounds,
                    settings,
                    checkpoint=checkpoint,
                    progress=speaking,
                    device=str(processes.device),
                )
            else:
                ranking = rank(
                    model,
                    images,
                    settings,
                    checkpoint=checkpoint,
                    progress=speaking,
                    engine=engine,
                    autocast=autocast,
                    processes=processes,
                    cka=CkaInputs(of_cka, request.cka_file, request.force),
                )
        if not processes.is_first:
            return None
        ranking.save(request.out)
        checkpoint.unlink(missing_ok=True)
        return ranking


def _rank_and_recover(
    request: RankRequest, rounds: Rounds, asked: RecoverInRounds, device: str, progress: Progress
) -> Ranking:
    """Rank in rounds that train what they cut; write the ranking, and the trained model beside it."""
    from .recovering_rounds import prepare

    model = load_model_of(request, progress)
    settings = settings_for(request.settings, model, progress)
    prepared = prepare(model, data_of(request), rounds, settings, asked, progress)
    if request.out.is_file() and not request.force:
        _refuse_other(request.out, prepared.made)
    ranking = prepared.run(request.out, device, progress)
    ranking.save(request.out)
    checkpoint_of(request.out).unlink(missing_ok=True)
    return ranking


def _images_of_cka(request: RankRequest, images: Images, progress: Progress) -> Images:
    """Return the images of the first covariance: those that calibrate, or as many more by the same seed as asked."""
    wanted = request.settings.cka_images
    if wanted is None or wanted <= len(images):
        return images
    source, _ = calibration_and_held_out(data_of(request), wanted, request.settings.seed, most_held_out=0)
    if source.count < wanted:
        progress.note(f"{source.count} images are there for the covariance, not {wanted}")
    return read_images((source,), images.preprocessing, progress)[0]


def _check_cka_file(request: RankRequest) -> None:
    """Refuse, before any work, a file for the covariance that is something else, or that nothing would use."""
    if request.cka_file is None:
        return
    if not request.settings.cka:
        raise UsageError("--cka-file keeps the covariance of --cka. Give --cka too, or leave it out")
    kind, inputs = "a CKA covariance", [request.checkpoint, Path(request.model), request.out]
    check_output(
        request.cka_file, kind, lambda path: is_checksummed(path, CKA), inputs, request.force, option="--cka-file"
    )


def _rank_onnx(request: RankRequest, progress: Progress) -> Ranking:
    """Rank an ONNX file of another tool without torch, and write the file."""
    from ..onnx_rank.rank import check_settings, provenance_of, rank

    given: dict[str, object] = {
        "--checkpoint": request.checkpoint,
        "--engine": request.engine,
        "--autocast": request.autocast,
    }
    given |= {
        "--model-arg, --pool or --image-size": request.model_arguments or None,
        "--rounds": request.rounds or None,
        "--recover": request.recover,
    }
    given |= {"--device": None if request.device == "cpu" else request.device}
    if unused := [option for option, value in given.items() if value is not None]:
        raise UsageError(f"{unused[0]} is for models in torch, and an ONNX file is ranked without it. Leave it out")
    settings = request.settings
    check_settings(settings)
    progress.phase("finding images")
    source, _ = calibration_and_held_out(data_of(request), settings.images, settings.seed, most_held_out=0)
    file = load_onnx(request.model, request.onnx, progress)
    model = file.blueprint
    (images,) = read_images((source,), model.preprocessing, progress)
    if request.out.is_file() and not request.force:
        _refuse_other(request.out, provenance_of(model, images, settings))
    require_same(file, images, progress)
    warn_of_preprocessing(file, images, progress)
    ranking, _ = rank(model, images, settings, progress)
    ranking.save(request.out)
    return ranking


def _rounds(request: RankRequest) -> Rounds | None:
    """Return the requested rounds, if any; refuse options that do not belong to rounds, or only to them."""
    if not request.rounds:
        if request.most_moved is not None:
            raise UsageError("--most-moved ends a ranking in rounds. Give --rounds 0.85,0.7,0.55 too, or leave it out")
        if request.recover is not None:
            raise UsageError("--recover trains between rounds. Give --rounds 0.85,0.7,0.55 too, or leave it out")
        return None
    if request.settings.evaluations:
        raise UsageError("rounds go without a search. Give --rounds with --evaluations 0, or leave --rounds out")
    if request.engine or request.autocast:
        raise UsageError("--engine and --autocast are of a search, and rounds have none. Leave them out")
    return Rounds(tuple(request.rounds), request.most_moved)


def import_ranking(file: Path, out: Path, model: str | None = None, force: bool = False) -> Ranking:
    """Turn a score file of the released SnapViT code into a ranking; `model`: check that it is of this one."""
    _check_place(out, [file], force)
    with needs("importing scores", extra="prune"):
        from ..prune.import_scores import import_scores
        from ..prune.models.timm_modules import anatomy_of

    ranking = import_scores(file, anatomy_of(model) if model else None)
    before = None if force else _known(out)
    if before is not None and (before.order_sha256, before.model) != (ranking.order_sha256, ranking.model):
        raise SnapvitError(f"{out}: is another ranking, of {before.model}. {ADVICE}")
    ranking.save(out)
    return ranking


def _check_place(out: Path, inputs: Sequence[Path | None], force: bool) -> None:
    """Refuse, before any work, to write over what is no ranking, or is a part of a family or an Elastic folder."""
    check_output(out, "a ranking", lambda path: is_checksummed(path, KIND), [*inputs, *parts_beside(out)], force)


def _refuse_other(out: Path, made: Mapping[str, Any]) -> None:
    """Refuse to replace a ranking of another model, of other images or settings: it may have taken long to make."""
    before = _known(out)
    if before is None:
        return
    names = dict.fromkeys((*made, *DECIDES))
    if other := [name for name in names if _deciding(before.provenance.get(name)) != _deciding(made.get(name))]:
        raise SnapvitError(f"{out}: is a ranking of another model, images or settings ({other[0]} differs). {ADVICE}")


def _known(path: Path) -> Ranking | None:
    """Return the ranking that is there; None if there is none, or a damaged one."""
    try:
        return Ranking.load(path) if path.is_file() else None
    except FileFormatError:
        return None


def _deciding(value: Any) -> Any:
    """Return settings without those that do not decide what is ranked."""
    plain = as_builtins(value)
    return {name: each for name, each in plain.items() if name not in WHERE} if isinstance(plain, dict) else plain
