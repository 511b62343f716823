"""A model that `transformers` saved: a folder, or a name on the hub, read without `transformers`.

Fetched are `config.json` first, so that what is not supported is refused before a long download, then the
preprocessing, then the weights: safetensors, whole or in shards, or else a torch file, of which nothing is executed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...calibration.preprocessing import Preprocessing
from ...calibration.preprocessor_config import FILES as PREPROCESSOR_FILES
from ...calibration.preprocessor_config import read_preprocessor
from ...errors import FileFormatError, SnapvitError, first_line
from ...storage.json import read_json
from .transformers_config import Config, read_config, timm_arguments
from .transformers_names import rename, timm_state
from .weight_files import INDEX, read_tensors, shards_of

CONFIG = "config.json"
WEIGHTS = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX))
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
MOST_PIXELS = 8192  # of a side: positions are made for every patch
NO_NAME = re.compile(r"LABEL_\d+")  # what `transformers` calls a class that nobody named
FIXED_SIZE = "it takes images in their own proportions; here all are squashed to {0}x{1} pixels"


@dataclass(frozen=True)
class Files:
    """The files of one model: in a folder, or on the hub, from where each is fetched when it is asked for."""

    name: str
    folder: Path | None  # None: on the hub

    @staticmethod
    def of(name: str) -> Files | None:
        """Return the files of a folder with a `config.json`, or of what can be a name on the hub; otherwise None."""
        folder = Path(name)
        if (folder / CONFIG).is_file():
            return Files(folder.resolve().name, folder)
        if folder.exists():
            return None
        on_hub = name.removeprefix("hf-hub:").removeprefix("hf:")  # as timm and --data say it
        return Files(on_hub, None) if HUB_ID.fullmatch(on_hub) else None

    def find(self, *names: str) -> Path | None:
        """Return the first of these files that there is."""
        for name in names:
            path = self._fetched(name) if self.folder is None else self.folder / name
            if path is not None and path.is_file():
                return path
        return None

    def _fetched(self, name: str) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()  # --quiet must be quiet, and a failure is reported in our one line
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        try:
            return Path(hf_hub_download(self.name, name))
        except LocalEntryNotFoundError as error:  # no network, and not fetched before
            raise self._failed(error) from error
        except EntryNotFoundError:
            return None
        except Exception as error:  # the hub's client raises its own, requests' and the system's errors
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> SnapvitError:
        return SnapvitError(
            f"{self.name}: no such folder, and it could not be fetched from the hub ({first_line(error)}). "
            f"Download it elsewhere and give the path of its folder"
        )

    def config(self) -> tuple[dict[str, Any], str]:
        """Return the decoded `config.json`, and its place for errors."""
        path = self.find(CONFIG)
        if path is None:
            raise SnapvitError(f"{self.name}: has no {CONFIG}, so nothing tells what model it is")
        return read_json(path, dict[str, Any]), str(path)

    def weights(self) -> Path:
        """Return the file of the weights, or the index of its shards, all of them fetched."""
        path = self.find(*WEIGHTS)
        if path is None:
            raise SnapvitError(f"{self.name}: has no weights in it ({WEIGHTS[0]}, an index of shards, or {WEIGHTS[2]})")
        if path.name.endswith(INDEX):
            for shard in shards_of(path):
                if self.find(shard.name) is None:
                    raise FileFormatError(f"{path}: {shard.name} is not there. Fetch the model again")
        return path


@dataclass(frozen=True)
class Foreign:
    """A model read from files of others: how timm builds it, its weights under timm's names, and what comes with it."""

    name: str
    architecture: str
    arguments: dict[str, Any]
    weights: dict[str, Tensor]
    path: Path  # of the weights, for errors
    preprocessing: Preprocessing
    labels: tuple[str, ...]
    notes: tuple[str, ...]


def read_transformers(files: Files) -> Foreign:
    """Read a model of `transformers`, or refuse it by naming the key that does not fit."""
    content, where = files.config()
    config = read_config(content, where)
    preprocessing = _preprocessing(files, config)
    image = preprocessing.input_size[1:]
    path = files.weights()
    tensors = read_tensors(path)
    try:
        renamed = rename(config, tensors)
        state = timm_state(config, renamed, image)
    except (RuntimeError, IndexError) as error:  # of torch, where shapes do not go together
        raise FileFormatError(f"{path}: its tensors are not of the sizes in {CONFIG}: {first_line(error)}") from error
    architecture, arguments = timm_arguments(config, renamed.heads, image)
    notes = (FIXED_SIZE.format(*image),) if config.model_type == "siglip2" else ()
    return Foreign(
        name=files.name,
        architecture=architecture,
        arguments=arguments,
        weights=state,
        path=path,
        preprocessing=preprocessing,
        labels=_labels(config.values.get("id2label"), renamed.heads.classes),
        notes=(*renamed.notes, *notes),
    )


def _preprocessing(files: Files, config: Config) -> Preprocessing:
    """Return the preprocessing; refuse one that gives images of a size that the model cannot take."""
    path = files.find(*PREPROCESSOR_FILES)
    if path is None:
        raise SnapvitError(
            f"{files.name}: has no {PREPROCESSOR_FILES[0]}, so nothing tells how images become its input. Copy that "
            f"file from the model that it was made from"
        )
    found = read_preprocessor(path, config.image)
    given, patch = found.input_size[1:], config.sides("patch_size")
    if given != config.image and not config.kind.any_size:
        sizes = f"makes images of {given[0]}x{given[1]} pixels, but the model takes {config.image[0]}x{config.image[1]}"
        raise SnapvitError(f"{path}: {sizes}. Give size (and crop_size) that value there")
    if any(not step <= side <= MOST_PIXELS for side, step in zip(given, patch)):
        size = f"{given[0]}x{given[1]}, which a model with patches of {patch[0]}x{patch[1]} cannot take"
        raise SnapvitError(f"{path}: makes images of {size}")
    return found


def _labels(names: Any, classes: int) -> tuple[str, ...]:
    """Return the names of the classes in the order of the outputs; none where they are missing or say nothing."""
    if not isinstance(names, Mapping) or len(names) != classes:
        return ()
    found = [name for i in range(classes) if isinstance(name := names.get(str(i)), str) and name.strip()]
    if len(found) != classes or all(NO_NAME.fullmatch(name) for name in found):
        return ()
    return tuple(name if name not in found[:i] else f"{name} ({i})" for i, name in enumerate(found))
