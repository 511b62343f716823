"""The training loop: steps of AdamW on a moving average that is looked at on held-out images, and the best is kept.

The start is the first candidate, so a recovery never ends with something worse on these images than it began with. It
ends early when the held-out fidelity has not risen for some looks, or when the loss is no number.

A step is the mean gradient over `batch` samples, in parts of `micro`. Processes take these parts in turns and add up
their gradients, on a CPU in float64: so one, two and four of them take the same steps but for the last bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import SnapvitError
from ...family.fidelity import Comparison, Fidelity, NotFinite
from ...progress import Progress, Silent, clock
from ..rank.checkpoint import Checkpoint, SavedState
from ..rank.distributed import Processes
from .augment import Pictures
from .checkpoint import TrainingState, restore, save
from .parameters import copies, put
from .schedule import make_optimiser, set_step_size, step_size
from .settings import TrainingSettings
from .student import Learner

SAVE_SECONDS = 120.0  # between checkpoints, beside those at every look
LOOKING = 0.2  # of the minutes that were asked for is spent on looks at most
FEWEST_LOOKS = 3
EARLY = (1 / 8, 1 / 4, 1 / 2)  # of the way to the first look: with few images the best moment is near the start
SHOWN_SECONDS = 10.0  # between the lines that tell how it goes
SHOWN_LOSS = 0.9  # of the loss that is shown is the mean of earlier steps'
FIRST_SCALE = 2.0**14  # of the loss in float16
GROWS_AFTER = 500  # steps without an overflow


@dataclass(frozen=True)
class Outcome:
    """What a training has reached; the learner has the best weights."""

    before: tuple[Fidelity, ...]  # of every held-out model, with the weights that it began with
    after: tuple[Fidelity, ...]
    steps: int  # that were taken
    best_step: int  # after which the weights were the best; 0: those that it began with
    history: tuple[dict[str, Any], ...]
    seconds: float
    stopped: str | None = None  # why it ended before its last step

    @property
    def is_better(self) -> bool:
        """False if the weights are those that it began with."""
        return self.best_step > 0


def steps_within(
    minutes: float, learner: Learner, pictures: Pictures, settings: TrainingSettings, processes: Processes = Processes()
) -> TrainingSettings:
    """Return the settings with as many steps as this machine takes in so many minutes; nothing is learnt yet.

    They are fixed before the first step, so a run is repeated by its steps and its seed. Looks at the held-out images
    take a share of the time, and are fewer where they would take more.
    """

    def measured() -> tuple[int, int]:
        views = pictures.views(range(settings.micro), learner.sizes)
        for _ in range(2):  # the first is slower
            part = _seconds(lambda: learner.backward(views, 0, 1.0))
        for tensor in learner.parameters.values():
            tensor.grad = None
        look, whole = _seconds(learner.compared), 60 * minutes
        looks = max(FEWEST_LOOKS, min(settings.looks, int(LOOKING * whole / look) - len(EARLY)))
        step = part * math.ceil(len(_parts(settings, 0)) / processes.count)
        return max(1, int((whole - (looks + len(EARLY) + 2) * look) / step)), looks

    steps, looks = processes.from_first(measured)
    return replace(settings, steps=steps, looks=looks)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def train(
    learner: Learner,
    pictures: Pictures,
    settings: TrainingSettings,
    *,
    name: str = "the model",
    checkpoint: Checkpoint | None = None,
    processes: Processes = Processes(),
    progress: Progress | None = None,
) -> Outcome:
    """Train a learner and leave it with the best weights that were seen on the held-out images.

    With a `checkpoint`, a run that was begun there goes on.
    """
    run = _Run(learner, pictures, settings, checkpoint, processes, progress or Silent(), name)
    return run.whole()


class _Run:
    """One training: what it changes, and what it shows."""

    def __init__(
        self,
        learner: Learner,
        pictures: Pictures,
        settings: TrainingSettings,
        checkpoint: Checkpoint | None,
        processes: Processes,
        progress: Progress,
        name: str,
    ) -> None:
        self.learner, self.pictures, self.settings, self.name = learner, pictures, settings, name
        self.checkpoint, self.processes, self.progress = checkpoint, processes, progress
        self.parameters: Mapping[str, Tensor] = learner.parameters
        self.optimiser = make_optimiser(self.parameters, settings)
        self.gradient = _Gradient(self.parameters, processes)
        self.state = TrainingState()
        self.start = copies(self.parameters)
        self.before = self._look()
        self._saved = self._began = time.monotonic()
        self._shown, self._described, self.looks = "", 0.0, look_steps(settings)

    def whole(self) -> Outcome:
        """Take all steps, or go on with those that are left."""
        self._resume()
        settings, stopped = self.settings, None
        self.progress.phase(f"recovering {self.name}", settings.steps)
        self.progress.advance(self.state.step)
        while self.state.step < settings.steps:
            if (stopped := self._ended()) is not None:
                break
            loss = self._step()
            self.state.step += 1
            if not math.isfinite(loss):
                stopped = f"the loss of step {self.state.step} is no number"
                break
            self._count(loss)
            if self.state.step in self.looks:
                self._compare()
            self._show()
            self._save(due=self.state.step in self.looks)
            self.progress.advance()
        if stopped is not None:
            self.progress.note(f"{self.name}: stopped after step {self.state.step}: {stopped}; the best is kept")
        return self._outcome(stopped)

    def _step(self) -> float:
        """Take one step; return the mean loss of its samples."""
        settings, step = self.settings, self.state.step
        parts = _parts(settings, step)
        scale = self._scale()
        loss = 0.0
        for part in self.processes.share(parts):
            views = self.pictures.views(part, self.learner.sizes)
            share = len(part) / settings.batch
            loss += share * self.learner.backward(views, step, share * scale)
            self.gradient.take()
        loss = self.gradient.put(loss, scale)
        if not self._rescaled():
            return loss if math.isfinite(loss) else float("nan")
        if math.isfinite(loss):
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), settings.most_gradient)
            set_step_size(self.optimiser, step_size(settings, step))
            self.optimiser.step()
            self._average()
        self.optimiser.zero_grad(set_to_none=True)
        return loss

    def _scale(self) -> float:
        """Return what the loss is multiplied with, so that gradients do not vanish in float16."""
        if self.settings.autocast != "fp16":
            return 1.0
        return self.state.scaler.setdefault("scale", FIRST_SCALE)

    def _rescaled(self) -> bool:
        """Adapt the scale of float16; False if the gradient overflowed and the step is left out."""
        if self.settings.autocast != "fp16":
            return True
        scaler = self.state.scaler
        finite = all(bool(torch.isfinite(t.grad).all()) for t in self.parameters.values() if t.grad is not None)
        good = scaler.get("good", 0.0) + 1 if finite else 0.0
        grows = good >= GROWS_AFTER
        scaler["scale"] *= 2.0 if grows else 1.0 if finite else 0.5
        scaler["good"] = 0.0 if grows else good
        if not finite:
            scaler["left_out"] = scaler.get("left_out", 0.0) + 1
            self.optimiser.zero_grad(set_to_none=True)
        return finite

    @torch.no_grad()
    def _average(self) -> None:
        """Move the average of the weights towards those of this step; at first they are nearly all of it."""
        share = self.settings.average
        if not share:
            return
        if not self.state.average:
            self.state.average = copies(self.start)
        taken = self.state.step + 1
        stays = min(math.exp(-1 / max(1.0, share * self.settings.steps)), taken / (taken + 9))
        for name, tensor in self.parameters.items():
            self.state.average[name].lerp_(tensor, 1 - stays)

    def _kept(self) -> Mapping[str, Tensor]:
        """Return the weights that would be kept now."""
        return self.state.average or self.parameters

    def _compare(self) -> None:
        """Look at the held-out images with the weights that would be kept now, and keep the best."""
        now, kept = copies(self.parameters), copies(self._kept())
        put(self.parameters, kept)
        found = self._look()
        put(self.parameters, now)
        divergence, agreement = _means(found)
        row = {"step": self.state.step, "loss": self.state.loss, "divergence": divergence, "agreement": agreement}
        self.state.history.append(row)
        if divergence < min(self.state.best_divergence, _means(self.before)[0]):
            self.state.best, self.state.best_step, self.state.best_divergence = kept, self.state.step, divergence
        self._shown = f", held-out divergence {divergence:.4f}, same answer {100 * agreement:.1f} %"

    def _look(self) -> tuple[Fidelity, ...] | None:
        """Compare with the teacher; None where outputs are no numbers. One process looks for all."""

        def look() -> list[Any] | None:
            with suppress(NotFinite):
                return [_plain(comparison) for comparison in self.learner.compared()]
            return None

        found = self.processes.from_first(look)
        return None if found is None else tuple(Fidelity(**row) for row in found)

    def _ended(self) -> str | None:
        """Return why no further step is worth it: too many looks without a better one."""
        history = self.state.history
        since = [row for row in history if row["step"] > self.state.best_step]
        if len(since) < self.settings.patience:
            return None
        return f"the held-out fidelity has not risen for {len(since)} looks"

    def _count(self, loss: float) -> None:
        state = self.state
        state.loss = loss if state.loss is None else SHOWN_LOSS * state.loss + (1 - SHOWN_LOSS) * loss

    def _show(self) -> None:
        state = self.state
        now = time.monotonic()
        if now - self._described < SHOWN_SECONDS and state.step not in self.looks:
            return
        self._described = now
        passed = state.seconds + now - self._began
        left = passed / state.step * (self.settings.steps - state.step)
        self.progress.describe(f"recovering {self.name}: loss {state.loss:.4f}{self._shown}, {clock(left)} left")

    def _save(self, due: bool) -> None:
        now = time.monotonic()
        if self.checkpoint is None or not self.processes.is_first or not (due or now - self._saved > SAVE_SECONDS):
            return
        before = self.state.seconds
        self.state.seconds = before + now - self._began
        save(self.checkpoint, self.state, self.parameters, self.optimiser, (self.settings.steps, self.settings.looks))
        self.state.seconds = before
        self._saved = now

    def _resume(self) -> None:
        """Go on with the state that a checkpoint has, the same in all processes."""
        if self.checkpoint is None:
            return
        checkpoint = self.checkpoint
        saved = SavedState.unpacked(self.processes.from_first(lambda: SavedState.packed(checkpoint.load())))
        if saved is not None:
            self.state = restore(saved, str(checkpoint.path), self.parameters, self.optimiser)
            self.progress.note(f"{self.name}: going on after step {self.state.step} of {self.settings.steps}")

    def _outcome(self, stopped: str | None) -> Outcome:
        put(self.parameters, self.state.best or self.start)
        after = self._look() if self.state.best else self.before
        if self.before is None and after is None:
            raise SnapvitError(f"{self.name}: its outputs are not finite numbers, before and after. Check the model")
        return Outcome(
            before=self.before or (),
            after=after or (),
            steps=self.state.step,
            best_step=self.state.best_step,
            history=tuple(self.state.history),
            seconds=self.state.seconds + time.monotonic() - self._began,
            stopped=stopped,
        )


class _Gradient:
    """The gradient of a step, added up over its parts and over processes: one long vector, and the loss at its end."""

    def __init__(self, parameters: Mapping[str, Tensor], processes: Processes) -> None:
        self.tensors, self.processes = list(parameters.values()), processes
        first = self.tensors[0]
        kind = torch.float64 if first.device.type == "cpu" else torch.float32
        self.total = torch.zeros(sum(t.numel() for t in self.tensors) + 1, dtype=kind, device=first.device)

    def take(self) -> None:
        """Add the gradient of a part, and forget it."""
        at = 0
        for tensor in self.tensors:
            if tensor.grad is not None:
                self.total[at : at + tensor.numel()] += tensor.grad.flatten()
                tensor.grad = None
            at += tensor.numel()

    def put(self, loss: float, scale: float) -> float:
        """Give every parameter the gradient of all processes; return their loss."""
        self.total[-1] = loss
        self.processes.add_up(self.total)
        at = 0
        for tensor in self.tensors:
            piece = self.total[at : at + tensor.numel()].reshape(tensor.shape) / scale
            tensor.grad = piece.to(tensor.dtype)
            at += tensor.numel()
        found = float(self.total[-1])
        self.total.zero_()
        return found


def look_steps(settings: TrainingSettings) -> set[int]:
    """Return the steps after which the held-out images are looked at: evenly, after the last, and some early ones.

    >>> sorted(look_steps(TrainingSettings(steps=120, looks=4)))
    [4, 8, 15, 30, 60, 90, 120]
    """
    looks = max(1, min(settings.looks, settings.steps))
    every = settings.steps / looks
    early = {max(1, round(share * every)) for share in EARLY}
    return early | {round((n + 1) * every) for n in range(looks)}


def _parts(settings: TrainingSettings, step: int) -> list[range]:
    """Return the numbers of a step's samples, in parts that pass through the model at once."""
    first, end = step * settings.batch, (step + 1) * settings.batch
    return [range(start, min(start + settings.micro, end)) for start in range(first, end, settings.micro)]


def _means(found: Sequence[Fidelity] | None) -> tuple[float, float]:
    """Return divergence and agreement, the means over all models; infinite and none where outputs are no numbers."""
    if not found:
        return float("inf"), 0.0
    return (
        sum(each.divergence for each in found) / len(found),
        sum(each.agreement for each in found) / len(found),
    )


def _plain(comparison: Comparison) -> dict[str, Any]:
    """Return a fidelity as plain values, as they go from one process to others."""
    fidelity = comparison.fidelity()
    return {name: getattr(fidelity, name) for name in Fidelity.__struct_fields__}


def checkpoint_at(
    path: Path, settings: TrainingSettings, made_from: Mapping[str, Any], minutes: float | None
) -> Checkpoint:
    """Return the checkpoint of a run that these settings, this model and these images decide.

    `minutes`: from which the steps came; a run that goes on keeps those that it was begun with (`begun_steps`).
    """
    decided = {**vars(settings), "steps": settings.steps if minutes is None else f"of {minutes:g} minutes"}
    return Checkpoint(path, {"recover": decided, **made_from})


def begun_steps(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return the steps and the looks of the run that a checkpoint is of; None if there is none."""
    saved = checkpoint.load()
    return None if saved is None else (int(saved.rest["steps"]), int(saved.rest["looks"]))
