"""The Plans that an export was asked for by size: sparsity, FLOPs, parameters, pairs, tokens, resolution. Light."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..allocation import recipe
from ..allocation.planner import Planner, check_reach
from ..allocation.token_target import TokenTarget, token_targets
from ..allocation.tokens import DEFAULT, SCHEDULES, Schedule
from ..errors import SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import Plan, Protection
from ..model.ranking import Ranking
from ..selection.mixes import SPREAD
from .export_request import Request


def refuse_early(request: Request, given: Ranking | None, anatomy: Anatomy, name: str, has_one_size: bool) -> None:
    """Refuse Plans that protection forbids, before any long work. `has_one_size`: the model takes no other images."""
    settings = request.settings
    grids = [tokens.grid for tokens in _tokens(request, anatomy).values() if tokens is not None]
    if any(grids) and has_one_size:
        raise SnapvitError(f"{name}: its rotary tables are its own, made for one size. Leave --resolution out")
    if given is not None:
        requested_plans(request, planner_of(request, given, anatomy), SCHEDULES[DEFAULT])
        return
    flat = Planner(Ranking.flat(anatomy), anatomy)
    for mlp, head in request.pairs:
        flat.pair(mlp, head)
    for tokens in _tokens(request, anatomy).values():
        check_reach(
            anatomy,
            Protection(sublayers=not settings.depth),
            sparsity=request.sparsity,
            flops=request.flops,
            params=request.params,
            corrected=settings.correction in recipe.ADDS_BIASES,
            tokens=tokens,
        )


def planner_of(request: Request, ranking: Ranking, anatomy: Anatomy) -> Planner:
    """Return the Planner of a ranking; the request decides first if sub-layers are removable."""
    protection = ranking.protection
    if request.depth is not None or request.levers is not None:
        protection = msgspec.structs.replace(protection, sublayers=not request.settings.depth)
    if "width" not in request.used_levers:  # what is not removed whole stays whole
        protection = protection.of_whole_parts
    return Planner(
        ranking,
        anatomy,
        protection,
        corrected=request.settings.correction in recipe.ADDS_BIASES,
        multiple=request.width_multiple,
    )


def requested_plans(request: Request, planner: Planner, merging: Schedule) -> dict[str, Plan]:
    """Return the Plans requested by sparsity, FLOPs, parameters, pairs, tokens or resolution, by their names."""
    plans: dict[str, Plan] = {}
    for with_tokens, tokens in _tokens(request, planner.anatomy, merging).items():
        made = planner if tokens is None else planner.for_tokens(tokens)
        widths = _widths(request, made)
        if not widths and tokens is not None:
            plans[with_tokens] = made.dense
        plans |= {"-".join(filter(None, (name, with_tokens))): plan for name, plan in widths.items()}
    return plans


def _widths(request: Request, planner: Planner) -> dict[str, Plan]:
    by_fraction: list[tuple[str, Sequence[float], Callable[[float], Plan]]] = [
        ("s", request.sparsity, planner.sparsity),
        ("flops", _unmixed_flops(request), planner.flops),
        ("params", request.params, planner.params),
    ]
    plans = {f"{prefix}{percent(f)}": plan(f) for prefix, fractions, plan in by_fraction for f in fractions}
    plans |= {f"pair{percent(mlp)}-{percent(head)}": planner.pair(mlp, head) for mlp, head in request.pairs}
    return plans


def _tokens(
    request: Request, anatomy: Anatomy, merging: Schedule = SCHEDULES[DEFAULT]
) -> dict[str, TokenTarget | None]:
    """Return all combinations of the requested tokens and resolutions, by their part of a name; or none of either."""
    return {**token_targets(anatomy, request.tokens, request.resolution, merging)} or {"": None}


def percent(fraction: float) -> str:
    """Write a fraction as a part of a name."""
    return f"{100 * fraction:g}"


def mixed_flops(request: Request) -> Sequence[float]:
    """Return the FLOPs targets that a mix of levers meets; the others are met by width and depth alone."""
    if "tokens" not in request.used_levers or request.tokens or request.resolution:
        return ()
    if request.wants_spread:
        return SPREAD
    return request.flops if request.levers is not None else ()


def _unmixed_flops(request: Request) -> Sequence[float]:
    """Return the FLOPs targets that width and depth meet alone."""
    if mixed_flops(request):
        return ()
    return SPREAD if request.wants_spread else request.flops
