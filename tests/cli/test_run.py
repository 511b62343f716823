"""`snapvit run`: a line for each image, JSON, deadlines, a camera, and images that cannot be read."""

import json
import shutil

import numpy as np
import pytest

from snapvit_export.calibration.source import Source, UnreadableImage
from snapvit_export.family.folder import own_files, read_family
from snapvit_export.family.loaded import load_family
from snapvit_export.family.trace import Trace
from snapvit_export.report.charts import all_charts
from snapvit_export.report.data import LoadedFamily, collect
from snapvit_export.serving.frames import frames
from snapvit_export.serving.session import ElasticSession


@pytest.fixture
def images(plain_family):
    return plain_family.parent / "images"


def test_each_image_gets_a_line_with_its_classes_its_variant_and_its_latency(snapvit, plain_family, images):
    outcome = snapvit("run", plain_family, images / "class0", "--top", 2)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert len(lines) == 12
    best = load_family(plain_family).dense.predict(images / "class0" / "0.png")[0]
    assert f"{best.label} {100 * best.probability:.0f} %" in lines[0]
    assert all("  dense  " in line and line.endswith(" ms") for line in lines)
    assert "12 of 12 images answered" in outcome.err


def test_a_single_image_and_json(snapvit, plain_family, images):
    outcome = snapvit("run", plain_family, images / "class0" / "0.png", "--deadline", "60000ms", "--json", "-q")
    found = json.loads(outcome.out)
    assert found["deadline_ms"] == 60000.0
    (image,) = found["images"]
    assert image["met"] is True
    assert image["predictions"][0]["label"].startswith("class ")
    assert found["stats"]["calls"] == 1


def test_a_deadline_that_nothing_meets_is_told_or_refused(snapvit, plain_family, images):
    outcome = snapvit("run", plain_family, images / "class0", "--deadline", "0.0001ms")
    assert all(line.endswith("late") for line in outcome.out.splitlines())
    assert "0.0 % in time" in outcome.err
    outcome = snapvit("run", plain_family, images / "class0", "--deadline", "0.0001ms", "--late", "refuse")
    assert any("no variant would be in time" in line for line in outcome.out.splitlines())


def test_always_one_variant(snapvit, plain_family, images):
    outcome = snapvit("run", plain_family, images / "class0", "--variant", "s30")
    assert all("  s30  " in line for line in outcome.out.splitlines())
    assert "no variant is called 'x'" in snapvit("run", plain_family, images, "--variant", "x").error_line


def test_an_image_that_cannot_be_read_is_named_and_the_others_are_answered(snapvit, plain_family, images, tmp_path):
    shutil.copytree(images / "class0", tmp_path / "some")
    (tmp_path / "some" / "1.png").write_bytes(b"no image")
    outcome = snapvit("run", plain_family, tmp_path / "some")
    assert outcome.code == 0
    assert sum("cannot be read as an image" in line for line in outcome.out.splitlines()) == 1
    assert "12 of 13 images answered" in outcome.err
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "1.png").write_bytes(b"no image")
    assert "no image was answered" in snapvit("run", plain_family, tmp_path / "none").error_line


class Clock:
    """Time that passes when somebody sleeps or works."""

    now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def camera(session, clock, takes, **more):
    """Frames of a camera whose images take so many seconds to answer, by number."""
    arrived = []

    def answer(picture, arrived_at):
        arrived.append(arrived_at)
        clock.now += takes.get(len(arrived) - 1, 0.0)
        return plain(picture, arrived=arrived_at)

    plain = session.run_images
    session.run_images = lambda picture, arrived: answer(picture, arrived)
    picture = np.zeros((8, 8, 3), np.uint8)
    source = Source("noise", open=lambda _: picture, count=4, title=str)
    return list(frames(session, source, clock=clock, sleep=clock.sleep, **more)), arrived


def test_a_camera_takes_frames_at_its_pace_and_misses_those_for_which_there_is_no_time(plain_family):
    clock = Clock()
    with ElasticSession(plain_family, 50.0, seconds=0) as session:
        found, arrived = camera(session, clock, {1: 0.35}, fps=10, count=8)
    assert len(found) == 8
    assert arrived == pytest.approx([100.0, 100.1, 100.4, 100.5, 100.6, 100.7])
    assert [frame.error for frame in found if frame.variant is None] == ["no time for this frame"] * 2
    assert [frame.image for frame in found] == list("01230123")


def test_an_image_that_cannot_be_opened_does_not_stop_a_camera(plain_family):
    clock = Clock()

    def broken(number):
        if number == 1:
            raise UnreadableImage("broken")
        return np.zeros((8, 8, 3), np.uint8)

    with ElasticSession(plain_family, 50.0, seconds=0) as session:
        source = Source("noise", open=broken, count=3, title=str)
        found = list(frames(session, source, fps=10, clock=clock, sleep=clock.sleep))
    assert [frame.error for frame in found] == [None, "broken", None]


def test_recorded_answers_are_kept_for_the_report(snapvit, plain_family, images, tmp_path):
    family = shutil.copytree(plain_family, tmp_path / "family")
    assert snapvit("run", family, images, "--fps", 500, "--frames", 20, "--record").code == 0
    trace = Trace.load(family)
    assert len(trace.requests) == 20
    assert trace.deadline_ms == 2.0
    assert trace.variants == ("dense", "s30")
    report = collect(LoadedFamily(family, read_family(family), trace=trace))
    assert "deadlines" in [chart.name for chart in all_charts(report)]
    assert "deadlines.json" in own_files(family)
