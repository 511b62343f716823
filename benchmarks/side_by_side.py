"""Time files of several runtimes in turns, in a process of its own: `levers.py` starts it once for each round.

    python benchmarks/side_by_side.py FILES.json SECONDS

FILES.json maps a name to [path, runtime, precision, side of the image in pixels]; all take one image on one thread.
Prints the median milliseconds of each as JSON. No torch here: what a process has loaded may change how fast a file is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from snapvit_export.profiling.sampling import time_together
from snapvit_export.runtimes.session import open_session
from snapvit_export.target import Target

Files = dict[str, tuple[str, str, str, int]]


def ratios(files: Files, dense: str, seconds: float, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return latency relative to the dense file: median, least and most of some new processes."""
    found: dict[str, list[float]] = {name: [] for name in files}
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "files.json"
        listed.write_text(json.dumps(files))
        for _ in range(rounds):
            call = [sys.executable, __file__, str(listed), str(seconds)]
            told = json.loads(subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True).stdout)
            for name, ms in told.items():
                found[name].append(ms / told[dense])
    return {name: (float(np.median(each)), min(each), max(each)) for name, each in found.items()}


def main() -> None:
    files: Files = json.loads(Path(sys.argv[1]).read_text())
    rng = np.random.default_rng(0)
    with ExitStack() as opened:
        calls = {}
        for name, (path, runtime, precision, pixels) in files.items():
            image = rng.standard_normal((1, 3, pixels, pixels)).astype(np.float32)
            target = Target(runtime=runtime, precision=precision, batch=1, threads=1)  # type: ignore[arg-type]
            calls[name] = partial(opened.enter_context(open_session(Path(path), target)).run, image)
        samples = time_together(calls, float(sys.argv[2]))
    print(json.dumps({name: taken.percentile(50) for name, taken in samples.items()}))


if __name__ == "__main__":
    main()
