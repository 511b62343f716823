"""Resolutions: from the pixels that a user asks for to the grid of patches of a Plan, or why not. Light.

A smaller input has fewer patches, so fewer tokens. Sides are whole patches, since a ViT reads nothing else; and at most
the model's own, since more tokens are not cheaper.
"""

from __future__ import annotations

from ..errors import UsageError
from ..model.anatomy import Anatomy

Resolution = int | tuple[int, int]  # pixels of a square, or height and width


def check_resolution(asked: Resolution) -> None:
    """Refuse sizes that no model has."""
    if min(_sides(asked)) < 1:
        raise UsageError(f"a resolution of {shown(asked)} pixels is no size of an image. Write it like 160 or 192x160")


def grid_for(anatomy: Anatomy, asked: Resolution) -> tuple[int, int] | None:
    """Return the rows and columns of patches of a resolution; None if it is the model's own.

    >>> grid_for(anatomy, 24)     # (3, 3) in patches of 8 pixels
    """
    check_resolution(asked)
    own, name = anatomy.image, shown(asked)
    if isinstance(asked, int) and own[0] != own[1]:
        raise UsageError(
            f"the model takes {own[0]}x{own[1]} pixels, which is no square. Write height and width: 64x128"
        )
    for side, whole, step in zip(_sides(asked), own, anatomy.patch):
        if side > whole:
            raise UsageError(f"resolution {name} is larger than the model's own {own[0]}x{own[1]}. Take at most that")
        if side < step:
            raise UsageError(f"resolution {name} is smaller than one patch of {step} pixels. Take at least {step}")
        if side % step and side != whole:
            low = side // step * step
            near = f"{low} or {low + step}" if low + step <= whole else f"{low}"
            raise UsageError(f"resolution {name} is no multiple of the patch, {step} pixels. Take {near}")
    if _sides(asked) == own:
        return None
    rows, columns = (side // step for side, step in zip(_sides(asked), anatomy.patch))
    return None if (rows, columns) == anatomy.grid else (rows, columns)


def shown(asked: Resolution) -> str:
    """Return a resolution as users write it: 160, or 192x160."""
    height, width = _sides(asked)
    return str(height) if height == width else f"{height}x{width}"


def _sides(asked: Resolution) -> tuple[int, int]:
    return (asked, asked) if isinstance(asked, int) else asked
