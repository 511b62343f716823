"""Standard streams that are closed, full, left by their reader or of another encoding, and text that means harm."""

import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from contextlib import contextmanager

import msgspec
import pytest

from helpers.report_factory import make_manifest
from snapvit_export.cli import progress as shown_progress
from snapvit_export.report.markdown import print_comparison
from snapvit_export.report.terminal import print_evaluation, print_family, print_rows, print_validation

HOSTILE = "evil\x1b[2J\x07\x9b31m\u202e\x7f\ny\rz"
PROGRAM = f"{sys.executable} -m snapvit_export.cli"


def controls(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c == "\u202e"} - {"\n"}


def run(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell runs `snapvit` of this line."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    words = ["bash", "-c", line.replace("snapvit", PROGRAM, 1)]
    return subprocess.run(words, capture_output=True, env=env, timeout=120, encoding="utf-8", errors="surrogateescape")


@pytest.fixture
def lines(plain_family):
    """Quick commands that print: a table, sentences, JSON, the parser's help."""
    return {
        "inspect": f"snapvit inspect {plain_family}/dense.onnx",
        "json": f"snapvit inspect {plain_family}/dense.onnx --json",
        "fleet": f"snapvit fleet {plain_family} --budget cpu=1000ms",
        "help": "snapvit --help",
    }


@pytest.mark.parametrize("name", ["inspect", "json", "help"])
def test_a_full_disk_under_standard_output_is_one_line(lines, name):
    done = run(f"{lines[name]} > /dev/full")
    assert done.returncode == 1
    assert done.stderr.endswith("No space left on device. Send it elsewhere\n") or name == "help"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("name", ["inspect", "json", "fleet", "help"])
def test_a_closed_standard_output_is_silence(lines, name):
    done = run(f"{lines[name]} >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_standard_output_does_not_become_the_first_file_that_is_written(lines, tmp_path):
    family = lines["fleet"].split()[2]
    done = run(f"snapvit report {family} --format json --out {tmp_path}/r.json <&- >&- 2>&-")
    assert done.returncode == 0
    assert json.loads((tmp_path / "r.json").read_text())["model"]


def test_a_refusal_with_closed_streams_keeps_its_exit_code():
    assert run("snapvit inspect nowhere.onnx >&- 2>&-").returncode == 1
    assert run("snapvit nonsense >&- 2>&-").returncode == 2
    assert run("snapvit inspect nowhere.onnx 2>/dev/full").returncode == 1


@pytest.mark.parametrize("name", ["inspect", "json", "help"])
def test_a_reader_that_leaves_early_is_no_error(lines, name):
    done = run(f"{lines[name]} | true; exit ${{PIPESTATUS[0]}}")
    assert done.stderr == ""
    assert done.returncode in (0, 1)  # 0 where all was written before the reader left


@pytest.mark.parametrize("name", ["inspect", "json", "fleet", "help"])
def test_ascii_streams_take_everything(lines, name):
    plain = dict(PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = run(lines[name], **plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert done.stdout
    if name == "json":
        assert json.loads(done.stdout) == json.loads(run(lines[name]).stdout)


def test_json_with_other_letters_is_still_json_on_an_ascii_stream(tmp_path):
    script = (
        "import sys; from snapvit_export.cli.output import print_json; from snapvit_export.visible import *\n"
        "open_streams(); print_json({'né': 'a\\x9b\\u202e😀'}); say('± é 😀 █')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert done.stderr == ""
    *told, last = done.stdout.splitlines()
    assert json.loads("\n".join(told)) == {"né": "a\x9b\u202e😀"}
    assert last == r"+- \xe9 \U0001f600 #"


def hostile_manifest():
    manifest = make_manifest(names={1: HOSTILE})
    device = msgspec.structs.replace(manifest.target.device, cpu=HOSTILE, governor=HOSTILE)
    target = msgspec.structs.replace(manifest.target, device=device)
    choice = msgspec.structs.replace(manifest.choice, doubt=HOSTILE, decided=False)
    return msgspec.structs.replace(manifest, model=HOSTILE, target=target, choice=choice, seconds={HOSTILE: 99.0})


@pytest.mark.parametrize("printing", [print_family, print_validation])
@pytest.mark.parametrize("width", [None, 80])
def test_tables_of_a_strangers_family_cannot_control_the_terminal(printing, width):
    file = io.StringIO()
    printing(hostile_manifest(), file=file, width=width)
    assert controls(file.getvalue()) == set()
    assert "evil" in file.getvalue()


def test_other_tables_and_lines_neither(capsys):
    from snapvit_export.checks.inspect import Inspection, Port
    from snapvit_export.evaluate.comparison import Comparison
    from snapvit_export.report.terminal import print_inspection, print_profiles
    from snapvit_export.selection.known_profiles import FamilyProfile

    manifest = hostile_manifest()
    profiles = {HOSTILE: manifest.variants[0].profile}
    print_profiles(FamilyProfile(model=HOSTILE, target=manifest.target, profiles=profiles))
    print_evaluation(msgspec.structs.replace(manifest.variants[0].evaluation, source=HOSTILE))
    print_rows(("a",), [(HOSTILE,)], set())
    dense = msgspec.structs.replace(manifest.variants[0].evaluation, source=HOSTILE)
    print_comparison(
        Comparison(
            model=HOSTILE, weights_sha256="", calibration={}, judged_on={}, settings={}, axis="flops", dense=dense
        )
    )
    port = Port(name=HOSTILE, type="float", shape=(1, HOSTILE))
    print_inspection(
        Inspection(
            file=HOSTILE,
            size_bytes=1,
            opset=17,
            nodes=1,
            operators={},
            inputs=(port,),
            outputs=(port,),
            weights={HOSTILE: 1},
            reads=(HOSTILE,),
            model=HOSTILE,
            variant=HOSTILE,
            precision="fp32",
            correction=HOSTILE,
        )
    )
    told = capsys.readouterr().out
    assert controls(told) == set()
    assert told.count("evil") >= 9


def test_errors_are_one_line_whatever_they_quote(snapvit, tmp_path):
    for words in (("inspect", HOSTILE), ("report", tmp_path / HOSTILE), (HOSTILE,), ("doctor", f"--{HOSTILE}"),
                  ("doctor", HOSTILE), ("export", "--budget", HOSTILE), ("profile", "x", "--target", HOSTILE),
                  ("rank", "--seed", HOSTILE), ("inspect", "\udcff\udc9b")):  # fmt: skip
        outcome = snapvit(*words)
        assert outcome.code in (1, 2)
        assert outcome.out == ""
        assert controls(outcome.err) == set()
        assert outcome.error_line  # it is one


def told_by(progress) -> None:
    progress.phase(HOSTILE, 3)
    progress.advance()
    progress.describe(HOSTILE)
    progress.note(HOSTILE)
    progress.latencies({HOSTILE: (1.0, 0.9, 1.1)}, 2.0)
    progress.phase(HOSTILE)


@pytest.mark.parametrize("as_json", [False, True])
def test_progress_in_lines_cannot_control_the_terminal(capsys, as_json):
    with shown_progress.shown(quiet=False, as_json=as_json) as progress:
        told_by(progress)
    told = capsys.readouterr().err
    assert controls(told) == set()
    assert "evil" in told
    if as_json:
        assert {json.loads(line).get("note") for line in told.splitlines()} == {None, HOSTILE}


def test_live_progress_neither():
    from rich.console import Console

    file = io.StringIO()
    with shown_progress._live(Console(file=file, force_terminal=True, width=300, color_system=None)) as progress:
        told_by(progress)
    own = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", file.getvalue().replace("\x1b[2J", "LEAK"))
    assert controls(own) == set()
    assert "LEAK" not in own
    assert "evil" in own


@contextmanager
def as_program(tmp_path, name: str, text: str):
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
    yield


def test_what_ssh_says_cannot_control_the_terminal(snapvit, lines, tmp_path, monkeypatch):
    with as_program(tmp_path, "ssh", "#!/bin/sh\nprintf 'gone \\033[2J\\302\\2331m\\n' >&2\nexit 255\n"):
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        outcome = snapvit("profile", lines["fleet"].split()[2], "--target", "ssh://pi@board", "--out", tmp_path / "p")
    assert outcome.code == 1
    assert r"no connection: gone \x1b[2J\x9b1m" in outcome.error_line
    assert controls(outcome.err) == set()
