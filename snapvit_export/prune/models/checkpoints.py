"""Read checkpoints: the weights of a ViT in whatever training scripts save, and the check that they fit a module.

Weights are found under a customary key, and below a prefix that the trainer gave every name. Foreign `.pth` files are
read with `weights_only=True`: nothing in them is executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...errors import FileFormatError
from .weight_files import read_file

Notes = tuple[str, ...]  # what a user should know of how a model was read
# Keys under which training scripts keep weights, the best first: a moving average is better than the last step.
STATE_DICTS = (
    *("state_dict_ema", "model_ema", "ema_state_dict", "ema", "state_dict", "model_state_dict", "model", "module"),
    *("teacher", "net"),
)
HEADS = ("head", "classifier", "fc")  # what the classifier beside a backbone is called
FIRST_BLOCK = "blocks.0.norm1.weight"  # a name that every ViT of timm has: what stands before it is a prefix


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict from safetensors, or from a torch file without executing anything in it."""
    return read_checkpoint(path)[0]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], Notes]:
    loaded = read_file(path)
    return bare_names(loaded, path) if path.suffix == ".safetensors" else _state_dict_in(loaded, path)


def _state_dict_in(loaded: Any, path: Path) -> tuple[dict[str, Tensor], Notes]:
    """Find the weights in what training scripts save: bare, or under one of the customary keys."""
    for key in STATE_DICTS if isinstance(loaded, Mapping) else ():
        for found in _levels(loaded.get(key)):
            if _is_state_dict(found):
                weights, notes = bare_names(found, path)
                others = [str(other) for other, value in loaded.items() if other != key and _has_vit(value)]
                return weights, (*_note_choice(path, key, others), *notes)
    if _is_state_dict(loaded):
        return bare_names(loaded, path)
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


def bare_names(weights: Mapping[Any, Tensor], path: Path) -> tuple[dict[str, Tensor], Notes]:
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


def fill(module: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load every weight by name and shape; the error names the first that does not match."""
    check_fits(module, weights, path)
    module.load_state_dict(dict(weights))


def check_fits(module: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
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
