"""Batches of a data loader as images: tensors that are ready for the model, with or without labels beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import SnapvitError
from ..models.load import Model


@dataclass(frozen=True, eq=False)
class ReadyImages:
    """Inputs of a model, held as they were given. Statistics are taken of them as of `Images`."""

    inputs: npt.NDArray[np.float32]  # (N, 3, H, W), normalised

    def __len__(self) -> int:
        return len(self.inputs)

    def batches(self, size: int) -> Iterator[npt.NDArray[np.float32]]:
        """Model inputs of at most `size` images, in order."""
        for start in range(0, len(self), size):
            yield self.inputs[start : start + size]

    @cached_property
    def fingerprint(self) -> dict[str, str | int]:
        """As that of `Images`; the hash is of the inputs, since nobody here saw the pixels."""
        digest = hashlib.sha256(np.ascontiguousarray(self.inputs).data).hexdigest()
        return {"source": "a loader", "images": len(self), "unreadable": 0, "sha256": digest}


def images_of(loader: Iterable[Any], model: Model) -> ReadyImages:
    """Return all images of a loader: its batches are tensors, or tuples that begin with one.

    >>> len(images_of([(inputs, labels)], model))
    4
    """
    found = [_inputs(batch, number, model) for number, batch in enumerate(loader)]
    if not found:
        raise SnapvitError("a correction needs images, and the loader gives none")
    return ReadyImages(np.concatenate(found))


def _inputs(batch: Any, number: int, model: Model) -> npt.NDArray[np.float32]:
    inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if not isinstance(inputs, Tensor):
        raise SnapvitError(
            f"batch {number} of the loader is a {type(batch).__name__}. Give tensors of images, or tuples that begin "
            f"with one"
        )
    wanted = (model.anatomy.channels, *model.anatomy.image)
    if inputs.ndim != 4 or tuple(inputs.shape[1:]) != wanted:
        raise SnapvitError(
            f"batch {number} of the loader has shape {tuple(inputs.shape)}, and {model.name} takes images of {wanted}"
        )
    ready = inputs.detach().to("cpu", torch.float32).numpy()
    if not np.isfinite(ready).all():
        raise SnapvitError(f"batch {number} of the loader has values that are not finite numbers")
    return ready
