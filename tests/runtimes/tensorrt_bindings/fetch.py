"""The real Python bindings of one TensorRT version, without its libraries: a wheel of about 1 MB, kept unpacked.

python fetch.py FOLDER tensorrt-cu12-bindings 10.3.0
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SECONDS = 45


class NoWheelError(Exception):
    """There is no such wheel for this Python and machine, or no way to reach it."""


def fetch(cache: Path, package: str, version: str) -> Path:
    """The folder to put first on sys.path; downloaded with pip, as pip is set up here, unless the cache has it."""
    folder = cache / f"{package}-{version}-{sys.implementation.cache_tag}-{platform.machine()}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        wheel = download(Path(temporary), f"{package}=={version}")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        try:
            unpacked.rename(folder)  # whole or not at all: two test runs may share the cache
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def download(folder: Path, requirement: str) -> Path:
    """The wheel alone: its libraries are not on the index, and are not wanted."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--retries", "1", "--timeout", "10", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise NoWheelError(f"{requirement}: pip did not answer within {SECONDS} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise NoWheelError(f"{requirement}: {lines[-1] if lines else 'pip brought no wheel'}")
    return wheels[0]


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
