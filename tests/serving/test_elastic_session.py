"""ElasticSession on real families: what it answers, deadlines, order, threads, and faults of files and inputs."""

import gc
import math
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from snapvit_export import ElasticSession
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.family.folder import read_family, read_manifest
from snapvit_export.family.loaded import load_family
from snapvit_export.serving import session as session_module
from snapvit_export.serving.controller import State
from snapvit_export.serving.mapped_weights import MappedWeights
from snapvit_export.serving.session import Refused
from snapvit_export.serving.turns import Closed, Overloaded
from snapvit_export.serving.variants import NoVariant, OpenVariant, Variants
from snapvit_export.storage.atomic import sha256

FAR = 60_000.0  # a deadline that any machine meets


@pytest.fixture
def family(family_and_elastic) -> Path:
    return family_and_elastic / "family"


@pytest.fixture
def copied(device_folder) -> Path:
    return device_folder / "family"


def opened(family, deadline=FAR, **more):
    return ElasticSession(family, deadline, seconds=0, **more)


def batch_for(family, count=1, seed=0):
    manifest = read_manifest(family)
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 3, *manifest.anatomy.image)).astype(np.float32)


def slowed(session, slowness):
    """Let a session believe that its machine is so slow."""
    level = math.log(slowness)
    session._controller.state = State(ratios=((1000 * time.perf_counter(), level),) * 3, factor=level)


def due_between(session, slower, faster):
    """A deadline that the second variant meets and the first does not."""
    known = session.stats.variants
    return math.sqrt(known[slower] * known[faster])


def test_a_generous_deadline_is_answered_by_the_dense_model_as_the_family_answers(family):
    with opened(family) as session:
        answer = session.run(batch_for(family, 3))
    assert (answer.variant, answer.met, answer.fitted, answer.fidelity) == ("dense", True, True, 1.0)
    expected = load_family(family).dense.session.run(batch_for(family, 3))
    np.testing.assert_allclose(answer.output, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert 0 < answer.ran_ms <= answer.latency_ms


@pytest.mark.parametrize("shared", [True, False])
def test_every_variant_answers_as_its_own_file_does(family, shared):
    images = batch_for(family, 2)
    with opened(family, shared=shared) as session:
        for loaded in load_family(family):
            expected = loaded.session.run(images)
            found = session._variants.opened[loaded.name].run(images)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_slower_machine_gets_a_smaller_variant_and_a_deadline_of_its_own_counts(family):
    with opened(family) as session:
        due = session.stats.variants["dense"] * 1.05
        slowed(session, 0.5)
        assert session.run(batch_for(family), deadline=due).variant == "dense"
        slowed(session, 50.0)
        answer = session.run(batch_for(family), deadline=due)
        assert answer.variant == min(session.stats.variants, key=session.stats.variants.get)
        assert answer.deadline_ms == pytest.approx(due)
        assert not answer.fitted
        slowed(session, 50.0)
        assert session.run(batch_for(family), deadline="60000ms").variant == "dense"


def test_what_is_late_is_refused_where_that_was_asked_for(family):
    with opened(family, late="refuse") as session:
        slowed(session, 19.0)
        with pytest.raises(Refused, match="no variant would be in time"):
            session.run(batch_for(family), deadline=0.001)
        assert (session.stats.refused, session.stats.calls) == (1, 0)
        assert session.run(batch_for(family)).met


def test_a_late_answer_is_an_answer_and_says_so(family):
    with opened(family, deadline=1e-4) as session:
        answer = session.run(batch_for(family))
    assert (answer.met, answer.fitted) == (False, False)
    assert answer.output.shape == (1, 5)
    assert session.stats.late == 1


def test_time_before_the_call_counts(family):
    with opened(family) as session:
        answer = session.run(batch_for(family), arrived=time.perf_counter() - 2.0)
    assert answer.waited_ms >= 2000
    assert answer.latency_ms >= 2000


def test_without_a_deadline_the_chosen_variant_answers(copied):
    from helpers.timing import short_timings
    from snapvit_export.budget import Budget
    from snapvit_export.family.manifest import Limits
    from snapvit_export.progress import Silent
    from snapvit_export.selection.on_device import TimingOptions, choose_in_family

    with short_timings():
        chosen = choose_in_family(copied, Budget.parse("1000ms"), Limits(), TimingOptions(), Silent()).choice.variant
    with opened(copied, deadline=None) as session:
        answer = session.run(batch_for(copied))
    assert answer.variant == chosen
    assert (answer.deadline_ms, answer.met) == (None, True)


def test_deadlines_as_people_write_them(family):
    with opened(family, deadline="50%") as session:
        assert session.deadline_ms == pytest.approx(session.stats.variants["dense"] / 2)
    with opened(family, deadline="100fps") as session:
        assert session.deadline_ms == 10.0
        for wrong in ("soon", "-3ms", 0.0, -1.0, math.nan, math.inf):
            with pytest.raises(UsageError):
                session.run(batch_for(family), deadline=wrong)


def test_stats_tell_what_was_done(family):
    with opened(family) as session:
        for _ in range(4):
            session.run(batch_for(family))
        stats = session.stats
    assert (stats.calls, stats.met, stats.late, stats.refused, stats.failed) == (4, 4, 0, 0, 0)
    assert stats.by_variant == {"dense": 4}
    assert (stats.hit_rate, stats.fidelity) == (1.0, 1.0)
    assert stats.p50_ms <= stats.p99_ms
    assert set(stats.variants) == {"dense", "s30", "s60"}
    assert stats.slowness > 0


@pytest.mark.parametrize(
    "images",
    [
        np.full((1, 3, 96, 96), np.nan, np.float32),
        np.full((1, 3, 96, 96), np.inf, np.float32),
        np.zeros((1, 3, 95, 96), np.float32),
        np.zeros((1, 1, 96, 96), np.float32),
        np.zeros((0, 3, 96, 96), np.float32),
        np.zeros((3, 96, 96), np.float32),
        np.zeros((1, 96, 96, 3), np.uint8),
        np.zeros((1, 3, 96, 96), np.float64),
    ],
    ids=["NaN", "infinite", "other size", "one channel", "empty", "no batch", "bytes", "double"],
)
def test_wrong_inputs_are_refused_and_no_variant_is_blamed(family, images):
    with opened(family) as session:
        with pytest.raises(UsageError):
            session.run(images)
        assert session.stats.retired == {}
        assert session.stats.failed == 1
        assert session.run(batch_for(family)).met


def test_images_of_all_kinds_are_prepared_as_the_family_prepares_them(family, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    loaded = load_family(family).dense
    with opened(family) as session:
        for image in (pixels, tmp_path / "picture.png", Image.fromarray(pixels)):
            answer = session.run_images(image)
            np.testing.assert_allclose(answer.output, loaded.run(pixels), rtol=1e-4, atol=1e-3)
            assert [each.label for each in session.likeliest(answer, 2)[0]] == [
                each.label for each in loaded.predict(pixels, 2)
            ]


def test_variants_for_other_sizes_take_part_where_images_are_given(tmp_path):
    from helpers.families import make_family

    family = make_family(tmp_path, "local", correct=False, resolution=[16])
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    with opened(family) as session:
        assert set(session.prepare(pixels)) == {(32, 32), (16, 16)}
        slowed(session, 50.0)
        assert session.run_images(pixels, deadline=1e-3).variant == "res16"
        slowed(session, 50.0)
        assert session.run(np.zeros((1, 3, 32, 32), np.float32), deadline=1e-3).variant == "dense"
        assert session.run(np.zeros((1, 3, 16, 16), np.float32)).variant == "res16"


# Faults


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda folder: (folder / "s30.onnx").unlink(), "missing"),
        (lambda folder: damage(folder / "s30.onnx"), "damaged"),
        (lambda folder: (folder / "s30.onnx").write_bytes(b""), "damaged"),
        (lambda folder: shutil.copy(folder / "s60.onnx", folder / "s30.onnx"), "damaged"),
    ],
    ids=["missing", "damaged", "empty", "swapped"],
)
def test_a_variant_whose_file_is_wrong_at_the_start_is_left_out(copied, fault, reason):
    fault(copied)
    with opened(copied) as session:
        assert session.variants == ("dense", "s60")
        assert reason in session.stats.retired["s30"]
        assert session.run(batch_for(copied)).variant == "dense"


def test_weights_that_are_damaged_leave_those_that_do_not_read_them(copied):
    own = {name for name in read_family(copied).variant("s60").weights if name.startswith("corrected")}
    damage(copied / own.pop())
    with opened(copied) as session:
        assert session.variants == ("dense", "s30")
    damage(copied / "weights.bin")
    with pytest.raises(NoVariant, match="no variant can be run"):
        opened(copied)


def test_a_family_that_is_not_there_is_refused_in_one_line(tmp_path):
    with pytest.raises(SnapvitError, match="cannot be read"):
        opened(tmp_path / "nowhere")


def test_files_that_are_replaced_while_running_change_nothing(copied):
    with opened(copied) as session:
        before = session.run(batch_for(copied)).output
        for path in copied.glob("*.bin"):
            other = path.with_suffix(".other")
            other.write_bytes(bytes(path.stat().st_size))
            other.replace(path)
        for path in copied.glob("*.onnx"):
            path.unlink()
        np.testing.assert_array_equal(session.run(batch_for(copied)).output, before)
        assert session.stats.retired == {}


def test_weights_that_are_written_over_while_running_are_noticed_before_the_next_answer(copied):
    own = next(name for name in read_family(copied).variant("s60").weights if name.startswith("corrected"))
    with opened(copied) as session:
        session._variants.know("s60", 1e-3)  # the fastest, whatever a noisy machine says
        assert session.run(batch_for(copied), deadline=1e-3).variant == "s60"
        with open(copied / own, "r+b") as file:
            file.write(b"another")
        assert session.run(batch_for(copied), deadline=1e-3).variant != "s60"
        assert "wrote into it" in session.stats.retired["s60"]


def test_a_session_that_does_not_open_is_left_out(family, monkeypatch):
    plain = session_module.Variants._open

    def failing(self, variant):
        if variant.name == "dense":
            raise SnapvitError("ONNX Runtime cannot open it: no memory")
        return plain(self, variant)

    monkeypatch.setattr(session_module.Variants, "_open", failing)
    with opened(family) as session:
        assert session.run(batch_for(family)).variant == "s30"
        assert "no memory" in session.stats.retired["dense"]


def test_a_variant_that_fails_while_it_runs_is_retired_and_the_request_is_answered_all_the_same(family, monkeypatch):
    plain = OpenVariant.run
    with opened(family) as session:

        def failing(self, images):
            if self.name == "dense":
                raise SnapvitError("ONNX Runtime cannot run it")
            return plain(self, images)

        monkeypatch.setattr(OpenVariant, "run", failing)
        assert session.run(batch_for(family)).variant == "s30"
        assert session.stats.retired == {"dense": "ONNX Runtime cannot run it"}
        assert session.stats.failed == 0


def test_answers_that_are_no_numbers_are_not_given(family):
    with opened(family) as session:

        class Broken:
            def run(self, images):
                return np.full((len(images), 5), np.nan, np.float32)

            def close(self):
                pass

        session._variants.opened["dense"].session = Broken()
        answer = session.run(batch_for(family))
        assert answer.variant == "s30"
        assert np.isfinite(answer.output).all()
        assert "not a finite number" in session.stats.retired["dense"]


def test_when_the_last_variant_fails_the_error_says_why(plain_family, monkeypatch):
    with opened(plain_family) as session:
        monkeypatch.setattr(OpenVariant, "run", lambda self, images: (_ for _ in ()).throw(SnapvitError("broken")))
        with pytest.raises(NoVariant, match="broken"):
            session.run(batch_for(plain_family))


# Threads


def held(session, monkeypatch):
    """Let the session run nothing until the event is set; the other event tells that something wants to run."""
    go, wants, plain = threading.Event(), threading.Event(), OpenVariant.run

    def waiting(self, images):
        wants.set()
        assert go.wait(30)
        return plain(self, images)

    monkeypatch.setattr(OpenVariant, "run", waiting)
    return go, wants


def until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_requests_are_answered_in_the_order_in_which_they_came(family, monkeypatch):
    with opened(family) as session:
        go, _ = held(session, monkeypatch)
        answered = []

        def ask(number):
            session.run(batch_for(family, seed=number))
            answered.append(number)

        threads = []
        for number in range(6):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            until(lambda: session.stats.waiting == number + 1)  # noqa: B023
        go.set()
        for thread in threads:
            thread.join(30)
    assert answered == sorted(answered)


def test_more_requests_than_may_wait_are_refused_at_once(family, monkeypatch):
    with opened(family, most_waiting=1) as session:
        go, wants = held(session, monkeypatch)
        threads = [threading.Thread(target=session.run, args=(batch_for(family),)) for _ in range(2)]
        threads[0].start()
        assert wants.wait(30)
        threads[1].start()
        until(lambda: session.stats.waiting == 2)
        with pytest.raises(Overloaded, match="wait already"):
            session.run(batch_for(family))
        go.set()
        for thread in threads:
            thread.join(30)
        assert (session.stats.calls, session.stats.refused) == (2, 1)


def test_closing_answers_what_waits_and_refuses_what_comes_later(family, monkeypatch):
    session = opened(family)
    go, wants = held(session, monkeypatch)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(session.run(batch_for(family)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert wants.wait(30)
    until(lambda: session.stats.waiting == 3)
    assert not session.close(0.05)  # not yet
    with pytest.raises(Closed):
        session.run(batch_for(family))
    go.set()
    assert session.close(30)
    for thread in threads:
        thread.join(30)
    assert len(answers) == 3


def test_waiting_requests_are_run_together_where_that_is_allowed(family, monkeypatch):
    with opened(family, max_batch=4) as session:
        go, wants = held(session, monkeypatch)
        answers = {}

        def ask(number):
            answers[number] = session.run(batch_for(family, seed=number))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
        threads[0].start()
        assert wants.wait(30)
        for thread in threads[1:]:
            thread.start()
        until(lambda: session.stats.waiting == 5)
        monkeypatch.undo()
        sizes, plain = [], OpenVariant.run
        monkeypatch.setattr(
            OpenVariant, "run", lambda self, images: (sizes.append(len(images)), plain(self, images))[1]
        )
        go.set()
        for thread in threads:
            thread.join(30)
        dense = load_family(family).dense.session
    assert 4 in sizes
    for number, answer in answers.items():
        expected = dense.run(batch_for(family, seed=number))
        np.testing.assert_allclose(answer.output, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


# Lazy


def test_a_lazy_session_opens_what_it_needs_and_the_rest_when_it_is_wished_for(family):
    with ElasticSession(family, "60000ms", lazy=True, seconds=0) as session:
        assert set(session.stats.opened) < {"dense", "s30", "s60"}
        assert "dense" in session.stats.opened
    tiny = 1e-6
    with ElasticSession(family, tiny, lazy=True, seconds=0) as session:
        assert "dense" not in session.stats.opened
        session.run(batch_for(family), deadline=FAR)
        until(lambda: "dense" in session.stats.opened)
        until(lambda: session.run(batch_for(family), deadline=FAR).variant == "dense")


def test_no_more_variants_are_kept_open_than_asked_for(family):
    with ElasticSession(family, 1e-6, keep_open=2, seconds=0) as session:
        for _ in range(3):
            until(lambda: session.run(batch_for(family), deadline=FAR).variant == "dense")
            session.run(batch_for(family))
            assert len(session.stats.opened) <= 2


# Bounds


def test_options_that_make_no_sense_are_refused(family):
    for wrong in (
        dict(hit=1.5),
        dict(hit=0.2),
        dict(late="never"),
        dict(max_batch=0),
        dict(keep_open=1),
        dict(seconds=-1),
    ):
        with pytest.raises(UsageError):
            ElasticSession(family, FAR, **wrong)
    with pytest.raises(UsageError, match="no variant is called 'x'"):
        opened(family, only=["x"])
    with pytest.raises(UsageError, match="not in tensorrt"):
        opened(family, runtime="tensorrt")


def test_torch_is_not_imported(family):
    code = (
        "import sys; sys.modules['torch'] = None\nimport numpy as np\nfrom snapvit_export import ElasticSession\n"
        f"with ElasticSession({str(family)!r}, '60000ms', seconds=0) as session:\n"
        "    print(session.run(np.zeros((1, 3, 96, 96), np.float32)).variant)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "dense", done.stderr


def test_openvino_answers_too(tmp_path):
    pytest.importorskip("openvino")
    from helpers.families import make_family

    family = make_family(tmp_path, "local", correct=False, sparsity=[0.3], flavour="portable")
    with opened(family, runtime="openvino") as session:
        answer = session.run(np.zeros((2, 3, 32, 32), np.float32))
        assert (answer.variant, answer.output.shape) == ("dense", (2, 5))
        assert session.stats.retired == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sessions_that_share_weights_hold_one_mapping_of_each_file(copied):
    def mapped():
        return sum(str(copied / "weights.bin") in line for line in Path("/proc/self/maps").read_text().splitlines())

    with opened(copied) as session:
        session.run(batch_for(copied))
        assert mapped() == 1
    del session
    gc.collect()
    assert mapped() == 0


def test_pages_that_were_given_back_are_read_again(family):
    with opened(family) as session:
        before = session.run(batch_for(family)).output
        session._variants.keep_in_memory([])
        np.testing.assert_array_equal(session.run(batch_for(family)).output, before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_of_the_latest_variants_stay_in_memory_as_far_as_the_bound_allows(family, tmp_path):
    """Three variants read a file that they share, of 16 MB, and 2 MB of their own each; 1.2 of 18 MB may stay."""
    sizes = {"shared.bin": 16 << 20, "a.bin": 2 << 20, "b.bin": 2 << 20, "c.bin": 2 << 20}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    weights = MappedWeights(tmp_path, {name: sha256(tmp_path / name) for name in sizes})
    files = {name: weights.file(name) for name in sizes}
    variants = Variants.of(family)
    variants.opened = {name: OpenVariant(name, None, [files["shared.bin"], files[f"{name}.bin"]]) for name in "abc"}

    def in_memory(latest):
        for file in files.values():
            file.load()
        variants.keep_in_memory(latest)
        return {name for name in sizes if resident_bytes(tmp_path / name) == sizes[name]}

    assert in_memory([]) == set()
    assert in_memory(["b", "a", "c"]) == {"shared.bin", "b.bin", "a.bin"}
    assert in_memory(["c"]) == {"shared.bin", "c.bin"}
    variants.load("a")
    assert resident_bytes(tmp_path / "a.bin") == sizes["a.bin"]
    assert resident_bytes(tmp_path / "c.bin") == 0


def test_a_session_gives_pages_back_when_another_variant_answers(family, monkeypatch):
    given_back = []
    monkeypatch.setattr(Variants, "keep_in_memory", lambda self, latest: given_back.append(list(latest)))
    with opened(family) as session:
        given_back.clear()
        fastest = min(session.stats.variants, key=session.stats.variants.get)
        for _ in range(3):
            session.run(batch_for(family))
        slowed(session, 50.0)
        session.run(batch_for(family), deadline=0.001)
        session.run(batch_for(family))
    assert given_back == [["dense"], [fastest, "dense"]]


def resident_bytes(path):
    """The bytes of a mapped file that this process has in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.endswith(str(path)))
    (rss,) = (line for line in lines[start : start + 6] if line.startswith("Rss:"))
    return 1024 * int(rss.split()[1])
