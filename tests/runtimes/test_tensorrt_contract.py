"""The adapter and the real bindings of TensorRT, 10.3 to 11.x and RTX, agree on names. No mock, and nothing is run.

The bindings are a wheel of about 1 MB each, which pip fetches once; TensorRT's libraries are replaced by a stub.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from helpers.shared import ROOT

HARNESS = Path(__file__).resolve().parent / "tensorrt_bindings"
ADAPTER = (ROOT / "snapvit_export" / "runtimes" / "tensorrt" / "network.py").read_text()
VERSIONS = {
    "10.3.0": "tensorrt-cu12-bindings",  # JetPack 6
    "10.13.3.9.post1": "tensorrt-cu13-bindings",  # JetPack 7
    "10.16.1.11": "tensorrt-cu13-bindings",  # the last of 10
    "11.0.0.114": "tensorrt-cu12-bindings",
    "11.4.0.106": "tensorrt-cu13-bindings",
    "1.7.1.116": "tensorrt-rtx-cu13-bindings",  # TensorRT-RTX, with the names of 11
}
REMOVED_IN_11 = (
    "BuilderFlag.FP16",
    "BuilderFlag.INT8",
    "Builder.platform_has_fast_fp16",
    "IInt8EntropyCalibrator2",
    "ILayer.precision",
    "NetworkDefinitionCreationFlag.EXPLICIT_BATCH",
    "OnnxParser.supports_model",
)
LIBRARIES = [f"lib{name}.so.{n}" for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser") for n in (10, 11)]
LIBRARIES += ["libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1"]
ALSO_OF_LISTS = {"clear"}  # in TensorRT only IErrorRecorder has it, which is for users to write, and we write none


def load(name: str) -> ModuleType:
    """A file of the harness. Its folder is no package: one called tensorrt_bindings would hide the real one."""
    spec = importlib.util.spec_from_file_location(f"harness_{name}", HARNESS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fetch, uses = load("fetch"), load("uses")
NAMES, OF_RTX = load("names").NAMES, load("names").OF_RTX
RTX = next(version for version, package in VERSIONS.items() if "rtx" in package)


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> Path:
    """A folder with TensorRT's libraries, all of them the stub."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler (cc) for the stub of TensorRT's libraries")
    folder = tmp_path_factory.mktemp("stub")
    first = folder / LIBRARIES[0]
    subprocess.run([compiler, "-shared", "-fPIC", "-o", first, HARNESS / "stub.c"], check=True)
    for other in LIBRARIES[1:]:
        shutil.copy(first, folder / other)
    return folder


@pytest.fixture(scope="module")
def fetched(request, tmp_path_factory) -> dict[str, Path | Exception]:
    """The folder of every version's bindings, or why there is none; all at once, so that no network costs little."""
    cache = getattr(request.config, "cache", None)
    folder = Path(cache.mkdir("tensorrt_bindings")) if cache else tmp_path_factory.mktemp("bindings")

    def one(version: str) -> Path | Exception:
        try:
            return fetch.fetch(folder, VERSIONS[version], version)
        except fetch.NoWheelError as error:
            return error

    with ThreadPoolExecutor() as pool:
        return dict(zip(VERSIONS, pool.map(one, VERSIONS)))


@pytest.fixture
def ask(stub, fetched):
    """Which of these names a version has."""

    def which(version: str, names: tuple[str, ...]) -> dict[str, bool]:
        folder = fetched[version]
        if isinstance(folder, Exception):
            pytest.skip(f"no bindings for this Python, or no network: {folder}")
        command = [sys.executable, "-I", "-S", HARNESS / "list_names.py", folder]  # none of the installed packages
        environment = {**os.environ, "LD_LIBRARY_PATH": str(stub)}
        done = subprocess.run(command, input=json.dumps(names), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return which


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_of_the_table_exists(ask, version):
    found = ask(version, NAMES)
    assert set(found) == set(NAMES)
    assert [name for name in NAMES if not found[name]] == []


def test_what_is_used_of_rtx_alone_exists_there(ask):
    assert ask(RTX, OF_RTX) == dict.fromkeys(OF_RTX, True)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_11_removed_is_missing_there_and_only_there(ask, version):
    expected = version.startswith("10.")
    found = ask(version, (*REMOVED_IN_11, "Builder.create_nothing", "*.precision", "*.create_nothing"))
    assert {name: found[name] for name in REMOVED_IN_11} == dict.fromkeys(REMOVED_IN_11, expected)
    assert found["*.precision"] is expected
    assert not found["Builder.create_nothing"]
    assert not found["*.create_nothing"]


def test_the_adapter_uses_nothing_outside_the_table():
    assert uses.find_uses(ADAPTER).outside((*NAMES, *OF_RTX), REMOVED_IN_11) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_adapter_calls_its_own_is_not_of_tensorrt(ask, version):
    excused = uses.find_uses(ADAPTER).excused((*NAMES, *OF_RTX)) - ALSO_OF_LISTS
    found = ask(version, tuple(f"*.{name}" for name in sorted(excused)))
    assert [name for name, there in found.items() if there] == [], (
        "list it in tensorrt_bindings/names.py, or rename ours"
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("config.set_flag(trt.BuilderFlag.FP16)", ["(...).set_flag", "BuilderFlag.FP16"]),
        ("flags = trt.TacticSource", ["TacticSource"]),
        ("self.trt.IInt8EntropyCalibrator2()", ["IInt8EntropyCalibrator2"]),
        ("self._trt.Builder(log).platform_has_fast_fp16", ["(...).platform_has_fast_fp16"]),
        ("trt.DataType.FP4", ["DataType.FP4"]),
        ("layer.precision = trt.DataType.HALF", ["(...).precision"]),
        ("getattr(trt, 'TacticSource')", ["TacticSource"]),
        ("getattr(config, 'set_flag')", ["(...).set_flag"]),
        ("getattr(trt.TacticSource, name)", ["look-up of name", "TacticSource"]),
        ("vars(trt)", ["vars"]),
        ("trt.DataType.__members__", ["DataType.__members__"]),
        ("import tensorrt", ["import of tensorrt"]),
        ("from tensorrt_rtx import Builder", ["import of tensorrt_rtx"]),
        ("class Monitor(trt.IProfiler):\n        def report(self): ...", ["IProfiler.report"]),
    ],
)
def test_a_name_outside_the_table_is_found(line, told):
    source = f"{ADAPTER}\n\ndef more(self, trt, log, config, layer, name):\n    {line}\n"
    found = uses.find_uses(source).outside((*NAMES, *OF_RTX), REMOVED_IN_11)
    assert len(found) >= len(told)
    for each in told:
        assert any(each in one for one in found), (each, found)
