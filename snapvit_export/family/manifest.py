"""A family: a folder of variants of one model and the `manifest.json` that says what each of them is. Light.

The manifest's keys are a contract with other programs. Reading checks versions, bounds, sizes and hashes, and refuses
names that leave the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from ..calibration.preprocessing import Preprocessing
from ..errors import FileFormatError
from ..model.anatomy import Anatomy
from ..profiling.latency_model import LatencyModel
from ..profiling.profile import Percentile, Profile
from ..runtimes.device import DeviceCard
from ..runtimes.tensorrt.engine_file import engine_files
from ..storage.atomic import inside, sha256
from ..storage.json import Count, Kept, Ratio, Size, Value, read_json, write_json
from ..target import Precision, Runtime, SumBits, Target
from .evaluation import Evaluation
from .layout import report_files
from .validation import VALIDATION

MANIFEST, RANKING = "manifest.json", "ranking.safetensors"
KEPT = ".validation-"  # features of a validation that was stopped


class WeightFile(Value, frozen=True, kw_only=True):
    """A file that graphs read their weights from."""

    file: str  # relative to the folder
    size_bytes: Count
    sha256: str


class Variant(Value, frozen=True, kw_only=True):
    """A Plan made real: one file, what it keeps, how fast it is and how well it does."""

    name: str
    file: str  # the graph, relative to the folder
    weights: tuple[str, ...] = ()  # files that the graph points into; none if it holds all of them itself
    sparsity: Ratio
    heads: tuple[Kept, ...]  # by block; 0: its attention is gone
    neurons: tuple[Kept, ...]  # 0: its MLP is gone
    params: Count
    flops: Count  # of one image
    flops_ratio: Ratio
    size_bytes: Count  # of the graph and the weights that it reads: what a device needs that has only this variant
    sha256: str  # of the graph, which names the hashes of its weight files
    engines: tuple[str, ...] = ()  # files that were built from the graph for one device, and their records
    precision: Precision = "fp32"
    precision_cosine: float | None = None  # least cosine of the outputs to those of the same variant in fp32
    int8_sum_bits: SumBits | UnsetType = UNSET  # int8 of ours: 16 computes the same on every CPU; not there: 32
    corrected: bool = False
    correction: str | None = None  # which one: refit, elastic, sequential or sparsegpt
    parity: float | None = None  # largest difference to the torch module in float32, in units of the largest output
    profile: Profile | None = None
    evaluation: Evaluation | None = None
    dominated_by: str | None = None  # a variant that is as fast and as good or better, and not the same in both


class Measurement(Value, frozen=True, kw_only=True):
    """One artefact that was built and timed on the way to the choice, kept or not."""

    variant: str
    sparsity: Ratio
    params: Count
    flops: Count
    size_bytes: Count
    correction: str | None = None
    latency_ms: float  # that the budget was compared with: at the percentile of the limits and the machine's usual pace
    between_ms: tuple[float, float]
    profile: Profile  # the last look
    evaluation: Evaluation | None
    fits: bool  # also in size, and surely


class Limits(Value, frozen=True, kw_only=True):
    """What a choice keeps beside its budget."""

    at: Percentile = "p50"  # of the latency that the budget is compared with
    max_size_bytes: Count | None = None
    max_params: Count | None = None


class Choice(Value, frozen=True, kw_only=True):
    """The densest variant that fits, the next denser one that does not, and every measurement that led there."""

    variant: str
    budget_ms: float
    next_denser: str | None  # None: the dense model fits
    decided: bool  # False: the machine was too noisy to tell the two apart, and the sparser one was taken
    doubt: str | None = None  # why it is not decided, and what to do
    limits: Limits = Limits()
    model: LatencyModel | None = None  # which proposed what to build; it decides nothing
    measurements: tuple[Measurement, ...]


class MeasuredOn(Value, frozen=True, kw_only=True):
    """The target, and the device that stood for it."""

    runtime: Runtime
    precision: Precision
    batch: Size
    threads: Size
    device: DeviceCard

    @staticmethod
    def of(target: Target, device: DeviceCard) -> MeasuredOn:
        return MeasuredOn(
            runtime=target.runtime,
            precision=target.precision,
            batch=target.batch,
            threads=target.threads,
            device=device,
        )


class Input(Value, frozen=True, kw_only=True):
    """What the graphs of a family take: normalised pixels, or bytes that they normalise themselves."""

    type: Literal["float32", "uint8"] = "float32"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    batch: Size | None = None  # None: any


class Manifest(Value, frozen=True, kw_only=True):
    """What a family folder holds."""

    format_version: Literal[1] = 1
    model: str
    anatomy: Anatomy
    preprocessing: Preprocessing
    recipe: dict[str, Any]
    target: MeasuredOn
    variants: tuple[Variant, ...]
    dense: str
    choice: Choice | None
    weights: tuple[WeightFile, ...] = ()  # all files that graphs point into
    input: Input = Input()
    labels: tuple[str, ...] = ()  # names of the classes, in the order of the outputs; none: not known

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError("two variants have the same name")
        wanted = [self.dense] + ([self.choice.variant] if self.choice else [])
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(f"no variant is called {missing[0]}")
        read = {file for variant in self.variants for file in variant.weights}
        if missing := sorted(read - {weights.file for weights in self.weights}):
            raise ValueError(f"{missing[0]} is read by a variant and not listed")

    def variant(self, name: str) -> Variant:
        """The variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)

    def latency(self, name: str, at: Percentile = "p50") -> tuple[float, tuple[float, float]] | None:
        """What a variant takes and between what: as the choice compared it with its budget, or as it was timed since.

        Variants that were timed at different moments can only be told apart at the machine's usual pace, which a
        choice knows.
        """
        profile = self.variant(name).profile
        if profile is None:
            return None
        looks = self.choice.measurements if self.choice is not None and self.choice.limits.at == at else ()
        for look in looks:
            if look.variant == name and look.profile == profile:
                return look.latency_ms, look.between_ms
        ms = profile.at_ms(at)
        return ms, profile.intervals_ms.get(at, (ms, ms))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`."""
    write_json(folder / MANIFEST, manifest)


def read_family(folder: Path | str) -> Manifest:
    """Read a family and check that every file in it is what its manifest says."""
    folder = Path(folder)
    try:
        manifest = read_json(folder / MANIFEST, Manifest)
    except FileFormatError as error:
        raise FileFormatError(f"{error}. If another version wrote it, export the family again") from error
    for listed in _listed(manifest):
        path = inside(folder, listed.file, MANIFEST)
        if not path.is_file():
            raise FileFormatError(f"{path}: missing, though {MANIFEST} lists it. Export or copy the family again")
        if sha256(path) != listed.sha256:
            raise FileFormatError(f"{path}: damaged: it is not the file that {MANIFEST} describes")
    for variant in manifest.variants:
        path = inside(folder, variant.file, MANIFEST)
        if path.suffix == ".onnx":  # an OpenVINO graph points at nothing but the file of its own name
            _check_graph(path, variant)
    return manifest


def _listed(manifest: Manifest) -> list[WeightFile | Variant]:
    return [*manifest.weights, *manifest.variants]


def _check_graph(path: Path, variant: Variant) -> None:
    """What the graph points into is what the manifest says, and no more."""
    from ..graph.read import external_files, read_graph

    if undeclared := sorted(external_files(read_graph(path)) - set(variant.weights)):
        raise FileFormatError(f"{path}: reads {undeclared[0]}, which {MANIFEST} does not list for it")


def own_files(folder: Path) -> list[str] | None:
    """Names of the files that a family of ours has in this folder; None if there is no family."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        manifest = read_json(folder / MANIFEST, Manifest)
    except FileFormatError:
        return None
    graphs = [folder / variant.file for variant in manifest.variants]  # a profile may have built engines beside them
    engines = [path.name for graph in graphs for path in engine_files(graph)]
    listed = [each.file for each in _listed(manifest)]
    left_behind = [path.name for begun in (".tap-*", f"{KEPT}*") for path in folder.glob(begun)]  # by a validation
    return [MANIFEST, RANKING, VALIDATION, *listed, *engines, *report_files(), *left_behind]
