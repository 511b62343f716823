"""Which names the bindings in a folder have: a JSON list of dotted names on stdin, JSON name -> bool on stdout.

    echo '["Builder.create_network", "*.precision"]' | LD_LIBRARY_PATH=STUB python -I -S list_names.py FOLDER

"*.name" asks whether any class has it. Nothing is ever created or called: behind the bindings there is only the stub.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

MISSING = object()


def has(place: Any, name: str) -> bool:
    """Follow a dotted name without running anything, not even a property."""
    for part in name.split("."):
        place = inspect.getattr_static(place, part, MISSING)
        if place is MISSING:
            return False
    return True


def classes(module: ModuleType) -> list[type]:
    """TensorRT's own classes; not what its __init__ happens to import, nor its lists, which are like Python's."""
    found = [value for value in vars(module).values() if isinstance(value, type)]
    return [each for each in found if each.__module__.startswith(module.__name__) and not hasattr(each, "append")]


def answer(module: ModuleType, name: str) -> bool:
    """Whether the module has the name."""
    if name.startswith("*."):
        return any(has(each, name[2:]) for each in classes(module))
    return has(module, name)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    (package,) = Path(sys.argv[1]).glob("*_bindings")  # tensorrt_bindings, tensorrt_rtx_bindings
    bindings = importlib.import_module(package.name)
    print(json.dumps({name: answer(bindings, name) for name in json.load(sys.stdin)}))
