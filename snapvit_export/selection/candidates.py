"""The candidates of a selection: variants of one model that are built, compared and timed side by side. Light.

Three collaborators are passed in. A `Builder` makes the file of a point: with torch (`prune.build`) or from an Elastic
folder (`elastic_builder`). A `Meter` compares it with the dense model, by images or by a table (`image_meter`,
`table_meter`). A `Timer` times files. Where all files and latencies exist already, none is needed.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from ..allocation.recipe import ADDS_BIASES
from ..checks.comparison import Compared
from ..family.evaluation import Evaluation
from ..family.fidelity import Fidelity, NotFinite
from ..family.manifest import Limits, Measurement, Recovery, Variant, Verdict, WeightFile, verdict_on, worst
from ..graph.format import GraphFormat
from ..graph.forward import can_reorder
from ..graph.precision import GraphPrecision
from ..graph.writer import GraphWriter, is_shared
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..profiling.drift import DriftCorrection, Latency
from ..profiling.energy import Energy, energy_of
from ..profiling.latency_model import ALL_BUT_PROJ, KEYS_AND_VALUES, LatencyModel, fit
from ..profiling.profile import Percentile, Profile
from ..profiling.sample_plans import held_out_plans, sample_plans, with_least_heads
from ..profiling.sampling import Report, Samples
from ..profiling.timer import File, Timer
from ..progress import Progress, Stages
from ..runtimes.tensorrt.engine_file import engine_files
from ..storage.atomic import sha256
from ..target import Precision, SumBits, Target
from .point import Point

DENSE = "dense"  # the name of the variant that cuts nothing
SHOWN_EVERY = 0.5  # seconds
SHOWN_BURSTS = 64  # that latencies so far are taken from: all of a long run would take longer to draw than to time
PROBE = ".probe"  # the name of a graph that is only compared with the dense model
FRESH_RUNS = 24  # of a file in each new process, of several: these differ more than the runs within one
FIT_SECONDS, FIT_RUNS = 0.2, 24  # of every sample configuration that the latency model is fitted to

Key = TypeVar("Key")


@dataclass(frozen=True, eq=False)
class Losses:
    """What a variant loses, image by image: divergence from the dense model, and wrong answers where labels are."""

    divergence: npt.NDArray[np.float64]  # (N,)
    wrong: npt.NDArray[np.float64] | None = None  # (N,): 1 where its answer is not the label


@dataclass(frozen=True)
class BuiltVariant:
    """A variant as a file on disk, with everything measured so far."""

    name: str
    path: Path
    weights: tuple[Path, ...]  # that it reads; others may read them too
    plan: Plan
    precision: Precision
    sha256: str
    size_bytes: int
    correction: str | None
    precision_cosine: float | None
    kept: bool  # made as well as it can be, not only to be timed
    evaluation: Evaluation | None = None
    evaluations: tuple[Evaluation, ...] = ()  # that a manifest has of it already
    fidelity: Fidelity | None = None
    losses: Losses | None = None  # image by image; None: known from a table or a manifest, or not at all
    profile: Profile | None = None  # of the last timing run
    parity: float | None = None  # largest difference to torch, in units of the largest output
    int8_sum_bits: SumBits | None = None  # None: not known, or not int8
    compared: Compared | None = None  # in the target's runtime with ONNX Runtime; None: not compared, or the same
    recovered: Recovery | None = None  # how it was trained after it was cut

    @staticmethod
    def of(folder: Path, variant: Variant, anatomy: Anatomy) -> BuiltVariant:
        """Make one from the manifest's description of a variant of a model, without its latencies."""
        sum_bits = variant.int8_sum_bits
        return BuiltVariant(
            name=variant.name,
            path=folder / variant.file,
            weights=tuple(folder / name for name in variant.weights),
            plan=variant.plan_of(anatomy),
            precision=variant.precision,
            sha256=variant.sha256,
            size_bytes=variant.size_bytes,
            evaluation=variant.evaluation,
            evaluations=tuple(filter(None, (variant.evaluation, *variant.evaluations))),
            fidelity=variant.fidelity,
            correction=variant.correction,
            precision_cosine=variant.precision_cosine,
            kept=True,
            parity=variant.parity,
            int8_sum_bits=None if sum_bits is UNSET else sum_bits,
            recovered=variant.recovered,
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of this variant alone: graph, engine and its record; some may not exist."""
        return (self.path, *engine_files(self.path))

    def file(self, anatomy: Anatomy) -> File:
        """Return the graph as a timer takes it."""
        return File(self.path, self.sha256, anatomy.image_of(self.plan), self.precision)

    @property
    def point(self) -> Point:
        return Point(self.plan, self.precision)

    def params(self, anatomy: Anatomy) -> int:
        """Return the number of parameters; a correction gives a bias to layers that had none."""
        after = anatomy.with_output_biases() if self.correction in ADDS_BIASES else anatomy
        return after.params(self.plan)


@dataclass(frozen=True)
class SampleGraphs:
    """Graphs of uncorrected weights that a latency model is fitted to."""

    paths: Mapping[str, Path]
    weights: frozenset[Path]  # that they point into
    last_head: float  # share of a head's work that the last attention does for all tokens, though only one is read


def write_samples(
    writer: GraphWriter, plans: Mapping[str, Plan], format: GraphFormat, precision: GraphPrecision
) -> SampleGraphs:
    """Write graphs of these Plans with uncorrected weights."""
    written = {name: writer.write(name, plan, format=format, precision=precision) for name, plan in plans.items()}
    paths = {name: each.graph for name, each in written.items()}
    weights = frozenset(path for each in written.values() for path in each.weights)
    last = Plan.dense(writer.anatomy).last_attention
    few = 0.0 if can_reorder(writer.anatomy, last, precision) else KEYS_AND_VALUES
    return SampleGraphs(paths, weights, last_head=ALL_BUT_PROJ if format.flavour == "tensorrt" else few)


@dataclass(frozen=True)
class Probe:
    """A graph that is only compared with the dense model, not timed: nothing is checked that a variant must be."""

    path: Path
    weights: tuple[Path, ...]
    precision: Precision  # that it is written in, which may be fp32 where its own would need calibration


class Builder(Protocol):
    """Makes the file of a point."""

    def build(self, name: str, point: Point, keep: bool, before: BuiltVariant | None) -> BuiltVariant:
        """Build a variant; `keep`: as well as can be, not only to be timed. `before`: the same, built to be timed."""
        ...

    def write_samples(self, plans: Mapping[str, Plan], precision: Precision) -> SampleGraphs | None:
        """Write graphs of these Plans, to be timed and removed; None if each would take longer than it saves."""
        ...

    def write_probe(self, name: str, point: Point) -> Probe:
        """Write a graph to be compared with the dense model."""
        ...


class Meter(Protocol):
    """Compares with the dense model in fp32, on images that nothing was fitted on."""

    def losses(self, probe: Probe | None, point: Point, few: bool) -> npt.NDArray[np.float64]:
        """Return the losses of a candidate, image by image; `few`: on some images, to begin with."""
        ...

    def measured(self, built: BuiltVariant) -> BuiltVariant:
        """Return a variant with its fidelity, and its accuracy where labels suit."""
        ...

    @property
    def needs_probes(self) -> bool:
        """False if a point alone tells its losses."""
        ...


class Latencies(Protocol):
    """Latencies of variants from all their runs: `DriftCorrection`, or those that a manifest has kept of one."""

    def add(self, run: Mapping[str, Profile]) -> None:
        """Add one timing run, the dense variant's profile among it."""
        ...

    def runs(self, name: str) -> int:
        """Return how often a variant was timed."""
        ...

    def is_contended(self, name: str) -> bool:
        """Return True if other work kept most runs of a variant from their cores."""
        ...

    def reference_ms(self, at: Percentile) -> float:
        """Return the latency of the dense variant."""
        ...

    def latency(self, name: str, at: Percentile, relative: bool = False) -> Latency:
        """Return a variant's latency and its interval."""
        ...


class Candidates:
    """Variants of one model by name, and what was measured of them; one called "dense" cuts nothing."""

    def __init__(
        self,
        anatomy: Anatomy,
        target: Target,
        progress: Progress,
        builder: Builder | None = None,  # None: nothing new can be built
        timer: Timer | None = None,  # None: latencies were taken elsewhere, and nothing is timed here
        meter: Meter | None = None,  # None: nothing is compared here
        built: Iterable[BuiltVariant] = (),  # that exist already
        advice: str = "",  # what helps if no variant fits a budget: ends an error message
        latencies: Latencies | None = None,  # None: those of the runs that are recorded here
        energies: Mapping[str, Energy] | None = None,  # by all runs; of others those that are recorded here
    ) -> None:
        self.anatomy, self.target, self.advice = anatomy, target, advice
        self.progress = progress if isinstance(progress, Stages) else Stages(progress)  # how long what takes
        self.built = {variant.name: variant for variant in built}
        self.drift: Latencies = latencies or DriftCorrection(DENSE)
        self.meter, self._builder, self._timer = meter, builder, timer
        self._energies = dict(energies or {})
        self._taken: dict[str, list[Profile]] = defaultdict(list)  # by variant, one of every timing run

    def add(self, name: str, point: Point | Plan, keep: bool = False) -> None:
        """Build a variant and compare it, unless it exists already; `keep`: as well as can be, not only to be timed.

        A Plan alone means the family's own precision.
        """
        before = self.built.get(name)
        if before is not None and (before.kept or not keep):
            return
        assert self._builder is not None, f"{name} does not exist, and there is no builder"
        point = point if isinstance(point, Point) else Point(point, self.target.precision)
        with self.progress.stage("building"):
            built = self._builder.build(name, point, keep, before)
        if before is not None and built.sha256 == before.sha256:  # what was measured of the file holds
            built = replace(before, kept=keep)
        elif self.meter is not None:
            self.progress.phase(f"comparing {name} with the dense model")
            with self.progress.stage("comparing"), _removed_if_not_finite(built):
                built = self.meter.measured(built)
        self.built[name] = built
        self._remove_unread(() if before is None else before.weights)

    def losses(self, points: Mapping[Key, Point], few: bool) -> dict[Key, npt.NDArray[np.float64]]:
        """Compare points with the dense model; their graphs are removed. Those without finite outputs are left out."""
        assert self.meter is not None
        found: dict[Key, npt.NDArray[np.float64]] = {}
        with self.progress.stage("candidates"):
            for key, point in points.items():
                try:
                    found[key] = self._losses(point, few)
                except NotFinite:
                    self.progress.note(f"{point.name(self.anatomy, self.target.precision)}: outputs are not finite")
        return found

    def _losses(self, point: Point, few: bool) -> npt.NDArray[np.float64]:
        assert self.meter is not None
        if not self.meter.needs_probes:
            return self.meter.losses(None, point, few)
        assert self._builder is not None
        probe = self._builder.write_probe(PROBE, point)
        try:
            return self.meter.losses(probe, point, few)
        finally:
            self._remove_probe(probe)
            self.progress.advance()

    def _remove_probe(self, probe: Probe) -> None:
        for file in (probe.path, *engine_files(probe.path)):
            file.unlink(missing_ok=True)
        self._remove_unread(probe.weights)

    def update(self, variant: BuiltVariant) -> None:
        """Take a variant that is there already as it is now, such as in another folder."""
        self.built[variant.name] = variant

    def probe_ms(
        self, points: Mapping[Key, Point], seconds: float, at: Percentile, budget_ms: float
    ) -> dict[Key, float]:
        """Time graphs of points side by side with the dense one, and remove them; latencies at the reference speed.

        Points whose precision needs calibration are left out.
        """
        assert self._builder is not None
        assert self._timer is not None
        probes: dict[str, tuple[Key, Probe]] = {}
        try:
            for n, (key, point) in enumerate(points.items()):
                probes[f"{PROBE}{n}"] = key, self._builder.write_probe(f"{PROBE}{n}", point)
            files = {DENSE: self.built[DENSE].file(self.anatomy)}
            for name, (key, probe) in probes.items():
                if probe.precision == points[key].precision:
                    image = self.anatomy.image_of(points[key].plan)
                    files[name] = File(probe.path, sha256(probe.path), image, probe.precision)
            if len(files) == 1:
                return {}
            with self.progress.stage("timing"):
                least = FRESH_RUNS if at == "p50" else None
                report = live_report(self.progress, budget_ms)
                run = self._timer.time(files, seconds, report, at, fresh=True, least_runs=least)
        finally:
            for _, probe in probes.values():
                self._remove_probe(probe)
        self.drift.add({DENSE: run[DENSE]})  # one more run of the reference
        slower = run[DENSE].at_ms(at) / self.drift.reference_ms(at)
        return {key: run[name].at_ms(at) / slower for name, (key, _) in probes.items() if name in run}

    def time(
        self,
        names: Sequence[str],
        seconds: float = 1.0,
        at: Percentile = "p50",
        budget_ms: float | None = None,
        fresh: bool = False,
        energy: bool = False,
    ) -> None:
        """Time variants in turns with the dense one, each for `seconds` and often enough to tell the percentile `at`.

        A variant timed before gets the newer profile. `budget_ms` is shown beside the latencies while they come in.
        `fresh`: in a new process, since one file's latency differs from process to process. `energy`: measure that too.
        """
        if self._timer is None:
            return
        together = names if DENSE in names else [DENSE, *names]
        files = {name: self.built[name].file(self.anatomy) for name in together}
        with self.progress.stage("timing"):
            least = FRESH_RUNS if fresh and at == "p50" else None
            report = live_report(self.progress, budget_ms)
            self.record(self._timer.time(files, seconds, report, at, energy=energy, fresh=fresh, least_runs=least))

    def record(self, run: Mapping[str, Profile]) -> None:
        """Record the profiles of one timing run, the dense variant's among them."""
        self.drift.add(run)
        for name, profile in run.items():
            self._taken[name].append(profile)
            built = self.built[name]
            told = profile if built.compared is None else msgspec.structs.replace(profile, compared=built.compared)
            self.built[name] = replace(built, profile=told)

    def energy(self, name: str) -> Energy | None:
        """Return the energy of one run of a variant's last file; None if it was not measured, or too rarely."""
        if name in self._energies:
            return self._energies[name]
        return energy_of([profile for profile in self._taken[name] if profile.sha256 == self.built[name].sha256])

    def latency_model(
        self,
        precision: Precision,
        removable: bool = False,
        budget_ms: float | None = None,
        tokens: bool = False,
        least_heads: int = 1,
    ) -> LatencyModel | None:
        """Fit a model of a precision to sample configurations, which are timed side by side and then removed.

        `removable`: also to some that lack sub-layers, which show the cost of having one. `tokens`: also to some that
        merge tokens or take smaller images. `least_heads`: of every attention in them.
        """
        assert self._builder is not None
        assert self._timer is not None
        samples = with_least_heads(self.anatomy, sample_plans(self.anatomy, removable, tokens), least_heads)
        unseen = with_least_heads(self.anatomy, held_out_plans(self.anatomy) if tokens else [], least_heads)
        plans = {f".fit{n}": plan for n, plan in enumerate([*samples, *unseen])}
        self.progress.phase(f"timing {len(plans)} sample configurations for a latency model of {precision}")
        graphs = self._builder.write_samples(plans, precision)
        if graphs is None:
            return None
        files = {
            name: File(path, sha256(path), self.anatomy.image_of(plans[name]), precision)
            for name, path in graphs.paths.items()
        }
        with self.progress.stage("latency model"):
            profiles = self._timer.time(files, FIT_SECONDS, live_report(self.progress, budget_ms), least_runs=FIT_RUNS)
        for path in graphs.paths.values():
            for file in (path, *engine_files(path)):
                file.unlink(missing_ok=True)
        self._remove_unread(graphs.weights)
        one_thread = self.target.threads == 1  # the CPU time of several threads includes their waiting for each other
        found = [
            (plans[name], profile.cpu_ms if one_thread and profile.cpu_ms is not None else profile.p50_ms)
            for name, profile in profiles.items()
        ]
        model = fit(self.anatomy, found[: len(samples)], graphs.last_head, held_out=found[len(samples) :])
        self.progress.note(f"latency model: {100 * model.mean_error:.1f} % off on configurations it has not seen")
        return model

    def latency(self, name: str, limits: Limits, relative: bool) -> Latency:
        """Return the latency to compare with a budget: infinite for a variant that exceeds another limit."""
        if not self.meets_limits(name, limits):
            return Latency(*[math.inf] * 3)
        return self.drift.latency(name, limits.at, relative)

    def meets_limits(self, name: str, limits: Limits) -> bool:
        """Return True if a variant meets the limits beside the budget."""
        built = self.built[name]
        small = built.size_bytes <= (limits.max_size_bytes or math.inf)
        return small and built.params(self.anatomy) <= (limits.max_params or math.inf)

    def named(self, grid: Mapping[str, Plan]) -> dict[str, Plan]:
        """Name Plans so that none is built twice: one that exists keeps its name, a taken name gets a number."""
        found: dict[str, Plan] = {}
        for name, plan in grid.items():
            found[self.name_of(Point(plan, self.target.precision), name, found)] = plan
        return found

    def name_of(self, point: Point, name: str | None = None, also: Collection[str] = ()) -> str:
        """Return the name of a point: that of the variant that exists, or one that is not taken yet, nor in `also`."""
        for built in self.built.values():  # of equals the first
            if built.point == point:
                return built.name
        name = name or point.name(self.anatomy, self.target.precision)
        taken = {*self.built, *also}
        return name if name not in taken else next(n for i in count(2) if (n := f"{name}-{i}") not in taken)

    def measurements(
        self, budget_ms: float, limits: Limits, relative: bool, budget_mj: float | None = None
    ) -> tuple[Measurement, ...]:
        """Return a Measurement of every variant that was built and timed, densest first."""
        found = []
        for built in self.built.values():
            if built.profile is None:
                continue
            latency = self.drift.latency(built.name, limits.at, relative)
            energy = self.energy(built.name)
            verdicts = [verdict_on((latency.low, latency.high), budget_ms, self.meets_limits(built.name, limits))]
            if budget_mj is not None and energy is not None:
                verdicts.append(verdict_on((energy.low, energy.high), budget_mj))
            verdict: Verdict = worst(verdicts)
            found.append(
                Measurement(
                    variant=built.name,
                    latency_ms=latency.ms,
                    between_ms=(latency.low, latency.high),
                    sparsity=built.plan.sparsity(self.anatomy),
                    correction=built.correction,
                    params=built.params(self.anatomy),
                    flops=self.anatomy.flops(built.plan),
                    size_bytes=built.size_bytes,
                    profile=built.profile,
                    evaluation=built.evaluation,
                    fits=verdict == "fits",
                    verdict=verdict,
                    energy_mj=None if energy is None else energy.mj,
                    energy_between_mj=None if energy is None else (energy.low, energy.high),
                    fidelity=built.fidelity,
                    precision=built.precision,
                    tokens=self.anatomy.tokens_after(built.plan),
                    image_size=self.anatomy.image_of(built.plan),
                    removed=len(built.plan.removed) - len(Plan.dense(self.anatomy).removed),
                    levers=built.point.levers(self.anatomy, self.target.precision),
                )
            )
        return tuple(sorted(found, key=lambda m: (-m.flops, m.variant)))

    def described(self, names: Collection[str]) -> tuple[Variant, ...]:
        """Describe these variants for the manifest, densest first."""
        variants = [_described(self.built[name], self.anatomy) for name in names]
        return tuple(sorted(variants, key=lambda v: (-v.flops, v.name)))

    def weight_files(self, names: Collection[str]) -> tuple[WeightFile, ...]:
        """Return all weight files that the graphs of these variants point into, the shared one first."""
        paths = dict.fromkeys(path for name in self.built if name in names for path in self.built[name].weights)
        return tuple(WeightFile(file=path.name, size_bytes=path.stat().st_size, sha256=sha256(path)) for path in paths)

    def keep_only(self, names: Collection[str]) -> None:
        """Remove the files of all other variants, but for weights that those which are kept read too."""
        gone = [self.built.pop(name) for name in list(self.built) if name not in names]
        for path in (path for built in gone for path in built.files):
            path.unlink(missing_ok=True)
        self._remove_unread([path for built in gone for path in built.weights], shared=True)

    def _remove_unread(self, weights: Iterable[Path], shared: bool = False) -> None:
        """Remove those of the weight files that no variant reads; `shared`: also what more variants might read."""
        read = {path for built in self.built.values() for path in built.weights}
        for path in set(weights) - read:
            if shared or not is_shared(path):
                path.unlink(missing_ok=True)


def _described(built: BuiltVariant, anatomy: Anatomy) -> Variant:
    plan, before = built.plan, built.evaluations
    described = Variant(
        name=built.name,
        file=built.path.name,
        weights=tuple(path.name for path in built.weights),
        sparsity=plan.sparsity(anatomy),
        heads=plan.heads,
        neurons=plan.neurons,
        tokens=anatomy.tokens_after(plan),
        image_size=anatomy.image_of(plan),
        params=built.params(anatomy),
        flops=anatomy.flops(plan),
        flops_ratio=plan.flops_ratio(anatomy),
        size_bytes=built.size_bytes,
        sha256=built.sha256,
        engines=tuple(path.name for path in engine_files(built.path) if path.is_file()),
        precision=built.precision,
        precision_cosine=built.precision_cosine,
        int8_sum_bits=built.int8_sum_bits or UNSET,
        corrected=built.correction is not None,
        correction=built.correction,
        parity=built.parity,
        profile=built.profile,
        evaluation=before[0] if before else built.evaluation,
        evaluations=before[1:],
        fidelity=built.fidelity,
        recovered=built.recovered,
    )
    if built.evaluation is None or built.evaluation in before:
        return described
    return described.evaluated(built.evaluation, shown=not described.knows_better(built.evaluation))


@contextmanager
def _removed_if_not_finite(built: BuiltVariant) -> Iterator[None]:
    """Remove the files of a variant that cannot be compared: nobody will."""
    try:
        yield
    except NotFinite:
        for file in built.files:
            file.unlink(missing_ok=True)
        raise


def live_report(progress: Progress, budget_ms: float | None) -> Report:
    """Return a callback that shows the latencies so far, twice a second: drawing must not disturb the timing."""
    shown = time.monotonic()

    def report(samples: Mapping[str, Samples]) -> None:
        nonlocal shown
        if time.monotonic() - shown > SHOWN_EVERY:
            some = {name: taken.spread(SHOWN_BURSTS) for name, taken in samples.items()}
            found = {name: (taken.percentile(50), *taken.interval(50)) for name, taken in some.items()}
            progress.latencies(found, budget_ms)
            shown = time.monotonic()

    return report
