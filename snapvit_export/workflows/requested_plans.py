"""The Plans that an export was asked for by size: sparsity, FLOPs, parameters, pairs, tokens, resolution. Light."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from ..allocation import recipe
from ..allocation.asked import percent
from ..allocation.planner import Planner, check_reach
from ..allocation.token_target import TokenTarget, token_targets
from ..allocation.tokens import DEFAULT, SCHEDULES, Schedule
from ..errors import SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import DeviceProtection, Plan
from ..model.ranking import Ranking
from ..progress import Progress
from ..selection.candidates import DENSE
from ..selection.mixes import SPREAD
from .export_request import Request
from .prepared import PreparedModel


def refuse_early(request: Request, given: Ranking | None, anatomy: Anatomy, name: str, has_one_size: bool) -> None:
    """Refuse Plans that protection forbids, before any long work. `has_one_size`: the model takes no other images."""
    settings = request.settings
    grids = [tokens.grid for tokens in _tokens(request, anatomy).values() if tokens is not None]
    if any(grids) and has_one_size:
        raise SnapvitError(f"{name}: its rotary tables are its own, made for one size. Leave --resolution out")
    if given is not None:
        requested_plans(request, planner_of(request, given, anatomy), SCHEDULES[DEFAULT])
        return
    protection = DeviceProtection.of(recipe.protection_of(settings), request.least_heads)
    width = DeviceProtection.of(
        msgspec.structs.replace(recipe.protection_of(settings), sublayers=True), request.least_heads
    )
    flat = Planner(Ranking.flat(anatomy), anatomy, width)
    for mlp, head in request.pairs:
        flat.pair(mlp, head)
    for tokens in _tokens(request, anatomy).values():
        check_reach(
            anatomy,
            protection,
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
        DeviceProtection.of(protection, request.least_heads),
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


def note_same(plans: Mapping[str, Plan], planner: Planner, progress: Progress) -> None:
    """Say which of the requested names mean one Plan: steps of heads and neurons are coarser than numbers."""
    named: dict[Plan, str] = {planner.dense: DENSE}
    for name, plan in plans.items():
        if (same := named.setdefault(plan, name)) != name:
            progress.note(f"{name} keeps the same heads, neurons and tokens as {same}")


def note_least_heads(request: Request, prepared: PreparedModel, progress: Progress) -> None:
    """Say which of the requested Plans differ since the device wants more heads in a block, and why."""
    if request.least_heads <= 1 or not request.asks_for_plans:
        return
    free = planner_of(replace(request, least_heads=1), prepared.ranking, prepared.anatomy)
    for name, plan in requested_plans(request, free, prepared.merging).items():
        few = [i for i, kept in enumerate(plan.heads) if 0 < kept < min(request.least_heads, prepared.anatomy.heads[i])]
        if few:
            progress.note(
                f"{name}: {_blocks(few)} would keep fewer than {request.least_heads} heads, whose attention TensorRT "
                "does not compute in one kernel at batch 1: on this device every block keeps that many, or none"
            )


def _blocks(numbers: Sequence[int]) -> str:
    return f"block{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


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
