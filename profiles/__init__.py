"""Device cards: what is known beforehand about a kind of device, as data. `cpu` is any machine with ONNX Runtime."""

from __future__ import annotations

from importlib import resources

from ..errors import UsageError
from ..target import Target
from ..values import Value, from_json


class Card(Value, frozen=True, kw_only=True):
    """A kind of device and the target that it defaults to."""

    name: str
    description: str
    target: Target


def load(name: str) -> Card:
    """Read the card of a kind of device."""
    folder = resources.files(__name__)
    file = folder / f"{name}.json"
    if not name.isidentifier() or not file.is_file():
        known = sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))
        raise UsageError(f"no device card is called '{name}'. There are: {', '.join(known)}")
    return from_json(file.read_bytes(), Card, f"profiles/{name}.json")
