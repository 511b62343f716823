"""A variant as a folder for torch: weights, how timm loads them without us, and files for `transformers` if possible.

model.json           how timm builds the dense model, the Plan, the preprocessing
model.safetensors    the weights that are left, in float32
load.py              loads them with timm and safetensors (`plain_timm`)
README.txt           how, and what cannot be loaded that way
transformers/        the same model for `from_pretrained`, where a config can describe it
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...model.anatomy import Anatomy
from ...storage.atomic import write_atomically
from .load import ModelDescription, save_model
from .read_anatomy import read_anatomy
from .transformers_out import reason_against, write_transformers

LOAD, README, TRANSFORMERS = "load.py", "README.txt", "transformers"
SOURCE = Path(__file__).with_name("plain_timm.py")


def save_for_torch(module: nn.Module, description: ModelDescription, folder: Path) -> None:
    """Write a model, dense or pruned, so that timm loads it without us."""
    anatomy = read_anatomy(module, description.name)
    save_model(module, description, folder)
    preprocessing = description.preprocessing.at(anatomy.image)
    write_atomically(folder / LOAD, SOURCE.read_bytes())
    reason = reason_against(anatomy)
    if reason is None:
        write_transformers(folder / TRANSFORMERS, module, anatomy, preprocessing, description.labels)
    write_atomically(folder / README, _readme(description.name, anatomy, reason).encode())


def against_timm(anatomy: Anatomy) -> str | None:
    """Return why timm has no module for a model; None if it has."""
    if any(anatomy.merges):
        return "its tokens are merged"
    heads = {block.heads * block.head_dim for block in anatomy.blocks}
    if anatomy.family == "eva" and heads - {0, anatomy.embed_dim}:
        return "timm's attention of this model takes all heads or none"
    return None


def _readme(name: str, anatomy: Anatomy, against_transformers: str | None) -> str:
    timm, theirs = against_timm(anatomy), against_transformers
    with_timm = "from load import load, transform      (pip install 'timm>=1.0.23' safetensors)"
    lines = [
        f"{name} for torch: {anatomy.params()} parameters in float32, images of {anatomy.image[0]}x{anatomy.image[1]}",
        "",
        f"timm          {with_timm if timm is None else f'not alone: {timm}'}",
        f"transformers  {f'from_pretrained({TRANSFORMERS!r})' if theirs is None else f'not possible: {theirs}'}",
        "snapvit       snapvit_export.load_model('this folder')",
    ]
    return "\n".join(lines) + "\n"
