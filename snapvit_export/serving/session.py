"""A family that answers before a deadline: each request goes to the best variant that will make it. Light: no torch.

    with ElasticSession("snapvit-family", deadline="10ms") as session:
        answer = session.run(batch)
        answer.output, answer.variant, answer.latency_ms, answer.fidelity

One request runs at a time, on all threads of the target, in the order in which they came: any number of threads may
call. `controller` decides, `variants` has the files, `turns` the order. All variants are opened and timed at the start,
unless `lazy`: then a thread beside opens what the controller wishes for, and what is open answers meanwhile.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..budget import Budget
from ..errors import SnapvitError, UsageError
from ..family.loaded import Prediction, decoded, likeliest, prepared
from ..family.manifest import Manifest
from ..target import Runtime
from .answer import Answer, Stats, Tally
from .controller import Controller, Decision, Hit, Late, Runnable, Settings
from .turns import Overloaded, Request, Turns
from .variants import NoVariant, Size, Variants

if TYPE_CHECKING:
    from ..family.loaded import Image

Array = npt.NDArray[Any]
Inputs = Mapping[Size, Array]
MOST_WAITING = 64
UNUSED_S = 10.0  # after which the pages of a weight file are given back
TIDY_EVERY = 256  # requests


class Refused(SnapvitError):
    """No variant would be in time, and the session was asked to refuse what is late."""


class ElasticSession:
    """All variants of a family, of which each request gets the most faithful that will be in time.

    >>> with ElasticSession("snapvit-family", deadline="1000ms") as session: answer = session.run(batch)
    >>> answer.variant, answer.met
    ('dense', True)
    """

    def __init__(
        self,
        family: Path | str,
        deadline: str | float | None = None,
        *,
        hit: float = 0.99,
        late: Late = "run",
        max_batch: int = 1,
        most_waiting: int = MOST_WAITING,
        lazy: bool = False,
        keep_open: int | None = None,
        shared: bool = True,
        runtime: Runtime | None = None,
        threads: int | None = None,
        only: Sequence[str] | None = None,
        seconds: float = 1.0,
    ) -> None:
        """`deadline` of a request that has none of its own, from its arrival: `10ms`, `60%` of the dense model, ms.

        `hit`: the share of requests to answer in time; `late`: what to do with those that nothing can: run or refuse.
        `max_batch`: run so many images of waiting requests together. `keep_open`: so many variants at most, which
        makes it `lazy`. `shared`: variants share their weights, in ONNX Runtime; False: each packs its own, which is
        faster and takes the memory of all. `only`: these variants. `seconds`: to time the variants at the start.
        """
        self._settings = _settings(hit, late)
        if max_batch < 1 or most_waiting < 1 or (keep_open is not None and keep_open < 2) or not seconds >= 0:
            raise UsageError("max_batch and most_waiting are at least 1, keep_open at least 2, seconds not negative")
        self._variants = Variants.of(family, runtime, threads, shared, only)
        self._max_batch = self._variants.manifest.input.batch or max_batch
        self._keep_open, self._lazy = keep_open, lazy or keep_open is not None
        self._turns, self._tally, self._count = Turns(most_waiting), Tally(), 0
        self._used: dict[str, float] = {}  # when each variant answered last
        self._opened: dict[str, float] = {}  # when the other thread opened it
        self._in_memory: list[str] = []  # the one that answered last when pages were given back
        self._wishes: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._wished: set[str] = set()
        try:
            self._open(deadline, seconds)
            self._deadline_ms = self._ms(deadline)
            self._controller = Controller(self._known(), self._settings)
        except BaseException:
            self._variants.close()
            raise
        self._opener = threading.Thread(target=self._open_wishes, name="opener", daemon=True)
        if self._lazy:
            self._opener.start()

    # At the start

    def _open(self, deadline: str | float | None, seconds: float) -> None:
        """Open and time all variants; of a lazy session those that it begins with."""
        variants = self._variants
        names = self._first(deadline) if self._lazy else variants.names
        for name in names:
            variants.open(name)
        while self._lazy and not variants.opened and variants.names:
            variants.open(variants.names[0])
        variants.require_any()
        variants.time([name for name in variants.names if name in variants.opened], seconds, self._max_batch)
        variants.require_any()
        if self._lazy:
            self._estimate()

    def _first(self, deadline: str | float | None) -> list[str]:
        """Return the fastest variant and the one that suits the deadline, by the latencies of the manifest."""
        known = {name: ms for name in self._variants.names if (ms := self._variants.known_ms(name)) is not None}
        if len(known) < len(self._variants.names):
            raise UsageError(f"{self._variants.folder}: has no latencies to begin with. Open it without lazy")
        due = self._ms(deadline, known.get(self._variants.manifest.dense))
        fitting = [name for name, ms in known.items() if due is None or ms <= due]
        fastest = min(known, key=lambda name: known[name])
        return list(dict.fromkeys([fastest, max(fitting, key=self._variants.quality, default=fastest)]))

    def _estimate(self) -> None:
        """Take latencies of the others from the manifest, at the speed that this machine has."""
        timed, variants = dict(self._variants.runnable), self._variants
        ratios = [each.ms / known for name, each in timed.items() if (known := variants.known_ms(name))]
        for name in variants.names:
            if name not in timed and (known := variants.known_ms(name)) is not None:
                variants.know(name, known * float(np.median(ratios)))

    def _ms(self, deadline: str | float | None, dense_ms: float | None = None) -> float | None:
        """Return a deadline in milliseconds."""
        if deadline is None:
            return None
        if isinstance(deadline, str):
            budget = Budget.parse(deadline)
            dense = self._variants.runnable.get(self._variants.manifest.dense)
            known = dense.ms if dense is not None else dense_ms
            if budget.is_relative and known is None:
                raise UsageError(f"deadline '{deadline}' is relative to the dense model, which is not here. Give ms")
            return budget.to_ms(known or 0.0, 1)
        if not 0 < deadline < math.inf:
            raise UsageError(f"a deadline of {deadline} leaves no time. Give milliseconds above zero, such as 10.0")
        return float(deadline)

    # What is asked

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the variants that may answer."""
        return tuple(self._variants.names)

    @property
    def best_first(self) -> tuple[str, ...]:
        """The same, the most faithful first."""
        return tuple(sorted(self.variants, key=self._variants.quality, reverse=True))

    @property
    def slowness(self) -> float:
        """How slow the machine is now, beside the time when the session was opened."""
        return math.exp(self._controller.state.level)

    @property
    def deadline_ms(self) -> float | None:
        """The deadline of a request that has none of its own."""
        return self._deadline_ms

    @property
    def manifest(self) -> Manifest:
        """The manifest of the family."""
        return self._variants.manifest

    @property
    def stats(self) -> Stats:
        """What was done so far, and how the machine is."""
        state, variants = self._controller.state, self._variants
        return Stats(
            **self._tally.summary(),
            waiting=len(self._turns.waiting()),
            slowness=self.slowness,
            margin=math.exp(state.factor - state.level),
            variants={each.name: each.ms for each in self._known()},
            opened=tuple(variants.opened),
            retired=dict(variants.retired),
        )

    def run(self, batch: Array | Inputs, deadline: str | float | None = None, arrived: float | None = None) -> Answer:
        """Run a batch as the graphs take it, (B, 3, H, W) or (B, H, W, 3) bytes, on a variant for images of that size.

        Or what `prepare` made, for variants of all sizes. `arrived`: when the request came, by `time.perf_counter()`;
        now if it is not given.
        """
        arrived_ms = _now_ms() if arrived is None else 1000 * arrived
        try:
            inputs = self._checked(batch)
            limit = self._deadline_ms if deadline is None else self._ms(deadline)
            images = len(next(iter(inputs.values())))
            request = Request(arrived_ms, limit, images, inputs)
            with self._turns.turn(request) as is_mine:
                answer: Answer = self._answer(request) if is_mine else request.answer
        except (Overloaded, Refused):
            self._tally.refuse()
            raise
        except BaseException:
            self._tally.fail()
            raise
        self._tally.add(answer)
        return answer

    def run_images(self, *images: Image, deadline: str | float | None = None, arrived: float | None = None) -> Answer:
        """Run images: files, Pillow's, or (H, W, 3) bytes. Their preparation counts."""
        began = time.perf_counter() if arrived is None else arrived
        return self.run(self.prepare(*images), deadline, began)

    def prepare(self, *images: Image) -> Inputs:
        """Resize and normalise images for the variants, once for each size that they take."""
        if not images:
            raise UsageError("there is nothing to run. Give at least one image")
        manifest, pictures = self._variants.manifest, [decoded(image) for image in images]
        by_size = {self._variants.image_size(name): self._variants.variant(name) for name in self._variants.names}
        return {
            size: np.concatenate([prepared(manifest, variant, picture) for picture in pictures])
            for size, variant in by_size.items()
        }

    def likeliest(self, answer: Answer, top: int = 5) -> list[list[Prediction]]:
        """Return the most likely classes of each image of an answer, the likeliest first."""
        return [likeliest(self._variants.manifest, scores, top) for scores in answer.output]

    def _checked(self, batch: Array | Inputs) -> Inputs:
        """Refuse what no variant takes: an error of the input must not count as one of a variant."""
        manifest = self._variants.manifest
        kind, channels = np.dtype(manifest.input.type), manifest.anatomy.channels
        sizes = {self._variants.image_size(name) for name in self._variants.names}
        inputs = batch if isinstance(batch, Mapping) else {_size(batch, manifest.input.layout): batch}
        for size, array in inputs.items():
            shape = (channels, *size) if manifest.input.layout == "NCHW" else (*size, channels)
            if array.dtype != kind or array.shape[1:] != shape or not len(array) or not set(inputs) & sizes:
                takes = ", ".join(f"{height} x {width}" for height, width in sorted(sizes))
                raise UsageError(
                    f"a batch of {array.dtype} {array.shape} is not what the variants take: {kind}, "
                    f"{manifest.input.layout}, {channels} channels, {takes} pixels"
                )
            if kind != np.uint8 and not np.isfinite(array).all():
                raise UsageError("the batch holds numbers that are not finite. Check what comes from the camera")
        return inputs

    # One request at a time

    def _answer(self, request: Request) -> Answer:
        """Answer the request whose turn it is, and perhaps some that wait, on the best variant that runs."""
        self._tidy()
        while True:
            together, decision = self._decide(request)
            found = self._variants.opened.get(decision.variant)
            if found is None:  # retired by the other thread
                continue
            size = self._variants.image_size(decision.variant)
            parts = [each.inputs[size] for each in together]
            began = _now_ms()
            try:
                output = found.run(parts[0] if len(parts) == 1 else np.concatenate(parts))
            except SnapvitError as error:
                self._variants.retire(decision.variant, error)
                self._variants.require_any()
                continue
            ended = _now_ms()
            late = any(ended > each.due_ms for each in together)
            waiting = max(0, len(self._turns.waiting()) - len(together))  # a caller may have left its place
            self._controller.learn(decision, ended - began, ended, len(together), waiting, late)
            self._used[decision.variant] = ended
            return self._deliver(together, output, decision, began, ended)

    def _deliver(
        self, together: Sequence[Request], output: Array, decision: Decision, began: float, ended: float
    ) -> Answer:
        """Give each request its part of the output; return that of the first."""
        ends = np.cumsum([each.images for each in together])
        for request, part in zip(together, np.split(output, ends[:-1])):
            request.answer = Answer(
                output=part,
                variant=decision.variant,
                latency_ms=ended - request.arrived_ms,
                fidelity=self._variants.fidelity(decision.variant),
                deadline_ms=request.limit_ms,
                met=ended <= request.due_ms,
                fitted=decision.fits,
                waited_ms=began - request.arrived_ms,
                ran_ms=ended - began,
            )
        self._turns.answered(list(together[1:]))
        answer: Answer = together[0].answer
        return answer

    def _decide(self, request: Request) -> tuple[list[Request], Decision]:
        """Return the requests to run together, and on which variant."""
        now, line = _now_ms(), self._turns.waiting()
        due = [each.due_ms - now for each in line]
        among = self._open_for(request)
        if math.isinf(request.due_ms):
            among = [max(among, key=lambda each: (each.name == self._preferred, each.quality))]
        for together in (self._alike(request, line), [request]):
            images = sum(each.images for each in together)
            decision = self._controller.decide(due, now, images, len(together), among)
            if decision.fits:
                break
        if decision.refused:
            self._controller.refuse(len(line) - 1)
            raise Refused(f"no variant would be in time: the fastest takes {decision.expected_ms:.3g} ms now")
        if self._lazy:
            self._wish(self._controller.decide(due, now, request.images, 1, self._known(request)).variant)
        return together, decision

    @property
    def _preferred(self) -> str | None:
        """The variant that was chosen when the family was made."""
        choice = self._variants.manifest.choice
        return None if choice is None else choice.variant

    def _alike(self, request: Request, line: Sequence[Request]) -> list[Request]:
        """Return the request and those right behind it that can be run with it."""
        found, images = [request], request.images
        for other in line[1:]:
            images += other.images
            same = other.inputs.keys() == request.inputs.keys() and math.isinf(other.due_ms) == math.isinf(
                request.due_ms
            )
            if images > self._max_batch or not same:
                break
            found.append(other)
        return found

    def _known(self, request: Request | None = None) -> list[Runnable]:
        """Return all variants that have a latency, open or not, for images of the request."""
        known = list(self._variants.runnable.values())
        return [each for each in known if request is None or self._variants.image_size(each.name) in request.inputs]

    def _open_for(self, request: Request) -> list[Runnable]:
        """Return the open variants that take the images of a request."""
        while True:
            found = [each for each in self._known(request) if each.name in self._variants.opened]
            if found:
                return found
            closed = self._known(request)
            if not closed:
                raise NoVariant(f"{self._variants.folder}: no variant is left for images of this size")
            self._variants.open(min(closed, key=lambda each: each.ms).name)

    # Beside requests

    def _wish(self, name: str) -> None:
        """Let the other thread open a variant."""
        if name not in self._variants.opened and name not in self._wished:
            self._wished.add(name)
            self._wishes.put(name)

    def _open_wishes(self) -> None:
        while (name := self._wishes.get()) is not None:
            found = self._variants.open(name)
            if found is not None:
                try:
                    found.run(self._variants.noise(name))  # the first run of a session takes long
                except SnapvitError as error:
                    self._variants.retire(name, error)
            self._opened[name] = _now_ms()
            self._wished.discard(name)

    def _tidy(self) -> None:
        """Close variants beyond those to keep open, and give back the memory of weights that nobody reads."""
        opened, self._count = self._variants.opened, self._count + 1
        if self._keep_open is not None and len(opened) > self._keep_open:
            fastest = min(self._known(), key=lambda each: each.ms).name
            closable = [name for name in list(opened) if name != fastest and name not in self._wished]
            for name in sorted(closable, key=self._wanted_ms)[: len(opened) - self._keep_open]:
                self._variants.close_one(name)
        latest = sorted(self._used, key=lambda name: -self._used[name])
        if latest[:1] != self._in_memory or self._count % TIDY_EVERY == 0:
            self._in_memory, since = latest[:1], _now_ms() - 1000 * UNUSED_S
            self._variants.keep_in_memory([name for name in latest if self._used[name] > since])

    def _wanted_ms(self, name: str) -> float:
        """Return when a variant answered last, or was opened to answer."""
        return max(self._used.get(name, 0.0), self._opened.get(name, 0.0))

    def close(self, seconds: float | None = None) -> bool:
        """Take no more requests, answer those that wait, and release everything; False: some took too long."""
        drained = self._turns.close(seconds)
        if self._opener.is_alive():
            self._wishes.put(None)
            self._opener.join()
        if drained:
            self._variants.close()
        return drained

    def __enter__(self) -> ElasticSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settings(hit: float, late: Late) -> Settings:
    try:
        return Settings(hit=msgspec.convert(hit, Hit, strict=False), late=msgspec.convert(late, Late))
    except msgspec.ValidationError as error:
        raise UsageError(f"hit {hit} or late '{late}' makes no sense: {error}. Give 0.99, and run or refuse") from error


def _size(batch: Array, layout: str) -> Size:
    sides = batch.shape[2:4] if layout == "NCHW" else batch.shape[1:3]
    height, width = sides if len(sides) == 2 else (0, 0)
    return int(height), int(width)


def _now_ms() -> float:
    return 1000 * time.perf_counter()
