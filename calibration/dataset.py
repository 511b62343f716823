"""A dataset to evaluate on: the train, validation and test splits that a `--data` value names.

Probes learn from the training split and choose by the validation split; the test split only reports.

| `--data` | splits |
|---|---|
| folder with `train` or `trainval`, and `val` or `test` | these; with `val` alone, that is the test split |
| folder in the layout of Pascal VOC | `train` and `val`, without labels |
| `.npz` with `train_images`, `test_images`, ... | these |
| the plain name of a known set | those of its authors, from the Hugging Face hub (`known_sets`) |
| `hf:owner/name` | those of the Hugging Face hub |
| `digits` | its own |
| any other source | a fifth of it is the test split, by seed, each class in its proportion |

A class has the same number in all splits, so all must have the same classes. Only the splits that are asked for are
fetched from the hub: to calibrate takes what is trained and reported on, to report no training images.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import SnapvitError, UsageError
from . import hub
from .folder import folder_source
from .hub import Sample
from .known_sets import MERGED, known_name, known_split, merged, open_known
from .masks import is_voc, voc_splits
from .npz import npz_splits
from .open_source import open_source
from .sampling import mixed, spread
from .source import Source

TEST_SHARE = 0.2  # of a source that has no splits of its own
SPLIT_NAMES = {"train": ("train", "trainval"), "valid": ("val", "valid", "validation"), "test": ("test",)}
ROLES = tuple(SPLIT_NAMES)


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


def open_dataset(text: str, seed: int = 0, roles: Sequence[str] = ROLES) -> Dataset:
    """Open the dataset that a `--data` value names; `roles`: the splits that are needed, of train, valid and test.

    >>> open_dataset("path/to/pets").test.count
    10
    """
    if is_merged(text):
        raise UsageError(f"--data {text} is several training sets, to calibrate on. Evaluate on one of them: cifar10")
    splits = _splits(text, dict.fromkeys(roles))
    if not splits:
        return split_by_seed(text, open_source(text), seed)
    _check_classes(text, splits)
    return _arranged(text, splits, seed)


def open_to_calibrate(text: str, sample: Sample | None = None, held_out: Sample | None = None) -> Source:
    """Open the images that a `--data` value names, to calibrate on: those of the training split, where it has splits.

    The test split is what the source holds out, or the validation split if it has no other. Splits of the hub that are
    too large to be fetched give a `sample`, and of what they hold out another; `held_out` may be of no images.

    >>> open_to_calibrate("path/to/pets").held_out.count
    10
    """
    nothing_held_out = held_out is not None and not held_out.images
    wanted = {"train": sample} | ({} if nothing_held_out else {"test": held_out})
    splits = _splits(text, wanted)
    if not splits:
        return _unsplit(text, sample, held_out)
    train, other = splits.get("train"), splits.get("test") or splits.get("valid")
    if train is None or other is None:
        found = train or other
        assert found is not None, "there is a split"
        return found
    if list(train.classes) != list(other.classes):  # calibrating needs no labels, and no accuracy can be told
        other = replace(other, labels=None, classes=())
    return replace(train, held_out=other)


def open_to_report(text: str, sample: Sample | None = None) -> Source:
    """Open the images that a `--data` value names, to report on: of a source that has no splits, all.

    >>> open_to_report("path/to/pets").count
    10
    """
    if is_merged(text):
        parts = [open_to_report(name, sample) for name in merged(text)]
        return mixed(parts, 0 if sample is None else sample.seed)
    splits = _splits(text, {"test": sample})
    if splits:
        found = splits.get("test") or splits.get("valid") or splits.get("train")
        assert found is not None, "there is a split"
        return found
    source = _unsplit(text, sample, None)
    return source.held_out or source


def are_other_splits(names: Collection[str], data: Dataset) -> bool:
    """Return True if these sources are splits of the hub, none of which is the one that a dataset reports on.

    >>> are_other_splits(["hf:owner/name:train"], open_dataset("path/to/pets"))
    False
    """
    test = data.test.name
    splits = [name.removesuffix(hub.SAMPLED) for name in names]
    return _is_split(test) and all(_is_split(name) and name != test for name in splits)


def _is_split(name: str) -> bool:
    return name.startswith(hub.PREFIX) or known_split(name) is not None


def is_merged(text: str) -> bool:
    """Return True for `merged` and `merged:...`, unless there is a folder of that name."""
    return (text == MERGED or text.startswith(f"{MERGED}:")) and not Path(text).exists()


def _unsplit(text: str, sample: Sample | None, held_out: Sample | None) -> Source:
    """Open a source that has no splits: of a very large one on the hub, what calibrates and what is held out."""
    if not text.startswith(hub.PREFIX) or sample is None:
        return open_source(text)
    both = replace(sample, images=sample.images + (held_out.images if held_out else 0))
    source = hub.from_hub(text.removeprefix(hub.PREFIX), sample=both)
    if not source.name.endswith(hub.SAMPLED) or source.count <= sample.images:
        return source
    # The same images calibrate whether others are held out or not: they come first.
    first, others = range(sample.images), range(sample.images, source.count)
    return replace(source.subset(first), held_out=source.subset(others))


def _splits(text: str, samples: Mapping[str, Sample | None]) -> dict[str, Source]:
    """Splits that the source has itself, called train, valid and test; none if it is unsplit.

    Of the hub only those that `samples` names, and of very large ones no more than the sample.
    """
    path = Path(text)
    if text.strip() and path.is_dir():
        return voc_splits(path) if is_voc(path) else _folders(path)
    if path.suffix.lower() == ".npz" and path.is_file():
        return npz_splits(path)
    if (known := known_name(text)) and not path.exists():
        return open_known(known, samples)
    if text.startswith(hub.PREFIX):
        repository, split = hub.parse_name(text.removeprefix(hub.PREFIX))
        return {} if split else _usual(repository, samples)
    return {}


def _folders(folder: Path) -> dict[str, Source]:
    there = {path.name for path in folder.iterdir() if path.is_dir()}
    named = _named(there, str(folder))
    usual = {name for names in SPLIT_NAMES.values() for name in names}
    if not there <= usual and ("train" not in named or len(named) < 2):
        return {}  # classes, one of which may be called `train`
    return {split: folder_source(folder / name) for split, name in named.items()}


def _usual(repository: str, samples: Mapping[str, Sample | None]) -> dict[str, Source]:
    named = _named(hub.splits_on_hub(repository), f"{hub.PREFIX}{repository}")
    if "train" not in named or len(named) < 2:
        return {}
    if "test" not in named:  # as `_arranged` will have it
        named["test"] = named.pop("valid")
    return {
        role: hub.from_hub(f"{repository}:{name}", sample=samples[role])
        for role, name in named.items()
        if role in samples
    }


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
