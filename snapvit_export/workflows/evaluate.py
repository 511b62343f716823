"""`snapvit evaluate`: measures one model on a dataset, in torch or as an exported file.

Importing this is light; torch is loaded when a model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..allocation.planner import check_fraction, check_sparsity
from ..calibration.dataset import Dataset, open_dataset
from ..calibration.digits import BUNDLED as BUNDLED_IMAGES
from ..calibration.images import prepare
from ..errors import UsageError, needs
from ..evaluate.evaluator import EvalOptions, Evaluator, Extractor, check_options, splits_for
from ..evaluate.exported_model import SUFFIXES, is_ours, open_exported, read_info
from ..evaluate.features import Features, is_features
from ..family.evaluation import Evaluation
from ..family.folder import parts_beside
from ..graph.format import GraphFormat
from ..graph.writer import GraphWriter
from ..model.plan import Plan
from ..model.ranking import Ranking
from ..progress import Progress, Silent
from ..storage.places import check_output
from ..storage.temporary import scratch_folder
from ..target import Runtime, Target
from .evaluate_features import evaluate_features, is_feature_file, is_released, save_released
from .inputs import BUNDLED_MODEL, is_onnx, load_model_of, refuse_device
from .onnx_model import GATE_IMAGES, OnnxOptions, load_onnx, refuse_without_onnx, require_same


@dataclass(frozen=True)
class EvaluateRequest:
    """A model to evaluate, pruned or not, and the options.

    >>> evaluate_model(EvaluateRequest("my-vit", data="path/to/pets", options=EvalOptions(by=["knn"])))
    """

    model: str = BUNDLED_MODEL
    checkpoint: Path | None = None
    data: str | None = None  # None: the bundled digits, for the bundled model
    ranking: Path | None = None  # prune along it, to a sparsity or to FLOPs
    sparsity: float | None = None
    flops: float | None = None
    options: EvalOptions = field(default_factory=EvalOptions)
    runtime: Runtime | None = None  # of an exported file
    force: bool = False  # keep features in a file of something else, which is lost
    onnx: OnnxOptions = field(default_factory=OnnxOptions)  # what an ONNX file of another tool does not say itself
    model_arguments: Mapping[str, Any] | None = None  # for timm, beside a timm name
    device: str = "cpu"  # where a model of torch computes


def evaluate_model(request: EvaluateRequest, progress: Progress | None = None) -> Evaluation:
    """Load a model, prune it if asked to, and evaluate it."""
    progress = progress or Silent()
    ranking = _check(request)
    if is_feature_file(request.model):
        return evaluate_features(Path(request.model), request.options, progress)
    is_file = _is_file(request.model)
    if is_file:
        refuse_device(request.device, request.model)
    else:
        with needs("evaluating a model", extra="prune"):
            from ..prune.models.load import check_device
        check_device(request.device)
    progress.phase("finding images")
    data = open_dataset(
        data_of_evaluation(request.model, request.data), request.options.seed, splits_for(request.options.by)
    )
    with (
        _exported(request, data, progress)
        if is_file
        else nullcontext(_in_torch(request, ranking, progress)) as extractor
    ):
        options = request.options
        if is_released(options.features):
            options = replace(options, features=None)
        evaluator = Evaluator.prepare(extractor, data, options, progress)
        if is_released(request.options.features) and not {"knn", "linear"} & set(evaluator.metrics):
            raise UsageError("a .pt file of --features has training images, and none are run here. Give --by knn too")
        return replace(evaluator, on_features=_keeper(request.options)).evaluate(extractor, progress)


def _keeper(options: EvalOptions) -> Callable[[Features], None]:
    """Return what writes features for the released SnapViT code, if that was asked for; ours the evaluator keeps."""
    path = options.features
    if path is None or not is_released(path):
        return lambda features: None
    return lambda features: save_released(features, path, options.seed)


def _check(request: EvaluateRequest) -> Ranking | None:
    """Refuse what can be refused before any work; return the ranking that was given, if one was."""
    options = request.options
    if is_feature_file(request.model):
        _refuse_model_options(request)
    if not is_onnx(request.model):
        refuse_without_onnx(request.onnx, request.model)
    if request.runtime is not None and not _is_file(request.model):
        raise UsageError("--runtime runs exported files, and models run in torch. Leave it out, or give a .onnx file")
    check_options(options)
    if options.features is not None:
        read = [
            request.checkpoint,
            request.ranking,
            options.classes,
            Path(request.model),
            *parts_beside(options.features),
        ]
        check_output(options.features, "a file of features", is_features, read, request.force, "--features")
    elif request.force:
        raise UsageError("--force lets --features write over another file. Leave it out, or give --features FILE")
    sizes = [size for size in (request.sparsity, request.flops) if size is not None]
    if request.ranking is None and sizes:
        raise UsageError("--sparsity and --flops cut along a ranking. Give --ranking FILE, made by snapvit rank")
    if request.ranking is not None and len(sizes) != 1:
        raise UsageError(
            "--ranking tells in which order to cut, not how far. Give either --sparsity 0.3 or --flops 0.6"
        )
    if request.sparsity is not None:
        check_sparsity(request.sparsity)
    if request.flops is not None:
        check_fraction("FLOPs", request.flops)
    return None if request.ranking is None else Ranking.load(request.ranking)


def _refuse_model_options(request: EvaluateRequest) -> None:
    """Refuse what is about a model or images beside a file of features."""
    given = {
        "--data": request.data,
        "--checkpoint": request.checkpoint,
        "--model-arg, --pool or --image-size": request.model_arguments,
        "--device": None if request.device == "cpu" else request.device,
        "--ranking": request.ranking,
        "--sparsity": request.sparsity,
        "--flops": request.flops,
        "--runtime": request.runtime,
    }
    if idle := [name for name, value in given.items() if value]:
        raise UsageError(f"{request.model} holds features: no model is run and no image read. Leave {idle[0]} out")


def _is_file(model: str) -> bool:
    """Return True if a model is named by a graph that a runtime opens."""
    return Path(model).suffix.lower() in SUFFIXES


def data_of_evaluation(model: str, data: str | None) -> str:
    """Return the data that a model is evaluated on: the bundled digits by default, for the bundled model."""
    if data is None and model != BUNDLED_MODEL:
        raise UsageError(f"{model} needs images to be evaluated on. Give --data FOLDER")
    return BUNDLED_IMAGES if data is None else data


@contextmanager
def _exported(request: EvaluateRequest, data: Dataset, progress: Progress) -> Iterator[Extractor]:
    """Open a file of a family in the requested runtime."""
    if request.ranking is not None or request.checkpoint is not None or request.model_arguments:
        given = "--ranking, --checkpoint, --model-arg, --pool and --image-size"
        raise UsageError(f"{request.model} is cut and has its weights. Leave {given} out")
    path = Path(request.model)
    with scratch_folder() as folder:
        if is_onnx(request.model) and path.is_file() and not is_ours(path):
            path = _made_ours(path, request.onnx, folder, data, progress)
        else:
            refuse_without_onnx(request.onnx, request.model)
        info, precision = read_info(path)
        default: Runtime = "openvino" if path.suffix.lower() == ".xml" else "onnxruntime"
        target = Target(runtime=request.runtime or default, precision=precision, batch=1, threads=1)
        with open_exported(path, target, info) as exported:
            yield exported


def _made_ours(path: Path, options: OnnxOptions, folder: Path, data: Dataset, progress: Progress) -> Path:
    """Write the graph of another tool as ours, which tells how its images are prepared and has its embedding."""
    file = load_onnx(str(path), options, progress)
    model, few = file.blueprint, data.test.subset(range(min(GATE_IMAGES, data.test.count)))
    require_same(file, prepare(few, model.preprocessing), progress)
    return GraphWriter(model, folder).write(path.stem, Plan.dense(model.anatomy), format=GraphFormat("ort")).graph


def _in_torch(request: EvaluateRequest, ranking: Ranking | None, progress: Progress) -> Extractor:
    from ..allocation.planner import Planner
    from ..prune.models.extractor import TorchExtractor, cut_extractor
    from ..prune.models.load import check_same_weights
    from ..prune.models.slicing import shrink

    model = load_model_of(request, progress)
    if ranking is None:
        return TorchExtractor(model, request.device)
    check_same_weights(ranking, model, f"{request.ranking}: ")
    planner = Planner(ranking, model.anatomy, ranking.protection)
    plan = planner.flops(request.flops) if request.flops is not None else planner.sparsity(request.sparsity or 0.0)
    return cut_extractor(shrink(model.module, ranking, plan), model, request.device)
