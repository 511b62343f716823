"""`snapvit models`, `snapvit doctor`, and the program itself."""

import json

import pytest
from typer.main import get_command

import snapvit_export
from helpers.fake_packages import FakePackages
from snapvit_export.cli.app import MEANS_BOTH, app


@pytest.mark.slow  # it builds every known model, without weights
def test_models_lists_families_with_sizes(snapvit):
    outcome = snapvit("models")
    assert outcome.code == 0
    for family in (
        "AugReg",
        "DeiT",
        "DeiT distilled",
        "DeiT-III",
        "DINO",
        "DINOv2",
        "MAE",
        "CLIP",
        "SigLIP 2",
        "EVA-02",
        "DINOv3",
    ):
        assert family in outcome.out
    base = next(line for line in outcome.out.splitlines() if "deit_base_patch16_224" in line)
    assert "86.6 M" in base
    assert "35.1" in base
    known = {line.split()[1]: line for line in outcome.out.splitlines() if "/" in line and " px" in line}
    assert "86.6 M" in known["google/vit-base-patch16-224"]
    assert "5.9 M" in known["facebook/deit-tiny-distilled-patch16-224"]
    assert "21.6 M" in known["facebook/dinov3-vits16-pretrain-lvd1689m"]
    assert "303.2 M" in known["openai/clip-vit-large-patch14"]
    assert "ONNX files" in outcome.out


def test_models_can_be_filtered(snapvit):
    found = json.loads(snapvit("models", "deit_tiny*", "--json").out)
    assert [entry["name"] for entry in found] == ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]
    assert found[0]["params"] == 5_717_416
    found = json.loads(snapvit("models", "dinov2_with*", "--json").out)
    assert [(entry["source"], entry["family"]) for entry in found] == [("transformers", "dinov2_with_registers")]
    outcome = snapvit("models", "resnet")
    assert outcome.code == 1
    assert "no model matches 'resnet'" in outcome.error_line


def test_doctor_tells_what_works(snapvit):
    found = json.loads(snapvit("doctor", "--json").out)
    assert found["snapvit"] == snapvit_export.__version__
    assert found["runtimes"][0]["state"] == "works"
    assert all(command["works"] for command in found["commands"])
    table = snapvit("doctor").out
    assert "usable cores" in table
    assert "runtime onnxruntime" in table
    states = {runtime["runtime"]: runtime for runtime in found["runtimes"]}
    assert set(states) == {"onnxruntime", "openvino", "tensorrt", "onnxruntime-cuda", "onnxruntime-tensorrt"}
    assert found["packages"]["openvino"]
    assert states["openvino"]["state"] == "works"
    if found["packages"]["onnxruntime-gpu"] is None:
        assert states["onnxruntime-cuda"]["state"] == "absent"
        assert "ort-gpu" in states["onnxruntime-cuda"]["remedy"]


def test_doctor_tells_what_is_missing(snapvit, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    commands = {c["command"]: c for c in json.loads(snapvit("doctor", "--json").out)["commands"]}
    assert commands["models"]["missing"] == ["timm"]
    assert commands["models"]["remedy"] == "pip install 'snapvit-export[prune]'"
    assert "lacks timm. Try: pip install 'snapvit-export[prune]'" in snapvit("doctor").out


def test_doctor_says_when_a_runtime_is_broken_and_what_cures_it(snapvit, tmp_path, monkeypatch):
    FakePackages(tmp_path / "fakes", monkeypatch).add("onnxruntime-gpu", "1.23.0")  # its metadata alone
    runtime = json.loads(snapvit("doctor", "--json").out)["runtimes"][0]
    assert runtime["state"] == "broken"
    assert "both installed" in runtime["detail"]
    assert runtime["remedy"].startswith("pip uninstall -y onnxruntime onnxruntime-gpu && pip install")


def test_version_and_help(snapvit):
    assert snapvit("--version").out.strip() == f"snapvit {snapvit_export.__version__}"
    assert "Usage: snapvit" in snapvit("--help").out
    assert snapvit("nonsense").code == 2


def test_latencies_are_drawn_with_their_intervals_and_the_budget():
    from snapvit_export.cli.progress import drawn

    lines = drawn({"t61": (10.4, 10.2, 10.9), "dense": (20.0, 19.9, 20.1)}, budget_ms=10.0)
    assert lines[0].startswith("  t61   ━")
    assert "10.40 ms (10.20 to 10.90)" in lines[0]
    assert {line.index("│") for line in lines[:2]} == {lines[2].index("└")}
    assert "budget 10 ms" in lines[2]
    assert len(drawn({"a": (1.0, 1.0, 1.0)}, None)) == 1


def options_that_mean_both() -> list[tuple[str, str]]:
    """Command and option, of all that have room for one source, file or list."""
    from typer.main import get_command

    from snapvit_export.cli.app import MEANS_BOTH, app

    return [
        (name, option.opts[0])
        for name, command in get_command(app).commands.items()
        for option in command.params
        if option.opts[0] in MEANS_BOTH and not option.multiple
    ]


@pytest.mark.parametrize(("command", "option"), options_that_mean_both())
def test_an_option_with_room_for_one_source_or_list_refuses_a_second(snapvit, command, option):
    outcome = snapvit(command, option, "1", option, "2")
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.error_line == f"error: {option} is given twice, and snapvit {command} takes one. Give it once"


def test_the_known_cases_are_among_them():
    found = options_that_mean_both()
    assert {("evaluate", "--data"), ("validate", "--data"), ("compare", "--on"), ("fleet", "--budget")} <= set(found)
    assert not {("export", "--data"), ("rank", "--data"), ("pack", "--data"), ("compare", "--data")} & set(found)


def test_options_for_several_sources_plain_flags_and_settings_may_be_repeated(snapvit, tmp_path):
    nowhere = snapvit(
        "rank", "--data", tmp_path / "a", "--data", tmp_path / "b", "--quiet", "--quiet", "--seed", 1, "--seed", 2
    )
    assert "no such" in nowhere.error_line
    assert snapvit("doctor", "--json", "--json").code == 0


def test_every_option_that_refuses_a_second_value_is_one_of_some_command():
    options = {name for command in get_command(app).commands.values() for each in command.params for name in each.opts}
    assert options >= MEANS_BOTH


def test_the_help_of_every_command_fits_its_line(snapvit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = snapvit("--help").out
    assert "..." not in text.replace("[ARGS]...", "")
    assert max(map(len, text.splitlines())) <= 80
    assert "--install-completion" in text
