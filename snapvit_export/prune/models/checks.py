"""What is checked before work begins: that a device exists, and that weights are the same."""

from __future__ import annotations

import hashlib

import torch

from ...errors import SnapvitError, UsageError
from ...model.ranking import Ranking
from .load import Model


def weights_fingerprint(module: torch.nn.Module) -> str:
    """A hash of all weights by name: the same model gives the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_device(device: str) -> None:
    """Refuse a device that is not there, before any work."""
    if device != "cpu" and not device.startswith("cuda"):
        raise UsageError(f"device '{device}' is not cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SnapvitError("no CUDA device works here: torch finds none. Use --device cpu")


def check_same_weights(ranking: Ranking, model: Model, where: str = "") -> None:
    """Refuse a ranking of another model, or one that says it was made from other weights; `where` begins the error."""
    try:
        ranking.check_fits(model.anatomy)
    except SnapvitError as error:
        raise SnapvitError(f"{where}{error}") from error
    made_from = ranking.provenance.get("weights_sha256")
    if made_from is not None and made_from != weights_fingerprint(model.module):
        raise SnapvitError(f"{where}the ranking was made from other weights of {ranking.model}. Rank this model first")
