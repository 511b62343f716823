"""Load a model by timm name (hub or local checkpoint), from a folder of ours or of `transformers`, or the bundled one.

A model folder holds `model.json` (how to build the module, its preprocessing, and the Plan if it is pruned) and
`model.safetensors`. `checkpoints` finds weights in what training scripts save; `timm_modules` makes the modules.

`check_device` and `check_same_weights` refuse a missing device and a ranking of other weights before any work begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...calibration.preprocessing import Preprocessing
from ...errors import FileFormatError, SnapvitError, UsageError
from ...model.anatomy import Anatomy
from ...model.plan import Plan
from ...model.ranking import Ranking
from ...storage.atomic import settle, staged_folder, write_atomically
from ...storage.json import Value, read_json, write_json
from ...storage.places import is_json_of
from ..blocks.pruned_block import removed_parts
from ..blocks.timm_blocks import PARTS, as_module, blocks_of, give_bias, output_of
from .checkpoints import Notes, bare_names, check_fits, fill, read_checkpoint, read_weights
from .read_anatomy import find_vit, read_anatomy
from .slicing import shrink
from .timm_modules import check_known, converted, create, from_hub, pooled, preprocessing_of, shape_in
from .transformers_folder import Files, read_transformers
from .weight_files import read_tensors

BUNDLED = "bundled"
MODEL_FILES = ("model.json", "model.safetensors")


class ModelDescription(Value, frozen=True, kw_only=True):
    """The content of `model.json`: how to build the module that the weights of a model folder belong to."""

    format_version: Literal[1] = 1
    name: str
    architecture: str  # a timm name
    kwargs: dict[str, Any]
    preprocessing: Preprocessing
    labels: tuple[str, ...] = ()
    plan: Plan | None = None  # None: dense


@dataclass(frozen=True)
class Model:
    """A module ready to use (eval mode, float32), and everything that is known about it."""

    module: nn.Module
    anatomy: Anatomy
    description: ModelDescription
    notes: Notes = ()  # not kept in its files
    _hashed: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def preprocessing(self) -> Preprocessing:
        return self.description.preprocessing

    @property
    def weights_sha256(self) -> str:
        """The hash of the weights, computed once, and again after training or loading changed them in place."""
        tensors = self.module.state_dict().values()
        state = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
        if self._hashed.get("state") != state:
            self._hashed.update(state=state, sha256=weights_fingerprint(self.module))
        return str(self._hashed["sha256"])


def load_model(
    name: str = BUNDLED, checkpoint: Path | str | None = None, arguments: Mapping[str, Any] | None = None
) -> Model:
    """Load `name`: "bundled", a folder of ours or of `transformers`, a hub id, or a timm name with weights from a file
    or the hub.

    `arguments`: for timm's create_model, beside a timm name: those that shape a module, such as {"img_size": 384}.

    >>> model = load_model("deit_tiny_patch16_224", checkpoint="deit_tiny.safetensors")
    """
    folder = Path(name)
    is_ours = name == BUNDLED or (folder / "model.json").is_file()
    files = None if is_ours else Files.of(name)
    if is_ours or files is not None:
        if checkpoint is not None:
            raise UsageError(f"--checkpoint does not go with {name}, which has its own weights")
        if arguments:
            raise UsageError(
                f"--model-arg, --pool and --image-size do not go with {name}, which says itself how it is built"
            )
    if files is not None:
        return _load_foreign(files)
    if is_ours:
        return _load_folder(Path(str(resources.files("snapvit_export.bundled"))) if name == BUNDLED else folder)
    if folder.exists():
        raise SnapvitError(
            f"{name}: not a model folder (neither model.json nor config.json in it). Give a timm name, a folder of "
            f"ours or one of transformers"
        )
    return _load_timm(name, Path(checkpoint) if checkpoint is not None else None, dict(arguments or {}))


def as_model(model: Model | nn.Module, path: str | None = None) -> Model:
    """Return a timm module as `load_model` would, named by its architecture; a loaded model as it is.

    A module that contains one ViT gives that one; `path` names it, as in `named_modules`, where there are several.

    >>> import timm
    >>> model = as_model(timm.create_model("deit_tiny_patch16_224"))
    """
    if isinstance(model, Model):
        return model
    model = find_vit(model, path)
    config = getattr(model, "pretrained_cfg", None) or {}
    name = str(config.get("architecture") or type(model).__name__)
    anatomy = read_anatomy(model, name)
    _check_ready(model, name)
    described = ModelDescription(
        name=name, architecture=name, kwargs=_shape_arguments(anatomy), preprocessing=preprocessing_of(model, anatomy)
    )
    return Model(model, anatomy, described)


def _check_ready(module: nn.Module, name: str) -> None:
    """Refuse a module that `load_model` would never return, rather than change the caller's module."""
    for tensor in module.parameters():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise SnapvitError(f"{name}: its weights are {dtype} on {tensor.device}. Give module.float().cpu()")
    for part in module.modules():
        if part.training and any(getattr(part, rate, None) for rate in ("p", "drop_prob")):
            raise SnapvitError(f"{name}: is being trained, and {type(part).__name__} drops at random. Call .eval()")


def _shape_arguments(anatomy: Anatomy) -> dict[str, Any]:
    """Return the arguments with which timm builds the dense module, also if heads of this one were removed."""
    return dict(
        img_size=list(anatomy.image),
        patch_size=list(anatomy.patch),
        embed_dim=anatomy.embed_dim,
        depth=len(anatomy.blocks),
        num_heads=anatomy.embed_dim // anatomy.blocks[0].head_dim,
        num_classes=anatomy.classes,
        global_pool=anatomy.pooling,
    )


def save_model(model: Model | nn.Module, description: ModelDescription, folder: Path | str) -> None:
    """Write a model, dense or pruned, so that `load_model(folder)` gives it back.

    >>> small = shrink(model, ranking, plan)     # `model` is loaded or a timm module
    >>> save_model(small, as_model(model).description, "small")
    """
    from safetensors.torch import save

    module = as_module(model)
    anatomy = read_anatomy(module, description.name)
    state = {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    whole = _build(description).anatomy
    plan = Plan.dense(anatomy).with_tokens(anatomy.merges, None if anatomy.image == whole.image else anatomy.grid)
    if not _is_cut_from(anatomy, whole, plan):
        raise SnapvitError(f"{description.name}: {description.architecture} with {description.kwargs} is another model")
    described = ModelDescription(
        name=description.name,
        architecture=description.architecture,
        kwargs=description.kwargs,
        preprocessing=description.preprocessing.at(anatomy.image),
        labels=description.labels,
        plan=None if plan == Plan.dense(whole) else plan,
    )
    settle(Path(folder))
    is_ours = is_json_of(ModelDescription)(Path(folder) / "model.json")
    with staged_folder(Path(folder), replaceable=MODEL_FILES if is_ours else None) as stage:
        write_atomically(stage / "model.safetensors", save(state))
        write_json(stage / "model.json", described)


def _is_cut_from(anatomy: Anatomy, whole: Anatomy, plan: Plan) -> bool:
    """Return True if the Plan cuts one from the other: otherwise the folder could never be loaded."""
    try:
        plan.check_fits(whole)
    except SnapvitError:
        return False
    cut = whole.with_counts(plan)
    return cut.same_structures(anatomy) and cut.image == anatomy.image


def _load_folder(folder: Path) -> Model:
    description = read_json(folder / "model.json", ModelDescription)
    built = _build(description)
    _check_description(folder / "model.json", description, built.anatomy)
    path = folder / "model.safetensors"
    module = with_weights(built.module, description.plan, read_weights(path), path)
    return Model(module, read_anatomy(module, description.name), description)


def with_weights(whole: nn.Module, plan: Plan | None, weights: Mapping[str, Tensor], path: Path) -> nn.Module:
    """Return the module of a Plan with these weights; `whole` gives the shapes, or the module itself without a Plan."""
    module = whole if plan is None else shrink(whole, Ranking.flat(read_anatomy(whole, str(path))), plan)
    _give_biases(module, weights)
    fill(module, weights, path)
    return module


def _check_description(path: Path, description: ModelDescription, whole: Anatomy) -> None:
    """Refuse counts that the model does not have, and images of another size than it takes."""
    try:
        if description.plan is not None:
            description.plan.check_fits(whole)
    except SnapvitError as error:
        raise FileFormatError(f"{path}: {error}") from error
    wanted = (whole.channels, *whole.image_of(description.plan))
    if description.preprocessing.input_size != wanted:
        sizes = (" x ".join(map(str, size)) for size in (description.preprocessing.input_size, wanted))
        raise FileFormatError("{}: its images are {}, and the model takes {}".format(path, *sizes))


def _give_biases(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Add what the file has besides the architecture's own tensors.

    Correction gives proj and fc2 a bias where there is none, and a removed part may leave a vector behind.
    """
    for i, block in enumerate(blocks_of(module)):
        for name, part in zip(("attn.proj", "mlp.fc2"), PARTS):
            linear = output_of(block, part)
            if linear is not None and f"blocks.{i}.{name}.bias" in weights:
                give_bias(linear)
        for part in removed_parts(block):
            left = weights.get(f"blocks.{i}.{part}_added")
            setattr(block, f"{part}_added", None if left is None else torch.zeros_like(left))


def _build(description: ModelDescription) -> Model:
    module = create(description.architecture, description.name, **description.kwargs)
    try:
        return Model(module, read_anatomy(module, description.name), description)
    except ValueError as error:  # an Anatomy checks itself
        raise FileFormatError(f"{description.name}: {description.kwargs} is no model: {error}") from error


def _load_timm(name: str, checkpoint: Path | None, arguments: dict[str, Any]) -> Model:
    check_known(name)
    notes: Notes = ()
    if checkpoint is None:
        kwargs = pooled(name, arguments)
        module = from_hub(name, kwargs)
    else:
        weights, found = read_checkpoint(checkpoint)
        kwargs, notes = shape_in(weights, name, pooled(name, arguments, weights), checkpoint)
        notes = (*found, *notes)
        module = create(name, name, **kwargs)
        fill(module, converted(weights, module, checkpoint), checkpoint)
    anatomy = read_anatomy(module, name)
    description = ModelDescription(
        name=name, architecture=name, kwargs=kwargs, preprocessing=preprocessing_of(module, anatomy)
    )
    return Model(module, anatomy, description, notes)


def _load_foreign(files: Files) -> Model:
    """Load a model of `transformers`, or one that timm saved for the hub."""
    content, where = files.config()
    if "architecture" in content and content.get("model_type", "timm_wrapper") == "timm_wrapper":
        return _load_timm_folder(files, content, where)
    found = read_transformers(files)
    with torch.device("meta"):  # a config may name any sizes: nothing is allocated before its weights are seen to fit
        check_fits(create(found.architecture, found.name, **found.arguments), found.weights, found.path)
    module = create(found.architecture, found.name, **found.arguments)
    fill(module, found.weights, found.path)
    description = ModelDescription(
        name=found.name,
        architecture=found.architecture,
        kwargs=found.arguments,
        preprocessing=found.preprocessing,
        labels=found.labels,
    )
    return Model(module, read_anatomy(module, found.name), description, found.notes)


def _load_timm_folder(files: Files, content: Mapping[str, Any], where: str) -> Model:
    """Load what timm saved for the hub: a name of its own, arguments, weights under its names."""
    architecture, given = content["architecture"], content.get("model_args") or {}
    config = content.get("pretrained_cfg") or {}
    if not all(isinstance(part, dict) for part in (given, config)) or not isinstance(architecture, str):
        raise FileFormatError(f"{where}: architecture, model_args or pretrained_cfg is not what timm writes there")
    path = files.weights()
    weights, found = bare_names(read_tensors(path), path)
    kwargs, notes = shape_in(weights, architecture, given, path)
    module = create(architecture, files.name, **kwargs)
    fill(module, converted(weights, module, path), path)
    anatomy = read_anatomy(module, files.name)
    names, more = content.get("label_names"), content.get("label_descriptions")
    more = more if isinstance(more, dict) else {}
    names = names if isinstance(names, list) and len(names) == anatomy.classes else []
    description = ModelDescription(
        name=files.name,
        architecture=architecture,
        kwargs=kwargs,
        preprocessing=preprocessing_of(module, anatomy, config or None),
        labels=tuple(f"{name} {more.get(name, '')}".strip() for name in names),
    )
    return Model(module, anatomy, description, (*found, *notes))


def weights_fingerprint(module: torch.nn.Module) -> str:
    """Return a hash of all weights by name: the same model gives the same. See `Model.weights_sha256`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_device(device: str) -> None:
    """Refuse a device that is not there, before any work."""
    if device != "cpu" and not device.startswith("cuda"):
        raise UsageError(f"device '{device}' is not cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SnapvitError("no CUDA device works here: torch finds none. Use --device cpu")


def check_same_weights(ranking: Ranking, model: Model, where: str = "") -> None:
    """Refuse a ranking of another model, or one whose provenance names other weights; `where` begins the error."""
    try:
        ranking.check_fits(model.anatomy)
    except SnapvitError as error:
        raise SnapvitError(f"{where}{error}") from error
    made_from = ranking.provenance.get("weights_sha256")
    if made_from is not None and made_from != model.weights_sha256:
        raise SnapvitError(f"{where}the ranking was made from other weights of {ranking.model}. Rank this model first")
