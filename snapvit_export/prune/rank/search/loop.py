"""The loop of a search: evaluate the start, then generations of candidates; keep the best ever, save after each.

Candidates of a generation are spread over the processes; each is evaluated whole in one of them, so the result does
not depend on their number. A last generation that the limit of evaluations cuts short is evaluated, but the optimiser
does not learn from it.

With racing, a candidate is first run on a quarter and then on half of the images, against the best so far on the same
images. If it is worse there by more than 3 standard errors of the paired difference, the rest is skipped; it is then
ranked by the loss that the difference predicts. Each such test drops a candidate that would have won with a chance of
about 0.1 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ....errors import SnapvitError
from ....model.timing import Timer, untimed
from ...stats.single_thread import single_thread
from ..checkpoint import Checkpoint, SavedState
from ..distributed import Processes
from .candidate_runner import CandidateRunner
from .fitness import PerImage
from .optimiser import Optimiser, Vector

RACE_AT = (0.25, 0.5)  # shares of the images after which a candidate may be dropped
RACE_ERRORS = 3.0  # standard errors behind the best that drop it


class Objective(Protocol):
    """The loss that a search minimises: for every size that the factors' candidate is cut to, and every image."""

    runner: CandidateRunner

    @property
    def sizes(self) -> int: ...

    def per_image(self, factors: Vector, chunks: range | None = None) -> PerImage: ...  # (sizes, images)


@dataclass
class SearchState:
    """The state of a search after some generations; all of it goes into the checkpoint."""

    best_loss: float
    best_factors: Vector
    best_per_image: PerImage  # (sizes, images)
    start_loss: float
    evaluations: int = 0  # the start is not counted
    images_seen: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class CandidateResult:
    """One candidate's loss; `per_image` is absent if it was dropped early."""

    loss: float
    images: int
    per_image: PerImage | None

    def packed(self) -> list[Any]:
        """Return plain values, to be sent to another process."""
        return [self.loss, self.images, None if self.per_image is None else self.per_image.tobytes()]

    @staticmethod
    def unpacked(packed: list[Any], sizes: int) -> CandidateResult:
        """Undo `packed`."""
        loss, images, data = packed
        return CandidateResult(loss, images, None if data is None else np.frombuffer(data).reshape(sizes, images))


def search(
    fitness: Objective,
    optimiser: Optimiser,
    evaluations: int,
    racing: bool = False,
    processes: Processes = Processes(),
    checkpoint: Checkpoint | None = None,
    saved: SavedState | None = None,
    extra: dict[str, np.ndarray] | None = None,
    notes: dict[str, Any] | None = None,
    on_generation: Callable[[SearchState], None] = lambda progressed: None,
    timer: Timer = untimed,
) -> SearchState:
    """Minimise the fitness over the factors; `extra` arrays and `notes` are carried along in the checkpoint."""
    if saved is not None and saved.phase == "search":
        now = _restore(saved, optimiser)
    else:
        now = _first(fitness, optimiser)
    on_generation(now)
    while now.evaluations < evaluations:
        with timer("sampling"), single_thread():
            points = optimiser.ask()  # (n, D), the same in every process
        wanted = points[: evaluations - now.evaluations]
        mine = [_evaluate(fitness, optimiser.factors(x), now, racing).packed() for x in processes.share(list(wanted))]
        results = [CandidateResult.unpacked(packed, fitness.sizes) for packed in processes.gather(mine)]
        _update(now, results, wanted, optimiser)
        if len(wanted) == len(points):
            with timer("sampling"), single_thread():
                optimiser.tell(points, np.array([result.loss for result in results]))
        if checkpoint is not None and processes.is_first:
            _save(checkpoint, now, optimiser, extra or {}, notes or {})
        on_generation(now)
    return now


def _first(fitness: Objective, optimiser: Optimiser) -> SearchState:
    """Return the state after evaluating the start itself: a search can never end worse than no search."""
    factors = optimiser.factors(optimiser.start)
    per_image = fitness.per_image(factors)
    loss = float(per_image.mean())
    if not np.isfinite(loss):
        raise SnapvitError("the fitness of the start is not a finite number. Are the weights of this model whole?")
    return SearchState(loss, factors, per_image, start_loss=loss, images_seen=fitness.runner.count)


def _evaluate(fitness: Objective, factors: Vector, now: SearchState, racing: bool) -> CandidateResult:
    stops = [round(share * fitness.runner.chunks) for share in RACE_AT] if racing else []
    begun, parts = 0, []
    for stop in [*stops, fitness.runner.chunks]:
        if stop <= begun:
            continue
        parts.append(fitness.per_image(factors, range(begun, stop)))
        begun = stop
        if begun < fitness.runner.chunks and (behind := _hopeless(np.concatenate(parts, axis=1), now)):
            return CandidateResult(now.best_loss + behind, sum(part.shape[1] for part in parts), None)
    per_image = np.concatenate(parts, axis=1)  # (sizes, images)
    return CandidateResult(float(per_image.mean()), per_image.shape[1], per_image)


def _hopeless(partial: PerImage, now: SearchState) -> float | None:
    """Return how far a candidate is behind the best on the images run so far, if beyond doubt; otherwise None."""
    seen = partial.shape[1]
    behind = (partial - now.best_per_image[:, :seen]).mean(0)  # (seen,)
    error = behind.std(ddof=1) / np.sqrt(seen) if seen > 1 else np.inf
    return float(behind.mean()) if behind.mean() > RACE_ERRORS * error else None


def _update(now: SearchState, results: list[CandidateResult], points: np.ndarray, optimiser: Optimiser) -> None:
    for result, point in zip(results, points):
        now.evaluations += 1
        now.images_seen += result.images
        if result.per_image is not None and result.loss < now.best_loss:
            now.best_loss, now.best_factors = result.loss, optimiser.factors(point)
            now.best_per_image = result.per_image
    losses = [result.loss for result in results]
    now.history.append(
        {"evaluations": now.evaluations, "best": now.best_loss, "mean": float(np.mean(losses)), "least": min(losses)}
    )


def _save(
    checkpoint: Checkpoint, now: SearchState, optimiser: Optimiser, extra: dict[str, np.ndarray], notes: dict[str, Any]
) -> None:
    state = optimiser.state()
    arrays = {f"optimiser.{name}": value for name, value in state.items() if isinstance(value, np.ndarray)}
    arrays |= {"best_factors": now.best_factors, "best_per_image": now.best_per_image, **extra}
    rest: dict[str, Any] = {name: value for name, value in state.items() if not isinstance(value, np.ndarray)}
    counts = {
        "best_loss": now.best_loss,
        "start_loss": now.start_loss,
        "evaluations": now.evaluations,
        "images_seen": now.images_seen,
    }
    checkpoint.save("search", arrays, {"optimiser": rest, "history": now.history, **counts, **notes})


def _restore(saved: SavedState, optimiser: Optimiser) -> SearchState:
    state = {name.removeprefix("optimiser."): a for name, a in saved.arrays.items() if name.startswith("optimiser.")}
    optimiser.restore({**state, **saved.rest["optimiser"]})
    return SearchState(
        saved.rest["best_loss"],
        saved.arrays["best_factors"],
        saved.arrays["best_per_image"],
        saved.rest["start_loss"],
        saved.rest["evaluations"],
        saved.rest["images_seen"],
        saved.rest["history"],
    )
