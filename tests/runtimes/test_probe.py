"""Runtimes that are tried in a process of their own, here with fake packages: none of them is what it is called."""

import sys
from pathlib import Path

import pytest

from helpers.fake_packages import FakePackages
from snapvit_export.runtimes import probe
from snapvit_export.runtimes.probe import Probe, absent, probe_in_child


@pytest.fixture
def fakes(tmp_path, monkeypatch) -> FakePackages:
    return FakePackages(tmp_path / "fakes", monkeypatch)


def test_onnx_runtime_and_openvino_work_here():
    assert probe_in_child("onnxruntime").works
    assert probe_in_child("openvino").works


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "loading it ends the process (SIGSEGV)"),
        ("import sys; sys.exit('gone')", "loading it ends the process: gone"),
        ("import os; os._exit(3)", "loading it ends the process: it gave no reason"),
        ("raise RuntimeError('half installed')", "RuntimeError: half installed"),
    ],
)
def test_a_package_that_ends_its_process_is_told_with_the_command_that_puts_it_right(fakes, code, says):
    fakes.add("tensorrt", "10.13.3", code)
    found = probe_in_child("tensorrt")
    assert found == Probe(works=False, detail=says, remedy="pip install --force-reinstall --no-deps tensorrt")


def test_a_package_that_never_answers_is_given_up(fakes, monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 1)
    fakes.add("tensorrt", "10.13.3", "__import__('time').sleep(600)")
    assert probe_in_child("tensorrt").detail == "it did not answer within 1 s"


def test_where_there_is_no_gpu_the_packages_are_imported_all_the_same(fakes):
    fakes.add("tensorrt", "10.13.3", "__version__ = '10.13.3'")
    found = probe_in_child("tensorrt")
    assert found.works or "tensorrt 10.13.3 loads and builds; " in found.detail


@pytest.mark.parametrize(
    ("runtime", "python", "says"),
    [
        ("tensorrt", (3, 10), "sudo apt install nvidia-jetpack"),
        ("onnxruntime-cuda", (3, 10), "no package is made for ARM before Python 3.11"),
        ("onnxruntime-cuda", (3, 12), "pip install 'snapvit-export[ort-gpu]'"),
        ("onnxruntime-tensorrt", (3, 12), "no package has this provider for ARM"),
        ("onnxruntime", (3, 10), "pip install 'snapvit-export[ort]'"),
    ],
)
def test_on_arm_nothing_is_advised_that_pip_does_not_have(monkeypatch, tmp_path, runtime, python, says):
    monkeypatch.setattr(probe, "_installed", lambda name: False)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert says in absent(runtime, tmp_path).remedy


@pytest.mark.parametrize(("version", "extra"), [("10.13.3", "trt"), ("11.1.0", "trt11")])
def test_a_tensorrt_without_its_libraries_is_told_with_the_extra_that_brings_them(fakes, version, extra):
    fakes.add("tensorrt", version, "raise ImportError('libnvinfer.so.10: cannot open shared object file')")
    found = probe_in_child("tensorrt")
    assert found.detail == f"tensorrt {version} does not load: libnvinfer.so.10: cannot open shared object file"
    assert found.remedy == f"pip install 'snapvit-export[{extra}]'"


def test_a_tensorrt_that_lacks_a_part_is_not_taken_for_absent(fakes):
    fakes.add("tensorrt", "11.1.0", "import tensorrt_parts_that_are_nowhere")
    found = probe_in_child("tensorrt")
    assert found.detail == "tensorrt 11.1.0 does not load: No module named 'tensorrt_parts_that_are_nowhere'"


def test_what_a_library_prints_is_not_taken_for_the_answer(fakes):
    fakes.add("openvino", "1.0", "print('snapvit-probe'); print('{}')\nraise ImportError('no CPU plugin')")
    found = probe_in_child("openvino")
    assert not found.works
    assert "no CPU plugin" in found.detail or "openvino" in found.detail


def test_two_packages_of_onnx_runtime_are_told_with_the_way_out(fakes):
    fakes.add("onnxruntime-gpu", "1.23.0")
    for runtime in ("onnxruntime", "onnxruntime-cuda", "onnxruntime-tensorrt"):
        assert absent(runtime) is None
        found = probe_in_child(runtime)
        assert "onnxruntime and onnxruntime-gpu are both installed" in found.detail
        assert found.remedy.startswith("pip uninstall -y onnxruntime onnxruntime-gpu && pip install")


def make_system(root: Path, version: str) -> Path:
    """The places where JetPack puts its TensorRT."""
    place = root / "usr" / "lib" / version / "dist-packages"
    (place / "tensorrt").mkdir(parents=True)
    return place


def test_a_jetsons_tensorrt_that_a_virtual_environment_does_not_see_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_installed", lambda name: False)
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "_base_executable", "/usr/bin/python3.10")
    assert absent("tensorrt", tmp_path).detail == "not installed"
    place = make_system(tmp_path, f"python3.{sys.version_info.minor}")
    found = absent("tensorrt", tmp_path)
    assert found.detail == f"the system's tensorrt is in {place}, which this virtual environment does not see"
    assert found.remedy == "/usr/bin/python3.10 -m venv --system-site-packages /home/me/venv"
    monkeypatch.setattr(sys, "prefix", "/usr")
    assert absent("tensorrt", tmp_path).detail == "not installed"


def test_a_jetsons_tensorrt_of_another_python_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_installed", lambda name: False)
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    monkeypatch.setattr(sys, "base_prefix", "/opt/python")
    make_system(tmp_path, "python3.6")
    found = absent("tensorrt", tmp_path)
    assert "is of another Python than this" in found.detail
    assert found.remedy == "/usr/bin/python3 -m venv --system-site-packages VENV"
