"""Importance scores as the released SnapViT code has them: read from its files or ours, written to its layout.

A released file is a dict that `torch.save` wrote, with two members of enums of that code in it. Its loader passes both
through their enum, `ModelType(...)`, which takes the plain text just as well. So here they are written as text: the
file names no class, `weights_only` reads it, and the released code reads it too.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..errors import SnapvitError
from ..model.published import RELEASED_NAMES, published
from ..model.ranking import Array, Ranking
from ..storage.atomic import write_atomically
from ..storage.json import as_builtins
from .import_scores import IMPORTED, import_scores

SIZES = ("num_blocks", "hidden_dim", "embed_dim", "num_heads", "head_dim")


@dataclass(frozen=True, eq=False)
class ElasticImportanceScores:
    """Scores of all heads and neurons under the names that the released code gives them; `ranking` is what they are.

    >>> scores = ElasticImportanceScores.load("dino_vitb16.pt")     # or "ranking.safetensors"
    >>> scores.mlp_scores.shape, scores.min_head_keep_ratio
    (torch.Size([4, 192]), 0.2)
    """

    ranking: Ranking

    @staticmethod
    def load(path: Path | str, device: torch.device | str | None = None) -> ElasticImportanceScores:
        """Read a score file of the released code, or a ranking of ours. Nothing that is pickled in it is executed.

        `device`: scores stay on the CPU, which alone sorts them, so only that is taken.
        """
        if device is not None and torch.device(device).type != "cpu":
            raise SnapvitError(f"scores stay on the CPU, not on {device}. Leave device out; models may lie anywhere")
        path = Path(path)
        is_released = path.suffix == ".pt" or (path.is_file() and zipfile.is_zipfile(path))
        return ElasticImportanceScores(import_scores(path) if is_released else Ranking.load(path))

    def save(self, path: Path | str, model_type: str | None = None) -> None:
        """Write the layout of the released code; `model_type`: its name of the model, where ours does not tell it."""
        file = io.BytesIO()
        torch.save(self.released(model_type), file)
        write_atomically(Path(path), file.getvalue())

    def released(self, model_type: str | None = None) -> dict[str, Any]:
        """Return what a released file holds."""
        mlp_scores, head_scores = self.mlp_scores, self.head_scores  # first: they refuse blocks of several sizes
        return {
            "mlp_scores": mlp_scores,
            "head_scores": head_scores,
            "model_type": _released_name(self.ranking.model, model_type),
            "mlp_architecture": self.mlp_architecture,
            **{name: getattr(self, name) for name in SIZES},
            "min_hidden_dim_keep_ratio": self.min_hidden_dim_keep_ratio,
            "min_head_keep_ratio": self.min_head_keep_ratio,
            "metadata": self.metadata,
        }

    @property
    def mlp_scores(self) -> Tensor:
        """(blocks, neurons) in float32, bit for bit those of the ranking."""
        return _matrix(self.ranking.neuron_scores, "neurons")

    @property
    def head_scores(self) -> Tensor:
        """(blocks, heads) in float32, bit for bit those of the ranking."""
        return _matrix(self.ranking.head_scores, "heads")

    @property
    def model_type(self) -> str:
        """The name of the model, by the released code where it has one."""
        known = published(self.ranking.model)
        return self.ranking.model if known is None or known.released is None else known.released

    @property
    def mlp_architecture(self) -> str:
        """`standard`, or `swiglu` for a gated MLP."""
        anatomy = self.ranking.anatomy
        if anatomy is None:
            named = str(self.ranking.provenance.get("mlp_architecture") or "standard")
            if named not in ("standard", "swiglu"):
                raise SnapvitError(f"the scores are of MLPs of kind '{named}', which is neither standard nor swiglu")
            return named
        return "swiglu" if any(block.mlp == "glu" for block in anatomy.blocks) else "standard"

    @property
    def num_blocks(self) -> int:
        return len(self.ranking.heads)

    @property
    def hidden_dim(self) -> int:
        return self.mlp_scores.shape[1]

    @property
    def num_heads(self) -> int:
        return self.head_scores.shape[1]

    @property
    def embed_dim(self) -> int:
        return self._size("embed_dim")

    @property
    def head_dim(self) -> int:
        return self._size("head_dim")

    @property
    def min_hidden_dim_keep_ratio(self) -> float:
        return self.ranking.protection.neurons

    @property
    def min_head_keep_ratio(self) -> float:
        return self.ranking.protection.heads

    @property
    def metadata(self) -> dict[str, Any]:
        """Of a released file its own; of a ranking of ours how it was made."""
        provenance = self.ranking.provenance
        if provenance.get("criterion") == IMPORTED:
            return dict(provenance.get("metadata") or {})
        return {"made_by": f"snapvit-export {__version__}", **as_builtins(dict(provenance))}

    def _size(self, name: str) -> int:
        anatomy = self.ranking.anatomy
        if anatomy is not None:
            return anatomy.embed_dim if name == "embed_dim" else anatomy.blocks[0].head_dim
        size = self.ranking.provenance.get(name)
        if type(size) is not int or size < 1:
            raise SnapvitError(
                f"the ranking of {self.ranking.model or 'an unnamed model'} does not say its {name}. Make it again: "
                f"snapvit import-scores FILE.pt, or snapvit rank"
            )
        return size


def as_ranking(scores: Ranking | ElasticImportanceScores) -> Ranking:
    """Return the ranking of scores, or a ranking as it is."""
    return scores if isinstance(scores, Ranking) else scores.ranking


def _matrix(scores: tuple[Array, ...], of: str) -> Tensor:
    if len({len(block) for block in scores}) > 1:
        counts = ", ".join(str(len(block)) for block in scores)
        raise SnapvitError(f"the blocks have {counts} {of}, and the released layout has one number for all of them")
    return torch.from_numpy(np.stack(scores))


def _released_name(name: str, given: str | None) -> str:
    """Return what the released code calls a model; its loader refuses every other name."""
    if given is not None:
        if given not in RELEASED_NAMES:
            raise SnapvitError(f"the released code knows no model type '{given}'. Known: {', '.join(RELEASED_NAMES)}")
        return given
    known = published(name)
    if known is None or known.released is None:
        raise SnapvitError(
            f"the released code has no name for {name or 'an unnamed model'}. Give --model-type, one of "
            f"{', '.join(RELEASED_NAMES)}"
        )
    return known.released


def is_score_file(path: Path) -> bool:
    """Return True if a file has the layout of the released code."""
    try:
        return import_scores(path) is not None
    except SnapvitError:
        return False
