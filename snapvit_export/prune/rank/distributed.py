"""One process or several: the collective operations of a run that `torchrun` may have started on many processes.

gloo on the CPU, NCCL on GPUs. Every operation means the same with one process, so callers need not distinguish. A lost
peer becomes one clear error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import SnapvitError, first_line
from ..models.load import check_device

T = TypeVar("T")
CPU = torch.device("cpu")
TIMEOUT = timedelta(hours=2)  # for the slowest peer; a peer that dies is noticed at once


@dataclass(frozen=True)
class Processes:
    """This process among `count`; number 0 writes files and reports progress."""

    number: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Return the items of this process: every count-th."""
        return list(items[self.number :: self.count])

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what process 0 makes, in all processes."""
        if self.count == 1:
            return make()
        return self._exchange(make() if self.is_first else None)[0]

    def gather(self, mine: Sequence[T]) -> list[T]:
        """Undo `share`: return the results of all processes in the order of the items."""
        if self.count == 1:
            return list(mine)
        boxes = self._exchange(list(mine))
        return [box[i] for i in range(len(boxes[0])) for box in boxes if i < len(box)]

    def summed(self, totals: Sequence[Tensor]) -> list[Tensor]:
        """Return the element-wise sum over all processes, without changing `totals`."""
        sums = [total.to(self.device, copy=True) for total in totals]
        if self.count > 1:
            with _peers():
                for total in sums:
                    dist.all_reduce(total)
        return [total.cpu() for total in sums]

    def add_up(self, total: Tensor) -> None:
        """Replace a tensor, on the device of this process, by its sum over all processes."""
        if self.count > 1:
            with _peers():
                dist.all_reduce(total)

    def _exchange(self, mine: Any) -> list[Any]:
        """Return every process's value in all processes, sent as MessagePack: plain values, nothing that executes."""
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine)), dtype=torch.uint8)
        with _peers():
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(lengths, torch.tensor([len(data)]))
            longest = max(int(length) for length in lengths)
            boxes = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
            dist.all_gather(boxes, torch.nn.functional.pad(data, (0, longest - len(data))))
        return [msgspec.msgpack.decode(box[: int(n)].numpy().tobytes()) for box, n in zip(boxes, lengths)]


def alone(device: str) -> Processes:
    """Return the only process, on a device that is there."""
    check_device(device)
    return Processes(device=torch.device(device))


@contextmanager
def join(device: str) -> Iterator[Processes]:
    """Join the run that torchrun started, or be the only process."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(device=torch.device(device))
        return
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    with _peers():
        dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Processes(dist.get_rank(), count, _own_device(device))
    finally:
        dist.destroy_process_group()


def _own_device(device: str) -> torch.device:
    """Return the device of this process: with several processes on GPUs, one GPU each."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else torch.device(device)


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises it when a peer is lost
        raise SnapvitError(
            f"another process of this run was lost ({first_line(error)}). "
            f"The checkpoint is whole: run the same command again to continue"
        ) from error
