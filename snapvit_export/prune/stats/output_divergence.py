"""Output divergence of a cut model from the dense one, image by image and without labels.

| symbol | meaning                                              | shape  |
|--------|------------------------------------------------------|--------|
| z, z'  | pre-logits embeddings of the dense and the cut model | (N, E) |
| p, p'  | softmax of the classifier's logits for them          | (N, C) |
| s, s'  | softmax over the other images j of cos(z_i, z_j)/t; of cos(z'_i, z_j)/t | (N, N) |

`predictions` is KL(p || p'), `neighbours` KL(s || s'), `cosine` 1 - cos(z', z). The first needs a classifier; the
second compares what a model without one is used for: which images are alike. docs/quality.md has how well each
predicts the accuracy on other images.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import SnapvitError, UsageError
from ..models.load import Model

DivergenceName = Literal["predictions", "neighbours", "cosine"]
TEMPERATURE = 0.07  # t of the similarities, as customary in contrastive learning


class OutputDivergence:
    """Compares embeddings of a cut model with those of the dense one.

    >>> divergence = OutputDivergence("predictions", model, runner.dense)
    >>> divergence(embedding[:8], slice(0, 8))     # (8,)
    """

    def __init__(self, name: DivergenceName, model: Model, dense: Tensor) -> None:
        check_divergence(name, model)
        self.name = name
        self.classifier: Any = getattr(model.module, "head", None)
        self.bank = F.normalize(dense, dim=1)  # (N, E)
        self.teacher = self._compared(dense, slice(0, len(dense)))

    def __call__(self, z: Tensor, rows: slice) -> Tensor:
        """Return the divergence of the images in `rows`, whose embeddings are `z`: (n,) in float64."""
        student = self._compared(z, rows)
        if self.name == "cosine":
            return 1 - (student * self.teacher[rows]).sum(1).double()
        teacher = self.teacher[rows].double()
        return (teacher.exp() * (teacher - student.double())).sum(1)

    def _compared(self, z: Tensor, rows: slice) -> Tensor:
        """Return what is compared: log-probabilities, or embeddings of length one."""
        with torch.no_grad():
            if self.name == "cosine":
                return F.normalize(z, dim=1)
            if self.name == "predictions":
                return self.classifier(z).log_softmax(1)  # (n, classes)
            similar = F.normalize(z, dim=1) @ self.bank.T / TEMPERATURE  # (n, N)
            own = torch.arange(rows.start, rows.start + len(z))
            similar[torch.arange(len(z)), own] = -1e4  # an image is no neighbour of itself
            return similar.log_softmax(1)


def default_divergence(model: Model) -> DivergenceName:
    """Return the best divergence that this model allows: of its predictions, or of neighbours where it makes none."""
    return "predictions" if _predicts(model) else "neighbours"


def check_divergence(name: str, model: Model) -> None:
    """Refuse a name that does not exist, and predictions of a model that makes none from its embedding."""
    if name not in ("predictions", "neighbours", "cosine"):
        raise UsageError(f"no divergence is called '{name}'. Known: predictions, neighbours, cosine")
    if name == "predictions" and not _predicts(model):
        raise SnapvitError(f"{model.name} makes no predictions from its embedding alone. Use neighbours")


def _predicts(model: Model) -> bool:
    """Return True if one classifier reads the embedding; a distilled model has two, each on a token of its own."""
    return model.anatomy.classes > 1 and not model.anatomy.distillation_token
