"""The board's side of `selection/remote_agent`: takes files, runs the agent while somebody listens, gives results back.

Nothing of it is installed there: its text goes along with every call, as `python3 -c TEXT WORD FOLDER ...`.

    look     which of the files that standard input names (JSON: name to SHA-256) the folder lacks or has damaged
    take     the files of a tar archive on standard input, each with its hash; none appears unless it is whole
    work     the agent, with everything that it starts, until it ends or standard input does
    give     what the agent has written and printed, as JSON

A connection can end in three ways: closed, which ends standard input; cut off, after which nothing comes any more; and
with the death of this process, which the kernel tells the agent. Each of them ends the agent and its trtexec, and
nothing else: they are a process group of their own.

May import: the standard library, nothing of snapvit; grammar of Python 3.8. tests/selection/test_remote_agent.py
holds us to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO, Sequence  # noqa: UP035 (Python 3.8)

AGENT = "jetson_agent.py"
FAMILY, ENGINES, RESULTS, LOCK = "family", "engines", "results", "lock"  # in the folder, beside the agent
UNFINISHED, TABLE = ".partial.json", ".txt"  # endings of what a run that was cut off leaves, and of its table
HASH = "SNAPVIT.sha256"  # header of every file in an archive
GRACE_SECONDS = 20.0  # for the agent to end in order
SWEEP = "--power-modes"  # the option of the agent that changes the board
SWEEP_GRACE_SECONDS = 210.0  # to set a power mode again, which nvpmodel and jetson_clocks may take long for
PARENT_DIES = 1  # PR_SET_PDEATHSIG
CHUNK = 1 << 20


class Refused(Exception):
    """The work could not be done. The text is one line."""


def _tell(text: str, stream: IO[str] | None = None) -> None:
    """Print a line for the other end of the connection, which shows it or reads it."""
    print(text, file=stream or sys.stdout, flush=True)


# --- Files ------------------------------------------------------------------------------------------------------------


def place(key: str) -> Path:
    """Return the folder of a family on this board, which stays until somebody removes it."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(cache).absolute() / "snapvit" / key
    for part in (folder, folder / FAMILY, folder / RESULTS):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def look(key: str) -> None:
    """Print the folder, the files in it that must come again, and the free space."""
    folder, wanted = place(key), json.load(sys.stdin)
    for left in folder.glob("**/.incoming-*"):
        left.unlink()
    missing = [name for name, digest in wanted.items() if sha256(folder / name) != digest]
    free = shutil.disk_usage(folder).free
    _tell(json.dumps({"folder": str(folder), "missing": missing, "free_bytes": free}))


def take(folder: Path) -> None:
    """Write the files of an archive."""
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            if not member.isfile() or not re.fullmatch(rf"(?:{FAMILY}/)?[A-Za-z0-9_+-][A-Za-z0-9_.+-]*", member.name):
                raise Refused(f"'{member.name}' is no file of a family")
            source = archive.extractfile(member)
            assert source is not None, "it is a file"
            _write(folder / member.name, source, member.pax_headers.get(HASH, ""))


def _write(path: Path, source: IO[bytes], wanted: str) -> None:
    """Write a file that appears whole or not at all."""
    handle, name = tempfile.mkstemp(dir=str(path.parent), prefix=".incoming-")
    try:
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as file:
            for chunk in iter(lambda: source.read(CHUNK), b""):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != wanted:
            raise Refused(f"{path.name} did not arrive as it was read: its hash is another one. Run the command again")
        os.replace(name, str(path))
    except BaseException:
        os.unlink(name)
        raise


def sha256(path: Path) -> str:
    """Hash a file; nothing if there is none."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(CHUNK), b""):
                digest.update(chunk)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def give(folder: Path, stem: str) -> None:
    """Print what the agent has written, by name, and its table."""
    places = [*(folder / RESULTS).glob(f"{stem}.json"), *(folder / RESULTS).glob(f"{stem}.*.json")]
    places = [path for path in places if not path.name.endswith(UNFINISHED)] + [folder / RESULTS / f"{stem}{TABLE}"]
    _tell(json.dumps({path.name: path.read_text(encoding="utf-8", errors="replace") for path in places}))


# --- Work -------------------------------------------------------------------------------------------------------------


def work(folder: Path, stem: str, silence: float, words: Sequence[str]) -> int:
    """Run the agent and return its exit code; its progress is our standard output.

    `stem`: of the files that it writes. `silence`: seconds without any byte on standard input after which nobody
    listens any more.
    """
    heard = _hear_signals()
    with open(folder / LOCK, "w", encoding="utf-8") as lock:
        _be_alone(lock, folder, silence + grace_of(words))
        _forget(folder / RESULTS, stem)
        options = ["--out", f"{RESULTS}/{stem}.json", "--keep-engines", str(folder / ENGINES), *words]
        with open(folder / RESULTS / f"{stem}{TABLE}", "wb") as table:
            agent = subprocess.Popen(
                [sys.executable, str(folder / AGENT), str(folder / FAMILY), *options],
                cwd=str(folder),
                stdin=subprocess.DEVNULL,
                stdout=table,
                stderr=sys.stdout.fileno(),
                start_new_session=True,
                pass_fds=(lock.fileno(),),  # the folder is taken for as long as the agent lives
                preexec_fn=_end_with_parent,
            )
        try:
            _attend(agent.pid, heard, silence)
        finally:
            code = _end(agent, grace_of(words))
    return code


def grace_of(words: Sequence[str]) -> float:
    """Return the seconds that an agent with these options has to end in order."""
    return SWEEP_GRACE_SECONDS if SWEEP in words else GRACE_SECONDS


def _forget(results: Path, stem: str) -> None:
    """Remove what an earlier run has written, unless it was cut off: then it goes on."""
    if not any(results.glob(f"{stem}*{UNFINISHED}")):
        for path in [*results.glob(f"{stem}.json"), *results.glob(f"{stem}.*.json")]:
            path.unlink()


def _hear_signals() -> int:
    """Let signals end this process in order; returns a pipe that the end of a child is heard on."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return heard


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGTERM)


def _be_alone(lock: IO[str], folder: Path, seconds: float) -> None:
    """Wait for an earlier run in this folder, which ends when it finds that its connection is cut."""
    until, said = time.monotonic() + seconds, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise Refused(f"another run is at work in {folder}. Wait for it, or end it there") from None
        if not said:
            _tell("waiting for an earlier run to end")
            said = True
        if select.select([0], [], [], 0.5)[0] and not os.read(0, 4096):
            raise SystemExit(1)


def _attend(pid: int, heard: int, silence: float) -> None:
    """Wait until a child ends, standard input ends, or nothing comes from there for too long."""
    while not _has_ended(pid):
        ready = select.select([0, heard], [], [], silence)[0]
        if not ready or (0 in ready and not os.read(0, 4096)):
            return
        if heard in ready:
            os.read(heard, 4096)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not waited for, so that its number stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(agent: subprocess.Popen[bytes], grace: float) -> int:
    """End the agent if it still runs, then all that is left of its group; returns its exit code."""
    with contextlib.suppress(OSError):
        os.killpg(agent.pid, signal.SIGTERM)
    until = time.monotonic() + grace
    while not _has_ended(agent.pid) and time.monotonic() < until:
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        os.killpg(agent.pid, signal.SIGKILL)
    code = agent.wait()
    return code if code >= 0 else 128 - code


def main(words: Sequence[str]) -> int:
    """Do what the first word says."""
    what, where, *rest = words
    try:
        if what == "work":
            return work(Path(where), rest[0], float(rest[1]), rest[2:])
        if what == "look":
            look(where)
        elif what == "take":
            take(Path(where))
        else:
            give(Path(where), rest[0])
    except (Refused, tarfile.TarError) as error:
        _tell(f"error: {error}", sys.stderr)
        return 1
    except OSError as error:
        _tell(f"error: {error.filename or 'the board'}: {error.strerror}", sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
