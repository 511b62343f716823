"""Read tensors from files: safetensors, torch files of which nothing is executed, and either of them in shards."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FileFormatError, SnapvitError, first_line
from ...storage.json import read_json
from ...storage.reading import MOST_ARRAYS, check_archive, check_readable

INDEX = ".index.json"  # ends the name of a file that tells which shard has which tensor


def read_file(path: Path) -> Any:
    """Return what a weight file holds: tensors by name, or for a torch file whatever was saved around them."""
    if not path.is_file():
        raise SnapvitError(f"{path}: no such checkpoint file")
    check_readable(path, MOST_ARRAYS)
    check_archive(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # options of a trainer: plain values
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere inside the readers
        if "Unsupported global" in str(error):  # what torch says of every class that it would have to run
            raise FileFormatError(
                f"{path}: holds pickled objects, which are code that would have to be run. Save the weights alone, "
                "with torch.save(model.state_dict(), FILE), and give that file"
            ) from error
        raise FileFormatError(f"{path}: not a readable checkpoint: {first_line(error)}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that holds nothing else, or of all shards that an index names."""
    if path.name.endswith(INDEX):
        shards = shards_of(path)
        found = {name: tensor for shard in shards for name, tensor in read_tensors(shard).items()}
        _check_whole(path, found)
        return found
    found = read_file(path)
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FileFormatError(f"{path}: holds more than tensors by their names. Save model.state_dict() alone")
    return {str(name): value for name, value in found.items()}


def shards_of(index: Path) -> list[Path]:
    """Return the files that an index names: they lie beside it."""
    names = sorted(set(_places(index).values()))
    for name in names:
        if Path(name).name != name or "\\" in name or name in ("", ".", "..") or name.endswith(INDEX):
            raise FileFormatError(f"{index}: '{name}' is not the name of a weight file beside it")
    return [index.parent / name for name in names]


def _places(index: Path) -> dict[str, str]:
    places = read_json(index, dict[str, Any]).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise FileFormatError(f"{index}: has no weight_map from tensors to files")
    return places


def _check_whole(index: Path, found: dict[str, Tensor]) -> None:
    places = _places(index)
    if missing := sorted(set(places) - set(found)):
        raise FileFormatError(f"{index}: {missing[0]} is not in {places[missing[0]]}. Fetch the model again")
