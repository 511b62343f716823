"""Accuracy with the model's own head, also on data that has only some of its classes. Light: numpy.

The classes of a dataset are looked up among the names of the head's outputs, and an image is classified among the
outputs of the data's classes only. Where the outputs have no names, class i of the data is output i, if there are as
many.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, first_line
from ..storage.reading import MOST_TEXT, check_readable
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
    names, where = (read_names(classes_file), str(classes_file)) if classes_file else (tuple(labels), "its labels")
    if not names:
        if len(classes) != outputs:
            sizes = f"the data has {len(classes)} classes, the head {outputs} outputs without names"
            raise SnapvitError(f"{sizes}. {advice or 'Give --classes FILE: line i names class i'}")
        return np.arange(outputs)
    if len(names) != outputs:
        sizes = f"{where}: names {len(names)} classes, the head has {outputs} outputs"
        raise SnapvitError(f"{sizes}. {advice or 'Give --classes FILE'}")
    places = {name: i for i, name in enumerate(names)} | {_short(name): i for i, name in enumerate(names)}
    if missing := [name for name in classes if name not in places]:
        advice = advice or "Give --classes FILE: line i names class i as the data does"
        raise SnapvitError(f"class '{missing[0]}' of the data is not among {where} of the head. {advice}")
    return np.array([places[name] for name in classes], np.int64)


def _short(name: str) -> str:
    """Shorten "n01496331 electric ray" to its WordNet id, as ImageNet's folders are named."""
    return name.split()[0] if WORDNET.match(name) else name


def read_names(path: Path) -> tuple[str, ...]:
    """Read the first word of each line: line i names class i."""
    check_readable(path, MOST_TEXT)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SnapvitError(
            f"{path}: cannot be read as a list of classes ({first_line(error)}). Save it as UTF-8"
        ) from error
    while lines and not lines[-1].strip():
        lines.pop()
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            raise SnapvitError(f"{path}, line {number}: is empty. Write the name of class {number - 1} there")
        if words[0] in seen:
            raise SnapvitError(
                f"{path}, line {number}: '{words[0]}' is on line {seen[words[0]]} too. Name each class once"
            )
        seen[words[0]] = number
    if not seen:
        raise SnapvitError(f"{path}: names no classes. Write one name per line")
    return tuple(seen)


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
