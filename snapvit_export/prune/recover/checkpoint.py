"""The state of a training on disk: weights, their moving average, the best so far, AdamW's moments, and the history.

One safetensors file with JSON in it, bound to the settings of its run (`rank.checkpoint`). A run that was killed goes
on from it, and ends with the same bits as one that was not, on a CPU with the same number of threads: everything
random comes from the seed and the number of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import FileFormatError
from ..rank.checkpoint import Checkpoint, SavedState

PHASE = "recover"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
Values = dict[str, Tensor]


@dataclass
class TrainingState:
    """Everything that a step changes but for the weights and the optimiser, which hold themselves."""

    step: int = 0  # that comes next
    average: Values = field(default_factory=dict)  # moving average of the weights
    best: Values = field(default_factory=dict)  # empty: those that the run began with
    best_step: int = 0
    best_divergence: float = float("inf")
    history: list[dict[str, Any]] = field(default_factory=list)  # a row for each look at the held-out images
    loss: float | None = None  # moving average of the last steps'
    scaler: dict[str, float] = field(default_factory=dict)  # of float16's loss
    seconds: float = 0.0  # that all parts of the run took


def save(
    checkpoint: Checkpoint,
    state: TrainingState,
    parameters: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
    planned: tuple[int, int],
) -> None:
    """Write the state whole, or leave what was there; `planned`: steps and looks of the whole run."""
    arrays = _prefixed("now", parameters) | _prefixed("average", state.average) | _prefixed("best", state.best)
    named = parameters.items()
    for moment in MOMENTS:  # none yet where all steps so far overflowed in float16
        values = {name: optimiser.state[tensor].get(moment, torch.zeros_like(tensor)) for name, tensor in named}
        arrays |= _prefixed(moment, values)
    rest = {
        "step": state.step,
        "steps": planned[0],
        "looks": planned[1],
        "best_step": state.best_step,
        "best_divergence": state.best_divergence,
        "history": state.history,
        "loss": state.loss,
        "scaler": state.scaler,
        "seconds": state.seconds,
    }
    checkpoint.save(PHASE, arrays, rest)


def restore(
    saved: SavedState, where: str, parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer
) -> TrainingState:
    """Put a saved state into the weights and the optimiser, and return the rest of it."""
    try:
        taken = int(saved.rest["step"])
        scaler = dict(saved.rest["scaler"])
        made = float(taken - int(scaler.get("left_out", 0)))  # AdamW counts those that it made
        for name, tensor in parameters.items():
            _put(tensor, saved.arrays[f"now.{name}"])
            moments = {moment: torch.zeros_like(tensor) for moment in MOMENTS}
            for moment, values in moments.items():
                _put(values, saved.arrays[f"{moment}.{name}"])
            optimiser.state[tensor].update(step=torch.tensor(made), **moments)
        return TrainingState(
            step=taken,
            average=_taken(saved, "average", parameters),
            best=_taken(saved, "best", parameters),
            best_step=int(saved.rest["best_step"]),
            best_divergence=float(saved.rest["best_divergence"]),
            history=list(saved.rest["history"]),
            loss=saved.rest["loss"],
            scaler=scaler,
            seconds=float(saved.rest["seconds"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise FileFormatError(f"{where}: damaged. Remove it to start again") from error


def _prefixed(prefix: str, values: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {f"{prefix}.{name}": tensor.detach().cpu().numpy() for name, tensor in values.items()}


def _taken(saved: SavedState, prefix: str, parameters: Mapping[str, Tensor]) -> Values:
    """Return the values of one kind, on the devices of the parameters; nothing if there were none."""
    if not any(name.startswith(f"{prefix}.") for name in saved.arrays):
        return {}
    found = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    for name, values in found.items():
        _put(values, saved.arrays[f"{prefix}.{name}"])
    return {name: values.detach() for name, values in found.items()}


@torch.no_grad()
def _put(tensor: Tensor, array: np.ndarray) -> None:
    if tuple(tensor.shape) != array.shape:
        raise ValueError("of another shape")
    tensor.copy_(torch.from_numpy(array.copy()))
