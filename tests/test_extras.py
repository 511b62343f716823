"""What the extras for GPUs bring on which machine, as the package index tells it: metadata, nothing is installed.

docs/runtimes.md says the same in words. Without an index these tests are skipped.
"""

import json
import subprocess
import sys
from functools import cache

import pytest
from packaging.requirements import Requirement

from helpers.shared import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="reading pyproject.toml needs Python 3.11 or tomli")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
GLIBC = {"x86_64": ("2_28", "2_27", "2_17"), "aarch64": ("2_35", "2_34", "2_28", "2_17")}  # wheels name the oldest
slow = pytest.mark.slow  # the index answers in some seconds


def brought(extra: str, machine: str, python: str) -> list[str]:
    """The requirements of an extra that count on a machine, without their conditions; those of our own extras too."""
    place = {"platform_machine": machine, "python_version": python, "sys_platform": "linux"}
    found = []
    for text in EXTRAS[extra]:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate(place):
            continue
        inner = sorted(need.extras) if need.name == "snapvit-export" else []
        found += (
            [each for name in inner for each in brought(name, machine, python)]
            if inner
            else [f"{need.name}{need.specifier}"]
        )
    return found


def dry_run(machine: str, python: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """What pip says that it would install on a machine."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
    command += ["--only-binary=:all:", "--python-version", python, "--target", "nowhere", "--report", "-"]
    command += [word for glibc in GLIBC[machine] for word in ("--platform", f"manylinux_{glibc}_{machine}")]
    return subprocess.run([*command, "--retries", "1", "--timeout", "10", *words], capture_output=True, text=True)


def installed(needs: list[str], machine: str, python: str) -> set[str]:
    """The names of all packages that pip would install for some, and for those that these need."""
    done = dry_run(machine, python, *needs)
    assert done.returncode == 0, done.stderr
    return {each["metadata"]["name"].lower() for each in json.loads(done.stdout)["install"]}


@cache
def asked(need: str, machine: str, python: str) -> dict | None:
    """The metadata of the wheel that pip would take; None if there is none."""
    done = dry_run(machine, python, "--no-deps", need)
    if "No matching distribution found" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["install"][0]["metadata"]


@pytest.fixture(scope="module")
def index() -> None:
    if asked("packaging>=24", "x86_64", "3.12") is None:
        pytest.skip("needs the package index, which does not answer")


def test_nothing_is_promised_to_a_jetson_that_it_cannot_install():
    for extra in ("ort-gpu", "ort-trt", "trt", "trt11"):
        assert brought(extra, "aarch64", "3.10") == []
    assert brought("ort-gpu", "aarch64", "3.12") == ["onnxruntime-gpu>=1.23"]
    assert brought("ort-trt", "x86_64", "3.10") == ["onnxruntime-gpu>=1.23", "tensorrt-cu12<11,>=10.3"]
    assert brought("ort-trt", "x86_64", "3.12") == ["onnxruntime-gpu>=1.23", "tensorrt-cu13<11,>=10.13.2"]


@slow
def test_a_board_with_jetpack_6_can_install_what_runs_on_its_processor(index):
    """`pip install 'snapvit-export[ort]'`, with all that these packages need themselves."""
    needs = [*PROJECT["dependencies"], *brought("ort", "aarch64", "3.10")]
    assert {"numpy", "onnx", "onnxruntime"} <= installed(needs, "aarch64", "3.10")


@slow
def test_onnxruntime_gpu_has_no_wheel_for_a_jetson_of_python_3_10(index):
    assert asked("onnxruntime-gpu>=1.23", "aarch64", "3.10") is None
    assert asked("onnxruntime-gpu>=1.23", "aarch64", "3.12") is not None


@slow
@pytest.mark.parametrize(("python", "cuda"), [("3.10", 12), ("3.12", 13)])
def test_onnxruntime_gpu_brings_the_cuda_that_its_tensorrt_is_for(index, python, cuda):
    found = asked("onnxruntime-gpu>=1.23", "x86_64", python)
    (runtime,) = [
        need for need in map(Requirement, found["requires_dist"]) if need.name.startswith("nvidia-cuda-runtime")
    ]
    assert runtime.specifier.contains(f"{cuda}.9")
    assert any(need.startswith(f"tensorrt-cu{cuda}<11") for need in brought("ort-trt", "x86_64", python))
    assert {"cuda", "cudnn"} <= Requirement(EXTRAS["ort-gpu"][0]).extras


@slow
@pytest.mark.parametrize(
    ("extra", "python", "cuda"), [("trt", "3.10", "cu12"), ("trt", "3.12", "cu12"), ("trt11", "3.12", "cu13")]
)
def test_the_index_has_bindings_of_tensorrt_and_no_libraries(index, extra, python, cuda):
    (need,) = map(Requirement, brought(extra, "x86_64", python))
    assert need.name == f"tensorrt-{cuda}"
    assert asked(f"{need.name}-bindings{need.specifier}", "x86_64", python) is not None
    assert (
        asked(f"{need.name}-libs{need.specifier}", "x86_64", python) is None
    )  # pip fetches them elsewhere, in a build


@slow
def test_tensorrt_10_in_cuda_12_has_no_bindings_for_arm(index):
    assert asked("tensorrt-cu12-bindings>=10.3,<11", "aarch64", "3.10") is None
