"""The files of an Elastic folder: `elastic.json`, and the layout of the Factors in `correction.bin`. Light: numpy.

`elastic.json` describes the folder, with a hash over itself. In `correction.bin` every width is a prefix, as in
`weights.bin`: the lower triangle of L is packed row after row, so its first k(k+1)/2 numbers are the leading block that
a width of k needs; W L is stored transposed, (d, E), so that its first k columns are the first k rows.

The Factors are float32, computed with in float64. On DeiT-Tiny (all 24 layers, 128 images, 1/3, 2/3 and 9/10 kept) the
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
from msgspec import UNSET, UnsetType

from ..allocation.tokens import Schedule
from ..calibration.preprocessing import Preprocessing
from ..correction.cholesky import Factor
from ..correction.moments import Array, Damping
from ..errors import FileFormatError
from ..model.anatomy import Anatomy, Epsilon
from ..model.positions import Rotary
from ..storage.json import Count, Name, Value, read_json, to_json, write_json
from ..storage.mapped import Array as Stored
from ..storage.mapped import Buffer, DataType
from .fidelity_table import FidelityTable

ELASTIC, RANKING, WEIGHTS, CORRECTION = "elastic.json", "ranking.safetensors", "weights.bin", "correction.bin"
STORED: DataType = "float32"  # of the Factors
PARTS = ("mean", "lower", "projected", "constant", "gain")  # of a stored Factor; "gain" is its `layer_scale`


class Wiring(Value, frozen=True, kw_only=True):
    """Details of the computation that an Anatomy leaves open, needed by whoever computes with the weights."""

    rotate_half: bool = False  # rotary pairs lie half a head apart; otherwise they are neighbours
    pool_prefix: bool = False  # pooling takes the prefix tokens too; otherwise the patches alone
    pool_activation: str | None = None  # of the MLP after attention pooling
    # Of the norms that differ from `anatomy.norm_eps`, by canonical name.
    eps: dict[str, Epsilon] = msgspec.field(default_factory=dict)
    # What rotary tables of another resolution are made from. Older folders lack it: their hash is over what they have.
    rotary: Rotary | UnsetType = UNSET


class RankingFile(Value, frozen=True, kw_only=True):
    """The file of the ranking, as `snapvit rank` writes it."""

    file: Name
    sha256: str


class Correction(Value, frozen=True, kw_only=True):
    """The settings that the factors were made with, and the file that holds them."""

    damping: Damping
    images: Count
    order_sha256: str  # of the order that the factors are in
    buffer: Buffer


class Description(Value, frozen=True, kw_only=True):
    """The contents of an Elastic folder."""

    format_version: Literal[1] = 1
    model: str
    anatomy: Anatomy
    preprocessing: Preprocessing
    labels: tuple[str, ...] = ()
    wiring: Wiring = Wiring()
    ranking: RankingFile
    weights: Buffer
    correction: Correction | None = None
    merging: Schedule | UnsetType = UNSET  # the schedule that suits the model, if it was measured
    fidelity: FidelityTable | UnsetType = UNSET  # of some Plans, if it was measured; older folders lack it
    seal: str = ""  # SHA-256 of this file while this field is empty

    def with_checksum(self) -> Description:
        """Return the description with its own hash in it."""
        unhashed = msgspec.structs.replace(self, seal="")
        return msgspec.structs.replace(self, seal=hashlib.sha256(to_json(unhashed)).hexdigest())

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files of the folder."""
        correction = () if self.correction is None else (self.correction.buffer.file,)
        return (ELASTIC, self.ranking.file, self.weights.file, *correction)


def write_description(folder: Path, description: Description) -> None:
    """Write `elastic.json`."""
    write_json(folder / ELASTIC, description.with_checksum())


def read_description(folder: Path) -> Description:
    """Read `elastic.json` and check it against its hash."""
    description = read_json(folder / ELASTIC, Description)
    if description.seal != description.with_checksum().seal:
        raise FileFormatError(f"{folder / ELASTIC}: damaged: its contents do not match its hash. Make or copy it again")
    return description


def own_files(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the files that an Elastic in this folder may have; None if there is none."""
    if not (folder / ELASTIC).is_file():
        return None
    try:
        read_description(folder)
    except FileFormatError:
        return None
    return (ELASTIC, RANKING, WEIGHTS, CORRECTION)


def pack_factor(factor: Factor) -> dict[str, Array]:
    """Return the arrays of one layer by the names of PARTS."""
    d = len(factor.mean)
    lower = np.empty(d * (d + 1) // 2)
    for row in range(d):
        lower[row * (row + 1) // 2 : (row + 1) * (row + 2) // 2] = factor.lower[row, : row + 1]
    parts = (factor.mean, lower, factor.projected.T, factor.constant, factor.layer_scale)
    return dict(zip(PARTS, parts))


def leading_factor(stored: Mapping[str, Stored], unit: int, keep: int) -> Factor:
    """Return the Factor of the best `keep` structures alone: all that correcting to that width reads."""
    k = keep * unit
    lower = np.zeros((k, k))
    for row in range(k):
        lower[row, : row + 1] = stored["lower"][row * (row + 1) // 2 : (row + 1) * (row + 2) // 2]
    mean, constant, layer_scale = (stored[part].astype(np.float64) for part in ("mean", "constant", "gain"))
    projected = np.array(stored["projected"][:k].T, np.float64, order="C")  # (E, k): the solver goes along rows
    return Factor(unit, mean[:k], lower, projected, constant, layer_scale)
