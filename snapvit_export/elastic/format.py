"""`elastic.json`: what an Elastic folder holds, sealed by a hash over itself. Light."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from ..calibration.preprocessing import Preprocessing
from ..correction.damping import Damping
from ..errors import FileFormatError
from ..model.anatomy import Anatomy
from ..storage.json import Count, Value, read_json, to_json, write_json
from ..storage.mapped import Buffer

ELASTIC, RANKING, WEIGHTS, CORRECTION = "elastic.json", "ranking.safetensors", "weights.bin", "correction.bin"


class Wiring(Value, frozen=True, kw_only=True):
    """What an Anatomy leaves open of how the parts are joined, and whoever computes with the weights must know."""

    rotate_half: bool = False  # rotary pairs lie half a head apart; otherwise they are neighbours
    pool_prefix: bool = False  # pooling takes the prefix tokens too; otherwise the patches alone
    pool_activation: str | None = None  # of the MLP after attention pooling
    eps: dict[str, float] = msgspec.field(
        default_factory=dict
    )  # of norms that differ from anatomy.norm_eps, by canonical name


class RankingFile(Value, frozen=True, kw_only=True):
    """The ranking lies beside, whole, as `snapvit rank` writes it."""

    file: str
    sha256: str


class Correction(Value, frozen=True, kw_only=True):
    """How the factors were made, and where they are."""

    damping: Damping
    images: Count
    order_sha256: str  # of the order that the factors are in
    buffer: Buffer


class Description(Value, frozen=True, kw_only=True):
    """What an Elastic folder holds."""

    format_version: Literal[1] = 1
    model: str
    anatomy: Anatomy
    preprocessing: Preprocessing
    labels: tuple[str, ...] = ()
    wiring: Wiring = Wiring()
    ranking: RankingFile
    weights: Buffer
    correction: Correction | None = None
    seal: str = ""  # SHA-256 of this file with an empty seal

    def sealed(self) -> Description:
        """The same with its own hash in it."""
        open_value = msgspec.structs.replace(self, seal="")
        return msgspec.structs.replace(self, seal=hashlib.sha256(to_json(open_value)).hexdigest())

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files of the folder."""
        correction = () if self.correction is None else (self.correction.buffer.file,)
        return (ELASTIC, self.ranking.file, self.weights.file, *correction)


def write_description(folder: Path, description: Description) -> None:
    """Write `elastic.json`."""
    write_json(folder / ELASTIC, description.sealed())


def read_description(folder: Path) -> Description:
    """Read `elastic.json` and check that it says what was written."""
    description = read_json(folder / ELASTIC, Description)
    if description.seal != description.sealed().seal:
        raise FileFormatError(f"{folder / ELASTIC}: damaged: its contents do not match its hash. Make or copy it again")
    return description


def own_files(folder: Path) -> tuple[str, ...] | None:
    """Names of the files that an Elastic of ours may have in this folder; None if there is none."""
    if not (folder / ELASTIC).is_file():
        return None
    try:
        read_description(folder)
    except FileFormatError:
        return None
    return (ELASTIC, RANKING, WEIGHTS, CORRECTION)
