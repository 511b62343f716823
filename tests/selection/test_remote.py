"""Timing on another machine over ssh: a real sshd on this one, with keys made here."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.ssh_server import needs_sshd, serving
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.family.folder import read_family
from snapvit_export.progress import Silent
from snapvit_export.selection.remote import Host, profile_there


@pytest.fixture
def host(tmp_path):
    with serving(tmp_path / "server") as made:
        yield made


@needs_sshd
def test_a_family_is_timed_there_and_nothing_is_left(host, device_folder):
    before = _left_there()
    found = profile_there(device_folder / "family", host, ["--seconds", "0.1", "--threads", "1"], Silent())
    wanted = {variant.name: variant.sha256 for variant in read_family(device_folder / "family").variants}
    assert {name: profile.sha256 for name, profile in found.profiles.items()} == wanted
    assert all(profile.p50_ms > 0 for profile in found.profiles.values())
    assert _left_there() == before


def _left_there() -> set[str]:
    import tempfile

    return {path.name for path in Path(tempfile.gettempdir()).glob("snapvit-*")}


@needs_sshd
def test_what_is_missing_there_is_said(host, device_folder):
    family = device_folder / "family"
    with pytest.raises(SnapvitError, match=r"127\.0\.0\.1: no program is called nopython there. Give --python"):
        profile_there(family, replace(host, python="nopython"), [], Silent())
    bare = [sys.executable, "-m", "venv", "--without-pip", device_folder / "bare"]
    subprocess.run(bare, check=True)
    with pytest.raises(SnapvitError, match=r"No module named 'snapvit_export'.*pip install 'snapvit-export\[ort\]'"):
        profile_there(family, replace(host, python=str(device_folder / "bare" / "bin" / "python")), [], Silent())
    with pytest.raises(SnapvitError, match="exactly|images|Give|batch|is not"):
        profile_there(family, host, ["--batch", "0"], Silent())


@needs_sshd
def test_unknown_hosts_wrong_keys_and_closed_ports_are_no_connection(host, device_folder, tmp_path):
    family = device_folder / "family"
    (tmp_path / "empty").write_text("")
    unknown = (*host.options[:2], "-o", f"UserKnownHostsFile={tmp_path / 'empty'}", "-F", "none")
    with pytest.raises(SnapvitError, match="no connection: Host key verification failed"):
        profile_there(family, replace(host, options=unknown), [], Silent())
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "stranger"], check=True)
    stranger = ("-i", str(tmp_path / "stranger"), "-o", "IdentitiesOnly=yes", *host.options[2:])
    with pytest.raises(SnapvitError, match="no connection: .*Permission denied"):
        profile_there(family, replace(host, options=stranger), [], Silent())
    with pytest.raises(SnapvitError, match="no connection: .*refused"):
        profile_there(family, replace(host, port=1), [], Silent())


def test_addresses():
    assert Host.parse("ssh://pi@10.0.0.7:2222") == Host("10.0.0.7", "pi", 2222)
    assert Host.parse("ssh://orin") == Host("orin")
    assert Host.parse("ssh://[fe80::1]/") == Host("fe80::1")
    for text in (
        "orin",
        "ssh://",
        "ssh://a b",
        "ssh://-oProxyCommand=x",
        "ssh://u@-h",
        "ssh://-u@h",
        "ssh://h;ls",
        "http://h",
    ):
        with pytest.raises(UsageError, match="neither local nor ssh://"):
            Host.parse(text)
