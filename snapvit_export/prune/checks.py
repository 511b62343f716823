"""What is checked before work begins: that a device, an engine, a precision exist, and that weights are the same."""

from __future__ import annotations

import hashlib

import torch

from ..errors import SnapvitError, UsageError
from ..ranking import Ranking
from .load import Model
from .search.engine import Autocast, EngineName


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


def check_engine(engine: str | None) -> EngineName | None:
    """Refuse an engine that does not exist."""
    if engine not in (None, "torch", "onnxruntime"):
        raise UsageError(f"no engine is called '{engine}'. Known: torch, onnxruntime")
    return engine  # type: ignore[return-value]


def check_autocast(autocast: str | None) -> Autocast | None:
    """Refuse a precision that does not exist; None lets a GPU measure."""
    if autocast not in (None, "none", "bf16", "fp16"):
        raise UsageError(f"no autocast is called '{autocast}'. Known: none, bf16, fp16")
    return autocast  # type: ignore[return-value]


def check_same_weights(ranking: Ranking, model: Model, where: str = "") -> None:
    """Refuse a ranking of another model, or one that says it was made from other weights; `where` begins the error."""
    try:
        ranking.check_fits(model.anatomy)
    except SnapvitError as error:
        raise SnapvitError(f"{where}{error}") from error
    made_from = ranking.provenance.get("weights_sha256")
    if made_from is not None and made_from != weights_fingerprint(model.module):
        raise SnapvitError(f"{where}the ranking was made from other weights of {ranking.model}. Rank this model first")
