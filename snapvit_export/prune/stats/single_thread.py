"""Linear algebra on one thread: libraries split sums by the number of threads, and the last bits change with it.

The small computations that decide what is cut run so, that the cores of a machine change no ranking.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def single_thread() -> Iterator[None]:
    """Within the context, numpy and torch compute on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)
