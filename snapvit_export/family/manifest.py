"""The contents of `manifest.json`: the variants of a family, their measurements, and the choice among them. Light.

The keys are a contract with other programs. `folder` reads and writes the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..allocation.levers import Lever
from ..calibration.preprocessing import Preprocessing
from ..errors import SnapvitError
from ..graph.format import GraphFormat
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..profiling.latency_model import LatencyModel
from ..profiling.profile import Percentile, Profile
from ..runtimes.device import DeviceCard
from ..storage.json import Count, Finite, Kept, Name, NotNegative, Positive, Ratio, Size, Some, Value
from ..target import Precision, SumBits, Target, in_precision
from .evaluation import Evaluation
from .fidelity import Fidelity
from .layout import APPLICATIONS, MANIFEST, RANKING, SHIPPED, Application
from .reference import Reference

Prefer = Literal["fidelity", "accuracy"]
Verdict = Literal["fits", "unsure", "no"]  # of a variant on a budget


def verdict_on(between_ms: tuple[float, float], budget_ms: float, within_limits: bool = True) -> Verdict:
    """Return the verdict on a variant by the interval of its latency; without its whole interval nothing surely fits.

    >>> verdict_on((9.6, 9.9), 10.0), verdict_on((9.9, 10.2), 10.0), verdict_on((10.1, 10.4), 10.0)
    ('fits', 'unsure', 'no')
    """
    low, high = between_ms
    if not within_limits or low > budget_ms:
        return "no"
    return "fits" if high <= budget_ms else "unsure"


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on several budgets at once: what surely misses one misses all.

    >>> worst(["fits", "unsure"]), worst(["fits", "no"]), worst([])
    ('unsure', 'no', 'fits')
    """
    return max(verdicts, key=("fits", "unsure", "no").index, default="fits")


class WeightFile(Value, frozen=True, kw_only=True):
    """A file that graphs read their weights from."""

    file: Name  # in the folder
    size_bytes: Count
    sha256: str


class Recovery(Value, frozen=True, kw_only=True):
    """How a variant was trained after it was cut, and what that brought on images that it was not trained on."""

    train: Literal["norms", "linear", "all"]  # what was trained
    steps: Count  # that were taken
    best_step: Count  # whose weights these are
    images: Some  # that it was trained on
    source: str  # of them
    batch: Size
    seed: Count
    recipe: str
    labels: bool = False  # True: labels were read
    together: tuple[Name, ...] = ()  # variants that learnt together and share their weights; empty: it learnt alone
    before: Fidelity  # of its file
    after: Fidelity
    seconds: NotNegative
    same_graph: bool  # True: only weights differ from the graph that was timed before


class Variant(Value, frozen=True, kw_only=True):
    """A Plan made real: one file, what it keeps, how fast it is and how well it does."""

    name: Name
    file: Name  # the graph, in the folder
    weights: tuple[Name, ...] = ()  # files that the graph points into; none if it holds all of them itself
    sparsity: Ratio
    heads: tuple[Kept, ...]  # by block; 0: its attention is removed
    neurons: tuple[Kept, ...]  # 0: its MLP is removed
    tokens: tuple[Size, ...] | UnsetType = UNSET  # after each block; unset in older files: as the dense model
    image_size: tuple[Size, Size] | UnsetType = UNSET  # height and width in pixels; unset likewise
    params: Count
    flops: Count  # of one image
    flops_ratio: Ratio
    size_bytes: Count  # of the graph and the weights that it reads, which is all that a device needs
    sha256: str  # of the graph, which names the hashes of its weight files
    engines: tuple[Name, ...] = ()  # files that were built from the graph for one device, and their records
    precision: Precision = "fp32"
    # Least cosine of the outputs to those of the same variant in fp32; an image whose merges rounding decides otherwise
    # is compared with fp32 under the same merges.
    precision_cosine: Finite | None = None
    int8_sum_bits: SumBits | UnsetType = UNSET  # our int8: 16 computes the same on every CPU; unset means 32
    corrected: bool = False
    correction: str | None = None  # which one: refit, elastic, sequential, sparsegpt or mean
    parity: NotNegative | None = (
        None  # largest difference to the torch module in float32, in units of the largest output
    )
    profile: Profile | None = None
    evaluation: Evaluation | None = None  # that is shown: the last one, unless an earlier one knows more
    evaluations: tuple[Evaluation, ...] = ()  # others: of other data, of fewer images, or of fewer measures
    fidelity: Fidelity | None = None  # to the dense model in fp32; None in older files, or without images for it
    dominated_by: Name | None = None  # a variant that is no worse in speed and quality, and better in one of them
    recovered: Recovery | None = None  # None: it was not trained

    def plan_of(self, anatomy: Anatomy) -> Plan:
        """Return the Plan of the variant: the heads, neurons and tokens that it keeps of a model."""
        plan, image = Plan(heads=self.heads, neurons=self.neurons), self.image_of(anatomy)
        if image != anatomy.image:
            plan = plan.with_tokens(grid=(image[0] // anatomy.patch[0], image[1] // anatomy.patch[1]))
        if self.tokens is UNSET:
            return plan
        before = (anatomy.prefix + anatomy.patches_of(plan), *self.tokens)
        return plan.with_tokens([a - b for a, b in pairwise(before)], plan.grid)

    def evaluated(self, new: Evaluation, shown: bool = True) -> Variant:
        """Return the variant with one more evaluation; `shown`: in the place of that before, which stays beside it."""
        known = [each for each in (self.evaluation, *self.evaluations) if each is not None]
        others = [each for each in known if (each.source, each.images) != (new.source, new.images)]
        ordered = [new, *others] if shown or not others else [others[0], new, *others[1:]]
        return msgspec.structs.replace(self, evaluation=ordered[0], evaluations=tuple(ordered[1:]))

    def knows_better(self, new: Evaluation) -> bool:
        """Return True if what is shown is of more images of the same data, and has all measures of the new one."""
        old = self.evaluation
        return (
            old is not None
            and old.source == new.source
            and old.images > new.images
            and set(new.measures) <= set(old.measures)
        )

    def image_of(self, anatomy: Anatomy) -> tuple[int, int]:
        """Return the height and width of the images that the variant takes."""
        return anatomy.image if self.image_size is UNSET else self.image_size


class Measurement(Value, frozen=True, kw_only=True):
    """A candidate that was built and timed on the way to the choice, whether it was kept or not."""

    variant: Name
    sparsity: Ratio
    params: Count
    flops: Count
    size_bytes: Count
    correction: str | None = None
    latency_ms: Positive  # compared with the budget: at the percentile of the limits, corrected for machine drift
    between_ms: tuple[Positive, Positive]
    profile: Profile  # of the last timing run
    evaluation: Evaluation | None
    fits: bool  # in size too, and with its whole interval
    energy_mj: Positive | None = None  # of one run; None: not measured, as in older files
    energy_between_mj: tuple[NotNegative, Positive] | None = None
    verdict: Verdict | None = None  # on the budget and all limits; None in older files
    fidelity: Fidelity | None = None
    precision: Precision | None = None  # None in older files, as what follows: the family's, and that of its model
    tokens: tuple[Size, ...] | UnsetType = UNSET  # after each block, as a Variant has them
    image_size: tuple[Size, Size] | UnsetType = UNSET
    removed: Count | None = None  # attentions and MLPs that it lacks
    levers: tuple[Lever, ...] = ()  # that it uses

    def __post_init__(self) -> None:
        for between in (self.between_ms, self.energy_between_mj):
            if between is not None and not between[0] <= between[1]:
                raise ValueError(f"the interval of {self.variant} ends before it begins")


class Limits(Value, frozen=True, kw_only=True):
    """Limits that a choice meets beside its budget."""

    at: Percentile = "p50"  # of the latency that the budget is compared with
    max_size_bytes: Count | None = None
    max_params: Count | None = None


class Alternative(Value, frozen=True, kw_only=True):
    """The best that one lever alone reaches within the budget."""

    lever: Lever
    variant: Name
    latency_ms: Positive  # those of its Measurement, which has the rest
    between_ms: tuple[Positive, Positive]
    fidelity: Fidelity | None


class DroppedPrecision(Value, frozen=True, kw_only=True):
    """A precision that no candidate was made in, since another is at least as good here."""

    precision: Precision
    ratio: NotNegative  # latency of the dense model in it, relative to fp32
    reason: str  # completes "fp16 is ..."


class Choice(Value, frozen=True, kw_only=True):
    """The most faithful variant that fits, the next better one that does not, and every measurement that led there.

    Where width and depth are the only levers, the most faithful is the densest.
    """

    variant: Name
    budget_ms: Positive | None  # None: energy alone was limited
    budget_mj: Positive | None = None  # energy of one run; None: not limited
    next_denser: Name | None  # the next better one, which did not fit; None: the dense model fits
    decided: bool  # False: the machine was too noisy to tell the two apart, and the sparser one was taken
    doubt: str | None = None  # the reason why it is not decided, and advice
    # False: the answers of the chosen file in its runtime were not compared with those of its graph in ONNX Runtime;
    # None: that runtime is ONNX Runtime on the CPU, or an older file does not say.
    compared: bool | None = None
    limits: Limits = Limits()
    model: LatencyModel | None = None  # proposed what to build, in the chosen precision; it decides nothing
    measurements: tuple[Measurement, ...]
    levers: tuple[Lever, ...] = ()  # that the choice could use; empty in older files: width and depth
    prefer: Prefer | None = None  # what "better" means; None in older files: denser
    alternatives: tuple[Alternative, ...] = ()  # of each single lever that reaches the budget
    dropped: tuple[DroppedPrecision, ...] = ()

    def __post_init__(self) -> None:
        measured = {measurement.variant for measurement in self.measurements}
        if self.budget_ms is None and self.budget_mj is None:
            raise ValueError("a choice has no budget")
        if len(measured) < len(self.measurements):
            raise ValueError("a choice has two measurements of one variant")
        next_better = () if self.next_denser is None else (self.next_denser,)
        for name in (self.variant, *next_better, *(each.variant for each in self.alternatives)):
            if name not in measured:
                raise ValueError(f"{name} is chosen or compared, and not among the measurements")

    @property
    def budget(self) -> str:
        """The budget as the command line takes it: 10ms, 15mJ or 10ms,15mJ."""
        parts = [(self.budget_ms, "ms"), (self.budget_mj, "mJ")]
        return ",".join(f"{value:.4g}{unit}" for value, unit in parts if value is not None)


class Shipped(Value, frozen=True, kw_only=True):
    """The chosen variant as one model that runs alone, without the weights that the family shares."""

    file: Literal["model.onnx", "model.xml"]  # to open; the second is OpenVINO's
    sha256: str
    size_bytes: Count  # of all its files: the bytes to ship
    also: tuple[WeightFile, ...] = ()  # that it reads: none, but for OpenVINO and models above 2 GB
    applications: tuple[Application, ...] = ()  # beside it, for its TensorRT engine; none for other runtimes

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files to ship."""
        return (self.file, *(each.file for each in self.also))


class MeasuredOn(Target, frozen=True, kw_only=True):
    """A Target and the device that it was measured on; in JSON the fields of both lie side by side."""

    device: DeviceCard

    @staticmethod
    def of(target: Target, device: DeviceCard) -> MeasuredOn:
        """Combine a Target with a device."""
        return MeasuredOn(**msgspec.structs.asdict(target), device=device)

    @property
    def target(self) -> Target:
        """The Target alone, as runtimes and timers take it."""
        return Target(**{name: getattr(self, name) for name in Target.__struct_fields__})


class Input(Value, frozen=True, kw_only=True):
    """The input of a family's graphs: normalised pixels, or bytes that they normalise themselves."""

    type: Literal["float32", "uint8"] = "float32"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    batch: Size | None = None  # None: any

    @staticmethod
    def of(format: GraphFormat) -> Input:
        """Return the input of graphs in this format."""
        kind: Literal["float32", "uint8"] = "uint8" if format.takes_bytes else "float32"
        return Input(type=kind, layout="NHWC" if format.takes_bytes else "NCHW", batch=format.batch)


class Manifest(Value, frozen=True, kw_only=True):
    """The description of a family folder."""

    format_version: Literal[1] = 1
    model: str
    anatomy: Anatomy
    preprocessing: Preprocessing
    recipe: dict[str, Any]
    target: MeasuredOn
    variants: tuple[Variant, ...]
    dense: Name
    choice: Choice | None
    weights: tuple[WeightFile, ...] = ()  # all files that graphs point into
    input: Input = Input()
    shipped: Shipped | None = None  # None in older files, or without a choice
    command: str | None = None  # that exported it; None in older files and from Python
    labels: tuple[str, ...] = ()  # names of the classes, in the order of the outputs; empty: not known
    reference: Reference | None = None  # images and answers to compare with elsewhere; None in older files
    seconds: dict[str, NotNegative] = msgspec.field(
        default_factory=dict
    )  # that each stage of the export or choice took, in order

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError("two variants have the same name")
        wanted = [self.dense] + ([self.choice.variant] if self.choice else [])
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(f"no variant is called {missing[0]}")
        if self.preprocessing.input_size[0] != self.anatomy.channels:
            raise ValueError("its images have other channels than its model")
        for variant in self.variants:
            self._check_counts(variant)
        if self.choice and self.choice.model and len(self.choice.model.head_ms) != len(self.anatomy.blocks):
            raise ValueError("its latency model is of another number of blocks")
        if len(self.labels) not in (0, self.anatomy.classes):
            raise ValueError(f"{len(self.labels)} labels do not name {self.anatomy.classes} classes")
        files = {*(v.file for v in self.variants), *(w.file for w in self.weights)}
        if reserved := sorted(files & {*SHIPPED, *APPLICATIONS}):
            raise ValueError(f"{reserved[0]} is the name of what is shipped, not of a variant")
        read = {file for variant in self.variants for file in variant.weights}
        if missing := sorted(read - {weights.file for weights in self.weights}):
            raise ValueError(f"{missing[0]} is read by a variant and not listed")
        if self.reference is not None:
            self._check_reference(self.reference)

    def _check_reference(self, reference: Reference) -> None:
        """Refuse a reference of variants or of images that the family does not have."""
        sizes = {variant.name: variant.image_of(self.anatomy) for variant in self.variants}
        for name in reference.answers:
            if name not in sizes:
                raise ValueError(f"no variant is called {name}, which has reference answers")
            if not reference.has(sizes[name]):
                raise ValueError(f"there are no reference images in the size of {name}")
        taken = {*(v.file for v in self.variants), *(w.file for w in self.weights), *SHIPPED, MANIFEST, RANKING}
        if both := sorted(taken & {each.file for each in reference.files}):
            raise ValueError(f"{both[0]} is both a reference and something else")

    def _check_counts(self, variant: Variant) -> None:
        """Refuse heads, neurons, tokens or an image size that a variant of this model cannot have."""
        plan = variant.plan_of(self.anatomy)
        blocks = len(self.anatomy.blocks) if variant.tokens is UNSET else len(variant.tokens)
        if min(plan.merged) < 0 or blocks != len(self.anatomy.blocks):
            raise ValueError(f"{variant.name} has tokens that are not those after each block")
        if self.anatomy.image_of(plan) != variant.image_of(self.anatomy):
            raise ValueError(f"{variant.name} takes images that are no whole patches")
        try:
            plan.check_fits(self.anatomy)
        except SnapvitError as error:
            raise ValueError(f"{variant.name}: {error}") from error

    def plan(self, variant: Variant) -> Plan:
        """Return the Plan of a variant."""
        return variant.plan_of(self.anatomy)

    def tokens_of(self, variant: Variant) -> tuple[int, ...]:
        """Return a variant's tokens before the first block and after each."""
        lengths = self.anatomy.lengths(self.plan(variant))
        return lengths[0][0], *(after for _, after in lengths)

    def preprocessing_of(self, variant: Variant) -> Preprocessing:
        """Return how a variant's images are prepared: as the model's, in its own size."""
        return self.preprocessing.at(variant.image_of(self.anatomy))

    def target_of(self, variant: Variant) -> Target:
        """Return the target of a variant: the family's, in the variant's own precision."""
        return in_precision(self.target.target, variant.precision)

    def variant(self, name: str) -> Variant:
        """Return the variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)

    def latency(self, name: str, at: Percentile = "p50") -> tuple[float, tuple[float, float]] | None:
        """Return a variant's latency and its interval: as compared with the budget, or as it was timed since.

        Variants that were timed at different moments can only be compared after correction for machine drift, which a
        choice has made.
        """
        profile = self.variant(name).profile
        if profile is None:
            return None
        corrected = self.choice.measurements if self.choice is not None and self.choice.limits.at == at else ()
        for measurement in corrected:
            if measurement.variant == name and measurement.profile == profile:
                return measurement.latency_ms, measurement.between_ms
        ms = profile.at_ms(at)
        return ms, profile.intervals_ms.get(at, (ms, ms))
