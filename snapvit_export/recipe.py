"""Recipes: all settings of a ranking under one name. Light: no torch.

`local` takes the label-free scores as they are. `snapvit` is the recipe of the released SnapViT code: 1000 images, and
50 evaluations of xNES, which are two updates of its covariance, so mostly the best of 50 samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .errors import UsageError

SEARCH_PAIRS = ((0.15, 0.0), (0.35, 0.2), (0.55, 0.4), (0.65, 0.5))  # nominal sparsities 10, 30, 50, 60 %


@dataclass(frozen=True)
class Settings:
    """Everything that decides a ranking beside the model and the images.

    >>> Settings(criterion="self-supervised", evaluations=50)
    """

    criterion: str = "self-supervised"
    views: Literal["paired", "distinct"] = "paired"
    reduction: Literal["summed", "per_sample"] = "summed"
    images: int = 256  # to calibrate on
    seed: int = 0
    evaluations: int = 0  # of the fitness; 0: no search
    optimiser: Literal["xnes", "snes-log"] = "xnes"
    population: int | None = None  # None: 4 + int(3 ln D)
    pairs: tuple[tuple[float, float], ...] = SEARCH_PAIRS
    pca: int = 192
    cka: bool = False
    racing: bool = False


RECIPES = {
    "local": Settings(),
    "snapvit": Settings(images=1000, seed=42, evaluations=50),
}
DEFAULT = "local"


def make_settings(recipe: str, **changes: object) -> Settings:
    """The settings of a recipe, with those options changed that were given (that is, are not None)."""
    if recipe not in RECIPES:
        raise UsageError(f"no recipe is called '{recipe}'. Known: {', '.join(RECIPES)}")
    settings = replace(RECIPES[recipe], **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    if settings.optimiser not in ("xnes", "snes-log"):
        raise UsageError(f"no optimiser is called '{settings.optimiser}'. Known: xnes, snes-log")
    if settings.cka and settings.optimiser != "xnes":
        raise UsageError("--cka gives a first covariance, which only --optimiser xnes has")
    if settings.population is not None and settings.population < 2:
        raise UsageError(f"a population of {settings.population} cannot be ranked. Give 2 or more")
