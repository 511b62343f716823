"""A dataset of the Hugging Face hub: `hf:owner/name` or `hf:name`, and if it is not `train`, `:split`.

Needs the package `datasets`, which is only imported here, when asked for. It keeps what it fetches, and where a local
folder is called `owner/name` it takes that instead. Versions before 4 ran programs from the hub and are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependency, SnapvitError, UsageError, first_line
from .decode import as_rgb, unreadable
from .source import Source

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

PREFIX = "hf:"
OLDEST = 4  # the first version of datasets that never runs code it fetched
NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(:(?P<split>[A-Za-z0-9][\w.-]*))?", re.ASCII)


def from_hub(name: str, label: str | None = None) -> Source:
    """Fetch `owner/name` or `owner/name:split`, or take what an earlier run has kept; `label`: column of classes."""
    repository, split = parse_name(name)
    split = split or "train"
    title = f"{PREFIX}{repository}:{split}"
    with _fetching(title) as datasets:
        dataset = datasets.load_dataset(repository, split=split, streaming=False)
    return hf_source(dataset, title, label)


def splits_on_hub(repository: str) -> list[str]:
    """The names of the splits that a dataset has."""
    with _fetching(f"{PREFIX}{repository}") as datasets:
        return list(datasets.get_dataset_split_names(repository))


def parse_name(name: str) -> tuple[str, str | None]:
    """Split `owner/name:split` into its two parts; the split is None if it is not given."""
    parts = NAME.fullmatch(name)
    if parts is None:
        raise UsageError(f"{PREFIX}{name} is not the name of a dataset. Write {PREFIX}owner/name or add :split")
    return parts["name"], parts["split"]


@contextmanager
def _fetching(title: str) -> Iterator[Any]:
    """Yield the package `datasets`, and turn whatever it raises into one line."""
    datasets = _package(title)
    _hush(datasets)
    try:
        yield datasets
    except Exception as error:  # network, credentials, disk, name, split: each has its own kinds
        advice = "Check the name, the split and the network"
        raise SnapvitError(f"{title}: cannot be fetched ({first_line(error)}). {advice}") from error


def hf_source(dataset: Dataset, name: str, label: str | None = None) -> Source:
    """Wrap a Dataset: its first column of type Image, and its ClassLabel column `label`, or its first if it has one."""
    datasets = _package(name)
    dataset = dataset.with_format(None)
    image_column = _column(dataset, datasets.Image)
    if label is not None and not isinstance(dataset.features.get(label), datasets.ClassLabel):
        columns = ", ".join(dataset.column_names)
        raise SnapvitError(
            f"{name}: has no column of classes called {label} (it has: {columns}). Give --data another dataset"
        )
    label = label or _column(dataset, datasets.ClassLabel)
    if image_column is None:
        columns = ", ".join(dataset.column_names)
        raise SnapvitError(f"{name}: has no column of images (it has: {columns}). Give --data another dataset")
    if not len(dataset):
        raise SnapvitError(f"{name}: holds no images. Give --data another dataset or split")
    images = dataset.select_columns([image_column]).cast_column(image_column, datasets.Image())
    labels, classes = _labels(dataset, label)

    def title(i: int) -> str:
        return f"{name} image {i}"

    return Source(name, lambda i: _open(images, image_column, i, title(i)), len(images), title, labels, classes)


def _package(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        missing = error.name or "datasets"
        raise MissingDependency(f"{what} needs {missing}, which is not installed. Try: pip install datasets") from error
    if int(datasets.__version__.split(".")[0]) < OLDEST:
        raise MissingDependency(f"{what} needs datasets {OLDEST} or newer. Try: pip install --upgrade datasets")
    return datasets


def _hush(datasets: Any) -> None:
    """Keep bars and retries off standard error: --quiet must be quiet, and a failure is reported in our one line."""
    datasets.disable_progress_bars()
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _column(dataset: Dataset, kind: type) -> str | None:
    return next((name for name, feature in dataset.features.items() if isinstance(feature, kind)), None)


def _labels(dataset: Dataset, column: str | None) -> tuple[list[int] | None, list[str]]:
    """Class numbers and names; none where a split keeps its labels secret (-1, or nothing)."""
    if column is None:
        return None, []
    labels = list(dataset[column])
    if any(label is None or label < 0 for label in labels):
        return None, []
    return labels, list(dataset.features[column].names)


def _open(images: Dataset, column: str, i: int, title: str) -> Image:
    try:
        image = images[i][column]
    except Exception as error:  # damaged files make the decoders raise whatever they like
        raise unreadable(title, first_line(error)) from error
    if image is None:
        raise unreadable(title, "it is empty")
    return as_rgb(image, title)
