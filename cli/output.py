"""Results as JSON on standard output; for people they go through `say` and the tables of the report."""

from __future__ import annotations

from typing import Any

from ..visible import say_json


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    from ..storage.json import to_json

    say_json(to_json(value).decode())
