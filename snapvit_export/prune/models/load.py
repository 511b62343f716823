"""Load a model by timm name (hub or local checkpoint), from a folder of ours or of `transformers`, or the bundled one.

A model folder holds `model.json` (how to build the module, its preprocessing, and the Plan if it is pruned) and
`model.safetensors`. Foreign `.pth` files are read with `weights_only=True`: nothing in them is executed. The weights
are found in what training scripts save: under a customary key, and below a prefix that the trainer gave every name.

`check_device` and `check_same_weights` refuse a missing device and a ranking of other weights before any work begins.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...calibration.preprocessing import Preprocessing
from ...errors import FileFormatError, SnapvitError, UsageError, first_line
from ...model.anatomy import Anatomy
from ...model.plan import Plan
from ...model.ranking import Ranking
from ...storage.atomic import settle, staged_folder, write_atomically
from ...storage.json import Value, read_json, write_json
from ...storage.places import is_json_of
from ...visible import heard
from ..blocks.functional import ACTIVATIONS
from ..blocks.pruned_block import removed_parts
from ..blocks.timm_blocks import PARTS, as_module, blocks_of, give_bias, output_of
from .read_anatomy import find_vit, read_anatomy
from .slicing import shrink
from .transformers_folder import Files, read_transformers
from .weight_files import read_file, read_tensors

BUNDLED = "bundled"
Notes = tuple[str, ...]  # what a user should know of how a model was read
# Arguments of timm that a model.json may set: those that shape a module, none that names files or fetches weights.
SHAPE_ARGUMENTS = frozenset(
    [
        "img_size",
        "patch_size",
        "in_chans",
        "num_classes",
        "global_pool",
        "embed_dim",
        "depth",
        "num_heads",
        "mlp_ratio",
        "qkv_bias",
        "qk_norm",
        "init_values",
        "class_token",
        "reg_tokens",
        "num_reg_tokens",
        "no_embed_class",
        "pre_norm",
        "fc_norm",
        "dynamic_img_size",
        "final_norm",
        "proj_bias",
        "pool_include_prefix",
        "act_layer",
        "norm_eps",
        "swiglu_align_to",
        "rope_temperature",
    ]
)
MODEL_FILES = ("model.json", "model.safetensors")
# Keys under which training scripts keep weights, the best first: a moving average is better than the last step.
STATE_DICTS = (
    *("state_dict_ema", "model_ema", "ema_state_dict", "ema", "state_dict", "model_state_dict", "model", "module"),
    *("teacher", "net"),
)
HEADS = ("head", "classifier", "fc")  # what the classifier beside a backbone is called
FIRST_BLOCK = "blocks.0.norm1.weight"  # a name that every ViT of timm has: what stands before it is a prefix


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
            raise UsageError(f"--model-arg does not go with {name}, which says itself how it is built")
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
        name=name, architecture=name, kwargs=_shape_arguments(anatomy), preprocessing=_preprocessing(model, anatomy)
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


def anatomy_of(name: str) -> Anatomy:
    """Return the Anatomy of a timm model by name, without its weights."""
    return anatomy_without_weights(name, {})


def anatomy_without_weights(name: str, arguments: Mapping[str, Any]) -> Anatomy:
    """Return the Anatomy of what timm builds of a name and arguments; nothing is allocated."""
    with torch.device("meta"):
        return read_anatomy(_create(name, name, **arguments), name)


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


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict from safetensors, or from a torch file without executing anything in it."""
    return _read_checkpoint(path)[0]


def _read_checkpoint(path: Path) -> tuple[dict[str, Tensor], Notes]:
    loaded = read_file(path)
    return _bare_names(loaded, path) if path.suffix == ".safetensors" else _state_dict_in(loaded, path)


def _state_dict_in(loaded: Any, path: Path) -> tuple[dict[str, Tensor], Notes]:
    """Find the weights in what training scripts save: bare, or under one of the customary keys."""
    for key in STATE_DICTS if isinstance(loaded, Mapping) else ():
        for found in _levels(loaded.get(key)):
            if _is_state_dict(found):
                weights, notes = _bare_names(found, path)
                others = [str(other) for other, value in loaded.items() if other != key and _has_vit(value)]
                return weights, (*_note_choice(path, key, others), *notes)
    if _is_state_dict(loaded):
        return _bare_names(loaded, path)
    raise FileFormatError(f"{path}: holds no state dict (names and tensors)")


def _levels(part: Any) -> tuple[Any, ...]:
    """Return what a key holds, and what that holds as its own state dict."""
    return (part, part.get("state_dict")) if isinstance(part, Mapping) else ()


def _is_state_dict(found: Any) -> bool:
    return isinstance(found, Mapping) and bool(found) and all(isinstance(value, Tensor) for value in found.values())


def _has_vit(part: Any) -> bool:
    return any(str(name).endswith(FIRST_BLOCK) for found in _levels(part) if _is_state_dict(found) for name in found)


def _note_choice(path: Path, taken: str, others: Sequence[str]) -> Notes:
    """Tell which of several models in a file is taken."""
    if not others:
        return ()
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return (f"{path.name}: the weights of {taken} are taken, which are beside those of {others[0]}{more}",)


def _bare_names(weights: Mapping[Any, Tensor], path: Path) -> tuple[dict[str, Tensor], Notes]:
    """Return the weights of the ViT alone, without the prefix that a trainer or a larger model gave their names.

    Lightning says `model.`, data-parallel training `module.`, torch.compile `_orig_mod.`, and some have several; beside
    the model there may be a loss, or a moving average of the model, which is the better one. Notes tell of the rest.
    """
    named = {str(name).removeprefix("module."): value for name, value in weights.items()}
    before = {name.removesuffix(FIRST_BLOCK) for name in named if name.endswith(FIRST_BLOCK)}
    prefixes = sorted(text for text in before if not text or text.endswith("."))
    if not prefixes:
        return {name.removeprefix("backbone."): value for name, value in named.items()}, ()
    averages = [text for text in prefixes if any("ema" in part.split("_") for part in text.split("."))]
    if len(prefixes) > 1 and len(averages) != 1:
        raise FileFormatError(
            f"{path}: holds several ViTs ({', '.join(prefixes[:3])}). Save the one that is meant alone"
        )
    (prefix,) = averages or prefixes
    bare = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
    head = {} if "head.weight" in bare else _head_beside(named, prefix)
    others = [text for text in prefixes if text != prefix]
    left_out = [name for name in named if not name.startswith((prefix, *others)) and name not in head.values()]
    notes = _note_choice(path, prefix[:-1], [text[:-1] or "the model itself" for text in others])
    return {**{ours: named[theirs] for ours, theirs in head.items()}, **bare}, (*notes, *_note_rest(path, left_out))


def _note_rest(path: Path, names: Sequence[str]) -> Notes:
    """Tell what of a file is not used: it may be a classifier under a name that is not known here."""
    if not names:
        return ()
    more, are = (f" and {len(names) - 1} more", "are") if len(names) > 1 else ("", "is")
    return (f"{path.name}: {names[0]}{more} {are} not of the ViT and {are} left out",)


def _head_beside(named: Mapping[str, Tensor], prefix: str) -> dict[str, str]:
    """Return our and its names of the classifier of a larger model that stands beside the ViT and reads its output."""
    parent = prefix[: prefix[:-1].rfind(".") + 1]
    for name in HEADS if prefix else ():
        weight = named.get(f"{parent}{name}.weight")
        if weight is not None and weight.ndim == 2 and weight.shape[1] == len(named[prefix + FIRST_BLOCK]):
            kinds = [kind for kind in ("weight", "bias") if f"{parent}{name}.{kind}" in named]
            return {f"head.{kind}": f"{parent}{name}.{kind}" for kind in kinds}
    return {}


def _load_folder(folder: Path) -> Model:
    description = read_json(folder / "model.json", ModelDescription)
    built = _build(description)
    module = built.module
    _check_description(folder / "model.json", description, built.anatomy)
    if description.plan is not None:
        module = shrink(module, Ranking.flat(built.anatomy), description.plan)  # only for the shapes
    weights = read_weights(folder / "model.safetensors")
    _give_biases(module, weights)
    _fill(module, weights, folder / "model.safetensors")
    return Model(module, read_anatomy(module, description.name), description)


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
    module = _create(description.architecture, description.name, **description.kwargs)
    try:
        return Model(module, read_anatomy(module, description.name), description)
    except ValueError as error:  # an Anatomy checks itself
        raise FileFormatError(f"{description.name}: {description.kwargs} is no model: {error}") from error


def _load_timm(name: str, checkpoint: Path | None, arguments: dict[str, Any]) -> Model:
    _check_known(name)
    notes: Notes = ()
    if checkpoint is None:
        module, kwargs = _from_hub(name, arguments), arguments
    else:
        weights, found = _read_checkpoint(checkpoint)
        kwargs, notes = _shape_in(weights, name, arguments, checkpoint)
        notes = (*found, *notes)
        module = _create(name, name, **kwargs)
        _fill(module, _converted(weights, module, checkpoint), checkpoint)
    anatomy = read_anatomy(module, name)
    description = ModelDescription(
        name=name, architecture=name, kwargs=kwargs, preprocessing=_preprocessing(module, anatomy)
    )
    return Model(module, anatomy, description, notes)


def _shape_in(
    weights: Mapping[str, Tensor], name: str, arguments: Mapping[str, Any], path: Path
) -> tuple[dict[str, Any], Notes]:
    """Return the arguments that the shapes of a checkpoint ask for beside the given ones, and notes on them."""
    kwargs, notes = {**_classes_in(weights), **arguments}, []
    kernel = weights.get("patch_embed.proj.weight")
    for key in ("patch_size", "img_size"):
        anatomy = anatomy_without_weights(name, kwargs)  # refuses what is no ViT before it blames the checkpoint
        if key in arguments:
            continue
        if key == "patch_size":
            found = None if kernel is None or kernel.ndim != 4 else tuple(kernel.shape[2:])
            found = None if found == anatomy.patch else found
        else:
            found = _image_in(weights.get("pos_embed"), anatomy, path)
        if found is not None:
            kwargs[key] = list(found)
            notes.append(f"{key} {found[0]}x{found[1]}, as the weights in {path.name} have it")
    return kwargs, tuple(notes)


def _image_in(positions: Tensor | None, anatomy: Anatomy, path: Path) -> tuple[int, int] | None:
    """Return height and width of the images that these positions are of; None if they are the model's own."""
    if positions is None or positions.ndim != 3 or not anatomy.positions:
        return None
    # Of the tokens in front some releases have rows and others not: timm converts between them.
    own = anatomy.positions - anatomy.patches
    for rows in (own, anatomy.prefix, int(anatomy.class_token), 0):
        if positions.shape[1] - rows == anatomy.patches:
            return None
    for rows in (own,) if own else (0, int(anatomy.class_token)):
        side = math.isqrt(max(0, positions.shape[1] - rows))
        if side and side * side == positions.shape[1] - rows:
            return side * anatomy.patch[0], side * anatomy.patch[1]
    raise FileFormatError(
        f"{path}: its {positions.shape[1]} positions are of no square of patches. "
        f"Give --model-arg img_size=HEIGHTxWIDTH"
    )


def _load_foreign(files: Files) -> Model:
    """Load a model of `transformers`, or one that timm saved for the hub."""
    content, where = files.config()
    if "architecture" in content and content.get("model_type", "timm_wrapper") == "timm_wrapper":
        return _load_timm_folder(files, content, where)
    found = read_transformers(files)
    with torch.device("meta"):  # a config may name any sizes: nothing is allocated before its weights are seen to fit
        _check_fits(_create(found.architecture, found.name, **found.arguments), found.weights, found.path)
    module = _create(found.architecture, found.name, **found.arguments)
    _fill(module, found.weights, found.path)
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
    weights, found = _bare_names(read_tensors(path), path)
    kwargs, notes = _shape_in(weights, architecture, given, path)
    module = _create(architecture, files.name, **kwargs)
    _fill(module, _converted(weights, module, path), path)
    anatomy = read_anatomy(module, files.name)
    names, more = content.get("label_names"), content.get("label_descriptions")
    more = more if isinstance(more, dict) else {}
    names = names if isinstance(names, list) and len(names) == anatomy.classes else []
    description = ModelDescription(
        name=files.name,
        architecture=architecture,
        kwargs=kwargs,
        preprocessing=_preprocessing(module, anatomy, config or None),
        labels=tuple(f"{name} {more.get(name, '')}".strip() for name in names),
    )
    return Model(module, anatomy, description, (*found, *notes))


def _check_known(name: str) -> None:
    import timm

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"Did you mean {', '.join(near)}?" if near else "See: snapvit models"
        raise SnapvitError(f"{name}: no such model folder, and timm knows no model of that name. {hint}")


def _create(architecture: str, name: str, **kwargs: Any) -> nn.Module:
    _check_known(architecture)
    _check_arguments(kwargs, name)
    try:
        return _made(architecture, kwargs, pretrained=False)
    except Exception as error:  # arguments come from files: they can be anything
        raise SnapvitError(f"{name}: timm cannot build {architecture} with {kwargs}: {first_line(error)}") from error


def _made(architecture: str, arguments: Mapping[str, Any], pretrained: bool) -> nn.Module:
    """Let timm make a module; the eps of its norms, which timm has no argument for, is set afterwards."""
    import timm

    given = {key: value for key, value in arguments.items() if key != "norm_eps"}
    module = timm.create_model(architecture, pretrained=pretrained, **given).float().eval()
    for part in module.modules():
        if "norm_eps" in arguments and isinstance(part, nn.LayerNorm):
            part.eps = arguments["norm_eps"]
    return module


def _check_arguments(kwargs: Mapping[str, Any], name: str) -> None:
    if unknown := sorted(set(kwargs) - SHAPE_ARGUMENTS):
        known = ", ".join(sorted(SHAPE_ARGUMENTS))
        raise SnapvitError(f"{name}: {unknown[0]} is not an argument that shapes a model. Those are {known}")
    if kwargs.get("act_layer", "gelu") not in ACTIVATIONS:
        raise SnapvitError(f"{name}: act_layer {kwargs['act_layer']} is none of {', '.join(ACTIVATIONS)}")
    eps = kwargs.get("norm_eps", 1e-6)
    if type(eps) is not float or not 0 < eps < 1:
        raise SnapvitError(f"{name}: norm_eps {eps} is not a number between 0 and 1")


def _from_hub(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    anatomy_without_weights(name, arguments)  # refuse an unsupported model before a long download
    try:
        with heard():  # as in `_converted`
            return _made(name, arguments, pretrained=True)
    except Exception as error:  # the hub's client raises its own, requests' and the system's errors
        raise SnapvitError(
            f"{name}: its weights could not be fetched ({first_line(error)}). "
            f"Download them elsewhere and give --checkpoint FILE"
        ) from error


def _classes_in(weights: Mapping[str, Tensor]) -> dict[str, int]:
    head = weights.get("head.weight")
    return {"num_classes": 0 if head is None or head.ndim != 2 else int(head.shape[0])}


def _converted(weights: dict[str, Tensor], module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Let timm rename the keys of original releases and resample position embeddings."""
    from timm.models import eva, vision_transformer

    convert = eva.checkpoint_filter_fn if isinstance(module, eva.Eva) else vision_transformer.checkpoint_filter_fn
    try:
        with heard():  # timm prints what it leaves out of a DINOv3
            return convert(dict(weights), module)
    except (RuntimeError, KeyError, ValueError, IndexError, AssertionError, AttributeError) as error:
        raise FileFormatError(f"{path}: its weights do not suit {type(module).__name__}: {error}") from error


def _fill(module: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load every weight by name and shape; the error names the first that does not match."""
    _check_fits(module, weights, path)
    module.load_state_dict(dict(weights))


def _check_fits(module: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    wanted = module.state_dict()
    missing = [name for name in wanted if name not in weights]
    surplus = [name for name in weights if name not in wanted]
    wrong = [name for name in wanted if name in weights and weights[name].shape != wanted[name].shape]
    if wrong:
        name = wrong[0]
        raise FileFormatError(
            f"{path}: {name} has shape {tuple(weights[name].shape)}, the model needs {tuple(wanted[name].shape)}. "
            f"Is it a checkpoint of this model?"
        )
    for names, what in ((missing, "lacks"), (surplus, "has unknown")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise FileFormatError(f"{path}: {what} {names[0]}{more}. Is it a checkpoint of this model?")
    bad = [name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        raise FileFormatError(f"{path}: {bad[0]} holds values that are not finite numbers")


def _preprocessing(module: nn.Module, anatomy: Anatomy, config: Mapping[str, Any] | None = None) -> Preprocessing:
    """Return what timm says of a module's images, or what a configuration of the same form says."""
    from timm.data import resolve_data_config, resolve_model_data_config

    config = resolve_model_data_config(module) if config is None else resolve_data_config(pretrained_cfg=dict(config))
    if config["crop_mode"] not in ("center", "squash"):
        raise SnapvitError(f"crop mode '{config['crop_mode']}' is not supported")
    return Preprocessing(
        input_size=(anatomy.channels, *anatomy.image),
        interpolation=config["interpolation"],
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )


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
