"""Linear algebra on one thread: libraries split sums by the number of threads, and their last bits change with it.

What is small but decides the search (PCA, CKA, the optimiser) runs here, so that neither the cores of a machine nor
the number of processes can change a ranking.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, numpy and torch compute on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)
