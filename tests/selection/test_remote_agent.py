"""A family timed on a board over ssh: a real sshd on this machine, behind it a fake board with a fake trtexec.

What is shown is how files go there, how runs end and go on, and what is refused. All times are invented.
"""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fake_board import FakeBoard, fake_board, is_alive, known_answers, ssh_that_knows, wait_until
from helpers.families import make_family
from helpers.ssh_server import needs_sshd
from snapvit_export.errors import SnapvitError
from snapvit_export.family.folder import files_to_time, read_family
from snapvit_export.progress import Silent
from snapvit_export.runtimes import board_side, jetson_agent
from snapvit_export.selection import remote_agent
from snapvit_export.selection.known_profiles import FamilyProfile
from snapvit_export.selection.remote import Host
from snapvit_export.selection.remote_agent import check_board_places, profile_on_board

SHORT = ("--seconds", "0.6", "--rounds", "3", "--warm-up", "0")
TIMINGS = 2 * 3 * 2  # of two variants in three rounds, with copying and without


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A tiny family as an export makes it for TensorRT. To be read, or copied."""
    folder = tmp_path_factory.mktemp("made")
    return make_family(folder, "local", correct=False, head=30.0, sparsity=[0.3], flavour="portable", reference=True)


@pytest.fixture
def family(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "family")


@pytest.fixture
def board(made, tmp_path):
    with fake_board(tmp_path / "board") as found:
        found.behave(**known_answers(made))
        yield found


class Heard(Silent):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def phase(self, what: str, total: int | None = None) -> None:
        self.lines.append(what)

    def describe(self, what: str) -> None:
        self.lines.append(what)

    def note(self, text: str) -> None:
        self.lines.append(text)


def timed(board: FakeBoard, family: Path, progress: Heard | None = None) -> remote_agent.BoardResults:
    return profile_on_board(family, board.host, [*SHORT, *board.root], progress or Heard())


@needs_sshd
def test_a_family_is_built_and_timed_there_and_the_same_command_copies_and_builds_nothing_again(
    board, family, tmp_path
):
    heard = Heard()
    found = timed(board, family, heard)
    wanted = {variant.name: variant.sha256 for variant in read_family(family).variants}
    assert {name: profile.sha256 for name, profile in found.profile.profiles.items()} == wanted
    assert found.profile.profiles["dense"].p50_ms == pytest.approx(5.375, rel=0.01)  # 5 invented, and two copies
    assert found.profile.target.runtime == "tensorrt"
    if board.root:
        assert found.profile.target.device.accelerator.name == "A fake Jetson"
    assert (board.builds, board.timed) == (["dense", "s30"], TIMINGS)
    assert any(line.startswith("copying ") for line in heard.lines)
    assert "dense: building" in heard.lines
    assert any(line.startswith("round 3 of 3: s30 ") for line in heard.lines)
    assert (board.kept / "engines" / "s30.engine").is_file()
    assert found.engines == str(board.kept / "engines")
    copied = {path.name for path in (board.kept / "family").iterdir()}
    assert copied == {"manifest.json", *files_to_time(read_family(family))}
    found.save(tmp_path / "orin.json")
    assert FamilyProfile.load(tmp_path / "orin.json") == found.profile
    assert {"looks", "builds"} <= json.loads((tmp_path / "orin.record.json").read_text()).keys()

    again = Heard()
    timed(board, family, again)
    assert (board.builds, board.timed) == (["dense", "s30"], 2 * TIMINGS)
    assert not any(line.startswith("copying ") for line in again.lines)
    assert "dense: engine built before" in again.lines


@needs_sshd
def test_the_command_times_there_and_chooses(board, family, tmp_path, snapvit, monkeypatch):
    monkeypatch.setenv("PATH", ssh_that_knows(board, tmp_path / "here"))
    asked = ("profile", family, "--target", board.target, "--python", sys.executable, "--seconds", 0.6)
    open_ended = snapvit(*asked, "--out", tmp_path / "first.json")
    assert open_ended.code == 0, open_ended.err
    assert f"snapvit choose {family} --budget 10ms --profile {tmp_path / 'first.json'}" in open_ended.out
    assert f"snapvit fleet {family} --budget {tmp_path / 'first.json'}=10ms" in open_ended.out
    assert str(board.kept / "engines") in open_ended.out
    assert read_family(family).choice is None
    folder = board.kept
    chosen = snapvit(*asked, "--out", tmp_path / "orin.json", "--budget", "4.8ms", "--quiet")
    assert chosen.code == 0, chosen.err
    assert read_family(family).choice.variant == "s30"
    assert FamilyProfile.load(tmp_path / "orin.json").target.runtime == "tensorrt"
    missed = snapvit(*asked, "--out", tmp_path / "orin.json", "--budget", "1ms", "--quiet")
    assert missed.code == 1
    assert "1 ms" in missed.error_line
    assert board.kept == folder  # one folder, whatever was chosen in the family
    assert board.builds == ["dense", "s30"]


def test_a_place_that_a_choice_may_not_write_is_told_before_the_board_is_asked(family, tmp_path, snapvit, monkeypatch):
    monkeypatch.setattr(remote_agent, "profile_on_board", lambda *_: pytest.fail("the board was asked"))
    (family / "run_engine.py").write_text("print('mine')")
    asked = ("profile", family, "--target", "jetson://orin", "--out", tmp_path / "orin.json", "--budget", "5ms")
    outcome = snapvit(*asked)
    assert outcome.code == 1
    assert "run_engine.py: is there already and not ours. Move it away" in outcome.error_line


def started(board: FakeBoard, family: Path, tmp_path: Path) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "snapvit_export.cli", "profile", family, "--target", board.target]
    command += ["--python", sys.executable, "--seconds", "0.6", "--out", tmp_path / "orin.json"]
    path = ssh_that_knows(board, tmp_path / "here") if not (tmp_path / "here").exists() else None
    path = path or f"{tmp_path / 'here'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [str(word) for word in command], env={**os.environ, "PATH": path}, stderr=subprocess.PIPE, text=True
    )


@needs_sshd
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_command_ends_so_does_what_it_started_there_and_nothing_else(board, family, tmp_path, how):
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        board.behave(hang_at={"--exportTimes": 6})
        running = started(board, family, tmp_path)
        processes = board.hanging()
        assert all(map(is_alive, processes))
        running.send_signal(how)
        _, said = running.communicate(timeout=30)
        wait_until(lambda: not any(map(is_alive, processes)))
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert not (tmp_path / "orin.json").exists()
    if how != signal.SIGKILL:
        assert running.returncode == 128 + how
        assert "The same command goes on where it stopped" in said
    board.behave(hang_at={})
    before = board.timed
    again = started(board, family, tmp_path)
    _, said = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert "going on after" in said
    assert board.builds == ["dense", "s30"]
    assert board.timed - before == 2 * 5 * 2 - 4  # two visits were whole, and are not made again
    assert set(FamilyProfile.load(tmp_path / "orin.json").profiles) == {"dense", "s30"}


@needs_sshd
def test_a_connection_that_is_lost_is_told_and_ends_the_work(board, family):
    board.behave(hang_at={"--onnx": 1})
    processes: list[int] = []

    def cut(line: str) -> None:
        if line != "dense: building":
            return
        processes.extend(board.hanging())
        for pid in _children(os.getpid(), "ssh"):
            os.kill(pid, signal.SIGKILL)

    heard = Heard()
    heard.describe = cut
    with pytest.raises(SnapvitError, match=r"127\.0\.0\.1: the connection was lost: .*goes on where it stopped"):
        timed(board, family, heard)
    wait_until(lambda: not any(map(is_alive, processes)))
    board.behave(hang_at={})
    assert timed(board, family).profile.profiles


@needs_sshd
def test_an_agent_that_the_kernel_ends_is_told_with_what_helps(board, family):
    board.behave(hang_at={"--onnx": 1})
    heard = Heard()
    heard.describe = lambda line: os.kill(board.hanging()[1], signal.SIGKILL) if line == "dense: building" else None
    with pytest.raises(
        SnapvitError, match=r"127\.0\.0\.1: the kernel ended the agent, probably for lack of memory\. .*swap"
    ):
        timed(board, family, heard)


@needs_sshd
def test_a_trtexec_that_the_kernel_ends_is_told_with_what_helps(board, family):
    board.behave(hang_at={"--onnx": 1})
    heard = Heard()
    heard.describe = lambda line: os.kill(board.hanging()[0], signal.SIGKILL) if line == "dense: building" else None
    with pytest.raises(SnapvitError, match=r"cannot build it: the kernel ended trtexec, .*swap\. All of it: "):
        timed(board, family, heard)


def _children(of: int, name: str) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            command, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if command == name and int(rest.split()[1]) == of:
            found.append(int(stat.parent.name))
    return found


@needs_sshd
def test_a_copy_that_is_damaged_there_is_repaired_and_the_rest_is_left(board, family):
    timed(board, family)
    there = board.kept / "family"
    (there / "s30.onnx").write_bytes(b"damaged")
    (there / ".incoming-left").write_bytes(b"of a run that was killed")
    before = {path.name: path.stat().st_ino for path in there.iterdir()}
    heard = Heard()
    timed(board, family, heard)
    assert (there / "s30.onnx").read_bytes() == (family / "s30.onnx").read_bytes()
    after = {path.name: path.stat().st_ino for path in there.iterdir()}
    assert set(before) - set(after) == {".incoming-left"}
    assert {name for name in after if after[name] != before[name]} == {"s30.onnx"}


@needs_sshd
def test_bytes_that_are_not_what_their_hash_says_do_not_appear_there(board, family):
    files = {"family/dense.onnx": family / "dense.onnx"}
    folder = json.loads(remote_agent._there(board.host, "look", "board-x", given=b"{}"))["folder"]
    with pytest.raises(SnapvitError, match=r"127\.0\.0\.1: dense.onnx did not arrive as it was read: .* again$"):
        remote_agent._send(board.host, folder, files, {"family/dense.onnx": 64 * "0"}, Silent())
    assert list((Path(folder) / "family").iterdir()) == []


@needs_sshd
@pytest.mark.parametrize("name", ["../x", "family/../../x", "/tmp/x", "other/x", "family/.x", "family/x y"])
def test_names_that_leave_the_folder_are_refused_there(board, family, name):
    folder = json.loads(remote_agent._there(board.host, "look", "board-x", given=b"{}"))["folder"]
    with pytest.raises(SnapvitError, match="is no file of a family"):
        remote_agent._send(board.host, folder, {name: family / "dense.onnx"}, {name: ""}, Silent())


OLD = """#!/bin/sh
exec {python} -c "import sys; sys.version_info = (3, 6, 9, 'final', 0); exec(sys.argv[2])" "$@"
"""


@needs_sshd
def test_what_the_board_lacks_is_one_line(board, family, tmp_path):
    (tmp_path / "old").write_text(OLD.format(python=sys.executable))  # a fake: it only says that it is old
    (tmp_path / "old").chmod(0o755)
    (tmp_path / "loud").write_text("#!/bin/sh\necho Welcome!\n")
    (tmp_path / "loud").chmod(0o755)
    for python, says in (
        (str(tmp_path / "old"), r"old is 3\.6\.9 there, and the agent needs 3\.8\. Give --python PATH"),
        (str(tmp_path / "loud"), "printed 'Welcome!' where a version was expected"),
        ("nopython", "no program is called nopython there. Give --python PATH"),
    ):
        with pytest.raises(SnapvitError, match=rf"^127\.0\.0\.1: .*{says}"):
            profile_on_board(family, replace(board.host, python=python), [], Silent())
    (board.folder / "bin" / "trtexec").unlink()
    with pytest.raises(SnapvitError, match=r"^127\.0\.0\.1: no trtexec in PATH .* or give --trtexec PATH$"):
        timed(board, family)
    with pytest.raises(SnapvitError, match="no connection: .*refused.*Try it by hand: ssh -p 1 "):
        profile_on_board(family, replace(board.host, port=1), [], Silent())


@needs_sshd
def test_what_the_agent_refuses_is_one_line_with_its_exit_code(board, family, tmp_path, snapvit, monkeypatch):
    monkeypatch.setenv("PATH", ssh_that_knows(board, tmp_path / "here"))
    board.behave(fails="s30")
    asked = ("profile", family, "--target", board.target, "--python", sys.executable, "--out", tmp_path / "orin.json")
    outcome = snapvit(*asked)
    assert outcome.code == 1
    assert "cannot build it: invented: no kernel for blocks.1.fc1" in outcome.error_line
    assert outcome.err.count("error: ") == 1
    assert not (tmp_path / "orin.json").exists()


@needs_sshd
def test_a_full_disk_there_is_told_before_anything_is_sent(board, family, monkeypatch):
    told = remote_agent._there

    def there(host, *words, given=b""):
        answer = told(host, *words, given=given)
        return json.dumps(dict(json.loads(answer), free_bytes=10)).encode() if words[0] == "look" else answer

    monkeypatch.setattr(remote_agent, "_there", there)
    with pytest.raises(SnapvitError, match="needs .* MB in /.*, and 0 MB are free. Make room there"):
        timed(board, family)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"board.json": '{"profiles": {}}'}, "not a valid FamilyProfile"),
        ({"board.record.json": "[]"}, "not a valid dict"),
        ({"../board.json": ""}, "a name of letters"),
        ([], "not a valid"),
        ({}, "it has no profile. Run the command again"),
        ({"board.record.json": "{}"}, "it has no profile. Run the command again"),
        ({"board.desktop": '{"profiles": {}}'}, "it has no profile. Run the command again"),  # no file of the agent's
    ],
)
def test_answers_that_are_no_profile_of_this_family_are_refused(made, monkeypatch, answer, says):
    monkeypatch.setattr(remote_agent, "_there", lambda *_: json.dumps(answer).encode())
    with pytest.raises(SnapvitError, match=f"^the answer of orin: .*{says}"):
        remote_agent._fetched(Host("orin"), "/there", "board", read_family(made), made)


@pytest.mark.parametrize(
    ("timed", "says"),
    [("modes.15W.json", "it has no profile"), ("modes.25W.json", "not a valid FamilyProfile"), ("../x", "a name of")],
)
def test_of_modes_only_those_of_this_sweep_are_brought_back(made, monkeypatch, timed, says):
    """One of other options, that was cut off, has left modes.25W.json there."""
    table = {"format_version": 1, "modes": [{"mode": "x", "file": timed}, {"mode": "7W", "left_out": "a restart"}]}
    answer = {"modes.modes.json": json.dumps(table), "modes.25W.json": '{"profiles": {}}', "modes.txt": ""}
    monkeypatch.setattr(remote_agent, "_there", lambda *_: json.dumps(answer).encode())
    with pytest.raises(SnapvitError, match=says):
        remote_agent._fetched(Host("orin"), "/there", "modes", read_family(made), made)
    of_15w = {".modes.json": "", ".15W.json": "", ".15W.record.json": ""}
    assert remote_agent._of_sweep({**of_15w, ".25W.json": "", ".25W.record.json": ""}, {".15W.json", ""}) == of_15w


def test_a_file_that_no_agent_wrote_is_not_written_over(tmp_path):
    out = tmp_path / "orin.json"
    check_board_places(out)
    (tmp_path / "orin.record.json").write_text('{"diary": 1}')
    with pytest.raises(
        SnapvitError, match=r"orin\.record\.json: is there already, and not a profile or a record that snapvit made"
    ):
        check_board_places(out)
    check_board_places(out, force=True)
    (tmp_path / "orin.record.json").write_text('{"looks": [], "builds": {}}')
    check_board_places(out)


def test_in_power_modes_only_what_a_sweep_writes_is_looked_at_before(tmp_path):
    out = tmp_path / "orin.json"
    for name in ("orin.json", "orin.record.json", "orin.modes.partial.json", "other.15W.json"):
        (tmp_path / name).write_text('{"diary": 1}')
    check_board_places(out, sweep=True)
    for name in ("orin.15W.json", "orin.15W.record.json", "orin.modes.json"):
        (tmp_path / name).write_text('{"diary": 1}')
        with pytest.raises(SnapvitError, match=rf"{name}: is there already"):
            check_board_places(out, sweep=True)
        check_board_places(out, force=True, sweep=True)
        (tmp_path / name).unlink()


def test_a_file_that_may_not_be_written_over_stops_no_other_and_force_writes_it(tmp_path):
    others = {".15W.record.json": b"{}", ".25W.record.json": b"{}", ".modes.json": b"{}"}
    found = remote_agent.BoardResults({}, others, "", "")
    (tmp_path / "orin.15W.record.json").write_text('{"diary": 1}')
    with pytest.raises(SnapvitError, match=r"orin\.15W\.record\.json: is there already"):
        found.save(tmp_path / "orin.json")
    assert (tmp_path / "orin.15W.record.json").read_text() == '{"diary": 1}'
    assert (tmp_path / "orin.25W.record.json").read_bytes() == b"{}" == (tmp_path / "orin.modes.json").read_bytes()
    found.save(tmp_path / "orin.json", force=True)
    assert (tmp_path / "orin.15W.record.json").read_bytes() == b"{}"


def test_the_side_of_the_board_is_one_text_in_the_grammar_of_python_3_8_with_the_standard_library_alone():
    tree = ast.parse(Path(board_side.__file__).read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "nothing of snapvit is there on the board"
            imported.add((node.module or "").split(".")[0])
    assert imported <= sys.stdlib_module_names
    assert Path(jetson_agent.__file__).name == board_side.AGENT


# --- The side of the board, without a connection ----------------------------------------------------------------------

ENDLESS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.fixture
def at_work(tmp_path):
    """Start the board's side with a fake agent that never ends; `silence` in seconds."""
    for name in (board_side.FAMILY, board_side.RESULTS):
        (tmp_path / name).mkdir()
    (tmp_path / board_side.AGENT).write_text(ENDLESS)
    begun = []

    def start(silence: float) -> tuple[subprocess.Popen[str], list[int]]:
        side = subprocess.Popen(
            [sys.executable, board_side.__file__, "work", tmp_path, "board", str(silence)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        begun.append(side)
        return side, [int(word) for word in side.stdout.readline().split() if word.isdigit()]

    yield start
    for side in begun:
        side.stdin.close()
        side.wait()
        side.stdout.close()


def test_a_table_in_letters_of_another_encoding_is_given_back(tmp_path):
    results = tmp_path / board_side.RESULTS
    results.mkdir()
    (results / "board.txt").write_bytes("Gerät".encode("latin-1"))
    (results / "board.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, board_side.__file__, "give", tmp_path, "board"], capture_output=True, check=True
    )
    assert json.loads(done.stdout) == {"board.json": "{}", "board.txt": "Ger\N{REPLACEMENT CHARACTER}t"}


def test_when_no_sign_of_life_comes_any_more_the_work_ends(at_work):
    side, processes = at_work(1.0)
    for _ in range(3):
        time.sleep(0.5)
        side.stdin.write("\n")
        side.stdin.flush()
    assert all(map(is_alive, processes))  # longer than the silence, and heard of in between
    wait_until(lambda: not any(map(is_alive, processes)))
    assert side.wait(30) != 0


SLOW_TO_END = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(3)))
print(flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("grace", "code"), [(30.0, 3), (0.1, 128 + signal.SIGKILL)])
def test_an_agent_has_its_grace_to_end_in_order(grace, code):
    command = [sys.executable, "-c", SLOW_TO_END]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as agent:
        agent.stdout.readline()
        assert board_side._end(agent, grace) == code


def test_an_agent_that_sets_power_modes_has_the_time_that_setting_one_again_may_take():
    most = 120 + 3 * 20  # nvpmodel sets, is asked twice, and jetson_clocks
    assert board_side.grace_of(["--seconds", "3", "--power-modes", "0,2"]) > most
    assert board_side.grace_of(["--seconds", "3"]) == board_side.GRACE_SECONDS < most


def test_when_the_boards_side_is_killed_the_agent_ends_too(at_work):
    side, processes = at_work(60.0)
    side.kill()
    wait_until(lambda: not is_alive(processes[0]))
    os.kill(processes[1], signal.SIGKILL)  # the fake agent does not end its children as the real one does


def test_two_runs_in_one_folder_wait_for_each_other(at_work):
    first, processes = at_work(60.0)
    second, none = at_work(60.0)
    assert none == []  # it says that it waits
    assert all(map(is_alive, processes))
    first.stdin.close()
    wait_until(lambda: not any(map(is_alive, processes)))
    assert len(second.stdout.readline().split()) == 2
    second.stdin.close()
    assert second.wait(30) != 0
