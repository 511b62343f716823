"""Recipes: all settings of a ranking under one name, and the rounds of an iterative ranking. Light: no torch.

`default` is what won on real weights (docs/quality.md): orders and damage curves from the statistics of the dense
model, heads and neurons allocated together, and every cut refitted on the images. A search over the layers' curves
helps the elastic correction but adds nothing to a refit, so it must be asked for. `paper` (`snapvit` in files) is the
recipe of the released SnapViT code: 1000 images, and 50 evaluations of xNES, which are two updates of its covariance,
so mostly the best of 50 samples. `local` is the same without the search. Neither corrects. `idap` is the idea of
IDAP++, in two stages: width by the divergence of the flow, then the sub-layers whose removal causes the least output
divergence; `planner.STAGES` has the share of each. It corrects if asked to.

`Rounds` are for a ranking that is made again after each cut: the size after each round, and the output divergence at
which it stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ..correction.moments import Damping
from ..errors import UsageError
from ..model.plan import Protection
from .from_scores import BY_SCORES
from .planner import check_fraction

SEARCH_PAIRS = ((0.15, 0.0), (0.35, 0.2), (0.55, 0.4), (0.65, 0.5))  # nominal sparsities 10, 30, 50, 60 %
DEFAULT = "default"
CORRECTIONS = ("refit", "elastic", "sequential", "sparsegpt", "mean")
SHOT_SPARSITY = 0.6  # of the prunable parameters: the sparsest of the published sizes
ADDS_BIASES = ("refit", "elastic", "sequential", "mean")  # corrections that give a bias to layers that had none
ORDERS = ("backward", "pivoted", "variance", "criterion", "product")
WITHOUT_IMAGES = ("lamp", "magnitude", "random")  # criteria that look at weights alone
OF_ROUNDS = ("divergence", "images")  # settings that rounds use, whatever the ranking

# The largest output divergence on images that no round was fitted on, by what is compared
# (`prune.stats.output_divergence`). The first two are a mean KL of k nats, so the probability mass that moved is
# at most sqrt(k / 2) on average (Pinsker): at 0.5 at most half of it. On DeiT-Tiny the three limits are met at nearly
# the same cut (docs/method.md).
MAX_DIVERGENCE = {"predictions": 0.5, "neighbours": 0.5, "cosine": 0.3}


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
    allocation: Literal["pairs", "joint", "mixed", "uniform", "summed"] = "pairs"  # joint: by damage curves; the others
    # by scores, see `allocation.from_scores`
    cuts: Literal["all", "mlp"] = "all"  # heads and neurons, or neurons alone
    shots: int = 1  # mixed: scored so often, each time after an even part of SHOT_SPARSITY has been cut
    step: int | None = None  # mixed: scored again after so many structures, until all that may be cut is
    order: str = "backward"  # joint: of the structures within a layer; "criterion" and "product" use the scores
    divergence: str | None = None  # joint: the outputs that the search compares; None: the best that the model allows
    depth: bool = False  # whole sub-layers are removable: joint where that pays, else after a part of the width
    flops: tuple[float, ...] = (0.6,)  # joint: sizes that the search evaluates, fractions of the dense blocks' FLOPs
    search_images: int = 192  # joint: at most so many of the images evaluate candidates
    correction: str | None = None  # of the cut layers; None: none
    damping: str = "mean:0.01"  # of the statistics; see `correction.moments.Damping`
    evaluations: int = 0  # of the fitness; 0: no search
    optimiser: Literal["xnes", "snes-log"] = "xnes"
    population: int | None = None  # None: 4 + int(3 ln D)
    pairs: tuple[tuple[float, float], ...] = SEARCH_PAIRS
    pca: int = 192
    cka: bool = False
    cka_images: int | None = None  # None: at most 256 of the images that calibrate
    search_over: Literal["none", "mlp", "all"] = "all"  # pairs: factors of nothing, of every MLP, or of every head too
    racing: bool = False
    recipe: str = field(default="custom", compare=False)  # the name that these settings have, for people
    given: frozenset[str] = field(default=frozenset(), compare=False)  # what was asked for: `follow_model` leaves it


RECIPES = {
    "default": Settings(allocation="joint", correction="refit", optimiser="snes-log", racing=True, depth=True),
    "snapvit": Settings(images=1000, seed=42, evaluations=50),
    "local": Settings(),
    "idap": Settings(criterion="divergence", depth=True),
    "fptp": Settings(criterion="fptp", images=1000, allocation="summed"),
    "fptp-cross-entropy": Settings(criterion="fptp-cross-entropy", images=1000, allocation="summed"),
    "sparsegpt": Settings(criterion="sparsegpt", images=1000, allocation="uniform", correction="sparsegpt"),
    "llm-surgeon": Settings(criterion="llm-surgeon", images=1000, allocation="mixed", shots=5),
    "llm-surgeon-cross-entropy": Settings(
        criterion="llm-surgeon-cross-entropy", images=1000, allocation="mixed", shots=5
    ),
    "nvit": Settings(criterion="nvit", images=1000, allocation="mixed", step=1024),
    "nvit-cross-entropy": Settings(criterion="nvit-cross-entropy", images=1000, allocation="mixed", step=1024),
    "vbp": Settings(criterion="vbp", images=1000, allocation="mixed", cuts="mlp", correction="mean"),
}


ALIASES = {"paper": "snapvit"}  # what people call it, and the name in files


def make_settings(recipe: str, in_rounds: bool = False, /, **changes: object) -> Settings:
    """Return the settings of a recipe, with those options changed that were given (that is, are not None).

    `in_rounds`: for a ranking in rounds, which also uses `OF_ROUNDS`.
    """
    recipe = ALIASES.get(recipe, recipe)
    if recipe not in RECIPES:
        known = [next((other for other, own in ALIASES.items() if own == name), name) for name in RECIPES]
        raise UsageError(f"no recipe is called '{recipe}'. Known: {', '.join(known)}")
    given = {name: value for name, value in changes.items() if value is not None}
    settings = replace(RECIPES[recipe], recipe=recipe, given=frozenset(given), **given)  # type: ignore[arg-type]
    _check(settings)
    settings = _without_search(settings, given) if settings.search_over == "none" else settings
    _refuse_idle(recipe, settings, {k: v for k, v in given.items() if not (in_rounds and k in OF_ROUNDS)})
    return settings


def correcting_settings(recipe: str, correct: bool = True, /, **changes: object) -> Settings:
    """Return the settings of a recipe for a command that also corrects; `correct`: False for weights as they are."""
    if not correct and (correction := changes.get("correction")) is not None:
        raise UsageError(f"--no-correct and --correction {correction} contradict each other. Give one")
    settings = make_settings(recipe, **changes)
    return settings if correct else replace(settings, correction=None)


def uses_scores(settings: Settings) -> bool:
    """Return True if the ranking uses the scores of the criterion."""
    return settings.allocation != "joint" or settings.order in ("criterion", "product")


def _without_search(settings: Settings, given: Mapping[str, object]) -> Settings:
    """Return the settings of a recipe that searches, without its search; --evaluations would contradict that."""
    if given.get("evaluations"):
        raise UsageError(
            f"--search-over none evaluates nothing, and --evaluations {given['evaluations']} contradicts that. Give one"
        )
    if not settings.evaluations:
        raise UsageError(f"--search-over none changes nothing: recipe {settings.recipe} does not search. Leave it out")
    return replace(settings, evaluations=0, given=settings.given | {"evaluations"})


def _refuse_idle(recipe: str, settings: Settings, given: Mapping[str, object]) -> None:
    """Refuse options that would have no effect: whoever gives one expects one."""
    idle: list[tuple[tuple[str, ...], str]] = []
    if settings.allocation == "joint":
        of_pairs = ("pairs", "pca", "cka", "cka_images", "search_over")
        idle.append((of_pairs, "--allocation pairs or --recipe local"))
    else:
        idle.append((("order", "divergence", "flops", "search_images"), "--allocation joint"))
    if not uses_scores(settings):
        idle.append((("criterion", "views", "reduction"), "--recipe local, or --order criterion or product"))
    if not settings.evaluations:
        searching = ("divergence", "flops", "search_images", "pairs", "pca", "cka", "optimiser", "population", "racing")
        if settings.search_over == "none":
            idle.append((searching, "--search-over all"))
        else:
            idle.append(((*searching, "search_over"), "--evaluations 100"))
    if not (settings.cka and settings.evaluations):
        idle.append((("cka_images",), "--cka with a search"))
    by_weights = settings.allocation != "joint" and not settings.depth and settings.criterion in WITHOUT_IMAGES
    if by_weights and not settings.evaluations:
        idle.append((("images",), "--evaluations 100 or another --criterion"))
    for names, remedy in idle:
        for name in names:
            if name in given:
                raise UsageError(
                    f"--{name.replace('_', '-')} has no part in recipe {recipe} as it is asked for. Give {remedy}, "
                    f"or leave it out"
                )


def _check(settings: Settings) -> None:
    if settings.optimiser not in ("xnes", "snes-log"):
        raise UsageError(f"no optimiser is called '{settings.optimiser}'. Known: xnes, snes-log")
    if settings.correction is not None and settings.correction not in CORRECTIONS:
        raise UsageError(f"no correction is called '{settings.correction}'. Known: {', '.join(CORRECTIONS)}")
    if settings.order not in ORDERS:
        raise UsageError(f"no order is called '{settings.order}'. Known: {', '.join(ORDERS)}")
    if settings.allocation not in (*BY_SCORES, "joint"):
        raise UsageError(f"no allocation is called '{settings.allocation}'. Known: joint, {', '.join(BY_SCORES)}")
    _check_by_scores(settings)
    if settings.search_over not in ("none", "mlp", "all"):
        raise UsageError(f"a search over '{settings.search_over}' is not known. Known: none, mlp, all")
    if settings.cka_images is not None and settings.cka_images < 2:
        raise UsageError(f"{settings.cka_images} images give no covariance. Give --cka-images 2 or more, such as 2500")
    if settings.search_images < 2:
        raise UsageError(f"a search on {settings.search_images} images cannot compare candidates. Give 2 or more")
    for fraction in settings.flops:
        check_fraction("FLOPs", fraction)
    Damping.parse(settings.damping)
    if settings.cka and settings.optimiser != "xnes":
        raise UsageError("--cka gives a first covariance, which only --optimiser xnes has")
    if settings.population is not None and settings.population < 2:
        raise UsageError(f"a population of {settings.population} cannot be ranked. Give 2 or more")


def _check_by_scores(settings: Settings) -> None:
    """Refuse what allocations other than joint and pairs do not have, and shots of those that are in no one order."""
    if settings.allocation in ("mixed", "uniform", "summed"):
        if settings.evaluations:
            raise UsageError(f"a search has no part in --allocation {settings.allocation}. Give joint or pairs")
        if settings.depth:
            raise UsageError(f"--allocation {settings.allocation} removes no sub-layers. Give --no-depth too")
    if settings.cuts == "mlp" and settings.allocation == "pairs" and settings.evaluations:
        raise UsageError("a search over pairs of ratios cuts heads, and this recipe cuts neurons alone. Leave it out")
    if in_shots(settings) and settings.allocation != "mixed":
        raise UsageError("shots are of heads and neurons in one order. Give --allocation mixed too")
    if settings.shots < 1 or (settings.step is not None and settings.step < 1):
        raise UsageError("a ranking has at least one shot, of at least one structure")


def in_shots(settings: Settings) -> bool:
    """Return True if the criterion scores the model again after a part of it is cut."""
    return settings.shots > 1 or settings.step is not None


def protection_of(settings: Settings) -> Protection:
    """Return the protection that the ranking of these settings has."""
    return Protection(sublayers=not settings.depth, heads=1.0 if settings.cuts == "mlp" else Protection().heads)


@dataclass(frozen=True)
class Rounds:
    """Falling FLOPs of the blocks, one for each round, and the output divergence at which the ranking ends.

    >>> Rounds((0.85, 0.7), most_moved=0.3)
    """

    flops: tuple[float, ...] = (0.85, 0.7, 0.55, 0.4)
    most_moved: float | None = None  # output divergence; None: MAX_DIVERGENCE; infinite: every round counts

    def __post_init__(self) -> None:
        for fraction in self.flops:
            check_fraction("FLOPs", fraction)
        if not self.flops or list(self.flops) != sorted(set(self.flops), reverse=True):
            raise UsageError("rounds need falling fractions of the FLOPs, such as 0.85,0.7,0.55")
        if self.most_moved is not None and not self.most_moved >= 0:
            raise UsageError(
                f"an output divergence is never {self.most_moved:g}. Give --most-moved 0 or more, such as 0.5"
            )

    def limit(self, divergence: str) -> float:
        """Return the largest output divergence that a round may have."""
        return MAX_DIVERGENCE[divergence] if self.most_moved is None else self.most_moved
