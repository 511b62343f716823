"""Threads of torch beside other work: as many as cores are free.

Threads of one computation wait for each other many thousand times a second. Where another program holds one of the
cores, each such wait lasts until the scheduler gives that core back: a refit on two threads beside two busy programs
took eight times as long as alone, on one thread three times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...profiling.conditions import LoadMonitor
from ...runtimes.device import usable_cores

LOOK_SECONDS = 0.25  # that the load of others is measured; the kernel counts in hundredths


@contextmanager
def on_free_cores() -> Iterator[None]:
    """Within the context torch uses no more threads than there are cores that nobody else keeps busy, at least one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, free_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def free_cores() -> int:
    """Return the number of cores that others leave free now, at least one; all of them where that is not known."""
    monitor = LoadMonitor()
    time.sleep(LOOK_SECONDS)
    return max(1, usable_cores() - round(monitor.others or 0.0))
