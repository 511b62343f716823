"""Read a score file of the released SnapViT code as a Ranking, without executing what is pickled in it.

Such a file holds two tensors, a few numbers, and two members of enums of the released code. torch's restricted reader
refuses those; here just these two names are let through, as plain strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import FileFormatError, SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import Protection
from ..model.ranking import Ranking
from .released_files import load_released

IMPORTED = "imported"  # the criterion in the provenance
_ENUMS = ["src.models.enums.ModelType", "src.models.enums.MLPArchitecture"]


class _EnumName(str):
    """The value of a pickled enum member, in its place."""


def import_scores(path: Path | str, anatomy: Anatomy | None = None) -> Ranking:
    """Read a released `.pt` score file; with an Anatomy, also check that it is of that model.

    >>> ranking = import_scores("dino_vitb16.pt")
    """
    path = Path(path)
    loaded = load_released(path, "score file", [(_EnumName, name) for name in _ENUMS])
    numbers = _numbers(loaded, path)
    neurons, heads = _scores(loaded, "mlp_scores", path), _scores(loaded, "head_scores", path)
    _check_shape(neurons, (numbers["num_blocks"], numbers["hidden_dim"]), "mlp_scores", path)
    _check_shape(heads, (numbers["num_blocks"], numbers["num_heads"]), "head_scores", path)
    provenance = {
        "criterion": IMPORTED,
        "file": path.name,
        "mlp_architecture": str(loaded.get("mlp_architecture", "")),
        "protection": {
            "neurons": _ratio(loaded, "min_hidden_dim_keep_ratio", Protection().neurons, path),
            "heads": _ratio(loaded, "min_head_keep_ratio", Protection().heads, path),
        },
        "metadata": _plain(loaded.get("metadata", {})),
    }
    # What an Anatomy says of any other ranking, for whoever writes the scores back to this layout.
    provenance |= {name: loaded[name] for name in ("embed_dim", "head_dim") if type(loaded.get(name)) is int}
    try:
        name = str(loaded.get("model_type", path.stem))
        ranking = Ranking(tuple(heads.numpy()), tuple(neurons.numpy()), name, None, provenance)
        if anatomy is not None:
            ranking = Ranking(ranking.head_scores, ranking.neuron_scores, name, anatomy, provenance)
    except SnapvitError as error:
        raise type(error)(f"{path}: {error}") from error
    return ranking


def _numbers(loaded: Mapping[str, Any], path: Path) -> dict[str, int]:
    names = ("num_blocks", "hidden_dim", "num_heads")
    for name in names:
        if not isinstance(loaded.get(name), int):
            raise FileFormatError(f"{path}: not a score file of the released SnapViT code ({name} is missing)")
    return {name: loaded[name] for name in names}


def _scores(loaded: Mapping[str, Any], name: str, path: Path) -> torch.Tensor:
    scores = loaded.get(name)
    if not isinstance(scores, torch.Tensor) or scores.dtype != torch.float32 or scores.ndim != 2:
        raise FileFormatError(f"{path}: {name} is not a float32 matrix")
    if scores.layout != torch.strided or scores.device.type != "cpu":
        raise FileFormatError(f"{path}: {name} is not a plain matrix")
    return scores.detach()


def _ratio(loaded: Mapping[str, Any], name: str, default: float, path: Path) -> float:
    value = loaded.get(name, default)
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise FileFormatError(f"{path}: {name} is not a number from 0 to 1")
    return float(value)


def _check_shape(scores: torch.Tensor, expected: tuple[int, int], name: str, path: Path) -> None:
    if tuple(scores.shape) != expected:
        raise FileFormatError(f"{path}: {name} has shape {tuple(scores.shape)}, the file says {expected}")


def _plain(value: Any) -> Any:
    """Keep what JSON can hold; turn the rest into text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)
