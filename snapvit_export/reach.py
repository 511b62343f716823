"""What no Plan can go below, known before any ranking: so that the impossible is refused before any work. Light.

With sub-layers protected, the smallest Plan is the protected part of every block. Where they may go whole, one must
stay, at its least: an attention where only the class token is read, else an attention or an MLP. Here it is the one
that costs least. A ranking may know too little to let all others go, or its line may end before: so what is refused
here no ranking reaches, and what passes may still be out of reach of the one that is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .anatomy import Anatomy
from .errors import SnapvitError
from .plan import Plan, Protection, check_fraction, check_sparsity


def check_reach(
    anatomy: Anatomy,
    protection: Protection,
    *,
    sparsity: Sequence[float] = (),
    flops: Sequence[float] = (),
    params: Sequence[float] = (),
    corrected: bool = False,
) -> None:
    """Refuse fractions that no ranking of such a model reaches; `corrected`: the biases that this adds count."""
    smallest = list(_smallest(anatomy, protection))
    most_sparse = max(plan.sparsity(anatomy) for plan in smallest)
    for fraction in sparsity:
        check_sparsity(fraction)
        if fraction > most_sparse:
            raise SnapvitError(f"sparsity {fraction:g} is out of reach: protection leaves at most {most_sparse:.4f}")
    least_flops = min(plan.flops_ratio(anatomy) for plan in smallest)
    for fraction in flops:
        check_fraction("FLOPs", fraction)
        if fraction < least_flops:
            raise SnapvitError(
                f"FLOPs fraction {fraction:g} is out of reach: protection leaves at least {least_flops:.4f}"
            )
    after = anatomy.with_output_biases() if corrected else anatomy
    least_params, dense = min(after.params(plan) for plan in smallest), anatomy.params()
    for fraction in params:
        check_fraction("parameter", fraction)
        if fraction < 1 and least_params > fraction * dense:  # what cuts nothing is not corrected
            share = least_params / dense
            raise SnapvitError(f"parameter fraction {fraction:g} is out of reach: the smallest plan has {share:.4f}")


def _smallest(anatomy: Anatomy, protection: Protection) -> Iterator[Plan]:
    """Plans of which every possible one keeps all of at least one."""
    least = protection.least(anatomy)
    if protection.sublayers:
        yield least
        return
    nothing = (0,) * len(anatomy.blocks)
    for i, (heads, neurons) in enumerate(zip(least.heads, least.neurons)):
        yield Plan(heads=(*nothing[:i], heads, *nothing[i + 1 :]), neurons=nothing)
        if not anatomy.reads_token:
            yield Plan(heads=nothing, neurons=(*nothing[:i], neurons, *nothing[i + 1 :]))
