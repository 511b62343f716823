"""Odd machines: full disks, closed pipes, no home, no place for temporary files, links that lead elsewhere."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "snapvit_export.cli"]


def run(*arguments: object, env: dict[str, str | None] | None = None, **more) -> subprocess.CompletedProcess[str]:
    """Run the program; variables that are None are left out of its environment."""
    given = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], env=given, capture_output=True, text=True, timeout=120, check=False, **more
    )


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Full disks


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_report_on_a_full_disk_is_one_line_and_leaves_nothing(small_disk, device_folder, snapvit):
    outcome = snapvit("report", device_folder / "family", "--out", small_disk / "report.html")
    assert outcome.code == 1
    assert "the disk is full" in outcome.error_line
    assert list(small_disk.iterdir()) == []


def test_a_choice_on_a_full_disk_leaves_the_family_as_it_was(small_disk, device_folder, snapvit, short_timings):
    family = small_disk / "family"
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    shutil.copytree(device_folder / "family", family)
    before = everything(family)
    used = sum(-(-len(data) // 4096) + 1 for data in before.values()) + 4
    subprocess.run(["mount", "-o", f"remount,size={4 * used + 24}k", str(small_disk)], check=True)
    outcome = snapvit("choose", family, "--budget", "100%", "--elastic", device_folder / "elastic")
    assert outcome.code == 1
    assert "the disk is full" in outcome.error_line
    assert everything(family) == before


@pytest.mark.parametrize("command", ["report", "rank", "profile"])
def test_a_file_that_grows_beyond_what_is_allowed_is_one_line_and_leaves_nothing(
    command, device_folder, tmp_path, snapvit
):
    """Without the right to mount a disk, a limit on the size of files is the nearest to a full one."""
    family, out = device_folder / "family", tmp_path / "place" / "out"
    out.parent.mkdir()
    made_from = ["--data", device_folder / "images", "--images", 16, "--out", out]
    arguments = {
        "report": ["report", family, "--out", f"{out}.html"],
        "rank": ["rank", device_folder / "model", "--recipe", "local", "--evaluations", 5, *made_from],
        "profile": ["profile", family, "--seconds", 0.1, "--out", out],
    }
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        outcome = snapvit(*arguments[command])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome.code == 1
    assert "cannot be written" in outcome.error_line
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("arguments", [["export", "--help"], ["--version"]])
def test_output_into_a_full_device_is_no_success_and_no_traceback(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


# Closed pipes


@pytest.mark.parametrize("arguments", [["export", "--help"], ["--version"]])
def test_a_reader_that_goes_away_is_no_traceback(arguments):
    process = subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # as `| head -0` does
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) in (0, 1, -signal.SIGPIPE, 128 + signal.SIGPIPE)
    assert "Traceback" not in said


def test_a_report_is_whole_though_nobody_reads_what_is_printed(device_folder, tmp_path):
    command = [*PROGRAM, "report", str(device_folder / "family"), "--out", str(tmp_path / "r.html")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    process.wait(timeout=60)
    assert "Traceback" not in said
    assert (tmp_path / "r.html").read_text().rstrip().endswith("</html>")


# No home, no place for temporary files

NOWHERE = {
    "not there": {"HOME": "/nonexistent/home", "XDG_CACHE_HOME": None, "TMPDIR": "/nonexistent/tmp"},
    "not set": {"HOME": None, "XDG_CACHE_HOME": None, "TMPDIR": None},
    "no folder": {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "TMPDIR": "/dev/null"},
    "not to be written": {"HOME": "/proc", "XDG_CACHE_HOME": "/proc/cache", "TMPDIR": "/proc"},
}


@pytest.mark.parametrize("nowhere", NOWHERE)
def test_commands_work_without_a_home_and_a_place_for_temporary_files_of_their_own(nowhere, device_folder, tmp_path):
    family, out = device_folder / "family", tmp_path / "p.json"
    done = run("profile", family, "--seconds", 0.1, "--out", out, env=NOWHERE[nowhere])
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert out.is_file()
    done = run("validate", family, "--data", device_folder / "images", "--images", 8, env=NOWHERE[nowhere])
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr


# Links that lead elsewhere


@pytest.mark.parametrize("name", ["manifest.json", "report.html", "validation.json"])
def test_what_a_link_in_a_family_points_to_is_never_written(name, device_folder, snapvit, tmp_path):
    family, victim = device_folder / "family", tmp_path / "victim"
    own = family / name
    victim.write_bytes(own.read_bytes() if own.is_file() else b"somebody's")
    before = victim.read_bytes()
    own.unlink(missing_ok=True)
    own.symlink_to(victim)
    snapvit("validate", family, "--data", device_folder / "images", "--images", 8)
    snapvit("report", family)
    assert victim.read_bytes() == before


def test_a_link_in_the_place_of_an_output_is_refused_or_replaced_itself(device_folder, snapvit, tmp_path):
    victim, link = tmp_path / "victim.json", tmp_path / "profile.json"
    victim.write_text("somebody's")
    link.symlink_to(victim)
    snapvit("profile", device_folder / "family", "--seconds", 0.1, "--out", link)
    assert victim.read_text() == "somebody's"
