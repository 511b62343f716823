"""Odd values of options: numbers that are none, and lists whose members are one."""

import pytest
from typer.main import get_command

from snapvit_export.cli.app import ENDLESS, app
from snapvit_export.cli.parsing import command_line, fractions, pairs, resolutions
from snapvit_export.errors import UsageError
from snapvit_export.workflows.export import Request, export

FLOATS = [
    (name, option.opts[0])
    for name, command in get_command(app).commands.items()
    for option in command.params
    if option.type.name in ("float", "float range")
]


def test_there_are_such_options():
    assert {("profile", "--pause"), ("profile", "--seconds"), ("validate", "--seconds")} <= {*FLOATS}


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [(*each, value) for each in FLOATS for value in ("nan", "-inf", *([] if each[1] in ENDLESS else ["inf"]))],
)
def test_no_option_takes_a_number_that_is_none(snapvit, tmp_path, command, option, value):
    needed = [] if command in ("rank", "evaluate") else [tmp_path]
    beside = {"choose": ["--budget", "10ms"], "run": ["digits"], "serve": ["--deadline", "10ms"]}
    outcome = snapvit(command, *needed, *beside.get(command, ()), option, value)
    assert outcome.code == 2
    assert option in outcome.error_line
    assert value in outcome.error_line


@pytest.mark.parametrize("text", ["nan", "0.1,inf", "0.3,,0.5", "x"])
def test_no_list_does_either(text):
    with pytest.raises(UsageError, match="is not a number"):
        fractions(text, "--sparsity")
    with pytest.raises(UsageError, match="is not a number"):
        pairs(f"0.3:{text.split(',')[-1] if ',,' not in text else 'nan'}", "--pair")


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (fractions, "0.5,0.50000001"),
        (fractions, "0.3,0.5,0.30"),
        (pairs, "0.3:0.2,0.3000000001:0.2"),
        (resolutions, "160,192,160x160"),
        (resolutions, "192x160,192x160"),
    ],
)
def test_two_of_a_list_that_are_one_variant_are_refused(parse, text):
    with pytest.raises(UsageError, match="which are one variant. Give one"):
        parse(text, "--these")


def test_lists_whose_members_differ_are_fine():
    assert fractions("0.5,0.501,0.05", "--flops") == [0.5, 0.501, 0.05]
    assert pairs("0.3:0.2,0.2:0.3", "--pair") == [(0.3, 0.2), (0.2, 0.3)]
    assert resolutions("160,192x160,160x192", "--resolution") == [160, (192, 160), (160, 192)]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(("export", f"--{name}") for name in ("sparsity", "flops", "params", "tokens")),
        *(("rank", "--rounds"), ("compare", "--sparsity"), ("compare", "--flops"), ("choose", "--tokens")),
    ],
)
def test_every_list_of_fractions_refuses_them(snapvit, tmp_path, monkeypatch, command, option):
    monkeypatch.chdir(tmp_path)
    needed = ["family", "--budget", "10ms"] if command == "choose" else []
    outcome = snapvit(command, *needed, option, "0.5,0.50000001")
    assert outcome.code == 2
    assert f"{option} has 0.5 and 0.50000001, which are one variant" in outcome.error_line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (dict(sparsity=[0.5, 0.50000001]), "--sparsity has 0.5 and 0.50000001"),
        (dict(pairs=[(0.3, 0.2), (0.3, 0.2)]), "--pair has 0.3:0.2 and 0.3:0.2"),
        (dict(resolution=[32, (32, 32)]), "--resolution has 32 and 32x32"),
    ],
)
def test_the_library_refuses_them_before_any_work(tmp_path, asked, shown):
    with pytest.raises(UsageError, match=shown):
        export(Request(out=tmp_path / "out", **asked))
    assert list(tmp_path.iterdir()) == []


def test_names_that_mean_one_plan_are_told(snapvit, tiny_folder, image_folder, tmp_path, short_timings):
    given = ["--model", tiny_folder, "--data", image_folder, "--images", 8, "--recipe", "local", "--no-depth"]
    outcome = snapvit("export", *given, "--sparsity", "0,0.5,0.50001", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert "s0 keeps the same heads, neurons and tokens as dense" in outcome.err
    assert "s50.001 keeps the same heads, neurons and tokens as s50" in outcome.err


def test_a_command_line_with_bytes_that_are_no_text_can_be_written_down(monkeypatch):
    monkeypatch.setattr("sys.argv", ["snapvit", "export", "--out", "caf\udce9"])
    assert command_line().encode().decode() == r"snapvit export --out 'caf\udce9'"
