"""A variant in words: the levers that make it cheaper, and whether it fits its budget. Light.

Every table, chart and sentence takes them from here, so that all of them say the same of a variant.
"""

from __future__ import annotations

from msgspec import UNSET

from ..family.manifest import Choice, Manifest, Measurement, Variant, Verdict, verdict_on

DENSE = "dense"
PRECISIONS = {"int8-dynamic": "int8", "int8-static": "int8 static"}


def levers(row: Variant | Measurement, manifest: Manifest) -> str:
    """Write what makes a variant cheaper than the model in fp32, such as "int8, 112 of 197 tokens, 85 % width"."""
    file = row if isinstance(row, Variant) else _file(row.variant, manifest)
    narrower, removed = _cuts(row, file, manifest)
    found = [
        *_precision(row.precision or (file.precision if file else manifest.target.precision)),
        *_tokens(row, file, manifest),
        *([f"{_percent(1 - row.sparsity)} width"] if narrower else []),
        *([f"{removed} sub-layer{'s' if removed > 1 else ''} fewer"] if removed else []),
        *(["trained"] if file is not None and file.recovered is not None else []),
    ]
    return ", ".join(found) or DENSE


def _file(name: str, manifest: Manifest) -> Variant | None:
    """Return the variant that was kept of a measured candidate, if it was: it knows what older measurements lack."""
    return next((variant for variant in manifest.variants if variant.name == name), None)


def _precision(precision: str) -> list[str]:
    return [] if precision == "fp32" else [precision_word(precision)]


def precision_word(precision: str) -> str:
    """Write a precision as people call it: int8 for int8-dynamic."""
    return PRECISIONS.get(precision, precision)


def _tokens(row: Variant | Measurement, file: Variant | None, manifest: Manifest) -> list[str]:
    """Write the image size if it is not the model's, and the tokens that are left if some of them merge."""
    anatomy, found = manifest.anatomy, []
    known = row if row.image_size is not UNSET or file is None else file
    image = anatomy.image if known.image_size is UNSET else known.image_size
    if image != anatomy.image:
        found.append(f"{image[0]} px" if image[0] == image[1] else f"{image[0]}x{image[1]} px")
    known = row if row.tokens is not UNSET or file is None else file
    grid = image[0] // anatomy.patch[0], image[1] // anatomy.patch[1]
    unmerged = anatomy.prefix + grid[0] * grid[1] - sum(anatomy.merges)
    if known.tokens is not UNSET and known.tokens[-1] < unmerged:
        found.append(f"{known.tokens[-1]} of {anatomy.tokens_after()[-1]} tokens")
    return found


def _cuts(row: Variant | Measurement, file: Variant | None, manifest: Manifest) -> tuple[bool, int]:
    """Return whether a sub-layer that is left is narrower, and how many are removed."""
    if file is not None:
        kept = [*zip(file.heads, manifest.anatomy.heads), *zip(file.neurons, manifest.anatomy.neurons)]
        return any(0 < k < n for k, n in kept), sum(k == 0 < n for k, n in kept)
    assert isinstance(row, Measurement)
    removed = row.removed or 0
    return row.sparsity > 0 and ("width" in row.levers or not removed), removed


def _percent(share: float) -> str:
    """Write a share in whole per cent; with a decimal where it would look like all of it."""
    return f"{100 * share:.0f} %" if share < 0.995 else f"{100 * share:.1f} %"


def measured_verdict(row: Measurement, choice: Choice) -> Verdict:
    """Return the verdict on a candidate that was timed for a choice; files of before do not hold it."""
    if row.verdict is not None:
        return row.verdict
    if row.fits:
        return "fits"
    limits = choice.limits
    within = (limits.max_size_bytes is None or row.size_bytes <= limits.max_size_bytes) and (
        limits.max_params is None or row.params <= limits.max_params
    )
    if choice.budget_ms is None:  # of energy alone; such files hold their verdicts
        return "no"
    surely_fast = row.between_ms[1] <= choice.budget_ms  # and yet it does not fit: it is too large
    return verdict_on(row.between_ms, choice.budget_ms, within and not surely_fast)
