"""Fixtures of more than one test file. What is no fixture is in tests/helpers/."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run two at a time, most of them on tiny models
os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported: no test asks the Hugging Face hub, nor its programs

from helpers.families import make_family, make_family_and_elastic
from helpers.images import make_image_folder
from helpers.models import make_model, make_model_folder
from helpers.onnx_files import Exported
from helpers.programs import Outcome
from helpers.shared import SHARED
from helpers.timing import short_timings as timings_are_short
from snapvit_export.prune.models.load import Model
from snapvit_export.runtimes.tensorrt.network import TensorRT

hypothesis.settings.register_profile("untimed", deadline=None)  # a machine that is busy fails no test
hypothesis.settings.load_profile("untimed")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a job that a shell put in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that tests interrupt would never end
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as below nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-minutes", type=float, default=0.0, help="also try new mutated files, for so long")
    parser.addoption("--fuzz-case", metavar="TARGET:NUMBER", help="of the fuzzer, this case alone")


@pytest.fixture(scope="session")
def rtx() -> TensorRT:
    """The package that parses and builds without a GPU."""
    if os.environ.get("SNAPVIT_REQUIRE_RUNTIMES"):
        importlib.import_module("tensorrt_rtx")  # a failure there, not a skip
    return TensorRT(pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install tensorrt-rtx"))


@pytest.fixture
def shared() -> Path:
    """The folder of reference arrays and real data beside the project, which a newcomer's clone does not have."""
    if not SHARED.is_dir():
        if os.environ.get("SNAPVIT_REQUIRE_SHARED"):
            pytest.fail(f"{SHARED} is required here and missing")
        pytest.skip("needs the reference folder ../shared, which is not part of the repository")
    return SHARED


@pytest.fixture
def tiny_model() -> Model:
    """A plain ViT of three blocks with random weights."""
    return make_model()


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """The same, saved as a model folder."""
    return make_model_folder(tmp_path / "tiny-model")


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Sixty noisy pictures in five classes."""
    return make_image_folder(tmp_path / "pictures")


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package, which finds sets in the test's own folder and keeps there what it makes of them."""
    package = pytest.importorskip("datasets", reason="needs the optional package datasets: pip install datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(package.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)  # after each stream
    monkeypatch.chdir(tmp_path)
    package.disable_progress_bars()
    return package


@pytest.fixture(scope="session")
def plain_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family of a tiny model that nothing was chosen in, made once and soon. To be read, or copied."""
    return make_family(tmp_path_factory.mktemp("plain"), "local", correct=False, sparsity=[0.3])


@pytest.fixture(scope="session")
def family_and_elastic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family and an Elastic folder of the same ranking, made once. To be read, or copied."""
    with timings_are_short():
        return make_family_and_elastic(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """ONNX files of small models as other tools export them, each made once. To be read."""
    return Exported(tmp_path_factory.mktemp("exported"))


@pytest.fixture
def device_folder(family_and_elastic: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may change."""
    return shutil.copytree(family_and_elastic, tmp_path / "made")


@pytest.fixture
def short_timings() -> Iterator[None]:
    """Timings are over soon, in tests that assert nothing about a latency."""
    with timings_are_short():
        yield


@pytest.fixture
def snapvit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line in this process."""
    from snapvit_export.cli.app import main

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["snapvit", *map(str, arguments)])
        monkeypatch.setattr("signal.signal", lambda *_: None)
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
