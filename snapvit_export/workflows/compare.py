"""`snapvit compare`: prunes a model by several methods, evaluates all, and writes a table and a chart.

Importing this is light; torch is loaded when the work begins. All methods calibrate on the same images and are
evaluated on the same others: a dataset of its own (`on`), or the images that calibration left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..allocation.method import Method
from ..allocation.planner import check_fraction, check_reach, check_sparsity
from ..allocation.recipe import ADDS_BIASES, Settings, protection_of
from ..calibration.dataset import Dataset, open_dataset
from ..calibration.images import Images, calibration_and_held_out, read_images
from ..errors import SnapvitError, UsageError, needs
from ..evaluate.comparison import COMPARISON, Axis, Comparison
from ..evaluate.evaluator import EvalOptions, Evaluator, check_options, fidelity_to, splits_for
from ..evaluate.options import refuse_token_metrics
from ..family.evaluation import Evaluation
from ..progress import Progress
from ..storage.atomic import write_atomically
from ..storage.json import as_builtins
from ..storage.places import check_output, is_json_of
from .inputs import BUNDLED_MODEL, MOST_HELD_OUT, data_of, is_onnx, load_model_of, settings_for

if TYPE_CHECKING:
    from torch import nn

METHODS = ("default", "snapvit", "snip", "lamp", "magnitude", "random")
DRAWN = ("compare.svg", "compare.png", "compare.md")  # beside the numbers
SIZES: dict[Axis, tuple[float, ...]] = {"sparsity": (0.1, 0.2, 0.3, 0.4, 0.5), "flops": (0.9, 0.8, 0.7, 0.6, 0.5)}


@dataclass(frozen=True)
class CompareRequest:
    """Methods, a model, sizes, and images to compare them on."""

    model: str = BUNDLED_MODEL
    checkpoint: Path | None = None
    data: str | Sequence[str] | None = None  # to calibrate on
    on: str | None = None  # a dataset to evaluate on; None: the images that calibration left
    recipes: Sequence[str] = METHODS  # as `Method.parse` reads them
    axis: Axis = "sparsity"
    sizes: Sequence[float] = ()
    out: Path = Path("snapvit-comparison")
    images: int = 256
    seed: int = 0
    evaluations: int | None = None  # of recipes that search
    options: EvalOptions = field(default_factory=EvalOptions)
    force: bool = False  # begin anew, over whatever is there
    model_arguments: Mapping[str, Any] | None = None  # for timm, beside a timm name
    device: str = "cpu"  # where torch ranks and evaluates


def run_comparison(request: CompareRequest, progress: Progress) -> Comparison:
    """Compare, and write the table, the chart and the numbers."""
    asked = [Method.parse(text) for text in request.recipes]
    sizes = _check(request, asked)
    from ..report.draw import check_there

    check_there()
    with needs("comparing methods", extra="prune"):
        import torch  # noqa: F401
    from ..prune.compare import compare, method, ordered, same_images
    from ..prune.models.extractor import TorchExtractor, cut_extractor
    from ..prune.rank.distributed import alone

    processes = alone(request.device)
    methods = {str(m): same_images(method(m), m, request.images, request.seed) for m in asked}
    if request.evaluations is not None:
        searching = {str(m): methods[str(m)] for m in asked if "evaluations" not in m.options}
        if not any(settings.evaluations for settings in searching.values()):
            raise UsageError("--evaluations are those of a search, and none of --recipes searches. Leave it out")
        methods |= {name: _searching(settings, request.evaluations) for name, settings in searching.items()}
    _refuse_same(asked, methods)
    _check_place(request)
    progress.phase("finding images")
    calibration, rest = calibration_and_held_out(data_of(request), request.images, request.seed, MOST_HELD_OUT)
    if request.on is None and not rest.count:
        raise SnapvitError(f"{rest.name}: no images are left to evaluate on. Give fewer --images, or --on another set")
    if request.on is None:
        data = Dataset(rest.name, None, None, rest)
    else:
        data = open_dataset(request.on, request.seed, splits_for(request.options.by))
    model = load_model_of(request, progress)
    methods = {name: settings_for(settings, model, progress) for name, settings in methods.items()}
    for settings in methods.values():
        check_reach(
            model.anatomy,
            protection_of(settings),
            sparsity=sizes if request.axis == "sparsity" else (),
            flops=sizes if request.axis == "flops" else (),
            corrected=settings.correction in ADDS_BIASES,
        )
    images = read_images([calibration], model.preprocessing, progress)[0]
    own = _own_images(asked, request, images, progress)
    dense = TorchExtractor(model, request.device)
    evaluator = Evaluator.prepare(dense, data, request.options, progress, label_free=True, streamed=False)
    dense_features = evaluator.features(dense, progress)

    def evaluate(module: nn.Module) -> Evaluation:
        extractor = cut_extractor(module, model, request.device)
        features = evaluator.features(extractor, progress)
        return evaluator.evaluation(evaluator.measures(features, progress) | fidelity_to(features, dense_features))

    start = Comparison(
        model=model.name,
        weights_sha256=model.weights_sha256,
        calibration=images.fingerprint,
        judged_on={name: part.fingerprint for name, part in evaluator.images.items()},
        settings={name: _described(settings, own.get(name)) for name, settings in methods.items()},
        axis=request.axis,
        dense=evaluator.evaluation(
            evaluator.measures(dense_features, progress) | fidelity_to(dense_features, dense_features)
        ),
    )
    begun = start if request.force else _continued(start, request.out)
    of_each = {name: own.get(name, images) for name in methods}
    found = compare(model, of_each, methods, sizes, evaluate, begun, request.out, progress, processes)
    wanted = ordered(found, list(methods), sizes)  # the file keeps the results of earlier runs besides
    _write(wanted, request.out)
    return wanted


def _own_images(
    asked: Sequence[Method], request: CompareRequest, shared: Images, progress: Progress
) -> dict[str, Images]:
    """Return the images of methods that calibrate on others than the rest, as many and by the same seed."""
    read: dict[tuple[str, ...], Images] = {}
    for sources in dict.fromkeys(m.data for m in asked if m.data):
        source, _ = calibration_and_held_out(sources, request.images, request.seed, most_held_out=0)
        read[sources] = read_images([source], shared.preprocessing, progress)[0]
    return {str(m): read[m.data] for m in asked if m.data}


def _refuse_same(asked: Sequence[Method], methods: Mapping[str, Settings]) -> None:
    """Refuse a method whose options change nothing beside another: it would be worked out twice."""
    for i, one in enumerate(asked):
        for other in asked[:i]:
            has_options = one.options or other.options
            if has_options and one.data == other.data and methods[str(one)] == methods[str(other)]:
                raise UsageError(f"--recipes: {one} is the same as {other}. Name one of them")


def _check(request: CompareRequest, asked: Sequence[Method]) -> tuple[float, ...]:
    if is_onnx(request.model):
        raise UsageError(
            f"{request.model}: compare needs gradients and refits, and those torch, which runs no ONNX file. Give "
            f"--model the model that it was made from"
        )
    sizes = tuple(request.sizes) or SIZES[request.axis]
    for size in sizes:
        check_sparsity(size) if request.axis == "sparsity" else check_fraction("FLOPs", size)
    if not request.recipes:
        raise UsageError("nothing to compare. Give --recipes default,magnitude")
    check_options(request.options)
    names = [str(method) for method in asked]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--recipes names {twice[0]} twice. Name each once")
    if request.on is None and (others := [method for method in asked if method.data]):
        raise UsageError(
            f"{others[0]}: calibrates on images of its own, which may be among those that --data leaves to evaluate "
            "on. Give --on another set"
        )
    refuse_token_metrics(request.options, "{} evaluates one model at a time: see snapvit evaluate")
    if request.out.exists() and not request.out.is_dir():
        raise SnapvitError(f"{request.out}: exists and is not a folder. Choose another --out")
    return sizes


def _check_place(request: CompareRequest) -> None:
    """Refuse, before any work, a folder whose files of these names are not of a comparison."""
    parts = [request.checkpoint, request.options.classes]
    is_ours = is_json_of(Comparison)
    check_output(request.out / COMPARISON, "a comparison", is_ours, parts, request.force)
    has_numbers = (request.out / COMPARISON).is_file()
    for name in DRAWN:
        check_output(request.out / name, "of a comparison", lambda _: has_numbers, parts, request.force)


def _described(settings: Settings, own: Images | None = None) -> dict[str, Any]:
    """The settings of a method as the file has them: by value, since the method's own name is the key."""
    found = {key: value for key, value in as_builtins(settings).items() if key not in ("recipe", "given")}
    return found if own is None else {**found, "calibration": own.fingerprint}


def _searching(settings: Settings, evaluations: int) -> Settings:
    return (
        replace(settings, evaluations=evaluations, given=settings.given | {"evaluations"})
        if settings.evaluations
        else settings
    )


def _continued(start: Comparison, folder: Path) -> Comparison:
    """Add the results of an earlier run with the same inputs, of methods whose settings are the same too."""
    before = Comparison.load(folder)
    if before is None:
        return start
    if not start.continues(before):
        raise SnapvitError(
            f"{folder / COMPARISON}: of another model, images or axis. Choose another --out, or give --force"
        )
    usual = _described(Settings())  # of settings that an older version did not have
    known = {name: {**usual, **each} for name, each in before.settings.items()}
    settings = {**known, **start.settings}
    wanted = set(start.dense.measures)  # an older version took fewer
    same = [
        c for c in before.contestants if settings[c.recipe] == known[c.recipe] and wanted <= set(c.evaluation.measures)
    ]
    return msgspec.structs.replace(start, contestants=tuple(same), settings=settings)


def _write(found: Comparison, folder: Path) -> None:
    from ..report.charts.methods import methods
    from ..report.draw import png, svg
    from ..report.markdown import comparison_markdown

    chart = methods(found)
    contents = (svg(chart), png(chart), comparison_markdown(found).encode())
    for name, content in zip(DRAWN, contents):
        write_atomically(folder / name, content)
