"""Targets and Pythons that would be options or commands for ssh, and machines that answer without end."""

import os
import shlex

import pytest

from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.selection import remote
from snapvit_export.selection.remote import Host

HOSTILE = [
    "ssh://-oProxyCommand=touch proof",
    "ssh://-oProxyCommand=touch%20proof",
    "ssh://-F/etc/passwd",
    "ssh://-h",
    "ssh://u@-h",
    "ssh://-l@h",
    "ssh://h;touch proof",
    "ssh://h|touch proof",
    "ssh://h&touch proof",
    "ssh://h`touch proof`",
    "ssh://$(touch proof)",
    "ssh://h\ntouch proof",
    "ssh://h\0",
    "ssh://h/../../etc",
    "ssh://h:22;touch proof",
    "ssh://h:-1",
    "ssh://u:password@h",
    "ssh://u@h@other",
    "ssh://u$(touch proof)@h",
    "ssh://{a,b}",
    "ssh://h>proof",
    "ssh://'h'",
    "ssh://[fe80::1%eth0;touch proof]",
    "ssh://",
    "ssh:// h",
    "http://h",
    "file:///etc/passwd",
    "h",
    "",
]


@pytest.mark.parametrize("target", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_target_is_refused_before_ssh_is_called(target, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("ssh was called"))
    with pytest.raises(UsageError, match="neither local nor ssh://"):
        Host.parse(target)


@pytest.mark.parametrize("target", ["ssh://_@h", "ssh://.@h", "ssh://h-"])
def test_an_odd_name_stays_behind_the_end_of_options(target):
    words = Host.parse(target).command("python3", "-V")
    assert words[-3] == "--"
    assert words[-2] == target.removeprefix("ssh://")


@pytest.mark.parametrize("python", ["python3; touch proof", "$(touch proof)", "a b", "`x`", "x\ny", "'", "-c"])
def test_a_python_is_one_word_for_the_shell_there(python):
    words = Host.parse("ssh://h", python).command(python, "-c", "print('x y')")
    assert shlex.split(words[-1]) == [python, "-c", "print('x y')"]


def test_the_command_refuses_a_hostile_target_in_one_line(snapvit, device_folder, tmp_path):
    outcome = snapvit("profile", device_folder / "family", "--target", HOSTILE[0], "--out", tmp_path / "p.json")
    assert outcome.code == 2
    assert "neither local nor ssh://" in outcome.error_line
    assert not (tmp_path / "p.json").exists()


@pytest.fixture
def other_ssh(tmp_path, monkeypatch):
    """Put another program in the place of ssh: what it does is what the other machine does."""

    def put(script: str) -> Host:
        (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return Host("orin")

    return put


def test_an_answer_without_end_is_not_waited_for(other_ssh, monkeypatch):
    monkeypatch.setattr(remote, "MOST_ANSWER", 1 << 20)
    with pytest.raises(SnapvitError, match="^orin: answers with more than 1 MB. Is its shell quiet at login"):
        other_ssh("exec yes").run("python3", "-V")


def test_of_many_errors_the_last_is_told(other_ssh):
    host = other_ssh("yes | head -c 200000 >&2; cat >&2; exit 1")
    with pytest.raises(SnapvitError, match=r"^orin: error of the day$"):
        host.run("python3", "-V", given=b"\nerror of the day\n")
    assert other_ssh("cat").run("python3", "-V", given=b"x" * 10**6) == b"x" * 10**6
