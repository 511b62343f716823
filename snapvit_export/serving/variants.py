"""The variants of a family as sessions in one process: opened, checked, timed, and retired when they fail. Light.

In ONNX Runtime on the CPU all variants read one mapping of each weight file (`mapped_weights`). Corrected variants have
matrices of their own too; so only the files that the latest variants read stay in memory (`keep_in_memory`).

A variant whose file is missing, damaged or written over, which does not open, does not run, or answers with what are no
numbers, is retired with the reason; the others go on. Its latency is taken beside the others, in turns, so that all are
of one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import FileFormatError, SnapvitError, UsageError, first_line
from ..family.folder import read_manifest
from ..family.manifest import Manifest, Variant
from ..graph.read import files_read_by
from ..runtimes.ort import OrtSession
from ..runtimes.session import Session, open_session, with_cores_here
from ..storage.atomic import inside, sha256
from ..storage.reading import MOST_GRAPH, why_not_read
from ..target import ON_CPU, Runtime, Target, parse_precision
from .controller import Runnable
from .mapped_weights import MappedFile, MappedWeights, keep_in_memory

Array = npt.NDArray[Any]
Size = tuple[int, int]  # height and width
LEAST_ROUNDS, WARM_UP = 5, 2


class NoVariant(SnapvitError):
    """Nothing is left that could answer."""


@dataclass(eq=False)
class OpenVariant:
    """A variant that can be run."""

    name: str
    session: Session
    files: Sequence[MappedFile]

    def run(self, images: Array) -> npt.NDArray[np.float32]:
        """Run a batch; an error if its weights were written over, or if it answers with what are no numbers."""
        for file in self.files:
            if not file.is_unchanged:
                raise FileFormatError(f"{file.path}: somebody wrote into it while it was in use")
        output = self.session.run(images)
        if not np.isfinite(output).all():
            raise SnapvitError(f"{self.name}: its answer is not a finite number")
        return output


@dataclass
class Variants:
    """All variants of a family folder."""

    folder: Path
    manifest: Manifest
    target: Target
    shares: bool  # weights, between sessions
    only: Sequence[str]
    retired: dict[str, str] = field(default_factory=dict)  # name: reason
    opened: dict[str, OpenVariant] = field(default_factory=dict)
    runnable: dict[str, Runnable] = field(default_factory=dict)  # with the latency that is known

    def __post_init__(self) -> None:
        self._weights = MappedWeights(self.folder, {each.file: each.sha256 for each in self.manifest.weights})

    @staticmethod
    def of(
        folder: Path | str,
        runtime: Runtime | None = None,
        threads: int | None = None,
        shares: bool = True,
        only: Sequence[str] | None = None,
    ) -> Variants:
        """Read the manifest of a family; its files are read when they are opened."""
        manifest = read_manifest(folder)
        known = [variant.name for variant in manifest.variants]
        if unknown := [name for name in only or () if name not in known]:
            raise UsageError(f"{folder}: no variant is called '{unknown[0]}'. Known: {', '.join(known)}")
        target = manifest.target.target
        chosen = runtime or target.runtime
        if chosen not in ON_CPU:
            raise UsageError(f"elastic sessions run in {' and '.join(ON_CPU)}, not in {chosen}. Give one of them")
        target = Target(
            runtime=chosen,
            precision=parse_precision(target.precision, chosen),
            batch=manifest.input.batch or 1,
            threads=threads or target.threads,
        )
        target = target if threads else with_cores_here(target)
        return Variants(Path(folder), manifest, target, shares and chosen == "onnxruntime", only or known)

    @property
    def names(self) -> list[str]:
        """The variants that are not retired."""
        return [name for name in self.only if name not in self.retired]

    def variant(self, name: str) -> Variant:
        return self.manifest.variant(name)

    def image_size(self, name: str) -> Size:
        """Return the height and width of the images that a variant takes."""
        return self.variant(name).image_of(self.manifest.anatomy)

    def fidelity(self, name: str) -> float | None:
        """Return on which share of images a variant gives the dense model's answer; None where that is not known."""
        if self._is_reference(name):
            return 1.0
        found = self.variant(name).fidelity
        return None if found is None else found.agreement

    def quality(self, name: str) -> float:
        """Return the number by which variants are compared: larger is nearer to the dense model."""
        variant = self.variant(name)
        if any(each.fidelity is not None for each in self.manifest.variants):
            if self._is_reference(name):
                return 0.0
            return -1e9 if variant.fidelity is None else -variant.fidelity.divergence
        return float(variant.flops) - (0.5 if variant.precision != "fp32" else 0.0)

    def _is_reference(self, name: str) -> bool:
        return name == self.manifest.dense and self.variant(name).precision == "fp32"

    def open(self, name: str) -> OpenVariant | None:
        """Open a variant; None if it had to be retired."""
        if name not in self.opened:
            try:
                self.opened[name] = self._open(self.variant(name))
            except SnapvitError as error:
                self.retire(name, error)
            except (OSError, MemoryError) as error:
                self.retire(name, SnapvitError(first_line(error)))
        return self.opened.get(name)

    def _open(self, variant: Variant) -> OpenVariant:
        path = inside(self.folder, variant.file, "manifest.json")
        if not path.is_file():
            raise FileFormatError(f"{path}: missing, though the manifest lists it")
        if reason := why_not_read(path, MOST_GRAPH):
            raise FileFormatError(f"{path}: cannot be read: {reason}")
        target = msgspec.structs.replace(self.target, precision=variant.precision)
        _require_same(path, sha256(path), variant.sha256)
        if self.shares:
            arrays, files = self._weights.of_graph(path)
            return OpenVariant(variant.name, OrtSession(path, target.threads, weights=arrays), files)
        files = [self._weights.file(name) for name in sorted(files_read_by(path))]
        return OpenVariant(variant.name, open_session(path, target), files)

    def retire(self, name: str, reason: Exception) -> None:
        """Take a variant out of use; those who read the same damaged file follow when they run."""
        self.retired[name] = str(reason)
        self.close_one(name)
        self.runnable.pop(name, None)

    def close_one(self, name: str) -> None:
        if (found := self.opened.pop(name, None)) is not None:
            found.session.close()

    def require_any(self) -> None:
        """Refuse to go on where nothing is left."""
        if not self.names:
            name, reason = next(iter(self.retired.items()))
            raise NoVariant(f"{self.folder}: no variant can be run. {name}: {reason}")

    def noise(self, name: str, images: int = 1) -> Array:
        """Return images as a variant takes them, of noise."""
        height, width = self.image_size(name)
        rng, channels = np.random.default_rng(0), self.manifest.anatomy.channels
        if self.manifest.input.type == "uint8":
            return rng.integers(0, 256, (images, height, width, channels), np.uint8)
        return rng.standard_normal((images, channels, height, width)).astype(np.float32)

    def know(self, name: str, ms: float, more_ms: float | None = None) -> None:
        """Take note of the latency of a variant."""
        more = ms if more_ms is None else min(max(more_ms, 0.0), ms)
        self.runnable[name] = Runnable(name=name, ms=ms, more_ms=more, quality=self.quality(name))

    def known_ms(self, name: str) -> float | None:
        """Return the latency of one image that the manifest has; it may be of another machine."""
        found, profile = self.manifest.latency(name), self.variant(name).profile
        return None if found is None or profile is None else found[0] / profile.batch

    def time(
        self, names: Sequence[str], seconds: float, most_images: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Time open variants in turns, for so many seconds in all and five rounds at least."""
        counts = [1] if most_images == 1 else [1, most_images]
        inputs = {(name, count): self.noise(name, count) for name in names for count in counts}
        taken: dict[tuple[str, int], list[float]] = {key: [] for key in inputs}
        began, rounds = clock(), -WARM_UP
        while rounds < LEAST_ROUNDS or clock() - began < seconds:
            for (name, count), images in inputs.items():
                if name in self.retired:
                    continue
                self.load(name)
                before = clock()
                try:
                    self.opened[name].run(images)
                except SnapvitError as error:
                    self.retire(name, error)
                if rounds >= 0:
                    taken[name, count].append(1000 * (clock() - before))
            rounds += 1
        for name in names:
            if name not in self.retired:
                one, many = (median(taken[name, count]) for count in (counts[0], counts[-1]))
                self.know(name, one, (many - one) / (most_images - 1) if most_images > 1 else None)

    def load(self, name: str) -> None:
        """Read the weights of a variant into memory, in the place of those of others."""
        if self.shares:
            self.keep_in_memory([name])
            for file in self.opened[name].files:
                file.load()

    def keep_in_memory(self, latest: Sequence[str]) -> None:
        """Give back the pages of weight files that none of the latest variants reads, or that are beyond the bound."""
        keep_in_memory({each.name: each.files for each in list(self.opened.values())}, latest)

    def close(self) -> None:
        """Release everything."""
        for name in list(self.opened):
            self.close_one(name)
        self._weights.close()


def _require_same(path: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise FileFormatError(f"{path}: damaged: it is not the file that the manifest describes")
