"""Timings of a ranking: added over interruptions, kept apart by the number of processes, and no part of its meaning."""

import pytest

from snapvit_export.errors import FileFormatError
from snapvit_export.model import timing
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.timing import PhaseClock, Timing, read_timings, untimed_part
from snapvit_export.progress import Stages


@pytest.fixture
def clock(monkeypatch):
    """Make clocks whose phases take the seconds that the test says."""

    def make(measured, processes=1, earlier=()):
        made = PhaseClock(processes, threads=2)
        monkeypatch.setattr(Stages, "measured", lambda _: measured)
        made.earlier = tuple(earlier)
        return made

    return make


def test_what_was_interrupted_is_added(clock):
    first = clock({"scores": 2.0, "search": 1.0}).timings()
    again = clock({"search": 0.5, "cka": 4.0}, earlier=first).timings()
    assert again == (Timing(processes=1, threads=2, device="cpu", seconds={"scores": 2.0, "search": 1.5, "cka": 4.0}),)
    assert again[0].total == 7.5


def test_another_number_of_processes_is_counted_apart(clock):
    first = clock({"search": 8.0}).timings()
    two = clock({"search": 3.0}, processes=2, earlier=first).timings()
    assert [(each.processes, each.seconds) for each in two] == [(1, {"search": 8.0}), (2, {"search": 3.0})]
    back = clock({"search": 1.0}, earlier=two).timings()
    assert [(each.processes, each.seconds) for each in back] == [(1, {"search": 9.0}), (2, {"search": 3.0})]


def test_a_phase_within_a_phase_counts_for_itself(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("snapvit_export.progress.time.monotonic", lambda: now[0])
    made = PhaseClock()
    with made("search"):
        now[0] += 2.0
        with made("sorting"):
            now[0] += 0.5
            assert made.timings()[0].seconds == {"search": 2.0, "sorting": 0.5}  # as a checkpoint sees it
        now[0] += 1.0
    assert made.timings()[0].seconds == {"search": 3.0, "sorting": 0.5}


def test_plain_values_are_read_back_and_left_out():
    made = PhaseClock(processes=3)
    with made("scores"):
        pass
    provenance = {"seed": 1, timing.KEY: made.in_plain_values()}
    assert read_timings(provenance) == made.timings()
    assert untimed_part(provenance) == {"seed": 1}
    assert read_timings({"seed": 1}) == ()  # an older file


def test_a_damaged_one_is_refused_with_the_file(tmp_path):
    ranking = Ranking(([1.0],), ([1.0, 2.0],), "m", None, {timing.KEY: [{"processes": 1}]})
    ranking.save(tmp_path / "r")
    with pytest.raises(FileFormatError, match=r"r: the ranking's timing is damaged"):
        Ranking.load(tmp_path / "r")
