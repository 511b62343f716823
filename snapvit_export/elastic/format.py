"""`elastic.json`: what an Elastic folder holds, sealed by a hash over itself. Light.

How a Factor lies in `correction.bin`: every width is a prefix there too. Light: numpy.

The lower triangle of L is packed row after row, so the first k(k+1)/2 numbers are the leading block that a width of k
needs; W L is stored transposed, (d, E), so that its first k columns are the first k rows.

Everything is float32, computed with in float64. On DeiT-Tiny (all 24 layers, 128 images, 1/3, 2/3 and 9/10 kept) the
corrected weights then differ from a direct float64 least-squares solve by at most 1.5e-7 of their Frobenius norm with
the default damping, 2.1e-7 with a tenth of it; float64 would be twice the size, and its result is rounded to float32
(2.6e-8) anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ..calibration.preprocessing import Preprocessing
from ..correction.cholesky import Factor
from ..correction.moments import Array, Damping
from ..errors import FileFormatError
from ..model.anatomy import Anatomy
from ..storage.json import Count, Value, read_json, to_json, write_json
from ..storage.mapped import Array as Stored
from ..storage.mapped import Buffer, DataType

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


STORED: DataType = "float32"
PARTS = ("mean", "lower", "projected", "constant", "gain")


def pack_factor(factor: Factor) -> dict[str, Array]:
    """The arrays of one layer by the names of PARTS."""
    d = len(factor.mean)
    lower = np.empty(d * (d + 1) // 2)
    for row in range(d):
        lower[row * (row + 1) // 2 : (row + 1) * (row + 2) // 2] = factor.lower[row, : row + 1]
    parts = (factor.mean, lower, factor.projected.T, factor.constant, factor.layer_scale)
    return dict(zip(PARTS, parts))


def leading_factor(stored: Mapping[str, Stored], unit: int, keep: int) -> Factor:
    """The Factor of the best `keep` structures alone: all that correcting to that width reads."""
    k = keep * unit
    lower = np.zeros((k, k))
    for row in range(k):
        lower[row, : row + 1] = stored["lower"][row * (row + 1) // 2 : (row + 1) * (row + 2) // 2]
    mean, constant, gain = (stored[part].astype(np.float64) for part in ("mean", "constant", "gain"))
    projected = np.array(
        stored["projected"][:k].T, np.float64, order="C"
    )  # (E, k): rows, as the solver goes along them
    return Factor(unit, mean[:k], lower, projected, constant, gain)
