"""Sample images with the prediction of each variant, mostly those on which the variants differ. Light."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..family.validation import Prediction, Sample

MOST = 12
SIDE = 112  # pixels of a thumbnail in the report
Logits = npt.NDArray[np.float32]


def pick_samples(
    images: Images,
    titles: Sequence[str],
    logits: Mapping[str, Logits],
    names: Sequence[str],
    dense: str,
    has_labels: bool,
    pruned: str | None = None,
) -> tuple[Sample, ...]:
    """Pick at most a dozen images; `logits` by variant are (N, classes) and `names` those of the classes.

    Those come first on which `pruned` answers otherwise than the dense model, the worst first; then others on which
    some variant does, and some on which all agree. `has_labels`: the classes are the data's own, so its labels can be
    shown and compared.
    """
    guesses = {variant: scores.argmax(1) for variant, scores in logits.items()}
    worst = [] if pruned is None else worst_first(logits[pruned], logits[dense])[: 2 * MOST // 3]
    others = [i for i in _chosen(len(images), guesses, dense) if i not in worst]
    chosen = [*worst, *others[: MOST - len(worst)]]
    return tuple(
        Sample(
            title=titles[i],
            picture=png(images.pixels[i], SIDE),
            label=images.classes[int(images.labels[i])] if has_labels and images.labels is not None else None,
            predictions={v: _prediction(scores[i], names) for v, scores in logits.items()},
        )
        for i in chosen
    )


def worst_first(scores: Logits, dense: Logits) -> list[int]:
    """Return the images whose answer is not the dense model's, those first that lose most of its answer's chance."""
    answer = dense.argmax(1)
    rows = np.flatnonzero(scores.argmax(1) != answer)
    lost = _chances(dense)[rows, answer[rows]] - _chances(scores)[rows, answer[rows]]
    return [int(row) for row in rows[np.argsort(-lost, kind="stable")]]


def _chances(scores: Logits) -> npt.NDArray[np.float64]:
    shifted = np.exp(scores.astype(np.float64) - scores.max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True))


def _chosen(count: int, guesses: Mapping[str, npt.NDArray[np.int64]], dense: str) -> list[int]:
    """Pick two thirds where some variant differs from the dense one, and some where all agree, evenly spaced."""
    differ = np.zeros(count, bool)
    for guess in guesses.values():
        differ |= guess != guesses[dense]
    differing, agreeing = spread(np.flatnonzero(differ), 2 * MOST // 3), np.flatnonzero(~differ)
    return sorted([*differing, *spread(agreeing, MOST - len(differing))])


def spread(rows: npt.NDArray[np.int64], most: int) -> list[int]:
    """Return at most so many of the rows, evenly spaced, the first and the last among them."""
    if len(rows) <= most:
        return [int(row) for row in rows]
    return [int(rows[int(k)]) for k in np.linspace(0, len(rows) - 1, most)]


def _prediction(scores: npt.NDArray[np.float32], names: Sequence[str]) -> Prediction:
    shifted = np.exp(scores.astype(np.float64) - scores.max())
    best = int(scores.argmax())
    return Prediction(label=names[best], probability=float(min(1.0, shifted[best] / shifted.sum())))


def png(pixels: npt.NDArray[np.uint8], side: int | None = None) -> str:
    """Return a picture as PNG in base64, at most `side` pixels wide and high if that is given."""
    from PIL import Image

    picture = Image.fromarray(pixels)
    if side is not None:
        picture.thumbnail((side, side))
    data = io.BytesIO()
    picture.save(data, "PNG", optimize=True)
    return base64.b64encode(data.getvalue()).decode()
