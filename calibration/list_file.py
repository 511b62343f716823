"""A list file: one image per line, and after a tab its label.

    # blank lines and lines like this one are skipped
    cats/one.jpg<TAB>cat
    /elsewhere/two.jpg<TAB>dog

A path is relative to the folder of the list file, or absolute. Labels that are all whole numbers are class numbers;
otherwise they are names, numbered in alphabetical order. An image that is named twice counts once, so that it cannot
serve for calibration and for reporting.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import SnapvitError, first_line
from ..storage.reading import MOST_TEXT, check_readable
from .decode import open_image
from .source import Source, by_name, by_number

SUFFIXES = frozenset({".txt", ".lst"})
WHOLE_NUMBER = re.compile("[0-9]{1,9}")  # a longer row of digits is a name


def list_source(path: Path) -> Source:
    """The images that a list file names. A missing image is only found out when it is opened."""
    labelled = _entries(path)
    paths, names = list(labelled), list(labelled.values())
    labels, classes = _numbered(names, path) if names[0] else (None, [])
    return Source(
        str(path),
        open=lambda i: open_image(paths[i]),
        count=len(paths),
        title=lambda i: paths[i],
        labels=labels,
        classes=classes,
    )


def _entries(path: Path) -> dict[str, str]:
    """Map image paths to labels, in the order of the lines; a label is empty where there is none."""
    found: dict[str, str] = {}
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, label = _parsed(line, f"{path}, line {number}")
        image = os.path.normpath(path.parent / name)
        if found.setdefault(image, label) != label:
            raise SnapvitError(f"{path}, line {number}: {name} has another label than before. Give it one")
        if bool(label) != bool(next(iter(found.values()))):
            raise SnapvitError(f"{path}, line {number}: labels are on some lines only. Give every line one, or none")
    if not found:
        raise SnapvitError(f"{path}: names no images. Write one path per line, and after a tab its label if it has one")
    return found


def _text(path: Path) -> str:
    check_readable(path, MOST_TEXT)
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors put a mark in front
    except FileNotFoundError as error:
        raise SnapvitError(f"{path}: no such list file. Give --data a list that exists") from error
    except UnicodeDecodeError as error:
        raise SnapvitError(f"{path}: not a text file in UTF-8 (byte {error.start}). Save the list as UTF-8") from error
    except OSError as error:
        raise SnapvitError(f"{path}: cannot be read ({first_line(error)}). Check that it may be read") from error


def _parsed(line: str, where: str) -> tuple[str, str]:
    name, *labels = (part.strip() for part in line.rstrip().split("\t"))
    if len(labels) > 1 or not name:
        raise SnapvitError(f"{where}: is not a path, or a path, one tab and a label. Mend the line")
    return name, "".join(labels)


def _numbered(names: list[str], path: Path) -> tuple[list[int], list[str]]:
    if all(WHOLE_NUMBER.fullmatch(name) for name in names):
        return by_number([int(name) for name in names], str(path))
    return by_name(names)
