"""Extract features with torch: the embedding that the head reads, the head's logits, and the patch tokens.

The embedding of a distilled model is the mean of its two tokens, as in the exported graphs. Patch tokens are taken
after the final norm, or after `fc_norm` where the model has no other. Where tokens were merged, every patch has the
token that it went into.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...calibration.images import Images
from ...calibration.preprocessing import Preprocessing
from ...evaluate.features import Array
from ...progress import Progress, Silent
from ..blocks.merging import holder_of
from .class_names import class_names
from .load import Model
from .read_anatomy import read_anatomy

BATCH = 32


@dataclass(frozen=True)
class TorchExtractor:
    """A torch model as the model under test of an evaluation."""

    model: Model
    device: str = "cpu"  # that computes
    runtime = "torch"
    batch = BATCH

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def preprocessing(self) -> Preprocessing:
        return self.model.preprocessing

    @property
    def labels(self) -> tuple[str, ...]:
        return class_names(self.model)

    @property
    def outputs(self) -> int:
        return self.model.anatomy.classes

    @property
    def weights_sha256(self) -> str:
        return self.model.weights_sha256

    def features(self, images: Images, progress: Progress | None = None) -> tuple[Array, Array | None]:
        """Return embeddings (N, E), and logits (N, C) if the model has a head."""
        module: Any = self.model.module
        embedded, classified = [], []
        for tokens in self._batches(images, progress or Silent()):
            embedded.append(module.forward_head(tokens, pre_logits=True).cpu().numpy())
            if self.outputs:
                classified.append(module.forward_head(tokens).cpu().numpy())
        return np.concatenate(embedded), np.concatenate(classified) if classified else None

    def tokens(self, images: Images, progress: Progress | None = None) -> Array:
        """Return the patch tokens in their places: (N, h, w, E)."""
        module: Any = self.model.module
        anatomy = self.model.anatomy
        holder, (h, w) = holder_of(module), anatomy.grid
        found = []
        for tokens in self._batches(images, progress or Silent()):
            tokens = tokens if holder is None else holder.groups.spread(tokens)  # of the pass that has just run
            patches = tokens[:, anatomy.prefix :]  # prefix tokens come first
            patches = patches if anatomy.final_norm else module.fc_norm(patches)
            found.append(patches.reshape(len(patches), h, w, -1).cpu().numpy())
        return np.concatenate(found)

    def _batches(self, images: Images, progress: Progress) -> Iterator[Tensor]:
        module: Any = self.model.module.to(self.device)
        try:
            with torch.no_grad():
                for batch in images.batches(BATCH):
                    yield module.forward_features(torch.from_numpy(batch).to(self.device))  # (B, T, E)
                    progress.advance(len(batch))
        finally:
            module.to("cpu")


def cut_extractor(small: nn.Module, model: Model, device: str = "cpu") -> TorchExtractor:
    """Return the extractor of a module that was cut from a model."""
    return TorchExtractor(Model(small, read_anatomy(small, model.name), model.description), device)
