"""`snapvit inspect ENGINE`: the record in words and as JSON, with its kernels; anything else is one line."""

import hashlib
import json
from pathlib import Path

import pytest

from helpers.engines import engine_record
from snapvit_export.runtimes.tensorrt.engine_file import engine_path, record_path, write_engine
from snapvit_export.runtimes.tensorrt.plan_reader import parse_log

LOGS = Path(__file__).parents[1] / "fixtures" / "tensorrt_rtx"
ENGINE = b"not loaded by anything here"


def write(folder: Path, kernels: str | None = "fp16", **changes) -> Path:
    """An engine with its record, and the kernels of a real log; what the engine holds is never looked at."""
    compiler = "tensorrt_rtx 1.7.1.116"
    plan = None if kernels is None else parse_log((LOGS / f"{kernels}.log").read_text(), compiler)
    rtx = dict(package="tensorrt_rtx", version="1.7.1.116", device="any", capability="any", driver="none", kernels=plan)
    own = dict(onnx_sha256=hashlib.sha256(b"graph").hexdigest(), products={"fp16": 17})
    write_engine(folder / "s30.onnx", ENGINE, engine_record(**{**rtx, **own, **changes}))
    return engine_path(folder / "s30.onnx")


def test_an_engine_is_shown_with_what_each_block_became_and_whose_compiler_it_was(snapvit, tmp_path):
    outcome = snapvit("inspect", write(tmp_path))
    assert outcome.code == 0, outcome.err
    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["0", "9", "yes", "yes", "yes", "8", "in", "fp16"] in rows
    assert ["1", "17", "no", "yes", "no", "8", "in", "fp16"] in rows
    for part in (
        "s30.engine: fp16, batch 1, built by tensorrt_rtx 1.7.1.116 for any GPU",
        hashlib.sha256(b"graph").hexdigest(),
        "matrix products in the network: 17 in fp16",
        "were not compared with",
        "32 kernels, with a fused attention in 1 of 2 blocks",
        "This is the plan of tensorrt_rtx 1.7.1.116, as it compiles for RTX cards",
        "TensorRT 10.3 on a Jetson has another compiler",
    ):
        assert part in outcome.out


def test_an_engine_of_a_board_names_it_and_that_it_agreed(snapvit, tmp_path):
    on_board = dict(package="tensorrt", version="10.3.0", device="Orin", capability="8.7", agreed=True, most_batch=4)
    told = snapvit("inspect", write(tmp_path, kernels=None, **on_board)).out
    assert "batch 1, at most 4, built by tensorrt 10.3.0 for Orin (8.7)" in told
    assert "its outputs on a GPU agreed with ONNX Runtime's" in told
    assert "its kernels are not known" in told
    assert "RTX" not in told


def test_as_json_everything_of_the_record_is_there(snapvit, tmp_path):
    found = json.loads(snapvit("inspect", write(tmp_path, "int8-static", precision="int8-static"), "--json").out)
    assert (found["file"], found["size_bytes"]) == ("s30.engine", len(ENGINE))
    assert found["record"]["kernels"]["summary"]["products"] == {"fp32": 5, "int8": 12}
    assert [block["attention_fused"] for block in found["blocks"]] == [False, False]
    assert len(found["record"]["kernels"]["kernels"]) == found["record"]["kernels"]["summary"]["kernels"] == 43


def damage_nothing(path: Path) -> Path:
    return path.with_name("other.engine")


def without_record(path: Path) -> Path:
    record_path(path).unlink()
    return path


def damaged_record(path: Path) -> Path:
    record_path(path).write_text("{")
    return path


def other_kernels(path: Path) -> Path:
    told = json.loads(record_path(path).read_text())
    told["kernels"]["kernels"].pop()
    record_path(path).write_text(json.dumps(told))
    return path


def other_engine(path: Path) -> Path:
    path.write_bytes(ENGINE + b"!")
    return path


def a_folder(path: Path) -> Path:
    path.unlink()
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (damage_nothing, "other.engine: there is no such engine"),
        (without_record, "has no record s30.engine.json beside it"),
        (damaged_record, "s30.engine.json: not a valid EngineRecord"),
        (other_kernels, "the summary is not that of the kernels"),
        (other_engine, "it is not the engine that s30.engine.json describes. Build it again"),
        (a_folder, "there is no such engine"),
    ],
)
def test_what_is_no_engine_with_its_record_is_refused_in_one_line(snapvit, tmp_path, spoil, says):
    outcome = snapvit("inspect", spoil(write(tmp_path)))
    assert (outcome.code, outcome.out) == (1, "")
    assert says in outcome.error_line
    assert len(outcome.err.strip().splitlines()) == 1


def test_an_engine_of_the_jetson_agent_is_recognised_by_its_own_record(snapvit, tmp_path):
    path = without_record(write(tmp_path))
    recipe = {"onnx_sha256": "0", "tensorrt": "10.3.0", "device": "Orin", "sm_count": 8, "precision": "fp16"}
    recipe.update(batch=1, arguments=["--onnx=s30.onnx"])
    told = {"recipe": recipe, "sha256": hashlib.sha256(ENGINE).hexdigest(), "size_bytes": len(ENGINE), "seconds": 1.0}
    path.with_suffix(".json").write_text(json.dumps(told))
    outcome = snapvit("inspect", path)
    assert (outcome.code, outcome.out) == (1, "")
    assert "built by the Jetson agent in fp16, batch 1, by TensorRT 10.3.0 for Orin, as s30.json" in outcome.error_line
    assert "has no kernel plan" in outcome.error_line
    path.write_bytes(b"another")
    assert "has no record s30.engine.json beside it" in snapvit("inspect", path).error_line


def test_a_runtime_is_asked_about_onnx_files_alone(snapvit, tmp_path):
    outcome = snapvit("inspect", write(tmp_path), "--runtime", "tensorrt")
    assert (outcome.code, "--runtime is for ONNX files" in outcome.error_line) == (2, True)


def test_names_of_a_strangers_kernels_cannot_control_the_terminal(snapvit, tmp_path):
    outcome = snapvit("inspect", write(tmp_path, kernels=None, device="\x1b[2Jevil", version="1\u202e7"))
    assert outcome.code == 0
    assert "\x1b" not in outcome.out
    assert "\u202e" not in outcome.out
    assert "evil" in outcome.out
