"""A dataset of the Hugging Face hub: `hf:owner/name` or `hf:name`, and if it is not `train`, `:split`.

Needs the package `datasets`, which is only imported here, when asked for. A split that is asked for is fetched and
kept, and no other: `datasets` itself would fetch them all, so each has a cache of its own. Of a split beyond `LARGE`
bytes a sample is not worth that: some of its files are read in an order by seed, through a buffer that mixes them,
until there are enough images, and nothing is kept. The same version of `datasets` gives the same sample.

Where a local folder is called `owner/name` that is taken instead. Versions before 4 ran programs from the hub and are
refused.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependency, SnapvitError, UsageError, first_line
from .decode import as_rgb, unreadable
from .source import Source

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder
    from PIL.Image import Image

PREFIX = "hf:"
SAMPLED = " (sample)"  # ends the name of images of which there are more on the hub
OLDEST = 4  # the first version of datasets that never runs code it fetched
LARGE = 2_000_000_000  # bytes of a split: two minutes or more on most lines
MOST_DRAWN = 10_000  # images of a sample, which stays in memory: a gigabyte of JPEGs
MIXED = 1000  # images that wait to be drawn from: files may have their classes in order
VALIDATION = ("validation", "val", "valid")
NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(:(?P<split>[A-Za-z0-9][\w.-]*))?", re.ASCII)


@dataclass(frozen=True)
class Sample:
    """How many images are wanted of a split, and by which seed."""

    images: int
    seed: int


def from_hub(name: str, label: str | None = None, mask: str | None = None, sample: Sample | None = None) -> Source:
    """Fetch `owner/name` or `owner/name:split`, or take what an earlier run has kept; with `sample`, that may be all.

    `label`: column of classes; `mask`: column of masks.
    """
    repository, split = parse_name(name)
    split = split or "train"
    title = f"{PREFIX}{repository}:{split}"
    with _fetching(title) as datasets:
        builder, there = _builder(datasets, repository, split, title)
        if sample is not None and sample.images <= MOST_DRAWN and _is_large(builder, there):
            drawn = _drawn(datasets, builder.as_streaming_dataset(there), sample)
            return hf_source(drawn, title + SAMPLED, label, mask)
        builder.download_and_prepare(verification_mode="no_checks")  # its card lists splits that were not asked for
        dataset = builder.as_dataset(there)
    return hf_source(dataset, title, label, mask)


def _builder(datasets: Any, repository: str, split: str, title: str) -> tuple[DatasetBuilder, str]:
    """Return what fetches one split alone, and the name that it has there."""
    whole = _whole(datasets, repository)
    if whole is not None and _is_kept(whole):  # by an earlier fetch of all splits, in another program
        return whole, _name_there(split, _splits_of(whole), title)
    own = os.path.join(datasets.config.HF_DATASETS_CACHE, f"split-{split}")
    builder = datasets.load_dataset_builder(repository, cache_dir=own)
    name = _name_there(split, _splits_of(builder), title)
    if files := builder.config.data_files:
        builder.config.data_files = type(files)({name: files[name]})
    return builder, name


def _whole(datasets: Any, repository: str) -> DatasetBuilder | None:
    try:
        return datasets.load_dataset_builder(repository)
    except ConnectionError:  # what was fetched for us may be kept all the same
        return None


def _splits_of(builder: DatasetBuilder) -> list[str]:
    """Return the names of splits: of the files on the hub, or without a network of what is kept."""
    return list(map(str, builder.config.data_files or builder.info.splits or ()))


def _name_there(split: str, there: list[str], title: str) -> str:
    """Return the name under which a dataset has a split: validation goes by three names."""
    for name in (split, *(VALIDATION if split in VALIDATION else ())):
        if name in there:
            return name
    raise SnapvitError(f"{title}: has no split '{split}' (it has: {', '.join(there)}). Name one of these")


def _is_kept(builder: DatasetBuilder) -> bool:
    """Return True if all that a builder would fetch has been fetched."""
    return os.path.isfile(os.path.join(builder.cache_dir, "dataset_info.json"))


def _is_large(builder: DatasetBuilder, split: str) -> bool:
    """Return True if a split is too large to be fetched for a sample, by the size on its card, and is not kept yet."""
    told = (builder.info.splits or {}).get(split)
    return told is not None and (told.num_bytes or 0) > LARGE and not _is_kept(builder)


def _drawn(datasets: Any, stream: Any, sample: Sample) -> Dataset:
    """Return images of a stream in an order by seed, as they are stored: they are decoded when they are opened."""
    kinds = (datasets.Image, datasets.ClassLabel)
    features = {name: kind for name, kind in stream.features.items() if isinstance(kind, kinds)}
    stream = stream.select_columns(list(features))
    for name, kind in features.items():
        if isinstance(kind, datasets.Image):
            stream = stream.cast_column(name, datasets.Image(decode=False))
    rows = list(stream.shuffle(seed=sample.seed, buffer_size=MIXED).take(sample.images))
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


def splits_on_hub(repository: str) -> list[str]:
    """The names of the splits that a dataset has."""
    with _fetching(f"{PREFIX}{repository}") as datasets:
        return _splits_of(datasets.load_dataset_builder(repository))


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
    except SnapvitError:
        raise
    except Exception as error:  # network, credentials, disk, name: each has its own kinds
        raise SnapvitError(f"{title}: cannot be fetched ({first_line(error)}). {_advice(title, error)}") from error


def _advice(title: str, error: Exception) -> str:
    repository = title.removeprefix(PREFIX).split(":")[0]
    if "gated" in str(error):
        return f"Accept its terms at https://huggingface.co/datasets/{repository}, then log in: hf auth login"
    if isinstance(error, ConnectionError):
        return f"Connect to the network, or put a copy of the repository into the folder {repository} here"
    return "Check the name, the split and the network"


def hf_source(dataset: Dataset, name: str, label: str | None = None, mask: str | None = None) -> Source:
    """Wrap a Dataset: its first column of type Image, and its ClassLabel column `label`, or its first if it has one.

    `mask`: a column of type Image with the classes of the pixels.
    """
    datasets = _package(name)
    dataset = dataset.with_format(None)
    columns = ", ".join(dataset.column_names)
    if label is not None and not isinstance(dataset.features.get(label), datasets.ClassLabel):
        raise SnapvitError(
            f"{name}: has no column of classes called {label} (it has: {columns}). Give --data another dataset"
        )
    if mask is not None and not isinstance(dataset.features.get(mask), datasets.Image):
        raise SnapvitError(
            f"{name}: has no column of masks called {mask} (it has: {columns}). Give --data another dataset"
        )
    image_column = _column(dataset, datasets.Image, besides=mask)
    if image_column is None:
        raise SnapvitError(f"{name}: has no column of images (it has: {columns}). Give --data another dataset")
    if not len(dataset):
        raise SnapvitError(f"{name}: holds no images. Give --data another dataset or split")
    labels, classes = _labels(dataset, label or _column(dataset, datasets.ClassLabel))

    def title(i: int) -> str:
        return f"{name} image {i}"

    stored = _stored(dataset, image_column)
    masks = None if mask is None else _stored(dataset, mask)
    return Source(
        name,
        lambda i: as_rgb(stored(i, title(i)), title(i)),
        len(dataset),
        title,
        labels,
        classes,
        mask=None if masks is None else lambda i: masks(i, f"{name} mask {i}"),
    )


def _package(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        missing = error.name or "datasets"
        advice = "Try: pip install 'snapvit-export[data]'"
        raise MissingDependency(f"{what} needs {missing}, which is not installed. {advice}") from error
    if int(datasets.__version__.split(".")[0]) < OLDEST:
        raise MissingDependency(f"{what} needs datasets {OLDEST} or newer. Try: pip install --upgrade datasets")
    return datasets


def _hush(datasets: Any) -> None:
    """Keep bars and retries off standard error: --quiet must be quiet, and a failure is reported in our one line."""
    datasets.disable_progress_bars()
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _column(dataset: Dataset, kind: type, besides: str | None = None) -> str | None:
    named = (name for name, feature in dataset.features.items() if isinstance(feature, kind))
    return next((name for name in named if name != besides), None)


def _labels(dataset: Dataset, column: str | None) -> tuple[list[int] | None, list[str]]:
    """Class numbers and names; none where a split keeps its labels secret (-1, or nothing)."""
    if column is None:
        return None, []
    labels = list(dataset[column])
    if any(label is None or label < 0 for label in labels):
        return None, []
    return labels, list(dataset.features[column].names)


def _stored(dataset: Dataset, column: str) -> Callable[[int, str], Image]:
    """Return what opens the images of a column by number; a title names them where they cannot be read."""
    datasets = _package(column)
    images = dataset.select_columns([column]).cast_column(column, datasets.Image())

    def opened(i: int, title: str) -> Image:
        try:
            image = images[i][column]
        except Exception as error:  # damaged files make the decoders raise whatever they like
            raise unreadable(title, first_line(error)) from error
        if image is None:
            raise unreadable(title, "it is empty")
        return image

    return opened
