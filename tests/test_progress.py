"""Progress: stages measure where the time goes and pass everything on; a phase is one live line."""

import io
import re
import time

import pytest
from rich.console import Console

from snapvit_export.cli.progress import _live, how_far, shortened
from snapvit_export.progress import Stages, clock


class Recorder:
    """A Progress that keeps what it is told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *values: self.told.append((name, *values))


@pytest.fixture
def now(monkeypatch):
    """A clock that a test sets."""
    at = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    return at


def test_stages_pass_everything_on():
    recorder = Recorder()
    stages = Stages(recorder)
    stages.phase("scoring", 3)
    stages.advance(2)
    stages.describe("scoring more")
    stages.note("half of it")
    stages.latencies({"a": (1.0, 0.9, 1.1)}, 2.0)
    assert recorder.told == [
        ("phase", "scoring", 3),
        ("advance", 2),
        ("describe", "scoring more"),
        ("note", "half of it"),
        ("latencies", {"a": (1.0, 0.9, 1.1)}, 2.0),
    ]


def test_time_inside_a_stage_counts_for_the_innermost_alone(now):
    stages = Stages()
    with stages.stage("candidates"):
        now[0] += 2
        with stages.stage("timing"):
            now[0] += 5
        now[0] += 1
    assert stages.seconds == {"candidates": 3.0, "timing": 5.0}


def test_a_stage_that_comes_again_goes_on_and_keeps_its_place(now):
    stages = Stages()
    for name, took in (("ranking", 1), ("timing", 2), ("ranking", 4)):
        with stages.stage(name):
            now[0] += took
    assert list(stages.rounded().items()) == [("ranking", 5.0), ("timing", 2.0)]


def test_what_belongs_to_no_stage_is_other_so_that_all_is_the_wall_clock(now):
    stages = Stages()
    now[0] += 0.31
    with stages.stage("ranking"):
        now[0] += 14.16
    now[0] += 0.7
    assert stages.rounded() == {"ranking": 14.2, "other": 1.0}


def test_a_stage_that_fails_is_counted_and_left(now):
    stages = Stages()
    with pytest.raises(ValueError, match="broken"), stages.stage("timing"):
        now[0] += 3
        raise ValueError("broken")
    now[0] += 1
    assert stages.rounded() == {"timing": 3.0, "other": 1.0}


def test_the_seconds_of_a_running_stage_are_there_before_its_end(now):
    stages = Stages()
    with stages.stage("timing"):
        now[0] += 3
        assert stages.rounded() == {"timing": 3.0}


def test_steps_are_numbered_and_what_is_done_tells_how_long_the_rest_takes(now):
    recorder = Recorder()
    stages = Stages(recorder)
    stages.plan({"reading": 1, "ranking": 3, "deciding": 4})
    for step, took in (("reading", 10), ("ranking", 30), ("unplanned", 5), ("deciding", 12)):
        stages.step(step)
        stages.phase(f"{step} first")
        now[0] += took
        stages.phase(f"{step} then")
    assert [told[1] for told in recorder.told] == [
        "[1/3] reading first",
        "[1/3] reading then",
        "[2/3, about 1:10 left] ranking first",
        "[2/3, about 0:40 left] ranking then",
        "unplanned first",
        "unplanned then",
        "[3/3, about 0:50 left] deciding first",  # 45 s for a half
        "[3/3, about 0:40 left] deciding then",
    ]


def test_how_far_a_phase_is():
    assert how_far(30, 120, 10.0, 30.4) == "30/120, 0:30 left"
    assert how_far(0, 120, 0.0, None) == "0/120"
    assert how_far(0, None, 75.0, None) == "1:15"
    assert how_far(4, None, 0.2, None) == ""
    assert [clock(seconds) for seconds in (0.2, 59.6, 3731)] == ["0:00", "1:00", "1:02:11"]


def test_a_phase_is_shortened_to_its_room():
    assert shortened("timing a, b and c", 40) == "timing a, b and c"
    assert shortened("timing a, b and c", 13) == "timing a, b …"
    assert len(shortened("x" * 50, -3)) == 12


def test_a_live_phase_is_one_line_without_question_marks(now):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    with _live(console) as progress:
        progress.phase("timing " + "dense, " * 30)
        now[0] += 12
        progress.describe("timing " + "dense, " * 30)
        progress.phase("scoring " + "heads, " * 30, 120)
        progress.advance(30)
        progress.note("half of it")
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", file.getvalue())
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    phases = [line for line in lines if line != "half of it"]
    assert all("starting" in line or "timing" in line or "scoring" in line for line in phases)  # none has a second line
    assert not any("?" in line for line in lines)
    assert phases[2].endswith("… 0:12")
    assert phases[-1].endswith("30/120")
