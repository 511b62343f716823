"""Write calibration/presets.json: the preprocessing of timm's plain ViTs, by the names of their checkpoints.

    python tools/list_presets.py [--check]

An ONNX file does not say how its images are prepared, and devices without timm have no other way to know it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

PATH = Path(__file__).parent.parent / "calibration" / "presets.json"
MODULES = ("vision_transformer", "deit", "eva")  # timm's, that have the families which can be cut
FIELDS = ("mean", "std", "interpolation", "crop_pct", "crop_mode")


def collected() -> list[dict[str, object]]:
    """Return the distinct presets, each with the names of its models; an architecture has that of its first weights."""
    import timm
    from timm.models import get_pretrained_cfg

    found: dict[str, list[str]] = {}
    for module in MODULES:
        for architecture in timm.list_models(module=module):
            names = timm.list_models(f"{architecture}.*", pretrained=True, module=module) or [architecture]
            for number, name in enumerate(names):
                config = get_pretrained_cfg(name)
                preset = {field: getattr(config, field) for field in FIELDS}
                if config is None or preset["crop_mode"] not in (None, "center", "squash"):
                    continue
                preset["crop_mode"] = preset["crop_mode"] or "center"
                key = json.dumps(preset, sort_keys=True)
                found.setdefault(key, []).append(name)
                if number == 0 and name != architecture:
                    found[key].append(architecture)
    return [{**json.loads(key), "models": sorted(set(names))} for key, names in sorted(found.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only tell if the file is as it would be written")
    text = json.dumps(collected(), indent=1) + "\n"
    if not parser.parse_args().check:
        PATH.write_text(text)
    elif PATH.read_text() != text:
        sys.exit("calibration/presets.json is not what the installed timm has. Run python tools/list_presets.py")


if __name__ == "__main__":
    main()
