"""Makes the families that the tests on a Jetson build and time: a tiny model in every precision that TensorRT takes.

    python tools/make_board_families.py

They are committed, since a board has neither torch nor onnx to make them with. Make them again when the format of
graphs or families changes; tests/runtimes/test_board_families.py tells when they can no longer be read.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ROOT / "tests" / "runtimes" / "jetson" / "families"
PRECISIONS = ("fp32", "fp16", "int8-static")
KEPT = ("manifest.json",)  # beside the files that it lists


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.families import make_family
    from snapvit_export.family.folder import files_to_time, read_family
    from snapvit_export.target import Target

    shutil.rmtree(FAMILIES, ignore_errors=True)
    for precision in PRECISIONS:
        target = Target(runtime="onnxruntime", precision=precision, batch=1, threads=1)
        with tempfile.TemporaryDirectory() as folder:
            made = make_family(Path(folder), "local", correct=False, sparsity=[0.5], target=target, flavour="portable")
            goal = FAMILIES / precision
            goal.mkdir(parents=True)
            for name in (*KEPT, *files_to_time(read_family(made))):
                shutil.copy(made / name, goal / name)


if __name__ == "__main__":
    main()
