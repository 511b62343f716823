"""The data sets of the SnapViT paper by plain name: where the Hugging Face hub has them, as parquet files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownSet:
    """A data set on the hub: its splits, and the column that holds the classes."""

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
    """The data set of this plain name, if there is one."""
    return KNOWN_SETS.get(ALIASES.get(name, name))
