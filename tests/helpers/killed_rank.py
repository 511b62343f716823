"""Run `snapvit rank` with a checkpoint after every step, and die without warning where the test says.

python killed_rank.py N rank ...        kill -9 right after the N-th checkpoint; 0: never
torchrun ... killed_rank.py lost ...    the second process dies in the second generation
"""

import os
import signal
import sys

from snapvit_export.cli.app import main
from snapvit_export.prune.rank import rank
from snapvit_export.prune.rank.checkpoint import Checkpoint
from snapvit_export.prune.rank.distributed import Processes

rank.SAVE_SECONDS = 0.0
when, sys.argv = sys.argv[1], ["snapvit", *sys.argv[2:]]
saves = calls = 0
plain_save, plain_share = Checkpoint.save, Processes.share


def save(self, *arguments):
    global saves
    plain_save(self, *arguments)
    saves += 1
    if str(saves) == when:
        os.kill(os.getpid(), signal.SIGKILL)


def share(self, items):
    global calls
    calls += 1
    if when == "lost" and self.number == 1 and calls == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain_share(self, items)


Checkpoint.save, Processes.share = save, share
main()
