"""Accuracy with the model's own head, also on data that has only some of its classes. Light: numpy.

The classes of a dataset are looked up among the names of the head's outputs, and an image is classified among the
outputs of the data's classes only. Where the outputs have no names, class i of the data is output i, if there are as
many.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..family.class_names import read_labels
from .features import Array, Targets

MOST_OF_TOP5 = 5  # with no more classes than this, top-5 is always right
WORDNET = re.compile(r"n\d{8} ")
Columns = npt.NDArray[np.int64]


def columns_for(
    classes: Sequence[str],
    outputs: int,
    labels: Sequence[str] = (),
    classes_file: Path | None = None,
    advice: str | None = None,
) -> Columns:
    """Return the output of the head for each class of the data: (classes,). `labels` are the model's own, if any.

    `advice` ends the error message where a list of classes cannot be given.
    """
    if not outputs:
        raise SnapvitError(f"the model has no head, so it classifies nothing. {advice or 'Give --by knn or linear'}")
    names, where = (read_labels(classes_file), str(classes_file)) if classes_file else (tuple(labels), "its labels")
    if not names:
        if len(classes) != outputs:
            sizes = f"the data has {len(classes)} classes, the head {outputs} outputs without names"
            raise SnapvitError(f"{sizes}. {advice or 'Give --classes FILE: line i names class i'}")
        return np.arange(outputs)
    if len(names) != outputs:
        sizes = f"{where}: names {len(names)} classes, the head has {outputs} outputs"
        raise SnapvitError(f"{sizes}. {advice or 'Give --classes FILE'}")
    places = _places(names, by_first_word=classes_file is not None)
    if missing := [name for name in classes if name not in places]:
        advice = advice or "Give --classes FILE: line i names class i as the data does"
        raise SnapvitError(f"class '{missing[0]}' of the data is not among {where} of the head. {advice}")
    return np.array([places[name] for name in classes], np.int64)


def _places(names: Sequence[str], by_first_word: bool) -> dict[str, int]:
    """Return the output of each name, and of each short one that no other name has or shortens to.

    "n01496331 electric ray" is short as its WordNet id, as ImageNet's folders are named; lines of a file also as their
    first word.
    """
    short = [name.split()[0] if name and (by_first_word or WORDNET.match(name)) else name for name in names]
    shared = Counter(short)
    places = {word: i for i, word in enumerate(short) if shared[word] == 1}
    return places | {name: i for i, name in enumerate(names)}


def head_right(
    logits: Array, targets: Targets, columns: Columns
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_] | None]:
    """Return for each image True if the best output, and one of the best five, is its class: (N,) each.

    The second is None with fewer than six classes.
    """
    if not np.isfinite(logits).all():
        raise SnapvitError(
            f"{int((~np.isfinite(logits)).any(1).sum())} images have outputs that are not finite numbers"
        )
    scores = logits[:, columns]  # (N, classes)
    best_first = np.argsort(-scores, axis=1, kind="stable")[:, :MOST_OF_TOP5]  # (N, <=5)
    right = best_first == np.asarray(targets)[:, None]
    return right[:, 0], right.any(1) if len(columns) > MOST_OF_TOP5 else None
