"""Long timing runs by a clock that is told the time: as much memory as a short one, and the whole of it is seen."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from helpers.clock import fake_clock
from snapvit_export.profiling import sampling
from snapvit_export.profiling.sampling import AT_ONCE, BURST, DRAWS, MOST_RUNS, Samples, time_together
from snapvit_export.progress import Silent
from snapvit_export.selection import candidates
from snapvit_export.selection.candidates import SHOWN_BURSTS, live_report

HOUR = 3600.0


def hour_of(ms: float, **options):
    """An hour of runs that get slower and slower, up to twice as slow, in two candidates."""
    with fake_clock() as clock:
        slow = lambda: clock.advance(ms * (1 + clock.monotonic() / (2 * HOUR)))  # noqa: E731
        found = time_together({"a": slow, "b": slow}, HOUR, **options)
    return clock, found


@pytest.mark.parametrize("pause_ms", [0.0, 5.0])
def test_an_hour_keeps_no_more_samples_than_fit_and_they_are_of_all_of_it(pause_ms):
    clock, found = hour_of(25, pause_ms=pause_ms)
    assert clock.monotonic() >= 2 * HOUR
    for taken in found.values():
        assert MOST_RUNS / 2 <= len(taken) <= MOST_RUNS
        assert len(taken.cpu_ms) == len(taken)
        assert len(taken) % taken.burst == 0
        steps = np.diff(taken.wall_ms[:: taken.burst])
        assert steps.max() < 3 * np.median(steps) + 1e-5  # no gap: bursts at equal distances
        assert taken.wall_ms[0] == pytest.approx(25, rel=0.001)
        assert taken.wall_ms[-1] == pytest.approx(25 * (1 + clock.monotonic() / (2 * HOUR)), rel=0.01)
        assert taken.drift > 0.3


def test_a_short_run_keeps_every_sample():
    with fake_clock() as clock:
        found = time_together({"a": lambda: clock.advance(1.0)}, MOST_RUNS / 1000)["a"]
    assert len(found) == MOST_RUNS


def test_more_runs_than_are_kept_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_RUNS", 64)
    with fake_clock() as clock:
        found = time_together({"a": lambda: clock.advance(1.0)}, 10.0, least_runs=1000)["a"]
    assert 1000 <= len(found) <= 2000 + BURST


def test_samples_are_dropped_by_whole_bursts_and_the_first_stays():
    taken = Samples(4, list(range(20)), [100 + n for n in range(20)])
    taken.thin()
    assert taken.wall_ms == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
    assert taken.cpu_ms == [100 + ms for ms in taken.wall_ms]


def test_some_bursts_stand_for_a_long_run_and_all_for_a_short_one():
    taken = Samples(4, list(range(400)), list(range(400)))
    assert taken.spread(100) is taken
    some = taken.spread(10)
    assert len(some) == 40
    starts = some.wall_ms[::4]
    assert [b - a for a, b in pairwise(starts)] == [40] * 9
    assert some.cpu_ms == some.wall_ms


@pytest.mark.parametrize("burst", [1, BURST])
def test_an_interval_is_that_of_all_draws_at_once_in_little_memory(burst):
    wall_ms = np.random.default_rng(1).normal(10, 1, 60_000).tolist()
    taken = Samples(burst, wall_ms, wall_ms)
    tracemalloc.start()
    low, high = taken.interval(50)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 6 * 8 * AT_ONCE  # a few arrays of what is resampled at once; all draws are up to 192 MB
    few = Samples(burst, wall_ms[:9600], wall_ms[:9600])
    bursts = np.array(few.wall_ms).reshape(-1, burst)
    drawn = np.random.default_rng(0).integers(0, len(bursts), (DRAWS, len(bursts)))
    at_once = np.percentile(bursts[drawn].reshape(DRAWS, -1), 50, axis=1)
    assert few.interval(50) == tuple(np.percentile(at_once, [2.5, 97.5]))
    assert low < 10.01
    assert high > 9.99


def test_what_is_shown_of_a_long_run_is_taken_from_some_of_it(monkeypatch):
    """All of an hour would take longer to draw than to time."""
    seen, plain = [], Samples.interval
    monkeypatch.setattr(Samples, "interval", lambda self, at: seen.append(len(self)) or plain(self, at))
    monkeypatch.setattr(candidates, "SHOWN_EVERY", -1.0)
    samples = Samples(BURST, [1.0] * MOST_RUNS, [1.0] * MOST_RUNS)
    live_report(Silent(), None)({"a": samples})
    assert seen == [SHOWN_BURSTS * BURST]
