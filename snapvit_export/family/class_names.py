"""Names of classes as people say them: ImageNet's come with a WordNet id in front. Light."""

from __future__ import annotations

import re

_WORDNET = re.compile(r"n[0-9]{8}[ _]+(?=\S)")


def class_name(label: str) -> str:
    """Return a class as people call it: without its id, and of several names the first.

    >>> class_name("n02123045 tabby, tabby cat"), class_name("7"), class_name("dog, small")
    ('tabby', '7', 'dog, small')
    """
    found = _WORDNET.match(label)
    return label[found.end() :].split(", ")[0] if found else label
