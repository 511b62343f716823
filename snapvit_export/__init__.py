"""snapvit: the most faithful form of a Vision Transformer that was measured to fit a device.

Public names are loaded on first use, so that importing the package costs nothing and never needs torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

__version__ = "0.1.0"


class _CloneFinder:
    """Finds the packages that a clone has beside this one and a wheel has inside it; nothing else that lies there."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        names = [f"{__name__}.{package}" for package in ("calibration", "cli", "profiles")]
        return PathFinder.find_spec(name, [os.path.dirname(__path__[0])]) if name in names else None


# Python started in a clone finds this folder before what is installed, and with a plain install nothing tells it where
# the other packages are. Last in line: an editable install finds them itself.
if not os.path.isdir(os.path.join(__path__[0], "cli")):
    sys.meta_path.append(_CloneFinder)

_HOME = {
    "Anatomy": ".model.anatomy",
    "Budget": ".budget",
    "calibration_and_held_out": ".calibration.images",
    "prepare": ".calibration.images",
    "Elastic": ".elastic.folder",
    "ElasticSession": ".serving.session",
    "SnapvitError": ".errors",
    "Request": ".workflows.export",
    "export": ".workflows.export",
    "Manifest": ".family.manifest",
    "read_family": ".family.folder",
    "load_family": ".family.loaded",
    "Plan": ".model.plan",
    "Planner": ".allocation.planner",
    "import_scores": ".prune.import_scores",
    "as_model": ".prune.models.load",
    "load_model": ".prune.models.load",
    "save_model": ".prune.models.load",
    "pack": ".prune.pack",
    "rank": ".prune.rank.rank",
    "refit": ".prune.correct.refit",
    "ElasticImportanceScores": ".prune.importance_scores",
    "ElasticViT": ".prune.elastic_vit",
    "shrink": ".prune.models.slicing",
    "Ranking": ".model.ranking",
    "Settings": ".allocation.recipe",
    "make_settings": ".allocation.recipe",
    "Target": ".target",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
