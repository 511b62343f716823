"""A dataset to evaluate on: the train, validation and test splits that a `--data` value names.

Probes learn from the training split and choose by the validation split; the test split only reports.

| `--data` | splits |
|---|---|
| folder with `train` or `trainval`, and `val` or `test` | these; with `val` alone, that is the test split |
| folder in the layout of Pascal VOC | `train` and `val`, without labels |
| `.npz` with `train_images`, `test_images`, ... | these |
| `hf:owner/name`, or the plain name of a known set (`KNOWN_SETS`) | those of the Hugging Face hub |
| `digits` | its own |
| any other source | a fifth of it is the test split, by seed, each class in its proportion |

A class has the same number in all splits, so all must have the same classes. The known sets are those of the SnapViT
paper that the hub has as parquet files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import SnapvitError, UsageError
from . import hub
from .folder import folder_source
from .masks import is_voc, voc_splits
from .npz import npz_splits
from .open_source import open_source
from .sampling import spread
from .source import Source

TEST_SHARE = 0.2  # of a source that has no splits of its own
SPLIT_NAMES = {"train": ("train", "trainval"), "valid": ("val", "valid", "validation"), "test": ("test",)}


@dataclass(frozen=True)
class KnownSet:
    """A dataset on the hub: its splits, and the column that holds the classes."""

    repository: str
    train: str
    test: str
    valid: str | None = None
    label: str = "label"


KNOWN_SETS = {
    "imagenet-1k": KnownSet("ILSVRC/imagenet-1k", "train", "validation"),  # the labels of its test split are secret
    "cifar10": KnownSet("uoft-cs/cifar10", "train", "test"),
    "cifar100": KnownSet("uoft-cs/cifar100", "train", "test", label="fine_label"),
    "dtd": KnownSet("tanganke/dtd", "train", "test"),  # train is the official train and validation of the first split
    "eurosat": KnownSet("blanchon/EuroSAT_RGB", "train", "test", valid="validation"),
    "oxford-pets": KnownSet("timm/oxford-iiit-pet", "train", "test"),  # label: the breed; it has cat or dog besides
    "fgvc-aircraft": KnownSet("Donghyun99/FGVC-Aircraft", "train", "test", valid="val"),  # 100 variants
}
ALIASES = {"imagenet": "imagenet-1k", "pets": "oxford-pets", "aircraft": "fgvc-aircraft"}


def known_set(name: str) -> KnownSet | None:
    """The dataset of this plain name, if there is one."""
    return KNOWN_SETS.get(ALIASES.get(name, name))


@dataclass(frozen=True)
class Dataset:
    """Splits with one numbering of classes; `valid` is None where the set has none."""

    name: str
    train: Source | None
    valid: Source | None
    test: Source
    unsplit: Source | None = None  # all images of a source without splits: train and test are drawn from them

    @property
    def splits(self) -> dict[str, Source]:
        """The splits that the dataset has, by name."""
        named = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: source for name, source in named.items() if source is not None}

    def at_most(self, images: int | None, seed: int) -> Dataset:
        """Return the dataset with at most so many images of each split, classes in proportion; None for all."""
        if images is None:
            return self
        fewer = {name: _first(source, images, seed) for name, source in self.splits.items()}
        unsplit = None if self.unsplit is None else _first(self.unsplit, images, seed)
        return Dataset(self.name, fewer.get("train"), fewer.get("valid"), fewer["test"], unsplit)

    def whole(self) -> Dataset:
        """Return an unsplit dataset as one test split, where nothing has to be trained; others as they are."""
        return self if self.unsplit is None else Dataset(self.name, None, None, self.unsplit)


def open_dataset(text: str, seed: int = 0) -> Dataset:
    """Open the dataset that a `--data` value names.

    >>> open_dataset("path/to/pets").test.count
    10
    """
    splits = _splits(text)
    if not splits:
        return split_by_seed(text, open_source(text), seed)
    _check_classes(text, splits)
    return _arranged(text, splits, seed)


def open_to_calibrate(text: str) -> Source:
    """Open the images that a `--data` value names, to calibrate on: those of the training split, where it has splits.

    The test split is what the source holds out, or the validation split if it has no other.

    >>> open_to_calibrate("path/to/pets").held_out.count
    10
    """
    splits = _splits(text)
    if not splits:
        return open_source(text)
    train, other = splits.get("train"), splits.get("test") or splits.get("valid")
    if train is None or other is None:
        found = train or other
        assert found is not None, "there is a split"
        return found
    if list(train.classes) != list(other.classes):  # calibrating needs no labels, and no accuracy can be told
        other = replace(other, labels=None, classes=())
    return replace(train, held_out=other)


def _splits(text: str) -> dict[str, Source]:
    """Splits that the source has itself, called train, valid and test; none if it is unsplit."""
    path = Path(text)
    if text.strip() and path.is_dir():
        return voc_splits(path) if is_voc(path) else _folders(path)
    if path.suffix.lower() == ".npz" and path.is_file():
        return npz_splits(path)
    if known := known_set(text):
        return _known(known)
    if text.startswith(hub.PREFIX):
        repository, split = hub.parse_name(text.removeprefix(hub.PREFIX))
        return {} if split else _usual(repository)
    return {}


def _folders(folder: Path) -> dict[str, Source]:
    there = {path.name for path in folder.iterdir() if path.is_dir()}
    named = _named(there, str(folder))
    usual = {name for names in SPLIT_NAMES.values() for name in names}
    if not there <= usual and ("train" not in named or len(named) < 2):
        return {}  # classes, one of which may be called `train`
    return {split: folder_source(folder / name) for split, name in named.items()}


def _known(known: KnownSet) -> dict[str, Source]:
    wanted = {"train": known.train, "valid": known.valid, "test": known.test}
    return {
        split: hub.from_hub(f"{known.repository}:{name}", known.label)
        for split, name in wanted.items()
        if name is not None
    }


def _usual(repository: str) -> dict[str, Source]:
    named = _named(hub.splits_on_hub(repository), f"{hub.PREFIX}{repository}")
    if "train" not in named or len(named) < 2:
        return {}
    return {split: hub.from_hub(f"{repository}:{name}") for split, name in named.items()}


def _named(there: Collection[str], where: str) -> dict[str, str]:
    """Map each split to the one of its usual names that is there."""
    found = {}
    for split, names in SPLIT_NAMES.items():
        present = [name for name in names if name in there]
        if len(present) > 1:
            raise SnapvitError(f"{where}: has both {present[0]} and {present[1]}, and one must be meant. Remove one")
        if present:
            found[split] = present[0]
    return found


def _check_classes(name: str, splits: Mapping[str, Source]) -> None:
    """Refuse splits in which one number would mean two classes."""
    first, *others = splits.values()
    for source in others:
        if (source.labels is None) != (first.labels is None):
            without, labelled = (source, first) if source.labels is None else (first, source)
            raise SnapvitError(f"{without.name}: has no labels, but {labelled.name} has. Give both, or neither")
        if list(source.classes) != list(first.classes):
            raise SnapvitError(_difference(name, first, source))


def _difference(name: str, one: Source, other: Source) -> str:
    for here, there in ((one, other), (other, one)):
        if missing := [label for label in here.classes if label not in set(there.classes)]:
            return f"{there.name}: has no class '{missing[0]}', which {here.name} has. Give all splits the same classes"
    return f"{name}: {one.name} and {other.name} number their classes differently. Give all splits the same order"


def _arranged(name: str, splits: dict[str, Source], seed: int) -> Dataset:
    train, valid, test = (splits.get(split) for split in SPLIT_NAMES)
    if test is None:
        test, valid = valid, None
    if test is None and train is not None:
        return split_by_seed(name, train, seed)
    if test is None:
        raise SnapvitError(f"{name}: has no images to report on. Give it a test split")
    return Dataset(name, train, valid, test)


def split_by_seed(name: str, source: Source, seed: int) -> Dataset:
    """Split a source by seed, or as it is split itself if it has set some images aside."""
    if source.held_out is not None:
        return Dataset(name, replace(source, held_out=None), None, source.held_out)
    if source.count < 2:
        raise UsageError(f"{name}: one image cannot serve for training and for testing. Give --data more")
    order = spread(source.labels, source.count, seed)
    cut = min(source.count - 1, round((1 - TEST_SHARE) * source.count))
    return Dataset(name, source.subset(order[:cut]), None, source.subset(order[cut:]), source)


def _first(source: Source, images: int, seed: int) -> Source:
    if source.count <= images:
        return source
    return source.subset(sorted(spread(source.labels, source.count, seed)[:images]))
