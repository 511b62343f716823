"""Torch leaves cores to other programs that keep them busy, where results need not repeat to the last bit."""

import torch

from snapvit_export.profiling.conditions import LoadMonitor
from snapvit_export.prune.stats import free_cores
from snapvit_export.prune.stats.free_cores import on_free_cores


def with_load(monkeypatch, cores: int, others: float | None) -> None:
    monkeypatch.setattr(free_cores, "usable_cores", lambda: cores)
    monkeypatch.setattr(LoadMonitor, "others", property(lambda self: others))
    monkeypatch.setattr(free_cores, "LOOK_SECONDS", 0.0)


def test_as_many_threads_as_others_leave_cores_and_at_least_one(monkeypatch):
    for others, wanted in ((0.1, 4), (0.9, 3), (2.2, 2), (9.0, 1), (None, 4)):
        with_load(monkeypatch, 4, others)
        assert free_cores.free_cores() == wanted


def test_the_number_of_threads_is_as_before_afterwards_and_never_larger(monkeypatch):
    before = torch.get_num_threads()
    with_load(monkeypatch, 64, 63.0)
    with on_free_cores():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with_load(monkeypatch, 64, 0.0)
    with on_free_cores():
        assert torch.get_num_threads() == before
