"""The Jetson agent: its plumbing, against a fake trtexec. Nothing here says anything about TensorRT itself.

`fake_trtexec` is a small program that takes the options of one version and no others, and writes files of the right
shape with invented times. That the real one takes these options is what its sources say (tests/fixtures/trtexec);
tests/runtimes/test_jetson.py tries, on a Jetson.
"""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from helpers.families import make_family
from helpers.models import TINY
from helpers.shared import ROOT
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.checks.inspect import inspect
from snapvit_export.family.folder import read_family
from snapvit_export.family.reference import as_inputs
from snapvit_export.profiling.sampling import Samples
from snapvit_export.report.terminal import print_profiles
from snapvit_export.runtimes import jetson_agent as agent
from snapvit_export.runtimes.device import DeviceCard
from snapvit_export.selection import reference_check
from snapvit_export.selection.known_profiles import FamilyProfile
from snapvit_export.target import Target

AGENT = Path(agent.__file__)
FIXTURES = ROOT / "tests" / "fixtures" / "trtexec"
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
V10_3, V10_13, V11_0 = agent.Version(10, 3, 0), agent.Version(10, 13, 3), agent.Version(11, 0, 0)
FAKE = r"""
import hashlib, json, os, signal, sys
from pathlib import Path

here = Path(__file__).parent
how = json.loads((here / "how.json").read_text())
version = how["version"]
given = dict((word.split("=", 1) + [""])[:2] for word in sys.argv[1:])
print(f"&&&& RUNNING TensorRT.trtexec [TensorRT v{version}] # trtexec " + " ".join(sys.argv[1:]))
if "--help" in given:
    sys.exit(0)
with open(here / "calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")
calls = len((here / "calls").read_text().splitlines())

def fail(*lines):
    for line in lines:
        print(f"[11/16/2025-12:00:00] [E] {line}")
    print("&&&& FAILED TensorRT.trtexec")
    sys.exit(1)

if calls == how.get("stop_at"):
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
build = {"--onnx", "--saveEngine", "--skipInference", "--timingCacheFile", "--minShapes", "--optShapes", "--maxShapes",
         "--memPoolSize", "--profilingVerbosity", "--noTF32"}
run = {"--loadEngine", "--shapes", "--warmUp", "--duration", "--exportTimes"}
layers = {"--loadEngine", "--shapes", "--duration", "--dumpProfile", "--exportProfile", "--exportLayerInfo"}
compare = {"--loadEngine", "--shapes", "--loadInputs", "--exportOutput", "--iterations", "--warmUp", "--duration"}
if version < 110000:
    build, layers = build | {"--stronglyTyped"}, layers | {"--separateProfileRun"}
    run |= {"--useCudaGraph", "--useSpinWait", "--noDataTransfers"}
else:
    run |= {"--includeDataTransfers"}
known = build if "--onnx" in given else layers if "--exportProfile" in given else run
known = compare if "--exportOutput" in given else known
if set(given) - known:
    fail(f"Unknown option: {sorted(set(given) - known)}")
if "--onnx" in given:
    name = Path(given["--onnx"]).stem
    if how.get("fails") == name:
        fail("[TRT] invented: no kernel for blocks.1.fc1", "Engine could not be created from network", "Engine failed")
    Path(given["--timingCacheFile"]).write_text("cache")
    Path(given["--saveEngine"]).write_text(json.dumps([name, how["ms"][name], how.get("salt", 0)]))
    sys.exit(0)
name, ms, _ = json.loads(Path(given["--loadEngine"]).read_text())
if "--exportProfile" in given:
    row = {"name": "fc1", "timeMs": 9.0, "averageMs": 0.3, "medianMs": 0.25, "percentage": 60}
    Path(given["--exportProfile"]).write_text(json.dumps([{"count": 30}, row, dict(row, name="fc2", medianMs=0.5)]))
    Path(given["--exportLayerInfo"]).write_text(json.dumps(
        {"Layers": [{"Name": "fc1", "LayerType": "gemm", "Outputs": [{"Name": "h", "Format/Datatype": "Half"}]}]}))
    sys.exit(0)
if "--exportOutput" in given:  # the reference answers of images that it knows, as the real one prints them
    port, path = given["--loadInputs"].rsplit(":", 1)
    images, size, wrong = Path(path).read_bytes(), how["bytes"], how.get("wrong", {}).get(name)
    if port != "images" or len(images) % size:
        fail("invented: no such input, or not whole images")
    if "--shapes" in given and int(given["--shapes"].split(":")[1].split("x")[0]) * size != len(images):
        fail("Unexpected file size for input file")
    parts = [hashlib.sha256(images[at : at + size]).hexdigest() for at in range(0, len(images), size)]
    if not set(parts) <= set(how["inputs"]):
        fail("invented: these are no images of the family")
    values = [list(how["answers"][name][how["inputs"][part]]) for part in parts]
    for row in values:
        best = row.index(max(row))
        if wrong == "perturbed":
            row[:] = [value * (1.2 if n % 2 else 0.8) for n, value in enumerate(row)]
        if wrong == "swapped":
            row[best], row[best - 1] = row[best - 1], row[best]
        if wrong == "nan":
            row[0] = float("nan")
    flat = [value for row in values for value in row][: -1 if wrong == "short" else None]
    shape = f"{len(values)}x{len(values[0])}"
    text = '[\n  { "name" : "logits"\n  , "dimensions" : "' + shape + '"\n  , "values" : [ '
    text += ", ".join(f"{value:.6g}" for value in flat) + " ]\n  }\n]\n"
    Path(given["--exportOutput"]).write_text(text[:40] if wrong == "truncated" else text)
    sys.exit(0)
copies = "--includeDataTransfers" in given if version >= 110000 else "--noDataTransfers" not in given
h2d, d2h = (0.25, 0.125) if copies and not how.get("never_copies") else (0.0, 0.0)
rows = []
for n in range(max(10, int(1000 * float(given["--duration"]) / ms))):
    compute = ms * (1 + (n * 7 % 11 - 5) / 500)
    rows.append({"h2dMs": h2d, "computeMs": compute, "d2hMs": d2h, "latencyMs": h2d + compute + d2h})
if how.get("no_graph"):
    print("[W] The specified --useCudaGraph flag has been ignored. The inference will be launched without it")
Path(given["--exportTimes"]).write_text(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A tiny family as it would be copied to a Jetson, with two reference images: each is a start of trtexec."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_check, "IMAGES", 2)
        return make_family(
            folder, "local", correct=False, head=30.0, sparsity=[0.3, 0.6], flavour="portable", reference=True
        )


@dataclass
class Device:
    """A folder with a family, a fake trtexec and the agent, which runs as a program of its own."""

    folder: Path
    how: dict = field(default_factory=dict)

    def run(self, *words: object, **changes: object) -> subprocess.CompletedProcess[str]:
        self.how.update(changes)
        (self.folder / "bin" / "how.json").write_text(json.dumps(self.how))
        short = ("--seconds", 0.6, "--rounds", 3)
        command = [sys.executable, AGENT, "family", "--out", "orin.json", *short, *words]
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "bin" / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def timed(self) -> list[tuple[str, bool]]:
        """What was timed, in order: the variant, and whether with copying."""
        runs = [words for words in self.calls if any(word.startswith("--exportTimes") for word in words)]
        return [(Path(words[0].split("=")[1]).stem, "--noDataTransfers" not in words) for words in runs]

    def edit(self, change) -> None:
        """Change the manifest."""
        path = self.folder / "family" / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    def refused(self, *words: object, code: int = 1, **changes: object) -> str:
        """The one line that a refusal prints."""
        done = self.run(*words, **changes)
        assert done.returncode == code, done.stderr
        lines = done.stderr.splitlines()
        assert "Traceback" not in done.stderr
        assert lines[-1].startswith("error: ")
        assert sum(line.startswith("error: ") for line in lines) == 1
        assert not (self.folder / "orin.json").exists()
        return lines[-1]


@pytest.fixture
def device(made, tmp_path) -> Device:
    shutil.copytree(made, tmp_path / "family")
    make_fake(tmp_path)
    return Device(tmp_path, {"version": 100300, "ms": {"dense": 5.0, "s30": 4.0, "s60": 3.0}, **known_to_fake(made)})


def make_fake(folder: Path) -> None:
    """Write the fake trtexec."""
    fake = folder / "bin" / "trtexec"
    fake.parent.mkdir()
    fake.write_text(f"#!{sys.executable}\n{FAKE}")
    fake.chmod(0o755)


def known_to_fake(family: Path) -> dict:
    """The images that a fake trtexec knows, by the hash of what a graph takes, and what it answers."""
    manifest = read_family(family)
    reference, size = manifest.reference, manifest.anatomy.image
    inputs = as_inputs(reference.pixels_at(family, size), manifest.preprocessing, manifest.input.type == "uint8")
    return {
        "bytes": inputs[0].nbytes,
        "inputs": {hashlib.sha256(image.tobytes()).hexdigest(): n for n, image in enumerate(inputs)},
        "answers": {name: reference.answers_of(family, name).tolist() for name in reference.answers},
    }


def imported_by(path: Path, nodes: Callable[[ast.AST], Iterable[ast.AST]] = ast.walk) -> set[str]:
    """The packages that a file of a board imports; it is in the grammar of Python 3.8."""
    imported = set()
    for node in nodes(ast.parse(path.read_text(), feature_version=(3, 8))):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "nothing of snapvit is there on the device"
            imported.add((node.module or "").split(".")[0])
    return imported


def test_it_is_one_file_in_the_grammar_of_python_3_8_with_the_standard_library_alone():
    assert imported_by(AGENT) <= sys.stdlib_module_names


def test_what_is_tried_on_a_jetson_needs_what_a_board_has():
    tests = Path(__file__).with_name("test_jetson.py")
    assert imported_by(tests, ast.iter_child_nodes) <= sys.stdlib_module_names | {"pytest"}
    alone = [sys.executable, "-m", "pytest", "-c", os.devnull, "--noconftest", "-q", "-m", "jetson", str(tests)]
    done = subprocess.run(alone, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout
    assert "4 skipped" in done.stdout or "4 passed" in done.stdout


@pytest.mark.parametrize("version", [V10_3, V10_13, V11_0])
def test_arguments_of_a_build_by_version(version):
    paths = Path("f/s30.onnx"), Path("e/s30.engine"), Path("e/timing.cache")
    least = ["--onnx=f/s30.onnx", "--saveEngine=e/s30.engine", "--skipInference", "--timingCacheFile=e/timing.cache"]
    least.append("--noTF32")
    typed = ["--stronglyTyped"] if version < (11,) else []
    assert agent.build_arguments(version, *paths) == least + typed
    shape = "images:1x3x32x32"
    shapes = [f"--minShapes={shape}", f"--optShapes={shape}", f"--maxShapes={shape}"]
    more = ["--memPoolSize=workspace:512", "--profilingVerbosity=detailed"]
    assert agent.build_arguments(version, *paths, shape, 512, True) == least + typed + shapes + more


@pytest.mark.parametrize("version", [V10_3, V10_13, V11_0])
def test_arguments_of_a_timing_by_version(version):
    def arguments(copying):
        return agent.run_arguments(version, Path("s30.engine"), Path("t.json"), 2.0, 0.5, "images:8x3x32x32", copying)

    end = ["--shapes=images:8x3x32x32", "--warmUp=500", "--duration=2", "--exportTimes=t.json"]
    held = ["--useCudaGraph", "--useSpinWait"]
    with_copying = ["--loadEngine=s30.engine", *(held if version < (11,) else ["--includeDataTransfers"]), *end]
    without = ["--loadEngine=s30.engine", *([*held, "--noDataTransfers"] if version < (11,) else []), *end]
    assert (arguments(True), arguments(False)) == (with_copying, without)
    layers = agent.layer_arguments(version, Path("e"), Path("p.json"), Path("i.json"), 1.0)
    assert ("--separateProfileRun" in layers) == (version < (11,))
    assert {"--dumpProfile", "--exportProfile=p.json", "--exportLayerInfo=i.json"} < set(layers)


@pytest.mark.parametrize(
    ("banner", "version", "opset"),
    [
        ("[TensorRT v100300]", (10, 3, 0), 20),
        ("[TensorRT v100700] [b23]", (10, 7, 0), 20),
        ("[TensorRT v100900]", (10, 9, 0), 20),
        ("[TensorRT v101303]", (10, 13, 3), 20),
        ("[TensorRT v101401]", (10, 14, 1), 23),
        ("[TensorRT v101600]", (10, 16, 0), 24),
        ("[TensorRT v110106] [b106]", (11, 1, 6), 25),
    ],
)
def test_versions_are_read_and_have_a_ceiling(banner, version, opset):
    found = agent.parse_version(f"&&&& RUNNING TensorRT.trtexec {banner} # trtexec --help\n=== Model Options ===")
    assert found == version
    assert agent.highest_opset(found) == opset


def test_the_version_of_an_old_release_is_read_and_that_of_another_program_is_not():
    assert agent.parse_version("&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec") == (8, 6, 1)
    with pytest.raises(agent.AgentError, match="does not say its version, only 'hello'"):
        agent.parse_version("hello\n")


def read(name: str) -> str:
    return (FIXTURES / name).read_text()


def test_times_are_parsed():
    found = agent.parse_times(read("times-10.json"), "t")
    assert found == ([4.4375, 4.3125, 4.5625, 4.375], [4.125, 4.0, 4.25, 4.0625], True)
    assert not agent.parse_times(read("times-10-no-copying.json"), "t").copied
    assert agent.parse_times(read("times-8.json"), "t").latency_ms == [6.75, 7.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "t.json: not what trtexec --exportTimes writes"),
        ("{}", "t.json: trtexec timed no run"),
        ("[1]", "t.json: not what trtexec"),
        ('[{"computeMs": 1}]', "no 'latencyMs' in it"),
        ('[{"latencyMs": NaN, "computeMs": 1}]', "NaN is no number"),
        ('[{"latencyMs": -1, "computeMs": 1}]', "-1 is no duration"),
        ('[{"latencyMs": "1", "computeMs": 1}]', "'1' is no duration"),
    ],
)
def test_damaged_times_are_refused(text, says):
    with pytest.raises(agent.AgentError, match=says):
        agent.parse_times(text, "t.json")


def test_layers_are_parsed_in_the_form_of_both_major_versions():
    layers = agent.parse_profile(read("profile-10.json"), "p")
    assert layers[-1] == ("blocks.0.fc1 + blocks.0.gelu", 0.3472, 69.6)
    assert len(layers) == 4
    names = agent.parse_layer_info(read("layers-10-names.json"), "i")
    assert list(names) == [layer.name for layer in layers]
    assert set(names.values()) == {"unknown"}
    detailed = agent.parse_layer_info(read("layers-10.json"), "i")
    assert list(detailed.values()) == ["fp16", "fp16", "fp16", "unknown"]
    assert agent.parse_layer_info(read("layers-11.json"), "i") == {"blocks.0.fc1 + blocks.0.gelu": "fp16"}
    assert [agent.number_type(told) for told in ("Row major linear FP32", "Int8", "FP9")] == ["fp32", "int8", "FP9"]
    for parse in (agent.parse_profile, agent.parse_layer_info):
        with pytest.raises(agent.AgentError, match="x.json: not what trtexec"):
            parse('[{"name": "a"}]', "x.json")


def test_the_telling_line_of_a_log_is_found():
    told = "Error[4]: ITensor::getDimensions: Error Code 4: API Usage Error (invented: types Half and Float)"
    assert agent.last_error(read("build-failed-10.log")) == told
    assert agent.last_error("&&&& RUNNING\nCuda failure: no device\n&&&& FAILED") == "Cuda failure: no device"
    assert agent.last_error("[t] [E] Engine set up failed") == "Engine set up failed"
    assert agent.last_error("") == "it gave no reason"


def test_samples_say_the_same_as_in_the_profiler():
    random = np.random.default_rng(0)
    rounds = [list(random.normal(10 + n / 20, 0.3, 200)) for n in range(9)]
    flat = [ms for taken in rounds for ms in taken]
    theirs = Samples(200, flat, flat)
    ours = agent.intervals(rounds, [50, 90, 99])
    for at in (25, 50, 90, 99):
        assert agent.percentile(sorted(flat), at) == pytest.approx(theirs.percentile(at))
    for at, bounds in ours.items():  # other dice, so nearly
        assert bounds == pytest.approx(theirs.interval(at), abs=0.05)
        assert bounds[0] < theirs.percentile(at) < bounds[1]
    assert agent.noise(rounds) == pytest.approx(theirs.noise)
    assert agent.drift(flat) == pytest.approx(theirs.drift)
    assert agent.noise(rounds[:1]) == 0
    assert agent.evenly(list(range(10)), 4) == [0, 2, 5, 7]
    assert agent.evenly([1.0, 2.0], 4) == [1.0, 2.0]


def test_graphs_are_read_without_onnx_as_with_it(made, tmp_path):
    for variant in read_family(made).variants:
        found, told = agent.read_graph(made / variant.file), inspect(made / variant.file)
        assert (found.opset, set(found.operators)) == (told.opset, set(told.operators))
        assert (found.input, found.shape) == (told.inputs[0].name, (0, 3, 32, 32))
        names = {
            node.op_type: node.name
            for node in reversed(onnx.load(made / variant.file, load_external_data=False).graph.node)
        }
        assert found.operators == names
    fixed = helper.make_tensor_value_info("images", TensorProto.UINT8, [4, 32, 32, 3])
    node = helper.make_node("Identity", ["images"], ["out"])
    weights = helper.make_tensor("w", TensorProto.FLOAT, [1000], np.zeros(1000, np.float32).tobytes(), raw=True)
    graph = helper.make_graph([node], "g", [fixed], [fixed], [weights])
    opsets = [helper.make_opsetid("com.microsoft", 99), helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), tmp_path / "fixed.onnx")
    found = agent.read_graph(tmp_path / "fixed.onnx")
    assert found == (18, {"Identity": ""}, "images", (4, 32, 32, 3))
    assert agent.shape_of(found, 4) is None
    whole = (tmp_path / "fixed.onnx").read_bytes()
    for damaged in (whole[:50], b"\xff" * 20, b"\x0b", b"\x08\x07"):
        (tmp_path / "damaged.onnx").write_bytes(damaged)
        with pytest.raises(agent.AgentError, match="damaged.onnx: not an ONNX file"):
            agent.read_graph(tmp_path / "damaged.onnx")


def make_orin(root: Path, mode: str = "pmode:0000", gpu: int = 306) -> Path:
    """The files of an Orin Nano that the agent looks at."""
    files = {
        "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n# KERNEL_VARIANT: oot\n",
        "etc/nvpmodel.conf": "# < POWER_MODEL ID=9 NAME=99W >\n< POWER_MODEL ID=0 NAME=15W >\nCPU_ONLINE CORE_0 1\n"
        "< POWER_MODEL ID=1 NAME=25W >\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n",
        "var/lib/nvpmodel/status": f"{mode} fmode:quiet\n",
        "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
        "proc/meminfo": "MemTotal:        7620000 kB\nMemAvailable:    5000000 kB\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: ARMv8 Processor rev 1 (v8l)\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release\n",
        "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.6.68"}}',
        "sys/class/devfreq/17000000.gpu/cur_freq": f"{gpu}000000",
        "sys/class/devfreq/17000000.gpu/min_freq": "306000000",
        "sys/class/devfreq/17000000.gpu/max_freq": "1020000000",
        "sys/class/devfreq/15480000.nvdec/cur_freq": "1",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "729600",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1728000",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal",
        "sys/class/thermal/thermal_zone0/temp": "48250",
        "sys/class/thermal/thermal_zone1/type": "cv0-thermal",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def card_of(root: Path) -> DeviceCard:
    return msgspec.convert(agent.device_card(V10_3, agent.look(root), root), DeviceCard)


def test_a_jetson_is_described_and_what_it_lacks_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvpmodel, dpkg-query or nvidia-smi
    root = make_orin(tmp_path / "slow")
    card = card_of(root)
    gpu = card.accelerator
    assert (gpu.name, gpu.power_mode) == ("NVIDIA Jetson Orin Nano Developer Kit", "15W")
    assert (gpu.board, gpu.sm_count) == (gpu.name, None)
    assert gpu.software == {
        "jetpack": "unknown",
        "l4t": "36.4.3",
        "tensorrt": "10.3.0",
        "cuda": "12.6.68",
        "driver": "540.4.0",
    }
    assert (gpu.clocks_mhz["gpu"], gpu.clocks_mhz["gpu max"], gpu.clocks_mhz["cpu0"]) == (306, 1020, 729.6)
    assert gpu.temperatures_c == {"cpu-thermal": 48.2}
    assert gpu.memory_bytes == card.memory_bytes == 7620000 * 1024
    assert card.cpu == "ARMv8 Processor rev 1 (v8l)"
    assert agent.warnings_of(msgspec.to_builtins(card), root) == [
        "the power mode is 15W, and MAXN_SUPER is higher. Set it: sudo nvpmodel -m 2",
        "the GPU is at 306 of 1020 MHz and moves. Hold it: sudo jetson_clocks",
    ]
    fast = make_orin(tmp_path / "fast", "pmode:0002", 1020)
    assert agent.warnings_of(msgspec.to_builtins(card_of(fast)), fast) == []
    bare = msgspec.to_builtins(card_of(tmp_path / "nothing"))
    assert (bare["accelerator"]["name"], bare["accelerator"]["board"]) == ("unknown", None)
    (tmp_path / "nothing" / "etc").mkdir(parents=True)
    (tmp_path / "nothing" / "etc" / "nv_tegra_release").touch()
    assert len(agent.warnings_of(bare, tmp_path / "nothing")) == 2


def test_programs_of_the_system_are_asked(tmp_path, monkeypatch):
    for name, says in (
        ("nvpmodel", "NV Power Mode: MAXN_SUPER\n2"),
        ("dpkg-query", "6.2+b77"),
        ("nvidia-smi", "[N/A]"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    gpu = card_of(make_orin(tmp_path / "root")).accelerator
    assert (gpu.power_mode, gpu.software["jetpack"]) == ("MAXN_SUPER", "6.2+b77")
    assert gpu.memory_bytes == 7620000 * 1024
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 42\n")
    card = card_of(tmp_path / "a PC").accelerator
    assert (card.name, card.clocks_mhz["gpu"], card.temperatures_c, card.memory_bytes) == (
        "42",
        42,
        {"gpu": 42},
        42 << 20,
    )


def test_a_device_is_the_same_when_it_is_warmer_and_another_in_another_power_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    cool = card_of(make_orin(tmp_path / "root"))
    (tmp_path / "root/sys/class/thermal/thermal_zone0/temp").write_text("71000")
    (tmp_path / "root/sys/class/devfreq/17000000.gpu/cur_freq").write_text("918000000")
    warm = card_of(tmp_path / "root")
    assert cool != warm
    assert cool.same_machine(warm)
    (tmp_path / "root/sys/class/devfreq/17000000.gpu/max_freq").write_text("612000000")
    assert not cool.same_machine(card_of(tmp_path / "root"))
    other = msgspec.structs.replace(cool, accelerator=msgspec.structs.replace(cool.accelerator, power_mode="25W"))
    assert not cool.same_machine(other)
    assert not cool.same_machine(msgspec.structs.replace(cool, accelerator=None))


def test_a_family_is_built_and_timed_in_turns_and_the_file_is_a_family_profile(device, snapvit, monkeypatch):
    done = device.run("--workspace", 512)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(device.folder)
    found, manifest = FamilyProfile.load("orin.json"), read_family("family")
    assert (found.model, found.target.runtime, found.target.precision) == (manifest.model, "tensorrt", "fp32")
    assert found.target.device.runtime_version == "10.3.0"
    assert found.target.device.accelerator.software["tensorrt"] == "10.3.0"
    assert set(found.profiles) == {"dense", "s30", "s60"}
    assert {profile.method for profile in found.profiles.values()} == {"trtexec"}
    target = Target(runtime="tensorrt", precision="fp32", batch=1, threads=manifest.target.threads)
    for name, ms in device.how["ms"].items():
        profile = found.profiles[name]
        assert profile.p50_ms == pytest.approx(ms + 0.375, rel=0.01)  # the copies too
        assert profile.gpu_ms == pytest.approx(ms, rel=0.01)
        assert profile.cpu_ms is None
        assert profile.burst * 3 == profile.runs == len(profile.samples_ms) >= 120
        assert profile.intervals_ms["p50"][0] <= profile.p50_ms <= profile.intervals_ms["p50"][1]
        assert profile.belongs_to(manifest.variant(name).sha256, target, found.target.device)
        assert profile.conditions.waited == 0
        assert f"{profile.p50_ms:.2f}" in done.stdout
    names = ["dense", "s30", "s60"]
    turns = [name for n in range(3) for name in names[n:] + names[:n]]
    assert device.timed == [(name, copying) for name in turns for copying in (True, False)]
    builds = [words for words in device.calls if words[0].startswith("--onnx")]
    assert len(builds) == 3
    assert {"--stronglyTyped", "--optShapes=images:1x3x32x32", "--memPoolSize=workspace:512"} < set(builds[0])
    assert len({word for words in builds for word in words if word.startswith("--timingCacheFile")}) == 1
    record = json.loads(Path("orin.record.json").read_text())
    assert record["gpu_ms"]["s30"]["p99"] >= record["gpu_ms"]["s30"]["p50"] > 3.9
    assert len(record["looks"]) == 1 + 9
    left = {path.name for path in Path().iterdir()}
    assert left == {"bin", "family", "orin.json", "orin.record.json"}
    picks = snapvit("fleet", "family", "--budget", "orin.json=4.5ms", "--json")
    assert picks.code == 0, picks.err
    assert json.loads(picks.out)[0]["variant"] == "s30"
    assert json.loads(picks.out)[0]["next_denser"] == "dense"
    assert json.loads(snapvit("fleet", "family", "--budget", "orin.json=70%", "--json").out)[0]["variant"] == "s60"
    print_profiles(found)  # a GPU's Profile has no CPU time
    outcome = snapvit("choose", "family", "--budget", "4.5ms", "--profile", "orin.json")
    assert outcome.code == 0, outcome.err
    manifest = read_family("family")
    assert (manifest.choice.variant, manifest.choice.next_denser, manifest.choice.decided) == ("s30", "dense", True)
    assert manifest.target.device == found.target.device


def test_on_version_11_copying_must_be_asked_for(device):
    done = device.run("--only", "s60", version=110000)
    assert done.returncode == 0, done.stderr
    found = FamilyProfile.load(device.folder / "orin.json")
    assert set(found.profiles) == {"dense", "s60"}  # others are compared with the dense one
    assert found.profiles["s60"].p50_ms == pytest.approx(3.375, rel=0.01)
    assert found.profiles["s60"].gpu_ms == pytest.approx(3.0, rel=0.01)
    runs = [words for words in device.calls if any(word.startswith("--exportTimes") for word in words)]
    assert ["--includeDataTransfers" in words for words in runs[:2]] == [True, False]


def test_layers_go_into_the_record(device):
    assert device.run("--only", "dense", "--layers", "--batch", 2).returncode == 0
    record = json.loads((device.folder / "orin.record.json").read_text())
    first = {"name": "fc2", "median_ms": 0.5, "percentage": 60, "type": "unknown"}
    assert record["layers"]["dense"] == [first, {"name": "fc1", "median_ms": 0.25, "percentage": 60, "type": "fp16"}]
    assert any("--profilingVerbosity=detailed" in words for words in device.calls)
    assert any("--shapes=images:2x3x32x32" in words for words in device.calls)
    assert FamilyProfile.load(device.folder / "orin.json").target.batch == 2


def test_an_interrupted_run_goes_on_where_it_stopped(device):
    stopped = device.run(stop_at=3 + 6 + 9)
    assert stopped.returncode == 130
    assert "The same command goes on where it stopped" in stopped.stderr
    assert not (device.folder / "orin.json").exists()
    partial = json.loads((device.folder / "orin.partial.json").read_text())
    assert len(partial["visits"]) == 4
    before = len(device.calls)
    done = device.run(stop_at=None)
    assert done.returncode == 0, done.stderr
    assert "going on after 4 of 9 visits" in done.stderr
    assert len(device.calls) - before == 2 * 5  # no build, no comparison and no visit twice
    found = FamilyProfile.load(device.folder / "orin.json")
    assert all(profile.runs == 3 * profile.burst for profile in found.profiles.values())
    assert not (device.folder / "orin.partial.json").exists()
    assert not (device.folder / "orin.engines").exists()


def test_what_an_interrupted_run_left_is_not_used_for_another(device):
    assert device.run(stop_at=3 + 6 + 5).returncode == 130
    done = device.run("--seconds", 0.9, stop_at=None)
    assert done.returncode == 0, done.stderr
    assert "is of another run and is begun anew" in done.stderr
    (device.folder / "orin.json").unlink()
    (device.folder / "orin.partial.json").write_text("{")
    assert "orin.partial.json: damaged" in device.refused()


def test_engines_are_kept_and_used_again_unless_stale(device):
    few = ("--keep-engines", "engines", "--only", "s30")
    assert device.run(*few).returncode == 0
    kept = {path.name for path in (device.folder / "engines").iterdir()}
    assert {"dense.engine", "dense.json", "s30.engine"} < kept
    assert not [name for name in kept if name.startswith(".")]

    def built_by(*words: object, **changes: object) -> int:
        before = sum(words[0].startswith("--onnx") for words in device.calls)
        assert device.run(*few, *words, **changes).returncode == 0
        return sum(words[0].startswith("--onnx") for words in device.calls) - before

    assert built_by() == 0
    (device.folder / "engines" / "s30.engine").write_text("cut off")
    assert built_by() == 1
    (device.folder / "engines" / "dense.json").write_text("[]")
    assert built_by() == 1
    assert built_by("--batch", 4) == 2
    assert built_by("--batch", 4, version=101303) == 2


def test_engines_and_timings_of_another_board_are_not_used(device, monkeypatch):
    (device.folder / "bin" / "how.json").write_text(json.dumps(device.how))
    monkeypatch.chdir(device.folder)
    monkeypatch.setenv("PATH", f"{device.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    names = ["NVIDIA Jetson Orin Nano Developer Kit", "NVIDIA Jetson AGX Orin Developer Kit"]
    built = []
    for name, multiprocessors in ((names[0], 8), (names[0], 8), (names[0], 4), (names[1], 4)):
        card = agent.device_card(V10_3, agent.look())
        card["accelerator"].update(name=name, board=name, sm_count=multiprocessors)
        monkeypatch.setattr(agent, "device_card", lambda *_, card=card: card)
        before = len(device.calls)
        few = ["--only", "dense", "--seconds", "0.3", "--rounds", "3", "--keep-engines", "engines"]
        assert agent.main(["family", "--out", "orin.json", *few]) == 0
        built.append(sum(words[0].startswith("--onnx") for words in device.calls[before:]))
    assert built == [1, 0, 1, 1]
    assert len(list(Path("engines").glob("timing-*.cache"))) == 3
    assert FamilyProfile.load("orin.json").target.device.accelerator.sm_count == 4


def test_what_cannot_be_relied_on_is_warned_of(device):
    done = device.run("--seconds", 0.1, no_graph=True)
    assert done.returncode == 0, done.stderr
    assert "warning: s30: TensorRT could not record a CUDA graph" in done.stderr
    assert "warning: s30 ran only 30 times, and 40 are needed. Give more --seconds" in done.stderr
    assert "ran only" in " ".join(json.loads((device.folder / "orin.record.json").read_text())["warnings"])


def in_precision(name: str, *variants: str):
    """A change of the manifest: some variants compute in another precision; without names, the whole family."""

    def change(manifest) -> None:
        if not variants:
            manifest["target"].update(precision=name)
        for entry in manifest["variants"]:
            if not variants or entry["name"] in variants:
                entry.update(precision=name)

    return change


def change_graph(device: Device, change) -> None:
    """Change s30's graph, and its hash with it."""
    path = device.folder / "family" / "s30.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model)
    onnx.save(model, path)

    def rehash(manifest):
        entry = next(v for v in manifest["variants"] if v["name"] == "s30")
        entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()

    device.edit(rehash)


def test_an_opset_above_the_ceiling_is_refused_with_file_and_node(device):
    def newer(model):
        model.opset_import[0].version = 23
        node = next(node for node in model.graph.node if node.op_type == "Softmax")
        node.op_type, node.name = "Attention", "blocks.0.attend"

    change_graph(device, newer)
    assert device.refused() == (
        "error: family/s30.onnx: opset 23, node blocks.0.attend is Attention, and TensorRT 10.3.0 reads up to 20. "
        "Export it with --flavour tensorrt"
    )
    assert not device.calls
    assert "is Attention, which TensorRT does not build in fp32" in device.refused(version=110000)
    device.edit(in_precision("fp16"))
    assert device.run(version=110000).returncode == 0


def test_what_scales_while_it_runs_is_refused(device):
    def dynamic(model):
        model.graph.node[-1].op_type = "MatMulInteger"

    change_graph(device, dynamic)
    assert "is MatMulInteger, which TensorRT does not take" in device.refused()
    device.edit(in_precision("int8-dynamic", "s30"))
    assert "family/s30.onnx: in int8-dynamic, which scales its inputs while it runs" in device.refused()
    device.edit(in_precision("int8-dynamic"))
    assert "family/dense.onnx: in int8-dynamic, which scales its inputs while it runs" in device.refused()


def test_a_family_that_mixes_precisions_is_built_and_described_in_each(device, monkeypatch):
    device.edit(in_precision("fp16"))
    device.edit(in_precision("int8-static", "s60"))
    done = device.run("--keep-engines", "engines")
    assert done.returncode == 0, done.stderr
    assert " in fp16 and int8-static on " in done.stderr
    monkeypatch.chdir(device.folder)
    found = FamilyProfile.load("orin.json")
    assert found.target.precision == "fp16"  # the dense model's
    wanted = {"dense": "fp16", "s30": "fp16", "s60": "int8-static"}
    assert {name: profile.precision for name, profile in found.profiles.items()} == wanted
    recipes = {name: json.loads(Path("engines", f"{name}.json").read_text())["recipe"] for name in wanted}
    assert {name: recipe["precision"] for name, recipe in recipes.items()} == wanted
    caches = {name: [word for word in recipe["arguments"] if "Cache" in word] for name, recipe in recipes.items()}
    assert caches["dense"] == caches["s30"] != caches["s60"]  # a timing cache is of one precision
    device.edit(lambda manifest: [entry.pop("precision") for entry in manifest["variants"]])  # as older ones were
    assert device.run("--keep-engines", "engines").returncode == 0
    assert {profile.precision for profile in FamilyProfile.load("orin.json").profiles.values()} == {"fp16"}


def test_damaged_and_foreign_families_are_refused(device):
    path = device.folder / "family" / "s60.onnx"
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    assert "family/s60.onnx: damaged: it is not the file that manifest.json describes" in device.refused()
    path.unlink()
    assert "family/s60.onnx: missing, though manifest.json lists it" in device.refused()
    path.write_bytes(whole)
    for change, says in (
        (lambda m: m["variants"][1].update(file="../bin/trtexec"), "'../bin/trtexec' leaves the folder"),
        (lambda m: m["variants"][1].update(file="s30.onnx", name="../s30"), "'../s30' cannot name a file"),
        (
            lambda m: m["variants"][1].update(file="weights.bin", name="s30", sha256=m["weights"][0]["sha256"]),
            "not an ONNX",
        ),
        (lambda m: m.update(format_version=2), "of format 2, and this agent reads 1"),
        (lambda m: (m.update(format_version=1), m.pop("weights")), "not the manifest of a family: no 'weights' in it"),
    ):
        device.edit(change)
        assert says in device.refused()
    (device.folder / "family" / "manifest.json").write_text("{")
    assert "family/manifest.json: damaged" in device.refused()
    (device.folder / "family" / "manifest.json").unlink()
    os.mkfifo(device.folder / "family" / "manifest.json")
    assert "family/manifest.json: cannot be read: not a plain file" in device.refused()
    shutil.rmtree(device.folder / "family")
    assert "family/manifest.json: cannot be read: No such file" in device.refused()


def test_without_a_trtexec_that_fits_nothing_is_begun(device, monkeypatch):
    assert "not a program that can be run" in device.refused("--trtexec", "nowhere")
    assert "TensorRT 8.6.1 is too old: 10.3.0 or newer is needed" in device.refused(version=8601)
    other = device.folder / "other"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    assert "does not say its version, only 'hello'" in device.refused("--trtexec", other)
    other.write_text("no program")
    assert "cannot be run" in device.refused("--trtexec", other)
    (device.folder / "bin" / "trtexec").unlink()
    monkeypatch.setenv("PATH", "/usr/bin")
    if not any(map(os.path.exists, agent.TRTEXEC_PLACES)) and shutil.which("trtexec") is None:
        assert "error: no trtexec in PATH nor at /usr/src/tensorrt/bin/trtexec. Install it" in device.refused()


def test_a_build_that_fails_is_told_with_the_telling_line_of_its_log(device):
    assert device.refused(fails="s60") == (
        "error: family/s60.onnx: TensorRT 10.3.0 cannot build it: invented: no kernel for blocks.1.fc1. "
        "All of it: orin.engines/s60.log"
    )
    assert "FAILED" in (device.folder / "orin.engines" / "s60.log").read_text()
    builds = len(device.calls)
    assert device.run(fails=None).returncode == 0
    assert sum(words[0].startswith("--onnx") for words in device.calls[builds:]) == 1  # the others are there


def test_a_run_with_copying_that_copies_nothing_is_refused(device):
    assert "copied nothing, though asked to" in device.refused(never_copies=True)


def test_requests_that_make_no_sense_get_one_line(device):
    for words, says in (
        (("--only", "s31"), "--only s31: no variant is called that. There are: dense, s30, s60"),
        (("--rounds", 2), "'2' is not a number from 3 on"),
        (("--seconds", "x"), "invalid"),
        (("--nonsense",), "unrecognized arguments: --nonsense"),
        (("--out", "bin"), "bin: a folder"),
    ):
        assert says in device.refused(*words, code=2)
    assert "cannot be written" in device.refused("--out", "/proc/orin.json")
    device.edit(lambda manifest: manifest["input"].update(batch=4))
    assert "the family takes exactly 4 images. Give --batch 4" in device.refused(code=2)


def compared_by(device: Device) -> list[str]:
    """The variants that trtexec ran the reference images of, one for each of its runs."""
    runs = [words for words in device.calls if any(word.startswith("--exportOutput") for word in words)]
    return [Path(words[0].split("=")[1]).stem for words in runs]


def test_every_engine_is_compared_with_the_reference_before_any_is_timed(device, snapvit, monkeypatch):
    done = device.run("--keep-engines", "engines")
    assert done.returncode == 0, done.stderr
    assert compared_by(device) == ["dense", "dense", "s30", "s30", "s60", "s60"]  # two images, one at a time
    kinds = [any(word.startswith("--exportTimes") for word in words) for words in device.calls]
    assert kinds == sorted(kinds), "builds and comparisons come first"
    monkeypatch.chdir(device.folder)
    found = FamilyProfile.load("orin.json")
    for name, profile in found.profiles.items():
        told = profile.compared
        assert (told.passed, told.images, told.asked, told.left_out) == (True, 2, 0.99999, 0)
        assert told.least_cosine == pytest.approx(1, abs=1e-9)  # but for six digits
        assert (told.dense_cosine > 1 - 1e-9) == (name == "dense")
        assert f"{name}: compared, least cosine 1.000000 of 2 images" in done.stderr
        how = profile.taken
        assert (how.transfers, how.queue_depth, how.ahead, how.cuda_graph) == (True, 2, 1, True)
        assert (how.spin_wait, how.tf32, how.pinned_memory) == (True, False, True)
    assert found.failed == {}
    record = json.loads(Path("orin.record.json").read_text())
    assert record["builds"]["s30"]["compared"]["passed"]
    outcome = snapvit("choose", "family", "--budget", "4.5ms", "--profile", "orin.json")
    assert "Compared with its graph in ONNX Runtime: least cosine 1.000000 of 2 images" in outcome.out
    assert "not compared" not in outcome.out
    assert read_family("family").choice.compared is True
    before = len(device.calls)
    assert device.run("--keep-engines", "engines").returncode == 0
    assert len(compared_by(device)) == 6, "what is known of an engine is not looked for again"
    assert len(device.calls) > before
    described = Path("engines", "s30.json")
    described.write_text(json.dumps({**json.loads(described.read_text()), "compared": {"passed": True}}))
    assert device.run("--keep-engines", "engines").returncode == 0
    assert compared_by(device)[6:] == ["s30", "s30"]


@pytest.mark.parametrize("batch", [2, 3])
def test_a_batch_is_filled_up_with_images_that_are_compared_too(device, batch):
    assert device.run("--only", "s30", "--batch", batch).returncode == 0
    assert compared_by(device) == ["dense", "s30"]
    assert FamilyProfile.load(device.folder / "orin.json").profiles["s30"].compared.images == batch


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("perturbed", "least cosine 0.9"),
        ("swapped", "the same best class in 0 %"),
        ("nan", "its answers to 2 images are not finite numbers"),
    ],
)
def test_a_variant_that_answers_otherwise_is_neither_timed_nor_chosen(device, snapvit, monkeypatch, wrong, says):
    done = device.run(wrong={"s30": wrong})
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "does not answer" in line]
    assert line.startswith("warning: s30: its engine does not answer as its graph does: ")
    assert says in line
    assert line.endswith("at least 0.99999 and the same classes are asked. It is neither timed nor chosen")
    assert {name for name, _ in device.timed} == {"dense", "s60"}
    monkeypatch.chdir(device.folder)
    found = FamilyProfile.load("orin.json")
    assert set(found.profiles) == {"dense", "s60"}
    assert not found.failed["s30"].compared.passed
    assert found.failed["s30"].sha256 == read_family("family").variant("s30").sha256
    assert any("s30" in text for text in json.loads(Path("orin.record.json").read_text())["warnings"])
    outcome = snapvit("choose", "family", "--budget", "4.5ms", "--profile", "orin.json")
    assert outcome.code == 0, outcome.err
    assert "s30: does not answer as its graph does" in outcome.err
    manifest = read_family("family")
    assert manifest.choice.variant == "s60"  # s30 would have met the budget
    assert "s30" not in {row.variant for row in manifest.choice.measurements}
    assert manifest.variant("s30").profile is None
    fleet = snapvit("fleet", "family", "--budget", "orin.json=4.5ms")
    assert "orin.json: s30 is left out, since it does not answer there as its graph does." in fleet.out
    pick = json.loads(snapvit("fleet", "family", "--budget", "orin.json=4.5ms", "--json").out)[0]
    assert (pick["variant"], pick["compared"], pick["left_out"]) == ("s60", True, ["s30"])


class FakeCuda:
    """A fake libcuda of a GPU with compute capability 8.7 and 8 multiprocessors."""

    attributes: ClassVar = {16: 8, 75: 8, 76: 7}

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: object, number: int) -> int:
        return 0

    def cuDeviceGetAttribute(self, found: object, number: int, device: object) -> int:
        found._obj.value = self.attributes[number]
        return 0


def on_a_fake_gpu(device: Device, monkeypatch) -> None:
    """Let the agent run in this process, with a fake libcuda."""
    (device.folder / "bin" / "how.json").write_text(json.dumps(device.how))
    monkeypatch.chdir(device.folder)
    monkeypatch.setenv("PATH", f"{device.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(agent.ctypes, "CDLL", lambda name: FakeCuda())


def test_fp8_on_a_gpu_without_it_is_left_out_and_the_rest_is_timed_and_chosen(device, snapvit, monkeypatch, capsys):
    on_a_fake_gpu(device, monkeypatch)
    assert (agent.sm_count(), agent.compute_capability()) == (8, (8, 7))
    device.edit(in_precision("fp8", "s30"))
    assert agent.main(["family", "--out", "orin.json", "--seconds", "0.6", "--rounds", "3"]) == 0
    reason = "in fp8, which needs compute capability 8.9, and this GPU has 8.7"
    assert capsys.readouterr().err.count(f"warning: s30: left out, {reason}\n") == 1
    found = FamilyProfile.load("orin.json")
    assert set(found.profiles) == {"dense", "s60"}
    assert {name: left.reason for name, left in found.left_out.items()} == {"s30": reason}
    outcome = snapvit("choose", "family", "--budget", "4.5ms", "--profile", "orin.json")
    assert outcome.code == 0, outcome.err
    assert f"s30 was not timed: {reason}. It is not chosen" in outcome.err
    assert read_family("family").choice.variant == "s60"
    assert json.loads(snapvit("fleet", "family", "--budget", "orin.json=4.5ms", "--json").out)[0]["variant"] == "s60"
    written = json.loads(Path("orin.json").read_text())
    written["left_out"]["s30"]["sha256"] = 64 * "0"
    Path("orin.json").write_text(json.dumps(written))
    other = snapvit("choose", "family", "--budget", "4.5ms", "--profile", "orin.json")
    assert "the given latencies of s30 are missing or of another file" in other.error_line


def test_a_dense_model_in_fp8_is_refused_on_a_gpu_without_it(device, monkeypatch, capsys):
    on_a_fake_gpu(device, monkeypatch)
    device.edit(in_precision("fp8"))
    assert agent.main(["family", "--out", "orin.json"]) == 1
    assert "error: dense: in fp8, which needs compute capability 8.9" in capsys.readouterr().err
    assert device.calls == []
    variants = agent.read_family(Path("family")).variants
    assert agent.without_fp8(variants, "dense", (8, 9)) == {} == agent.without_fp8(variants, "dense", None)


def test_without_a_dense_model_that_answers_rightly_nothing_is_timed(device):
    line = device.refused(wrong={"dense": "perturbed"})
    assert line.startswith("error: dense: its engine does not answer as its graph does: least cosine 0.9")
    assert line.endswith("Nothing is timed without it: try another --precision or TensorRT")
    assert device.timed == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [("truncated", "not what trtexec --exportOutput writes"), ("short", "4 values, and 5 were expected. Run again")],
)
def test_answers_that_are_not_whole_are_refused(device, wrong, says):
    assert says in device.refused(wrong={"s30": wrong})
    assert device.run(wrong={}).returncode == 0  # and goes on


def test_a_family_without_a_reference_is_timed_and_every_answer_says_not_compared(device, snapvit, monkeypatch):
    device.edit(lambda manifest: manifest.pop("reference"))
    done = device.run()
    assert done.returncode == 0, done.stderr
    assert "warning: the family has no reference images, so no answer is compared" in done.stderr
    assert compared_by(device) == []
    monkeypatch.chdir(device.folder)
    assert {profile.compared for profile in FamilyProfile.load("orin.json").profiles.values()} == {None}
    outcome = snapvit("choose", "family", "--budget", "4.5ms", "--profile", "orin.json")
    assert outcome.code == 0, outcome.err
    assert "fits, not compared, chosen" in " ".join(outcome.out.split())
    assert "; its answers there were not compared." in " ".join(outcome.out.split())
    assert "Not compared: nobody has looked if s30 answers" in outcome.out
    assert read_family("family").choice.compared is False
    assert json.loads(snapvit("fleet", "family", "--budget", "orin.json=4.5ms", "--json").out)[0]["compared"] is False
    assert "not compared" in snapvit("fleet", "family", "--budget", "orin.json=4.5ms").out
    assert snapvit("report", "family", "--format", "html,md,json", "--out", "r").code == 0
    for kind in ("html", "md"):
        assert "not compared" in Path("r", f"report.{kind}").read_text().lower()
    assert json.loads(Path("r", "report.json").read_text())["compared"] is False


def test_a_reference_that_is_damaged_is_refused(device):
    whole = json.loads((device.folder / "family" / "manifest.json").read_text())["reference"]
    for change, says in (
        (lambda m: m["reference"].update(images=3), "has not the"),
        (lambda m: m["reference"].update(images=True), "images is not a whole number"),
        (lambda m: m["reference"].update(pixels=[{**whole["pixels"][0], "image_size": [32]}]), "not the manifest"),
        (lambda m: m["reference"]["dense"].update(file="../dense.answers"), "leaves the folder"),
        (lambda m: m.update(reference=[]), "not the manifest of a family"),
    ):
        device.edit(lambda manifest: manifest.update(reference=json.loads(json.dumps(whole))))
        device.edit(change)
        assert says in device.refused()
    device.edit(lambda manifest: manifest.update(reference=whole))
    (device.folder / "family" / "s30.answers").write_bytes(b"others")
    assert "family/s30.answers: damaged: it is not the file that manifest.json describes" in device.refused()


@pytest.mark.parametrize("kind", ["bytes", "embeddings"])
def test_images_as_bytes_and_models_without_classes_are_compared_too(tmp_path, kind):
    asked = dict(takes_bytes=True) if kind == "bytes" else dict(kwargs={**TINY, "num_classes": 0})
    family = make_family(
        tmp_path / "made", "local", correct=False, sparsity=[0.6], flavour="portable", reference=True, **asked
    )
    known = known_to_fake(family)
    on = Device(tmp_path, {"version": 100300, "ms": {"dense": 5.0, "s60": 3.0}, **known})
    family.rename(tmp_path / "family")
    make_fake(tmp_path)
    done = on.run("--batch", 8)
    assert done.returncode == 0, done.stderr
    found = FamilyProfile.load(tmp_path / "orin.json").profiles["s60"].compared
    assert (found.passed, found.images) == (True, 8)
    assert (found.top1 is None) == (kind == "embeddings")
    (tmp_path / "orin.json").unlink()
    shutil.rmtree(tmp_path / "orin.engines", ignore_errors=True)
    assert "does not answer as its graph does" in on.refused("--batch", 8, wrong={"dense": "perturbed"})


@pytest.mark.parametrize("steps", [IMAGENET, dict(mean=(0.5, 0.1, 0.0), std=(0.5, 0.3, 1.0))])
def test_bytes_become_the_very_floats_of_the_workstation(steps):
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 24, 3), np.uint8)
    pixels[0, :, :16, 1] = np.arange(256).reshape(16, 16)
    wanted = Preprocessing(input_size=(3, 16, 24), **steps).normalise(pixels)
    assert agent.as_input(pixels.tobytes(), steps["mean"], steps["std"]) == wanted.tobytes()


def test_images_go_into_whole_batches():
    assert agent.in_runs(4, 1) == [[0], [1], [2], [3]]
    assert agent.in_runs(4, 3) == [[0, 1, 2], [3, 0, 1]]
    assert agent.in_runs(2, 5) == [[0, 1, 0, 1, 0]]


def test_scores_are_centred_by_image_and_embeddings_by_the_set():
    random = np.random.default_rng(0)
    wanted = random.normal(size=(8, 50))
    shifted = wanted + random.normal(size=(8, 1))
    assert agent.compare(wanted.tolist(), shifted.tolist(), True, 0.99999)["least_cosine"] == pytest.approx(1)
    found = wanted + 0.2 * random.normal(size=wanted.shape)
    a, b = (x - x.mean(1, keepdims=True) for x in (wanted, found))
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    told = agent.compare(wanted.tolist(), found.tolist(), True, 0.99999)
    assert (told["least_cosine"], told["cosine"]) == (pytest.approx(cosines.min()), pytest.approx(cosines.mean()))
    assert not told["passed"]
    common = 100.0  # that all embeddings have, and that would hide any difference
    told = agent.compare((wanted + common).tolist(), (found + common).tolist(), False, 0.99999)
    a, b = wanted - wanted.mean(0), found - wanted.mean(0)
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert (told["least_cosine"], told["top1"]) == (pytest.approx(cosines.min()), None)
    assert agent.compare([[1.0, 2.0]], [[1.0, 2.0]], False, 0.9)["passed"]  # a single image has no set


def test_near_ties_are_left_out_of_the_best_class_and_less_is_asked_of_undecided_images():
    far, near = [9.0, 1.0, 0.0, 0.0], [5.001, 5.0, 0.0, 0.0]
    swapped = [5.0, 5.001, 0.0, 0.0]
    told = agent.compare([far, near], [far, swapped], True, 0.9995)
    assert (told["passed"], told["top1"]) == (True, 1.0)
    told = agent.compare([near], [swapped], True, 0.9995)
    assert (told["passed"], told["top1"]) == (True, None)
    rows, wrong = [far, far, far, far], [far, far, [9.0, 3.0, 0.0, 0.0], far]
    assert not agent.compare(rows, wrong, True, 0.9995)["passed"]
    told = agent.compare(rows, wrong, True, 0.9995, [False, False, True, False])
    assert (told["passed"], told["left_out"]) == (True, 1)
    assert not agent.compare(rows, wrong, True, 0.9995, [True, True, False, True])["passed"]
    assert "in 1 of them rounding decides which tokens merge, and 0.9 is asked" in agent.told_of(told)
    garbage = [far, far, [0.0, 9.0, 1.0, 0.0], far]
    assert not agent.compare(rows, garbage, True, 0.9995, [True] * 4)["passed"], "rounding changes no answer so far"


def test_what_is_asked_of_each_precision():
    asked = {"fp32": 0.99999, "fp16": 0.9995, "int8-static": 0.99, "fp8": 0.99}
    assert {name: agent.least_cosine(name) for name in asked} == asked


@pytest.mark.parametrize("text", ["1, nan, 3", "-nan, 1, 2", "1, -inf, 2", "1, 2, nan(ind)"])
def test_what_is_no_number_is_read_as_such(text):
    values = agent.parse_output(f'[ {{ "name" : "y", "values" : [ {text} ] }} ]', "o.json", 3)
    assert sum(np.isfinite(values)) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "not what trtexec --exportOutput writes"),
        ('[{"name": "y"}]', "no 'values' in it"),
        ('[{"name": "y", "values": [1]}, {"name": "z", "values": [1]}]', "not what trtexec"),
        ('[{"name": "y", "values": [1]}]', "o.json: 1 values, and 2 were expected"),
    ],
)
def test_damaged_answers_are_refused(text, says):
    with pytest.raises(agent.AgentError, match=says):
        agent.parse_output(text, "o.json", 2)
