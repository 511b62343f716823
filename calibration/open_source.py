"""Opens the source of images that a `--data` value names: a folder, list, `.npz`, set by name, the hub, the digits."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import SnapvitError, UsageError
from . import hub, list_file
from .decode import open_image
from .digits import BUNDLED, bundled_digits
from .folder import SUFFIXES, folder_source
from .known_sets import KNOWN_SETS, known_name, known_split, open_known_split, refuse_missing_folder
from .npz import npz_source
from .source import Source


def open_source(text: str) -> Source:
    """Open the source that a `--data` value names.

    >>> open_source("path/to/images").count
    20
    """
    if not text.strip():
        raise UsageError("--data is empty. Give it a folder of images, or leave it out")
    if text == BUNDLED:
        return bundled_digits()
    if text.startswith(hub.PREFIX):
        return hub.from_hub(text.removeprefix(hub.PREFIX))
    if not os.path.exists(text):
        if named := _known(text):
            return open_known_split(*named)
        refuse_missing_folder(text)
    return _at_path(Path(text))


def _known(text: str, role: str = "train") -> tuple[str, str] | None:
    """Return a known set and the split that is meant: the one of this role if none is named."""
    name = known_name(text)
    return known_split(text) if name is None else (name, KNOWN_SETS[name].splits[role])


def open_images(text: str) -> Source:
    """Open images to look at: a source, of a known set what is reported on, or a single image file."""
    path = Path(text)
    if not os.path.exists(text) and (named := _known(text, "test")):
        return open_known_split(*named)
    if path.suffix.lower() in SUFFIXES and os.path.isfile(path):
        return Source(str(path), open=lambda _: open_image(path), count=1, title=lambda _: str(path))
    return open_source(text)


def _at_path(path: Path) -> Source:
    suffix = path.suffix.lower()
    if os.path.isdir(path):  # whatever a folder is called
        return folder_source(path)
    if suffix == ".npz":
        return npz_source(path)
    if suffix in list_file.SUFFIXES:
        return list_file.list_source(path)
    if os.path.isfile(path):
        raise SnapvitError(f"{path}: holds no images. Give --data a folder, a .txt or .lst list, or an .npz file")
    return folder_source(path)
