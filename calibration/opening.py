"""What `--data` may say, and which kind of source that is."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from .digits import BUNDLED, bundled_digits
from .folder import folder_source
from .source import Source


def open_source(text: str) -> Source:
    """The source that a `--data` value names.

    >>> open_source("path/to/images").count
    """
    if not text.strip():
        raise UsageError("--data is empty. Give it a folder of images, or leave it out")
    if text == BUNDLED:
        return bundled_digits()
    return folder_source(Path(text))
