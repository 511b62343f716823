"""Datasets that have a plain name: those of the SnapViT paper, with the splits that the paper has, and where they lie.

    cifar10               its training split to learn from, its test split to report on
    cifar10:test          one split alone
    merged                the training splits of the seven sets, in equal parts: to calibrate on
    merged:cifar10,dtd    the same of these two

Splits are those of a set's authors. EuroSAT has none: all of its images are split 80/20, each class in its proportion,
by a seed that never changes, so what is calibrated on in one run is never reported on in another. ImageNet-1k and VOC
are reported on their validation splits, as the labels of their test splits are secret.

Shaders21k and DiffusionDB have names too, but must be fetched by hand: the hub does not have them as tables of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import SnapvitError, UsageError
from . import hub
from .hub import Sample
from .sampling import spread
from .source import Source, joined

TRAIN_SHARE = 0.8  # of a set whose authors have not split it
SPLIT_SEED = 0  # never --seed: training and test images must not change places between two runs
MERGED = "merged"


@dataclass(frozen=True)
class KnownSet:
    """A dataset on the hub: its splits, and the columns that hold the classes or the masks."""

    repository: str
    train: str
    test: str  # what is reported on
    valid: str | None = None
    label: str | None = "label"
    mask: str | None = None
    unsplit: tuple[str, ...] = ()  # splits of the hub that together are the whole set: its authors made none

    @property
    def splits(self) -> dict[str, str]:
        """Names of the splits, by what they serve for."""
        named = {"train": self.train, "valid": self.valid, "test": self.test}
        return {role: name for role, name in named.items() if name is not None}


KNOWN_SETS = {
    "imagenet-1k": KnownSet("ILSVRC/imagenet-1k", "train", "validation"),
    "cifar10": KnownSet("uoft-cs/cifar10", "train", "test"),
    "cifar100": KnownSet("uoft-cs/cifar100", "train", "test", label="fine_label"),
    "dtd": KnownSet("mcimpoi/dtd_split_1", "train", "test", valid="validation"),  # the first of the official ten
    "eurosat": KnownSet("blanchon/EuroSAT_RGB", "train", "test", unsplit=("train", "validation", "test")),
    "oxford-pets": KnownSet("timm/oxford-iiit-pet", "train", "test"),  # label: the breed; it has cat or dog besides
    "fgvc-aircraft": KnownSet("Donghyun99/FGVC-Aircraft", "train", "test", valid="val"),  # 100 variants
    "voc2012": KnownSet("nateraw/pascal-voc-2012", "train", "val", label=None, mask="mask"),
}
ALIASES = {"imagenet": "imagenet-1k", "pets": "oxford-pets", "aircraft": "fgvc-aircraft", "voc": "voc2012"}
SEVEN = tuple(name for name, known in KNOWN_SETS.items() if known.mask is None)
BY_HAND = {
    "shaders21k": "http://data.csail.mit.edu/shaders21k/zipped_data/shaders21k.zip",
    "diffusiondb": "parts of https://huggingface.co/datasets/poloclub/diffusiondb",
}


def known_name(text: str) -> str | None:
    """Return the full name of a known set, if this is one of its names.

    >>> known_name("pets"), known_name("path/to/pets")
    ('oxford-pets', None)
    """
    name = ALIASES.get(text, text)
    return name if name in KNOWN_SETS else None


def known_split(text: str) -> tuple[str, str] | None:
    """Split `cifar10:test` into the set and its split; None for anything else.

    >>> known_split("pets:test")
    ('oxford-pets', 'test')
    """
    before, colon, split = text.partition(":")
    name = known_name(before)
    if name is None or not colon:
        return None
    there = list(KNOWN_SETS[name].splits.values())
    if split not in there:
        raise UsageError(f"{text}: {name} has no split '{split}' (it has: {', '.join(there)}). Name one of these")
    return name, split


def merged(text: str) -> tuple[str, ...]:
    """Return the sets that `merged` or `merged:cifar10,dtd` stands for; the text itself if it is neither.

    >>> merged("merged:cifar10,pets"), merged("cifar10")
    (('cifar10', 'oxford-pets'), ('cifar10',))
    """
    if text == MERGED:
        return SEVEN
    if not text.startswith(f"{MERGED}:"):
        return (text,)
    parts = [part.strip() for part in text.removeprefix(f"{MERGED}:").split(",")]
    names = [known_name(part) for part in parts]
    for part, name in zip(parts, names):
        if name not in SEVEN:
            raise UsageError(f"--data {text}: '{part}' is not one of its sets. Known: {', '.join(SEVEN)}")
    return tuple(name for name in names if name is not None)


def open_known(name: str, samples: Mapping[str, Sample | None]) -> dict[str, Source]:
    """Open the splits of a known set that serve as train, valid or test, as far as `samples` names these.

    A sample is taken of a split that is too large to be fetched for it; None: all of the split.
    """
    known = KNOWN_SETS[name]
    if known.unsplit:
        return {role: source for role, source in _stratified(name, known).items() if role in samples}
    return {
        role: hub.from_hub(f"{known.repository}:{split}", known.label, known.mask, samples[role])
        for role, split in known.splits.items()
        if role in samples
    }


def open_known_split(name: str, split: str) -> Source:
    """Open one split of a known set by the split's own name."""
    (role,) = (role for role, there in KNOWN_SETS[name].splits.items() if there == split)
    return open_known(name, {role: None})[role]


def _stratified(name: str, known: KnownSet) -> dict[str, Source]:
    """Split the whole set by the seed of all runs, each class in its proportion."""
    whole = joined(name, [hub.from_hub(f"{known.repository}:{split}", known.label) for split in known.unsplit])
    if whole.labels is None:
        raise SnapvitError(f"{name}: {known.repository} has no labels to split it by. Give --data its folder")
    order = spread(whole.labels, whole.count, SPLIT_SEED)
    cut = round(TRAIN_SHARE * whole.count)
    parts = {"train": sorted(order[:cut]), "test": sorted(order[cut:])}
    return {role: replace(whole.subset(rows), name=f"{name}:{role}") for role, rows in parts.items()}


def refuse_missing_folder(text: str) -> None:
    """Say where a set comes from that has a name here, but is in no folder of that name."""
    if text in BY_HAND:
        raise SnapvitError(
            f"{text}: no such image folder, and this set is fetched by hand. Unpack {BY_HAND[text]} into it "
            "(docs/evaluation.md, Datasets)"
        )
