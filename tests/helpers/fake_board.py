"""A fake board: this machine behind a real sshd, with a fake trtexec that invents its times, and a fake /sys.

It shows that copying, resuming and ending work. It says nothing about TensorRT or a Jetson.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.shared import ROOT
from helpers.ssh_server import serving
from snapvit_export.family.folder import read_family
from snapvit_export.runtimes import jetson_agent
from snapvit_export.selection.remote import Host

HANGS = """
import json, os, sys, time
from pathlib import Path
here = Path(__file__).parent
known = (here / "calls").read_text().splitlines() if (here / "calls").exists() else []
for kind, number in json.loads((here / "how.json").read_text()).get("hang_at", {}).items():
    count = sum(f'"{kind}=' in line for line in known) + 1
    if any(word.startswith(f"{kind}=") for word in sys.argv) and count == number:
        (here / "hanging.new").write_text(json.dumps([os.getpid(), os.getppid()]))
        (here / "hanging.new").rename(here / "hanging")
        time.sleep(600)
"""
MILLISECONDS = {"dense": 5.0, "s30": 4.0, "s60": 3.0}


def fake_trtexec() -> str:
    """Return the fake trtexec of the agent's own tests, which knows the options of one version and no others."""
    tree = ast.parse((ROOT / "tests" / "runtimes" / "test_jetson_agent.py").read_text())
    named = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAKE"]
    return str(ast.literal_eval(named[0].value))


def known_answers(family: Path) -> dict[str, Any]:
    """Return the reference images that the fake trtexec must know, by their hashes, and what it answers to them."""
    manifest = read_family(family)
    reference = getattr(manifest, "reference", None)  # families that have none are not compared
    if reference is None:
        return {}
    from snapvit_export.family.reference import as_inputs

    pixels = reference.pixels_at(family, manifest.anatomy.image)
    inputs = as_inputs(pixels, manifest.preprocessing, manifest.input.type == "uint8")
    return {
        "bytes": inputs[0].nbytes,
        "inputs": {hashlib.sha256(image.tobytes()).hexdigest(): n for n, image in enumerate(inputs)},
        "answers": {name: reference.answers_of(family, name).tolist() for name in reference.answers},
    }


@dataclass
class FakeBoard:
    """What the tests see of the board."""

    host: Host
    folder: Path  # of everything that is faked
    how: dict[str, Any] = field(default_factory=lambda: {"version": 100300, "ms": MILLISECONDS})

    def behave(self, **changes: object) -> None:
        """Tell the fake trtexec what to do; `hang_at`: the call that never ends, {"--onnx": 2}."""
        self.how.update(changes)
        (self.folder / "bin" / "how.json").write_text(json.dumps(self.how))

    @property
    def root(self) -> tuple[str, ...]:
        """The option that gives the agent a fake /sys and /proc."""
        return ("--root", str(self.folder / "root")) if "--root" in Path(jetson_agent.__file__).read_text() else ()

    @property
    def target(self) -> str:
        return f"jetson://{self.host.user}@{self.host.name}:{self.host.port}"

    @property
    def kept(self) -> Path:
        """The folder that a run has left on the board."""
        (found,) = (self.folder / "cache" / "snapvit").iterdir()
        return found

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "bin" / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def builds(self) -> list[str]:
        """The variants that engines were built of, in order."""
        return [Path(word.partition("=")[2]).stem for words in self.calls for word in words if "--onnx=" in word]

    @property
    def timed(self) -> int:
        """How often something was timed."""
        return sum(word.startswith("--exportTimes=") for words in self.calls for word in words)

    def hanging(self) -> list[int]:
        """Wait for the call that never ends, and return the numbers of its process and of the agent."""
        path = self.folder / "bin" / "hanging"
        wait_until(path.exists)
        found: list[int] = json.loads(path.read_text())
        path.unlink()
        return found


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something that happens soon."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def fake_board(folder: Path) -> Iterator[FakeBoard]:
    """Start the server; its sessions find the fake trtexec in PATH and a cache folder of their own."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    (programs / "trtexec").write_text(f"#!{sys.executable}\n{HANGS}\n{fake_trtexec()}")
    (programs / "trtexec").chmod(0o755)
    _make_root(folder / "root")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with serving(folder / "server", {"PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}) as host:
        board = FakeBoard(host, folder)
        board.behave()
        yield board


def ssh_that_knows(board: FakeBoard, folder: Path) -> str:
    """Return a PATH whose ssh brings the key of the board along, as a user's own configuration would."""
    folder.mkdir()
    words = shlex.join([str(shutil.which("ssh")), *board.host.options])
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (folder / "ssh").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def _make_root(root: Path) -> None:
    files = {
        "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n",
        "proc/device-tree/model": "A fake Jetson\0",
        "proc/meminfo": "MemTotal:        7620000 kB\nMemAvailable:    5000000 kB\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
