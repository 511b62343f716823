"""Checkpoints: the state of a long run on disk, so that it can be killed at any moment and resumed.

One safetensors file: arrays, and JSON in the metadata. It is written whole under another name and renamed. `settings`
identify the run; a checkpoint of other settings is refused by naming the first difference. With a clock it also keeps
how long the phases have taken, for the run that resumes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FileFormatError, SnapvitError
from ...model.timing import KEY as TIMING
from ...model.timing import PhaseClock
from ...storage.checksummed import Arrays, load_checksummed, save_checksummed

KIND = "snapvit-checkpoint"


@dataclass(frozen=True)
class SavedState:
    """The content of a checkpoint: the phase of the run, arrays by name, and anything that is not an array."""

    phase: str
    arrays: dict[str, np.ndarray]
    rest: dict[str, Any]

    @staticmethod
    def packed(saved: SavedState | None) -> dict[str, Any] | None:
        """Return plain values: one process reads the file and sends it to the others, perhaps on other machines."""
        if saved is None:
            return None
        arrays = {name: [a.dtype.str, list(a.shape), a.tobytes()] for name, a in saved.arrays.items()}
        return {"phase": saved.phase, "arrays": arrays, "rest": saved.rest}

    @staticmethod
    def unpacked(packed: dict[str, Any] | None) -> SavedState | None:
        """Undo `packed`."""
        if packed is None:
            return None
        arrays = {n: np.frombuffer(data, kind).reshape(shape) for n, (kind, shape, data) in packed["arrays"].items()}
        return SavedState(packed["phase"], arrays, packed["rest"])


class Checkpoint:
    """A file bound to the settings of one run."""

    def __init__(self, path: Path, settings: Mapping[str, Any], clock: PhaseClock | None = None) -> None:
        self.path, self.clock = path, clock
        self.settings = json.loads(json.dumps(settings))  # as it will be read back

    def save(self, phase: str, arrays: Arrays, rest: Mapping[str, Any]) -> None:
        """Replace the file by this state."""
        timed = {} if self.clock is None else {TIMING: self.clock.in_plain_values()}
        described = json.dumps({"settings": self.settings, "phase": phase, "rest": {**rest, **timed}})
        save_checksummed(self.path, KIND, arrays, described)

    def load(self) -> SavedState | None:
        """Return the state on disk, None if there is none; refuse one that is damaged or of another run."""
        if not self.path.exists():
            return None
        try:
            arrays, described = load_checksummed(self.path, KIND)
        except FileFormatError as error:
            raise FileFormatError(f"{error}. Remove it to start again") from error
        try:
            content = json.loads(described)
            settings, phase, rest = content["settings"], str(content["phase"]), dict(content["rest"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FileFormatError(f"{self.path}: damaged. Remove it to start again") from error
        if difference := _difference(settings, self.settings):
            raise SnapvitError(
                f"{self.path}: is of another run: {difference}. Remove it to start again, or give another --out"
            )
        return SavedState(phase, arrays, rest)


def _difference(theirs: Any, ours: Any, where: str = "") -> str | None:
    """Describe the first place where two settings differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            place = f"{where}.{key}" if where else key
            if found := _difference(theirs.get(key), ours.get(key), place):
                return found
        return None
    if theirs == ours:
        return None
    return f"{where} was {_short(theirs)}, now it is {_short(ours)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
