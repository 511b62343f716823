"""Writes what a recovery has trained into its family: exported, through all gates, and only where its file is better.

Names, shapes and operators stay, so latencies do too: a graph that differs from the one that was timed in its weights
alone keeps its Profile. The folder is replaced as a whole, or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..errors import FileFormatError, SnapvitError
from ..family.folder import own_files, read_family, write_manifest
from ..family.layout import RANKING, TORCH
from ..family.manifest import Choice, Manifest, Recovery, Variant, WeightFile
from ..family.shipped import write_shipped
from ..graph.read import differ_in_weights_alone
from ..graph.writer import GraphWriter, is_shared, shared_file
from ..model.plan import Plan
from ..progress import Progress
from ..runtimes.in_threads import run_in_threads
from ..runtimes.session import version_of
from ..selection.candidates import BuiltVariant, Candidates
from ..selection.elastic_builder import adopt
from ..selection.image_meter import BATCH, REFERENCE, ImageMeter, columns_of
from ..selection.on_device import format_of
from ..selection.point import Point
from ..selection.variant_builder import VariantBuilder
from ..storage.atomic import sha256, staged_folder, writing
from ..storage.temporary import scratch_folder
from ..target import Precision

if TYPE_CHECKING:
    from ..prune.build import ModuleCutter
    from ..prune.recover.cutter import RecoveredCutter
    from ..prune.recover.loop import Outcome
    from ..prune.recover.settings import TrainingSettings


@dataclass(frozen=True, eq=False)
class Done:
    """What was trained of which variants, and how."""

    variants: Sequence[Variant]
    cutter: RecoveredCutter
    reference: ModuleCutter  # of the dense model as it was
    outcomes: Mapping[Plan, Outcome]
    settings: TrainingSettings
    recipe: str
    images: int
    source: str
    together: bool = False


class _Builder(VariantBuilder):
    """Builds variants whose shared weights are not those of the family's dense model."""

    own_weights = False

    def writer(self, precision: Precision) -> GraphWriter:
        if precision not in self._writers and self.own_weights:
            name = shared_file(precision, self.target.precision).replace("weights", "weights-recovered", 1)
            self._writers[precision] = GraphWriter(
                self.blueprint, self.folder, self.format.takes_bytes, precision, shared=name
            )
        return super().writer(precision)


def write_recovered(
    folder: Path,
    manifest: Manifest,
    done: Done,
    calibration: Images,
    stopping: Images,
    reported: Images,
    progress: Progress,
) -> Manifest:
    """Export what was trained, compare it with what is there, and replace the family by one with the better files."""
    with staged_folder(folder, replaceable=own_files(folder)) as stage:
        writer = _Writer(folder, stage, manifest, done, calibration, stopping, reported, progress)
        recovered = writer.write()
        if read_family(folder) != manifest:
            raise SnapvitError(f"{folder}: somebody else wrote it meanwhile. Run the same command again")
    return recovered


class _Writer:
    """Fills a new folder with a family and what was recovered of it."""

    def __init__(
        self,
        folder: Path,
        stage: Path,
        manifest: Manifest,
        done: Done,
        calibration: Images,
        stopping: Images,
        reported: Images,
        progress: Progress,
    ) -> None:
        self.folder, self.stage, self.manifest, self.done, self.progress = folder, stage, manifest, done, progress
        self.calibration, self.stopping, self.reported = calibration, stopping, reported
        self.target = manifest.target.target

    def write(self) -> Manifest:
        """Write everything; return the manifest."""
        with (
            scratch_folder(self.stage) as made,
            scratch_folder(self.stage) as exact,
            scratch_folder(self.stage) as other,
        ):
            better = self._better(made, exact, other)
            kept = [variant for variant in self.manifest.variants if variant.name not in better]
            for variant in kept:
                for name in (variant.file, *variant.weights, *variant.engines):
                    self._take(name)
            found = {name: adopt(self.stage, built) for name, built in better.items()}
        self._take(RANKING)
        self._save_torch(found)
        described = Candidates(self.manifest.anatomy, self.target, self.progress, built=found.values()).described(found)
        renewed = {variant.name: variant for variant in described}
        variants = tuple(renewed.get(variant.name, variant) for variant in self.manifest.variants)
        manifest = msgspec.structs.replace(
            self.manifest,
            variants=variants,
            weights=self._weight_files(variants),
            choice=self._choice(renewed),
            shipped=None,
        )
        manifest = write_shipped(self.stage, manifest)
        write_manifest(self.stage, manifest)
        return manifest

    def _better(self, made: Path, exact: Path, other: Path) -> dict[str, BuiltVariant]:
        """Build what was trained; return the variants whose files are nearer to the dense model than before."""
        builder = self._builder(made, exact)
        reference = _Reference(self._builder(other, exact, dense=True), self.manifest)
        columns = columns_of(self.reported, self.manifest.anatomy, self.manifest.labels, "fidelity", self.progress)
        meter = ImageMeter(
            self.manifest.anatomy,
            self.target,
            self.stopping,
            self.reported,
            reference.outputs,
            self.manifest.input.type == "uint8",
            columns,
            runs_target=builder.runs_target,
        )
        found: dict[str, tuple[BuiltVariant, BuiltVariant]] = {}
        for variant in self.done.variants:
            plan = self.manifest.plan(variant)
            if not self.done.outcomes[plan].is_better:
                self.progress.note(f"{variant.name}: training made it no better, so it stays as it was")
                continue
            before = meter.measured(BuiltVariant.of(self.folder, variant, self.manifest.anatomy))
            built = builder.build(variant.name, Point(plan, variant.precision), keep=True)
            self._check_shared(built)
            found[variant.name] = (before, meter.measured(built))
        losses = {name: tuple(_divergence(each) for each in pair) for name, pair in found.items()}
        if self.done.together and found and np.mean([a - b for b, a in losses.values()]) >= 0:
            self.progress.note("together: on the images that report, the mean is no better, so all stay as they were")
            return {}
        better = {}
        for name, (before, after) in found.items():
            was, now = losses[name]
            if now >= was:
                self.progress.note(
                    f"{name}: its file is no better on images that it never saw ({was:.4f} to {now:.4f}), so it stays"
                )
                continue
            better[name] = self._recorded(before, after, list(found))
        return better

    def _recorded(self, before: BuiltVariant, after: BuiltVariant, together: list[str]) -> BuiltVariant:
        """Return a variant with how it was trained, and the latencies of before where only its weights are new."""
        old, outcome = self.manifest.variant(before.name), self.done.outcomes[after.plan]
        settings = self.done.settings
        same = differ_in_weights_alone(before.path, after.path)
        assert before.fidelity is not None
        assert after.fidelity is not None
        recovered = Recovery(
            train=settings.train,
            steps=outcome.steps,
            best_step=outcome.best_step,
            images=self.done.images,
            source=self.done.source,
            batch=settings.batch,
            seed=settings.seed,
            recipe=self.done.recipe,
            labels=bool(settings.labels),
            together=tuple(together) if self.done.together else (),
            before=before.fidelity,
            after=after.fidelity,
            seconds=round(outcome.seconds, 1),
            same_graph=same,
        )
        profile = None
        if old.profile is not None and same:
            profile = msgspec.structs.replace(old.profile, sha256=after.sha256)
        elif old.profile is not None:
            self.progress.note(f"{old.name}: its graph is another one. Time it again: snapvit profile {self.folder}")
        return replace(after, recovered=recovered, profile=profile)

    def _choice(self, renewed: Mapping[str, Variant]) -> Choice | None:
        """Return the choice with what is measured of the new files; what was decided by latency stays."""
        choice = self.manifest.choice
        if choice is None:
            return None
        measurements = []
        for each in choice.measurements:
            new = renewed.get(each.variant)
            if new is not None and new.profile is not None:
                each = msgspec.structs.replace(
                    each,
                    profile=msgspec.structs.replace(each.profile, sha256=new.sha256),
                    fidelity=new.fidelity,
                    evaluation=new.evaluation,
                    size_bytes=new.size_bytes,
                )
            measurements.append(each)
        alternatives = tuple(
            msgspec.structs.replace(each, fidelity=renewed[each.variant].fidelity) if each.variant in renewed else each
            for each in choice.alternatives
        )
        return msgspec.structs.replace(choice, measurements=tuple(measurements), alternatives=alternatives)

    def _builder(self, folder: Path, exact: Path, dense: bool = False) -> VariantBuilder:
        """Return a builder of what was trained, or of the dense model as it was."""
        cutter = self.done.cutter if not dense else self.done.reference
        made = _Builder(
            cutter,
            self.target,
            format_of(self.folder, self.manifest),
            self.calibration,
            folder=folder,
            exact_folder=exact,
            provenance=self.manifest.recipe,
            progress=self.progress,
            runs_target=self._runs_target,
        )
        made.own_weights = self.done.together and not dense
        return made

    @cached_property
    def _runs_target(self) -> bool:
        try:
            version_of(self.target.runtime)
        except SnapvitError as error:
            self.progress.note(f"{self.target.runtime} does not run here, so ONNX Runtime compares: {error}")
            return False
        return True

    def _check_shared(self, built: BuiltVariant) -> None:
        """Refuse shared weights that are not those which the other variants read."""
        known = {file.file: file.sha256 for file in self.manifest.weights}
        for path in built.weights:
            if is_shared(path) and path.name in known and sha256(path) != known[path.name]:
                raise FileFormatError(
                    f"{self.folder / path.name}: not what this version makes of the model. Export the family again"
                )

    def _take(self, name: str) -> None:
        """Take a file of the family over; a copy, since onnx reads no weights that have two names."""
        source, goal = self.folder / name, self.stage / name
        if source.exists() and not goal.exists():
            with writing(goal):
                shutil.copy2(source, goal)

    def _save_torch(self, found: Mapping[str, BuiltVariant]) -> None:
        """Write the variants for torch that the family has for torch."""
        if not (self.folder / TORCH).is_dir():
            return
        from ..prune.models.torch_folder import save_for_torch

        for path in sorted((self.folder / TORCH).iterdir()):
            if path.name not in found:
                shutil.copytree(path, self.stage / TORCH / path.name)
                continue
            cutter = self.done.cutter
            described = msgspec.structs.replace(cutter.model.description, labels=self.manifest.labels)
            save_for_torch(cutter.cut(found[path.name].plan, True).module, described, self.stage / TORCH / path.name)

    def _weight_files(self, variants: Sequence[Variant]) -> tuple[WeightFile, ...]:
        names = dict.fromkeys(name for variant in variants for name in variant.weights)
        paths = [self.stage / name for name in names]
        return tuple(WeightFile(file=p.name, size_bytes=p.stat().st_size, sha256=sha256(p)) for p in paths)


class _Reference:
    """The dense model in fp32, that everything is compared with."""

    def __init__(self, builder: VariantBuilder, manifest: Manifest) -> None:
        self.builder, self.manifest = builder, manifest

    def outputs(self, images: Images) -> npt.NDArray[np.float32]:
        dense = Plan.dense(self.manifest.anatomy)
        probe = self.builder.write_probe(REFERENCE, Point(dense, "fp32"))
        found = run_in_threads(probe.path, images.inputs(BATCH, self.manifest.input.type == "uint8"))
        probe.path.unlink()
        return found


def _divergence(built: BuiltVariant) -> float:
    assert built.fidelity is not None
    return built.fidelity.divergence
