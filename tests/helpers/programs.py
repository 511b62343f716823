"""Programs run beside the tests, and what the command line answered."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KILLED_RANK = Path(__file__).parent / "killed_rank.py"


@dataclass(frozen=True)
class Outcome:
    """How one call of the command line ended."""

    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The one line that a refusal prints."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


def python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python on one thread; a variable set to nothing is left out of its environment."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    env = {name: value for name, value in env.items() if value}
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=300)


def torchrun(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """That many processes of one program, on a port of their own."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", count, "--master-port", 29500 + os.getpid() % 2000]
    return python(*launcher, *arguments)
