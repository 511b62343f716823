"""Names of classes as people say them: ImageNet's come with a WordNet id in front. Light."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import SnapvitError, first_line
from ..storage.reading import MOST_TEXT, check_readable

_WORDNET = re.compile(r"n[0-9]{8}[ _]+(?=\S)")


def class_name(label: str) -> str:
    """Return a class as people call it: without its id, and of several names the first.

    >>> class_name("n02123045 tabby, tabby cat"), class_name("7"), class_name("dog, small")
    ('tabby', '7', 'dog, small')
    """
    found = _WORDNET.match(label)
    return label[found.end() :].split(", ")[0] if found else label


def read_labels(path: Path) -> tuple[str, ...]:
    """Read the names of classes from a file: line i names output i, as people call it or with its WordNet id first."""
    check_readable(path, MOST_TEXT)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SnapvitError(f"{path}: cannot be read as names of classes ({first_line(error)}). Save UTF-8") from error
    names = [line.strip() for line in lines]
    while names and not names[-1]:
        names.pop()
    for number, name in enumerate(names):
        if not name or name in names[:number]:
            wrong = "is empty" if not name else f"'{name}' is on line {names.index(name) + 1} too"
            raise SnapvitError(f"{path}, line {number + 1}: {wrong}. Give class {number} a name of its own")
    if not names:
        raise SnapvitError(f"{path}: names no classes. Write one name per line")
    return tuple(names)
