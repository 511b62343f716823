"""A request to export: what was asked for, which levers it may use, and what is refused before any work. Light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import profiles
from ..allocation import recipe
from ..allocation.asked import refuse_same
from ..allocation.cut_order import check_ratio
from ..allocation.levers import LEVERS, PUBLISHED, Lever, in_order
from ..allocation.planner import check_fraction, check_sparsity
from ..allocation.recipe import Settings, make_settings
from ..allocation.resolution import Resolution, check_resolution
from ..allocation.tokens import check_tokens
from ..budget import Budget
from ..errors import UsageError
from ..family.folder import own_files
from ..family.manifest import Limits, Prefer
from ..graph.format import GraphFormat, flavour_for
from ..model.ranking import Ranking
from ..runtimes.device import check_threads
from ..runtimes.session import version_of
from ..runtimes.tensorrt.session import BuildOnly
from ..storage.atomic import refuse_foreign, settle
from ..target import ON_CPU, Precision, Target, parse_precision
from .inputs import BUNDLED_MODEL, is_onnx, refuse_device, refuse_foreign_checkpoint, refuse_own_folder
from .onnx_model import OnnxOptions, refuse_without_onnx


@dataclass(frozen=True)
class Request:
    """A model to export to a budget, to explicit plans, or to both.

    Every sparsity, FLOPs, parameters and pair is a variant, with all tokens; or, if tokens or resolutions are given,
    one for each of their combinations, which then meets all of them.

    >>> manifest = export(Request("my-vit", data="path/to/images", budget="10ms"))
    >>> manifest = export(Request("my-vit", data="path/to/images", tokens=[0.5], flops=[0.4]))     # one variant
    """

    model: str = BUNDLED_MODEL
    checkpoint: Path | None = None
    model_arguments: Mapping[str, Any] | None = None  # for timm, beside a timm name
    onnx: OnnxOptions = field(default_factory=OnnxOptions)  # what an ONNX file does not say itself
    data: str | Sequence[str] | None = None  # None: the bundled digits, for the bundled model
    out: Path = Path("snapvit-family")
    budget: str | None = None
    sparsity: Sequence[float] = ()
    flops: Sequence[float] = ()
    params: Sequence[float] = ()
    pairs: Sequence[tuple[float, float]] = ()
    tokens: Sequence[float] = ()  # fractions of the patch tokens that are left at the end
    resolution: Sequence[Resolution] = ()  # pixels of a square input, or height and width
    target: Target = field(default_factory=lambda: profiles.load("cpu").target)
    settings: Settings = field(default_factory=lambda: make_settings(recipe.DEFAULT))
    levers: Sequence[Lever] | None = None  # that a budget or a FLOPs target may use; None: `default_levers`
    mixes_precisions: bool = True  # False: all variants compute in the target's precision
    prefer: Prefer = "fidelity"  # of the variants that fit: the most faithful, or the most accurate
    strict: bool = False  # True: what may fit but does not surely is refused
    depth: bool | None = None  # True: sub-layers are removable; None: as the settings or the given ranking have it
    ranking: Path | None = None  # made before; None: ranked anew
    flavour: str | None = None  # of the graphs: ort, tensorrt or portable; None: what suits the target's runtime
    single_file: bool = False  # True: every graph holds its own weights
    static_batch: bool = False  # True: graphs take exactly the target's batch
    takes_bytes: bool = False  # True: graphs take (B, H, W, 3) bytes and normalise them
    limits: Limits = field(default_factory=Limits)  # beside the budget
    width_multiple: int = 1  # of the neurons that an MLP keeps
    card_precisions: tuple[Precision, ...] = ()  # that a choice may try; none: those of the runtime
    least_heads: int = 1  # that an attention keeps, unless it is removed
    clock: str | None = None  # advice on the clocks of the device before timing; only shown
    command: str | None = None  # that asks for this, kept in the manifest
    build_only: bool = False  # True: build engines for a GPU that is not here, and time nothing
    save_torch: bool = False  # True: the chosen variant, or without a budget every one, is written for torch too
    elsewhere: bool = False  # True: for a device that is not here, which times and chooses itself; nothing is timed
    device: str = "cpu"  # where torch ranks and takes statistics
    reference: bool | None = None  # if some of the images go into the folder; None: where answers are compared later

    def __post_init__(self) -> None:
        depth = self.depth
        if depth is None and self.levers is not None:
            depth = "depth" in self.levers
        if depth is not None:  # one answer for ranking, checks and Plans
            object.__setattr__(self, "settings", replace(self.settings, depth=depth))

    @property
    def used_levers(self) -> tuple[Lever, ...]:
        """The levers that this export may use: those that were named, or the default ones.

        A budget may use all; but recipes other than the default one are published methods, which cut width (and depth)
        alone, and so do all other targets.
        """
        without = set() if self.mixes_precisions else {"precision"}
        if self.levers is not None:
            return in_order(list(set(self.levers) - without))
        may_be_all = (self.budget is not None or not self.is_timed) and self.settings.recipe == recipe.DEFAULT
        found = set(LEVERS if may_be_all else PUBLISHED)
        found -= set() if self.settings.depth else {"depth"}
        return in_order(list(found - without))

    @property
    def is_timed(self) -> bool:
        """False for a device that is not here."""
        return not (self.build_only or self.elsewhere)

    @property
    def runs_target(self) -> bool:
        """True if files can be run in the target's runtime, if only to compare their outputs."""
        return self.is_timed or (self.elsewhere and self.target.runtime in ON_CPU)

    @property
    def writes_reference(self) -> bool:
        """True if images and the answers to them go into the folder: ONNX Runtime on the CPU gives these itself."""
        if self.reference is not None:
            return self.reference
        return self.target.runtime != "onnxruntime" or not self.is_timed

    @property
    def format(self) -> GraphFormat:
        """The format that graphs are written in."""
        return GraphFormat(
            flavour=flavour_for(self.target.runtime, self.flavour),
            batch=self.target.batch if self.static_batch else None,
            takes_bytes=self.takes_bytes,
            single_file=self.single_file,
        )

    @property
    def races(self) -> bool:
        """True if candidates of several levers are compared on images."""
        return bool({"precision", "tokens"} & set(self.used_levers))

    @property
    def asks_for_plans(self) -> bool:
        """True if sizes are named, beside a budget or without one."""
        return bool(self.sparsity or self.flops or self.params or self.pairs or self.tokens or self.resolution)

    @property
    def wants_spread(self) -> bool:
        """True if a device that is not here is to choose among sizes that nobody has named."""
        return not self.is_timed and not self.asks_for_plans

    @property
    def merges(self) -> bool:
        """True if some variant may merge tokens."""
        return "tokens" in self.used_levers or any(fraction < 1 for fraction in self.tokens)


def check(request: Request, budget: Budget | None) -> Ranking | None:
    """Refuse what can be refused before any work; return the ranking that was given, if one was."""
    if not is_onnx(request.model):
        refuse_without_onnx(request.onnx, request.model)
    else:
        refuse_device(request.device, request.model)
        if request.save_torch:
            raise UsageError(f"--save-torch writes modules of torch, and {request.model} has none. Leave it out")
    if request.levers is not None and request.depth not in (None, "depth" in request.levers):
        raise UsageError("--levers and --depth or --no-depth contradict each other. Name depth in --levers, or not")
    ranked_anew = request.ranking is None and request.settings.depth
    if ranked_anew and request.settings.allocation in ("mixed", "uniform", "summed"):
        raise UsageError(f"--recipe {request.settings.recipe} removes no sub-layers. Leave depth out of --levers")
    if request.flops and budget is None and request.levers is not None and set(request.levers) == {"precision"}:
        raise UsageError("precision does not change FLOPs. Name other --levers too, or give --budget 10ms")
    if budget is None and request.is_timed and not request.asks_for_plans:
        raise UsageError(
            "nothing to export: give --budget 10ms, --sparsity 0.1,0.3, --flops 0.72, --tokens 0.5 or --pair 0.35:0.2"
        )
    flavour = flavour_for(request.target.runtime, request.flavour)
    if request.target.precision == "fp8" and flavour != "tensorrt":
        raise UsageError(f"fp8 is written for TensorRT alone, not in the flavour {flavour}. Leave --flavour out")
    parse_precision(request.target.precision, request.target.runtime)
    _check_runtime(request, budget)
    for fraction in request.sparsity:
        check_sparsity(fraction)
    for what, fractions in (("FLOPs", request.flops), ("parameter", request.params)):
        for fraction in fractions:
            check_fraction(what, fraction)
    for mlp, head in request.pairs:
        check_ratio("neurons", mlp)
        check_ratio("heads", head)
    for fraction in request.tokens:
        check_tokens(fraction)
    for size in request.resolution:
        check_resolution(size)
    _refuse_same(request)
    refuse_own_folder(request.out)
    settle(request.out)
    if request.ranking is None and not is_onnx(request.model):
        refuse_foreign_checkpoint(request.out)
    refuse_foreign(request.out, own_files(request.out))
    return None if request.ranking is None else Ranking.load(request.ranking)


def _refuse_same(request: Request) -> None:
    """Refuse targets that would get one name."""
    asked: dict[str, Sequence[float | tuple[float, float] | tuple[int, int]]] = {
        "--sparsity": request.sparsity,
        "--flops": request.flops,
        "--params": request.params,
        "--pair": request.pairs,
        "--tokens": request.tokens,
        "--resolution": request.resolution,
    }
    for option, targets in asked.items():
        refuse_same(option, targets)


def _check_runtime(request: Request, budget: Budget | None) -> None:
    """Refuse a runtime that cannot run here, and an engine that is neither run nor asked for."""
    runtime = request.target.runtime
    if runtime == "openvino" and request.target.precision != "fp32" and (request.single_file or request.flavour):
        raise UsageError("int8 for OpenVINO is written in its own format: leave --single-file and --flavour out")
    if budget is not None and budget.energy_mj is not None:
        raise UsageError(
            "export cuts to a latency, and energy is compared among variants that exist. Export some, such as --flops "
            f"0.8,0.6,0.4, and then: snapvit choose FAMILY --budget {budget}"
        )
    if budget is not None and not request.is_timed:
        raise UsageError(
            "a budget is met by timing, which only the device can do. Leave --budget out: a spread of variants is "
            "built, and the device chooses among them"
        )
    if not request.build_only:
        if request.is_timed:
            check_threads(request.target.threads)
        if request.runs_target:
            version_of(runtime)
        return
    if runtime != "tensorrt":
        raise UsageError(f"--build-only builds TensorRT engines, not for {runtime}. Give --runtime tensorrt too")
    BuildOnly.here()
