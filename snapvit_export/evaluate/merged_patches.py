"""Pictures of the patches that a variant merges, block by block: every group of patches in its mean colour. Light.

The decisions are read from the exported graph in ONNX Runtime, whatever runtime the variant is for: another one rounds
differently, so it may merge other patches where two matches are nearly equal. Groups need not be connected: lines are
drawn between neighbouring patches of different groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..checks.merging import places, read_matches
from ..errors import SnapvitError
from ..family.manifest import Manifest, Variant
from ..family.validation import MergedImage, MergedPatches, MergeStep
from .samples import png, spread

MOST_VARIANTS, MOST_IMAGES, MOST_BLOCKS = 2, 3, 4
SIDE = 196  # pixels of the longer side of a picture at most, unless patches would be too small for lines
LEAST_CELL = 4  # pixels of a patch
PHOTO_SIDE = 160  # of the image itself, which takes many more bytes
LINE = 0.45  # how far the colour of a line is from that of its group, towards white or black

Pixels = npt.NDArray[np.uint8]


def shown_variants(manifest: Manifest) -> list[Variant]:
    """Return the variants that are drawn: the chosen one, or the first that merges, and the one that merges most."""
    merging = [variant for variant in manifest.variants if any(manifest.plan(variant).merged)]
    if not merging:
        return []
    chosen = manifest.choice.variant if manifest.choice else None
    first = next((variant for variant in merging if variant.name == chosen), merging[0])
    most = min(merging, key=lambda variant: manifest.tokens_of(variant)[-1] / manifest.tokens_of(variant)[0])
    return [first] if most is first else [first, most]


def draw_merges(
    folder: Path, manifest: Manifest, variant: Variant, images: Images, titles: Sequence[str]
) -> MergedPatches:
    """Draw how a variant merges the patches of these images, which have its size; or tell why that is not known."""
    if missing := _why_not(variant):
        return MergedPatches(variant=variant.name, missing=missing)
    (inputs,) = images.inputs(len(images), manifest.input.type == "uint8")
    try:
        matches = read_matches(folder / variant.file, inputs)
    except SnapvitError as error:
        return MergedPatches(variant=variant.name, missing=str(error))
    if not matches:
        missing = "its only merge comes after the last attention, where it has no effect, so it is not in the file"
        return MergedPatches(variant=variant.name, missing=missing)
    anatomy = manifest.anatomy.with_counts(manifest.plan(variant))
    after, tokens = places(matches, anatomy), anatomy.tokens_after()
    blocks = spread(np.array(sorted(after)), MOST_BLOCKS)
    drawn = []
    for k, (pixels, title) in enumerate(zip(images.pixels, titles)):
        groups = {block: after[block][k].reshape(anatomy.grid) for block in blocks}
        steps = [
            MergeStep(block=block, tokens=tokens[block], picture=png(draw_groups(pixels, found, anatomy.patch)))
            for block, found in groups.items()
        ]
        drawn.append(MergedImage(title=title, picture=png(pixels, PHOTO_SIDE), steps=tuple(steps)))
    return MergedPatches(variant=variant.name, images=tuple(drawn))


def _why_not(variant: Variant) -> str | None:
    """Return why the merges of a file cannot be read; None if they can."""
    if Path(variant.file).suffix != ".onnx":
        return f"{variant.file} is in OpenVINO's own format, which does not tell what it merges"
    if find_spec("onnxruntime") is None:
        return "what a file merges is read in ONNX Runtime, which is not installed"
    return None


def draw_groups(pixels: Pixels, groups: npt.NDArray[np.int64], patch: tuple[int, int]) -> Pixels:
    """Fill each group of patches, numbered in (h, w), with the mean colour of its pixels, and draw lines between them.

    Patches that the image is not a whole number of are cut off, as the model does.
    """
    (h, w), (high, wide) = groups.shape, patch
    whole = pixels[: h * high, : w * wide].reshape(h, high, w, wide, 3)
    each = whole.mean(axis=(1, 3), dtype=np.float64).reshape(-1, 3)  # (patches, 3); patches are equally large
    _, numbers = np.unique(groups.reshape(-1), return_inverse=True)
    sums = np.stack([np.bincount(numbers, each[:, channel]) for channel in range(3)], axis=1)  # (groups, 3)
    means = sums / np.bincount(numbers)[:, None]
    cell = max(LEAST_CELL, SIDE // max(h, w))
    colours = means[numbers].reshape(h, w, 3).repeat(cell, axis=0).repeat(cell, axis=1)
    lines = np.zeros(colours.shape[:2], bool)
    for axis in (0, 1):  # a line is the first row or column of the patch behind it
        differs = np.diff(groups, axis=axis) != 0
        places_of_lines = np.repeat(differs, cell, axis=1 - axis)
        at = np.arange(1, groups.shape[axis]) * cell
        if axis == 0:
            lines[at] |= places_of_lines
        else:
            lines[:, at] |= places_of_lines
    towards = np.where(colours.mean(axis=2, keepdims=True) < 128, 255.0, 0.0)
    colours = np.where(lines[..., None], colours + LINE * (towards - colours), colours)
    return colours.round().astype(np.uint8)
