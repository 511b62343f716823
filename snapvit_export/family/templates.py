"""Templates of the programs that lie beside a chosen model, filled with its own values. Light.

`steps.py.in` prepares images and prints answers; it is the same text in every Python program.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..calibration.decode import FORMATS, MOST_PIXELS, MOST_PROPORTION
from ..calibration.preprocessing import FAR_MORE, Preprocessing
from .manifest import Input

HERE = Path(__file__).parent
STEPS = "steps"  # the place of the shared text in a program
MISSING = "@"  # around the names of what is filled in


def program(name: str) -> str:
    """Return the template of a Python program, with the shared steps in their place."""
    return (HERE / name).read_text().replace(f"{MISSING}{STEPS}{MISSING}\n", (HERE / "steps.py.in").read_text())


def filled(template: str, values: dict[str, str]) -> str:
    """Put values in the places of a template; each value must have a place, and each place a value."""
    named = set(re.findall(rf"{MISSING}([a-z_]+){MISSING}", template))
    assert named == set(values), f"{named ^ set(values)} are not in both"
    return re.sub(rf"{MISSING}([a-z_]+){MISSING}", lambda found: values[found[1]], template)


def step_values(steps: Preprocessing, given: Input, classes: int) -> dict[str, str]:
    """Return what the places of the shared steps are filled with."""
    return {
        "height": str(steps.input_size[1]),
        "width": str(steps.input_size[2]),
        "crop": repr(steps.crop_pct),
        "squash": str(steps.crop_mode == "squash"),
        "half": "int" if steps.margin == "down" else "round",
        "interpolation": steps.interpolation.upper(),
        "mean": repr(steps.mean),
        "std": repr(steps.std),
        "takes_bytes": str(given.type == "uint8"),
        "has_classes": str(classes > 0),
        "formats": repr(FORMATS),
        "most_pixels": str(MOST_PIXELS),
        "most_proportion": str(MOST_PROPORTION),
        "far_more": str(FAR_MORE),
    }


def line(name: str) -> str:
    """Return a class name as one line that cannot control a terminal: it may come from a stranger's manifest."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(name.split()))


def plain(text: str) -> str:
    """Return a name in letters that cannot end a docstring or a comment, and that every editor shows."""
    return re.sub(r"[^A-Za-z0-9_.,:@()+/ -]", "?", line(text)).replace(MISSING, "?")
