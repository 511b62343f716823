"""Levers: the ways to make a model cheaper that one budget trades against each other. Light: standard library.

    precision   of the weights and products, where the device is faster in it
    tokens      fewer of them: smaller images, merging
    width       fewer attention heads and MLP neurons
    depth       fewer attentions and MLPs

`--levers` names those that a choice may use; without it a budget may use all that the target and the output allow, and
targets such as `--sparsity` and `--flops` width and depth alone, which are the published method's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from ..errors import UsageError

Lever = Literal["precision", "tokens", "width", "depth"]
LEVERS: tuple[Lever, ...] = get_args(Lever)
PUBLISHED: tuple[Lever, ...] = ("width", "depth")


def parse_levers(text: str) -> tuple[Lever, ...]:
    """Read `tokens,width` or `all`, each once, in the order of LEVERS.

    >>> parse_levers("width,tokens")
    ('tokens', 'width')
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if words == ["all"]:
        return LEVERS
    if unknown := [word for word in words if word not in LEVERS]:
        raise UsageError(f"no lever is called '{unknown[0]}'. Known: {', '.join(LEVERS)}, or all")
    if not words:
        raise UsageError(f"--levers names none. Give some of {', '.join(LEVERS)}, or leave it out")
    return in_order(words)


def in_order(levers: Sequence[str]) -> tuple[Lever, ...]:
    """Return levers in the order of LEVERS, each once."""
    return tuple(lever for lever in LEVERS if lever in levers)
