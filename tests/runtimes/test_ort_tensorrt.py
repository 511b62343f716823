"""TensorRT's libraries for ONNX Runtime's provider: which are loaded, in which order, and what is said where none fits.

The libraries are empty files and the loader is a fake that keeps what it was asked for.
"""

import ctypes
from pathlib import Path

import pytest

from helpers.fake_packages import FakePackages
from snapvit_export.runtimes import ort_tensorrt
from snapvit_export.runtimes.ort import REMEDIES, TENSORRT, _why_not_open
from snapvit_export.runtimes.ort_tensorrt import preload_tensorrt, why_not_tensorrt


@pytest.fixture
def libraries(tmp_path, monkeypatch) -> Path:
    """A fake of pip's package of TensorRT's libraries, still empty."""
    return FakePackages(tmp_path / "fakes", monkeypatch).add("tensorrt-libs", "0", "raise ImportError('not imported')")


@pytest.fixture
def loaded(monkeypatch) -> list[tuple[str, int]]:
    """What the fake loader was asked for: names and modes."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(ort_tensorrt.ctypes, "CDLL", lambda path, mode=0: found.append((Path(path).name, mode)))
    return found


def test_tensorrt_10_is_loaded_for_all_in_the_order_in_which_they_need_each_other(libraries, loaded):
    for name in ("libnvonnxparser.so.10", "libnvinfer_plugin.so.10", "libnvinfer.so.10", "libnvinfer.so.10.13.3"):
        (libraries / name).touch()
    assert preload_tensorrt() is None
    wanted = ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10")
    assert loaded == [(name, ctypes.RTLD_GLOBAL) for name in wanted]
    assert why_not_tensorrt() is None


def test_tensorrt_11_does_not_serve_the_provider_and_one_line_says_so(libraries, loaded, monkeypatch):
    (libraries / "libnvinfer.so.11").touch()
    assert preload_tensorrt() is None
    assert loaded == []
    says = "has libnvinfer.so.11, and this provider needs libnvinfer.so.10 of TensorRT 10"
    assert says in why_not_tensorrt()
    missing = "libnvinfer.so.10: cannot open shared object file: No such file or directory"
    monkeypatch.setattr("snapvit_export.runtimes.ort._why_not_loaded", lambda _: missing)
    line = _why_not_open(TENSORRT, RuntimeError("it fell back"))
    assert line == f"{TENSORRT} does not load: the installed TensorRT {says}. {REMEDIES[TENSORRT]}"
    assert "'snapvit-export[ort-trt]'" in line


def test_a_library_that_does_not_load_is_told_by_the_loaders_words(libraries, monkeypatch):
    (libraries / "libnvinfer.so.10").touch()

    def refuse(path: str, mode: int = 0) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(ort_tensorrt.ctypes, "CDLL", refuse)
    assert preload_tensorrt() == why_not_tensorrt() == "libcudart.so.12: cannot open shared object file"


def test_without_pips_package_the_system_is_left_to_the_loader(loaded, monkeypatch):
    monkeypatch.setattr(ort_tensorrt, "PACKAGE", "no_such_package")
    assert preload_tensorrt() is None
    assert why_not_tensorrt() is None
    assert loaded == []
