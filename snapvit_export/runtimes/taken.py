"""How latencies on a GPU are taken: what a figure counts, so that nobody compares figures of different kinds. Light."""

from __future__ import annotations

from ..storage.json import Count, Size, Value


class Taken(Value, frozen=True, kw_only=True):
    """The way a latency on a GPU was taken; None: not known."""

    transfers: bool  # copies to and from the GPU count; they never do in `gpu_ms`
    queue_depth: Size  # batches that are under way at once: 1 waits for each
    ahead: Count  # launches that are queued before the one whose time on the GPU is measured
    cuda_graph: bool
    spin_wait: bool | None = None  # the processor polls while it waits
    tf32: bool | None = None  # fp32 products keep 10 of 23 bits
    pinned_memory: bool | None = None  # images and answers lie in page-locked memory
