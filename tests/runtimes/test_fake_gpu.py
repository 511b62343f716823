"""TensorRT in this process, against a fake of it and of the driver: what is asked of both, and what is compared.

Nothing here says anything about a GPU: tests/runtimes/test_gpu.py does, where there is one.
"""

import ctypes
import json
import shutil

import numpy as np
import pytest

from helpers.fake_gpu import FakeLibcuda, fake_gpu
from helpers.families import make_family
from helpers.timing import short_timings
from snapvit_export.errors import GateFailed, SnapvitError
from snapvit_export.progress import Silent
from snapvit_export.runtimes import cuda as cuda_module
from snapvit_export.runtimes import jetson_agent
from snapvit_export.runtimes.cuda import Cuda
from snapvit_export.runtimes.session import device_for
from snapvit_export.runtimes.tensorrt import session as session_module
from snapvit_export.runtimes.tensorrt.engine_file import record_path
from snapvit_export.runtimes.tensorrt.network import LoadedEngine
from snapvit_export.runtimes.tensorrt.session import TensorRTSession
from snapvit_export.selection.on_device import TimingOptions, profile_family
from snapvit_export.target import Target

TENSORRT = Target(runtime="tensorrt", precision="fp32", batch=1, threads=1)


class Notes(Silent):
    """Keeps what would be shown."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return make_family(
        folder, "local", correct=False, head=30.0, sparsity=[0.3, 0.6], flavour="portable", reference=True
    )


@pytest.fixture
def family(made, tmp_path):
    return shutil.copytree(made, tmp_path / "family")


@pytest.fixture
def libcuda(monkeypatch):
    library = FakeLibcuda()
    monkeypatch.setattr(cuda_module.ctypes, "CDLL", lambda _: library)
    return library


def profiled(family, progress=None, batch=1):
    with short_timings():
        return profile_family(family, TimingOptions(runtime="tensorrt", batch=batch), progress or Silent(), 0.05)


def test_one_launch_is_queued_before_the_first_event(libcuda):
    stream = Cuda().stream()
    libcuda.calls.clear()
    assert stream.elapsed_ms(lambda: libcuda.calls.append("launch")) == 0.5
    events = [name for name in libcuda.calls if name in ("launch", "cuEventRecord", "cuEventSynchronize")]
    assert events == ["launch", "cuEventRecord", "launch", "cuEventRecord", "cuEventSynchronize"]


def test_page_locked_memory_is_an_array_that_is_given_back(libcuda):
    array = Cuda().pinned((2, 3), np.float32)
    assert array.array.shape == (2, 3)
    assert not array.array.any()
    array.array[1, 2] = 7
    assert ctypes.sizeof(next(iter(libcuda.memory.values()))) == 24
    array.close()
    assert not libcuda.memory
    libcuda._cuMemHostAlloc = lambda *_: None  # gives nothing, and says so to nobody
    with pytest.raises(SnapvitError, match="no page-locked memory of 24 bytes"):
        Cuda().pinned((2, 3), np.float32)


def test_a_session_copies_from_page_locked_memory_and_says_how_it_is_timed(family):
    with fake_gpu() as api:
        images = np.random.default_rng(0).standard_normal((3, 3, 32, 32)).astype(np.float32)
        with TensorRTSession(family / "s30.onnx", TENSORRT) as session:
            assert api.library.calls.count("cuMemHostAlloc") == 2
            found = session.run(images)
            taken = session.taken
        assert found.shape == (3, 5)
        assert not api.library.memory  # of either kind
        with pytest.raises(SnapvitError, match="takes images of"):  # not a crash in memory that is gone
            session.run(images[:1])
    assert (taken.transfers, taken.queue_depth, taken.ahead, taken.cuda_graph) == (True, 1, 1, True)
    assert (taken.spin_wait, taken.tf32, taken.pinned_memory) == (True, False, True)


def test_engines_are_built_for_one_batch_on_one_board(family, monkeypatch):
    target = Target(runtime="tensorrt", precision="fp32", batch=4, threads=1)

    def built(board: str) -> int:
        monkeypatch.setattr(session_module, "board", lambda: board)
        with fake_gpu() as api:
            with TensorRTSession(family / "s30.onnx", target):
                pass
            assert all(settings.batches == (4, 4, 4) for _, settings in api.built)
            return len(api.built)

    assert (built("Orin Nano"), built("Orin Nano")) == (1, 0)
    record = json.loads(record_path(family / "s30.onnx").read_text())
    assert (record["board"], record["sm_count"], record["least_batch"]) == ("Orin Nano", 8, 4)
    assert built("AGX Orin") == 1, "Orin and 8.7 are both"


def test_timings_of_another_board_are_not_used(family, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for board in ("Orin Nano", "AGX Orin", "Orin Nano"):
        monkeypatch.setattr(session_module, "board", lambda board=board: board)
        with fake_gpu(), TensorRTSession(family / "s30.onnx", TENSORRT):
            pass
    assert len(list((tmp_path / "cache").rglob("*.cache"))) == 2


def test_rtx_compiles_for_the_shape_before_it_runs():
    class FakeConfig:
        dynamic_shapes_kernel_specialization_strategy = None

    class FakeEngine:
        def create_runtime_config(self):
            return FakeConfig()

        def create_execution_context(self, *given):
            self.given = given
            return "context"

    class FakePackage:
        class DynamicShapesKernelSpecializationStrategy:
            EAGER = "eager"

    class FakeApi:
        trt = FakePackage

    for name, strategies in (("tensorrt_rtx", ["eager"]), ("tensorrt", [])):
        FakePackage.__name__, engine = name, FakeEngine()
        LoadedEngine(FakeApi, None, engine, "x").context()
        assert [config.dynamic_shapes_kernel_specialization_strategy for config in engine.given] == strategies


@pytest.mark.parametrize("batch", [1, 3])
def test_a_profile_is_compared_with_the_reference_and_says_how_it_was_taken(family, batch):
    with fake_gpu():
        found = profiled(family, batch=batch)
    assert set(found.profiles) == {"dense", "s30", "s60"}
    for profile in found.profiles.values():
        assert (profile.compared.passed, profile.compared.images) == (True, 8 if batch == 1 else 9)
        assert profile.compared.least_cosine == pytest.approx(1)
        assert profile.taken.pinned_memory
        assert profile.gpu_ms == 0.5
    gpu = found.target.device.accelerator
    assert (gpu.name, gpu.sm_count, gpu.memory_bytes) == ("Orin", 8, 8 << 30)
    assert json.loads(record_path(family / "s30.onnx").read_text())["agreed"] is True


def test_a_variant_that_answers_otherwise_is_not_timed_in_this_process_either(family):
    def wrong(name, answers):
        return answers[:, ::-1] if name == "s30" else answers

    progress = Notes()
    with fake_gpu(wrong):
        found = profiled(family, progress)
    assert set(found.profiles) == {"dense", "s60"}
    assert not found.failed["s30"].compared.passed
    (note,) = [text for text in progress.said if text.startswith("s30: does not answer as its graph does: least cos")]
    assert note.endswith("at least 0.99999 is asked. It is neither timed nor chosen")
    assert json.loads(record_path(family / "s30.onnx").read_text())["agreed"] is False
    with fake_gpu(lambda _, answers: answers * np.nan), pytest.raises(GateFailed, match="dense: .*not finite numbers"):
        profiled(family)


def test_a_family_without_a_reference_is_not_compared_and_no_noise_takes_its_place(family):
    manifest = json.loads((family / "manifest.json").read_text())
    (family / "manifest.json").write_text(json.dumps({**manifest, "reference": None}))
    progress = Notes()
    with fake_gpu(lambda _, answers: answers[:, ::-1]):
        found = profiled(family, progress)
    assert {profile.compared for profile in found.profiles.values()} == {None}
    why = "since the family has no reference images. Export the family again with --reference"
    assert f"not compared: dense, s30, s60, {why}" in progress.said


def test_a_gpu_is_described_with_all_that_a_jetson_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(jetson_agent, "power_mode", lambda: "15W")
    monkeypatch.setattr(jetson_agent, "clocks", lambda: {"gpu": 306.0, "gpu max": 1020.0})
    monkeypatch.setattr(jetson_agent, "temperatures", lambda: {"gpu": 48.0})
    told = {"jetpack": "6.2", "l4t": "36.4.3", "tensorrt": "0.0.0", "cuda": "12.6.68", "driver": "unknown"}
    monkeypatch.setattr(jetson_agent, "software", lambda version: told)
    with fake_gpu():
        gpu = device_for("tensorrt").accelerator
    assert gpu.software == {"jetpack": "6.2", "l4t": "36.4.3", "cuda": "12.6", "compute capability": "8.7"}
    assert (gpu.power_mode, gpu.clocks_mhz["gpu max"], gpu.temperatures_c, gpu.sm_count) == (
        "15W",
        1020,
        {"gpu": 48},
        8,
    )
