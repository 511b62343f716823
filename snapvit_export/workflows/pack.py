"""`snapvit pack`: from a model, its ranking and images to an Elastic folder.

Importing this is light; torch is loaded when the work begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..allocation.recipe import DEFAULT, Settings, make_settings
from ..calibration.images import calibration_and_held_out, read_images
from ..correction.moments import Damping
from ..elastic.format import Description, own_files
from ..errors import needs
from ..model.ranking import Ranking
from ..progress import Progress, Silent
from ..storage.atomic import check_writable
from .inputs import BUNDLED_MODEL, checkpoint_of, data_of, refuse_own_folder


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

    def __post_init__(self) -> None:
        if not self.correct:  # then candidates of a search are not corrected either
            object.__setattr__(self, "settings", replace(self.settings, correction=None))


def pack_model(request: PackRequest, progress: Progress | None = None) -> Description:
    """Rank if no ranking is given, observe, factor, choose a schedule of merging, and write the folder."""
    progress = progress or Silent()
    settings = request.settings
    ranking = _check(request)
    with needs("packing", extra="prune"):
        import torch  # noqa: F401
    from ..prune.correct.elastic import make_factors
    from ..prune.models.load import check_same_weights, load_model
    from ..prune.pack import pack
    from ..prune.rank.rank import rank_and_factor
    from ..prune.stats.observe import observe
    from ..prune.stats.schedules import choose_schedule

    needs_images = ranking is None or request.correct
    split = calibration_and_held_out(data_of(request), settings.images, settings.seed, 0)[:1] if needs_images else ()
    progress.phase(f"loading {request.model}")
    model = load_model(request.model, request.checkpoint)
    if ranking is not None:
        check_same_weights(ranking, model, f"{request.ranking}: ")
    images = read_images(split, model.preprocessing, progress)
    factors = None
    if ranking is None:
        ranking, factors = rank_and_factor(
            model, images[0], settings, checkpoint=checkpoint_of(request.out), progress=progress
        )
    if request.correct and factors is None:
        factors = make_factors(model, ranking, observe(model, images[0], progress), Damping.parse(settings.damping))
    merging = choose_schedule(model, images[0], progress)[0] if images else None
    if merging is None:
        progress.note("no images, so devices merge tokens by the default schedule")
    packed = pack(model, ranking, request.out, factors if request.correct else None, progress, merging)
    if request.ranking is None:
        checkpoint_of(request.out).unlink(missing_ok=True)
    return packed


def _check(request: PackRequest) -> Ranking | None:
    """Refuse what can be refused before any work; return the ranking that was given, if one was."""
    refuse_own_folder(request.out)
    check_writable(request.out, own_files(request.out))
    return None if request.ranking is None else Ranking.load(request.ranking)
