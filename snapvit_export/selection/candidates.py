"""A stand: variants that were built, timed side by side and compared with a budget. Light.

What builds them is for others to say: `prune.workshop` cuts and repairs with torch, `on_device` emits from an Elastic
folder or takes the files of a family as they are.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from ..allocation.recipe import ADDS_BIASES
from ..family.evaluation import Evaluation
from ..family.manifest import Limits, Measurement, Variant, WeightFile
from ..graph.forward import Flavour, Options, can_reorder
from ..graph.precision import Numerics
from ..graph.writer import Emitter
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..profiling.drift import Latency, Pace
from ..profiling.latency_model import LatencyModel, design, fit
from ..profiling.profile import Percentile, Profile
from ..profiling.sampling import Report, Samples
from ..profiling.timer import File, Timer
from ..progress import Progress
from ..runtimes.device import DeviceCard
from ..runtimes.tensorrt.engine_file import engine_files
from ..storage.atomic import sha256
from ..target import SumBits, Target

DENSE = "dense"  # the name of the variant that cuts nothing
SHOWN_EVERY = 0.5  # seconds
FIT_SECONDS = 0.5  # of every net that the latency model is fitted to


@dataclass(frozen=True)
class Form:
    """What graphs look like from outside."""

    flavour: Flavour = "ort"
    single_file: bool = False  # every graph holds its own weights
    batch: int | None = None  # fixed; None: any
    takes_bytes: bool = False


@dataclass(frozen=True)
class Built:
    """A file on disk and all that is known of it so far."""

    name: str
    path: Path
    weights: tuple[Path, ...]
    plan: Plan
    sha256: str
    size_bytes: int
    evaluation: Evaluation | None
    correction: str | None
    precision_cosine: float | None
    kept: bool  # made as well as it can be, not only to be timed
    profile: Profile | None = None
    parity: float | None = None  # largest difference to torch, in units of the largest output
    int8_sum_bits: SumBits | None = None  # None: not known, or not int8


class Stand(ABC):
    """Variants of one model by name, and what was measured of them."""

    def __init__(
        self,
        anatomy: Anatomy,
        emitter: Emitter | None,
        target: Target,
        device: DeviceCard,
        inputs: npt.NDArray[Any],
        form: Form,
        progress: Progress,
        pause_ms: float = 0.0,
    ) -> None:
        """`emitter` makes new graphs, if there can be any; `inputs` are some images as the graphs take them."""
        self.anatomy, self.target, self.form, self.progress = anatomy, target, form, progress
        self._emitter = emitter
        batch = np.resize(inputs, (target.batch, *inputs.shape[1:]))
        self.timer = Timer(target, device, batch, pause_ms)
        self.numerics = Numerics(target.precision)  # of the dense model; others may know more when it is built
        self.built: dict[str, Built] = {}
        self.pace = Pace(DENSE)
        self.budget_ms: float | None = None  # only to be shown while timing

    @property
    def emitter(self) -> Emitter:
        assert self._emitter is not None, "there is nothing to make new graphs from"
        return self._emitter

    @abstractmethod
    def add(self, name: str, plan: Plan, keep: bool = False) -> None:
        """Build a variant, unless it is there already; `keep`: as well as can be, not only to be timed."""

    def time(self, names: Sequence[str], seconds: float = 1.0, at: Percentile = "p50") -> None:
        """Time variants in turns with the dense one, each for `seconds` and often enough to tell the percentile `at`.

        A variant timed before gets the newer profile.
        """
        self.progress.phase(f"timing {', '.join(names)}")
        together = names if DENSE in names else [DENSE, *names]
        files = {name: File(self.built[name].path, self.built[name].sha256) for name in together}
        look = self.timer.time(files, seconds, reported(self.progress, self.budget_ms), at)
        self.pace.add(look)
        for name, profile in look.items():
            self.built[name] = replace(self.built[name], profile=profile)
        for name in names:
            profile = look[name]
            between = "{:.2f} to {:.2f}".format(*profile.intervals_ms["p50"])
            self.progress.note(f"{name}: p50 {profile.p50_ms:.2f} ms ({between}), p90 {profile.p90_ms:.2f} ms")

    def latency_model(self, lacking: bool = False) -> LatencyModel | None:
        """Fit a model of this target to some nets of uncorrected weights, timed side by side and then removed.

        `lacking`: also to nets that lack sub-layers, which tell what one costs for being there.
        """
        plans = {f".fit{n}": plan for n, plan in enumerate(design(self.anatomy, lacking))}
        self.progress.phase(f"timing {len(plans)} nets for a latency model")
        options = Options(self.form.flavour, self.form.batch, numerics=self.numerics)
        paths = {
            name: self.emitter.write(name, plan, options=options, single_file=self.form.single_file).graph
            for name, plan in plans.items()
        }
        files = {name: File(path, sha256(path)) for name, path in paths.items()}
        profiles = self.timer.time(files, FIT_SECONDS, reported(self.progress, self.budget_ms))
        for path in paths.values():
            for file in (path, path.with_suffix(".bin"), *engine_files(path)):
                file.unlink(missing_ok=True)
        one_thread = self.target.threads == 1  # CPU time of several threads counts their waiting for each other
        found = [
            (plans[name], profile.cpu_ms if one_thread and profile.cpu_ms is not None else profile.p50_ms)
            for name, profile in profiles.items()
        ]
        makes_keys = not can_reorder(self.anatomy, len(self.anatomy.blocks) - 1, self.numerics)
        model = fit(self.anatomy, found, last_makes_keys=makes_keys)
        self.progress.note(f"latency model: {100 * model.mean_error:.1f} % off on nets that it has not seen")
        return model

    def latency(self, name: str, limits: Limits, relative: bool) -> Latency:
        """The latency that a budget is compared with; a variant that is too large for another limit takes forever."""
        if not self.is_small(name, limits):
            return Latency(*[math.inf] * 3)
        return self.pace.latency(name, limits.at, relative)

    def is_small(self, name: str, limits: Limits) -> bool:
        """Whether a variant keeps the limits beside the budget."""
        built = self.built[name]
        small = built.size_bytes <= (limits.max_size_bytes or math.inf)
        return small and self._params(built) <= (limits.max_params or math.inf)

    def named(self, grid: dict[str, Plan]) -> dict[str, Plan]:
        """Candidates under names that no other Plan has here."""
        return grid

    @property
    @abstractmethod
    def advice(self) -> str:
        """What would help if no variant fits a budget: the end of a sentence."""

    def measurements(self, budget_ms: float, limits: Limits, relative: bool) -> tuple[Measurement, ...]:
        """Everything that was built and timed, densest first."""
        timed = [built for built in self.built.values() if built.profile is not None]
        latencies = {built.name: self.pace.latency(built.name, limits.at, relative) for built in timed}
        found = [
            Measurement(
                variant=built.name,
                latency_ms=latencies[built.name].ms,
                between_ms=(latencies[built.name].low, latencies[built.name].high),
                sparsity=built.plan.sparsity(self.anatomy),
                correction=built.correction,
                params=self._params(built),
                flops=self.anatomy.flops(built.plan),
                size_bytes=built.size_bytes,
                profile=self._profile(built.name),
                evaluation=built.evaluation,
                fits=self.is_small(built.name, limits) and latencies[built.name].high <= budget_ms,
            )
            for built in timed
        ]
        return tuple(sorted(found, key=lambda m: (-m.flops, m.variant)))

    def finish(self, keep: Collection[str | None]) -> tuple[Variant, ...]:
        """Remove the files of variants that are not kept, and describe the rest, densest first."""
        for built in self.built.values():
            if built.name not in keep:
                built.path.unlink()
                for path in (built.path.with_suffix(".bin"), *engine_files(built.path)):
                    path.unlink(missing_ok=True)
        variants = [self.described(built) for built in self.built.values() if built.name in keep]
        return tuple(sorted(variants, key=lambda v: (-v.flops, v.name)))

    def weight_files(self, keep: Collection[str | None]) -> tuple[WeightFile, ...]:
        """All files that the graphs of these variants point into, the shared one first."""
        paths = dict.fromkeys(path for built in self.built.values() if built.name in keep for path in built.weights)
        return tuple(WeightFile(file=path.name, size_bytes=path.stat().st_size, sha256=sha256(path)) for path in paths)

    def described(self, built: Built) -> Variant:
        """A variant as the manifest has it."""
        anatomy, plan = self.anatomy, built.plan
        return Variant(
            name=built.name,
            file=built.path.name,
            weights=tuple(path.name for path in built.weights),
            sparsity=plan.sparsity(anatomy),
            heads=plan.heads,
            neurons=plan.neurons,
            params=self._params(built),
            flops=anatomy.flops(plan),
            flops_ratio=plan.flops_ratio(anatomy),
            size_bytes=built.size_bytes,
            sha256=built.sha256,
            engines=tuple(path.name for path in engine_files(built.path) if path.is_file()),
            precision=self.target.precision,
            precision_cosine=built.precision_cosine,
            int8_sum_bits=built.int8_sum_bits or UNSET,
            corrected=built.correction is not None,
            correction=built.correction,
            parity=built.parity,
            profile=built.profile,
            evaluation=built.evaluation,
        )

    def _params(self, built: Built) -> int:
        """Parameters of a variant; a correction gives a bias to layers that had none."""
        anatomy: Anatomy = self.anatomy.with_output_biases() if built.correction in ADDS_BIASES else self.anatomy
        return anatomy.params(built.plan)

    def _profile(self, name: str) -> Profile:
        profile = self.built[name].profile
        assert profile is not None, f"{name} was not timed"
        return profile


def reported(progress: Progress, budget_ms: float | None) -> Report:
    """Show the latencies so far, twice a second: drawing must not disturb what is timed."""
    shown = time.monotonic()

    def report(samples: Mapping[str, Samples]) -> None:
        nonlocal shown
        if time.monotonic() - shown > SHOWN_EVERY:
            found = {name: (taken.percentile(50), *taken.interval(50)) for name, taken in samples.items()}
            progress.latencies(found, budget_ms)
            shown = time.monotonic()

    return report
