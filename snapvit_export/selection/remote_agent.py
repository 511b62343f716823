"""Builds and times a family with TensorRT on a board over ssh, by the Jetson agent, and brings the Profile back. Light.

The board needs Python and trtexec, nothing of snapvit. The agent and the family go into a folder of the user's cache
there that is named after the family's files and stays: what is there and whole is not copied again, engines that were
built are not built again, and a run that was cut off goes on, all by giving the same command again.

While the agent works, this end sends a sign of life every few seconds. When none comes any more, whether this program
was stopped, was killed, or its connection was cut, the board ends the agent and its trtexec (`runtimes/board_side`).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from ..errors import SnapvitError, UsageError
from ..family.folder import files_to_time, read_family
from ..family.layout import MANIFEST
from ..family.manifest import Manifest
from ..progress import Progress
from ..runtimes import board_side, jetson_agent
from ..storage.atomic import sha256, write_atomically
from ..storage.json import Count, Name, Value, from_json, read_json, to_json
from ..storage.places import check_output
from .known_profiles import FamilyProfile, check_profile_place
from .remote import NO_CONNECTION, Host, end_of, last_line

LEAST_PYTHON = (3, 8)
LIFE_SECONDS = 10.0  # between two signs of life
SILENCE_SECONDS = 60.0  # without one the board ends what it does
END_SECONDS = 0.7  # for the board to hear of our end; a command that is stopped has a second
LONGEST_LINE = 4096
KILLED = 128 + 9  # exit code of what was ended by SIGKILL
AGENT = Path(jetson_agent.__file__)
BOARD_SIDE = Path(board_side.__file__)
MAIN, RECORD, MODES = ".json", ".record.json", ".modes.json"  # endings of what the agent writes
SWEEP = board_side.SWEEP  # among the options of the agent
GOES_ON = "The same command goes on where it stopped"


class _Seen(Value, frozen=True, kw_only=True):
    """What `board_side.look` prints."""

    folder: str
    missing: tuple[str, ...]
    free_bytes: Count


class _Mode(msgspec.Struct):
    """A power mode in the table of a sweep, as far as it is read here."""

    file: Name | None = None  # None: it was left out


class _Modes(msgspec.Struct):
    """The table of a sweep."""

    modes: tuple[_Mode, ...]


@dataclass(frozen=True)
class BoardResults:
    """What the agent measured on a board, and where its engines are there."""

    profiles: Mapping[str, FamilyProfile]  # by the ending of the file: .json, in power modes .15W.json
    others: Mapping[str, bytes]  # likewise: .record.json
    table: str  # what the agent printed
    engines: str

    @property
    def profile(self) -> FamilyProfile | None:
        """The Profile in the power mode that is set; None if several were asked for."""
        return self.profiles.get(MAIN)

    def places(self, out: Path) -> list[Path]:
        """Return the files that `save` writes."""
        return [_beside(out, ending) for ending in (*self.profiles, *self.others)]

    def save(self, out: Path, force: bool = False) -> None:
        """Write the Profiles, and beside them what else the agent has seen; what may not be written stops no other."""
        texts = {ending: to_json(profile) for ending, profile in self.profiles.items()} | dict(self.others)
        refused: list[SnapvitError] = []
        for ending, data in texts.items():
            place = _beside(out, ending)
            try:
                _check_place(place, force)
                write_atomically(place, data)
            except SnapvitError as error:
                refused.append(error)
        if refused:
            raise refused[0]


def check_board_places(out: Path, force: bool = False, sweep: bool = False) -> None:
    """Refuse, before anything is copied, to write over something else; `sweep`: in power modes, with files for each."""
    if not sweep:
        check_profile_place(out, force)
        _check_place(_beside(out, RECORD), force)
        return
    _check_place(_beside(out, MODES), force)
    for path in sorted(out.parent.glob(f"{glob.escape(out.stem)}.*{MAIN}")):  # only the board knows its modes' names
        if path != _beside(out, RECORD) and not path.name.endswith(board_side.UNFINISHED):
            _check_place(path, force)


def _check_place(path: Path, force: bool) -> None:
    check_output(path, "a profile or a record", _is_agents, force=force)


def _beside(out: Path, ending: str) -> Path:
    return out if ending == MAIN else out.with_name(out.stem + ending)


def _is_agents(path: Path) -> bool:
    """Whether the agent wrote a file: a Profile, a record, or the table of power modes."""
    try:
        keys = read_json(path, dict[str, Any]).keys()
    except SnapvitError:
        return False
    return any(needed <= keys for needed in ({"profiles", "target"}, {"looks", "builds"}, {"modes"}))


def profile_on_board(family: Path, host: Host, options: Sequence[str], progress: Progress) -> BoardResults:
    """Copy what a board lacks of a family, build and time it there, and return the results; `options`: of the agent."""
    manifest = read_family(family)
    progress.phase(f"asking {host.name}")
    _require_python(host)
    files = _files(family, manifest)
    folder = _copy(host, _key(manifest), files, progress)
    progress.phase(f"building and timing on {host.name}")
    stem = "modes" if SWEEP in options else "board"
    _work(host, folder, stem, options, progress)
    progress.phase(f"fetching the profile from {host.name}")
    return _fetched(host, folder, stem, manifest, family)


def _require_python(host: Host) -> None:
    """Refuse a Python that is too old, before it meets a line that it cannot read."""
    told = host.run(host.python, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])").decode(errors="replace")
    try:
        version = tuple(int(part) for part in told.strip().split("."))
    except ValueError:
        raise SnapvitError(
            f"{host.name}: printed '{told.strip()[:80]}' where a version was expected. Is its shell quiet at login?"
        ) from None
    if version < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        raise SnapvitError(
            f"{host.name}: {host.python} is {told.strip()} there, and the agent needs {least}. Give --python PATH"
        )


def _files(family: Path, manifest: Manifest) -> dict[str, Path]:
    """Return the files that the board needs, by their names in its folder."""
    names = [MANIFEST, *files_to_time(manifest)]
    return {AGENT.name: AGENT} | {f"{board_side.FAMILY}/{name}": family / name for name in names}


def _key(manifest: Manifest) -> str:
    """Return the name of the family's folder there: the same for as long as its files are, whatever was chosen."""
    listed = sorted(files_to_time(manifest).items())
    return f"board-{hashlib.sha256(repr(listed).encode()).hexdigest()[:16]}"


def _there(host: Host, *words: str, given: bytes = b"") -> bytes:
    return host.run(*_call(host, *words), given=given)


def _call(host: Host, *words: str) -> list[str]:
    return [host.python, "-c", BOARD_SIDE.read_text(encoding="utf-8"), *words]


# --- Copying ----------------------------------------------------------------------------------------------------------


def _copy(host: Host, key: str, files: Mapping[str, Path], progress: Progress) -> str:
    """Bring the files to the board that are not there whole, and return the folder."""
    hashes = {name: sha256(path) for name, path in files.items()}
    seen = from_json(_there(host, "look", key, given=to_json(hashes)), _Seen, f"the answer of {host.name}")
    missing = [name for name in files if name in seen.missing]
    size = sum(files[name].stat().st_size for name in missing)
    if size > seen.free_bytes:
        raise SnapvitError(
            f"{host.name}: the family needs {size / 1e6:.0f} MB in {seen.folder}, and {seen.free_bytes / 1e6:.0f} MB "
            "are free. Make room there"
        )
    if missing:
        progress.phase(f"copying {size / 1e6:.1f} MB to {host.name}", len(missing))
        _send(host, seen.folder, {name: files[name] for name in missing}, hashes, progress)
    return seen.folder


def _send(host: Host, folder: str, files: Mapping[str, Path], hashes: Mapping[str, str], progress: Progress) -> None:
    """Send files in one stream, each with its hash."""
    with tempfile.TemporaryFile() as said, _started(host.command(*_call(host, "take", folder)), said) as ssh:
        with contextlib.suppress(BrokenPipeError):  # its exit code says more
            with tarfile.open(fileobj=_pipe(ssh.stdin), mode="w|", format=tarfile.PAX_FORMAT) as archive:
                for name, path in files.items():
                    with open(path, "rb") as file:
                        info = archive.gettarinfo(arcname=name, fileobj=file)
                        info.uid, info.gid, info.uname, info.gname = 0, 0, "", ""
                        info.pax_headers = {board_side.HASH: hashes[name]}
                        archive.addfile(info, file)
                    progress.advance()
            _pipe(ssh.stdin).close()
        if code := ssh.wait():
            raise host.failure(code, end_of(said), host.python)


# --- Working ----------------------------------------------------------------------------------------------------------


def _work(host: Host, folder: str, stem: str, options: Sequence[str], progress: Progress) -> None:
    """Run the agent; every line of its progress becomes one of ours."""
    command = host.command(*_call(host, "work", folder, stem, f"{SILENCE_SECONDS:g}", *options))
    told = ""
    with tempfile.TemporaryFile() as said, _started(command, said) as ssh, _signs_of_life(ssh):
        try:
            for line in _lines(_pipe(ssh.stdout)):
                told = line
                _report(line, progress)
            code = ssh.wait()
        except (KeyboardInterrupt, SystemExit):
            progress.note(f"stopped, and so is the agent on {host.name}. {GOES_ON}")
            raise
        last = last_line(end_of(said))
    if code == NO_CONNECTION or code < 0:  # or ssh itself was killed
        raise SnapvitError(f"{host.name}: the connection was lost: {last}. {GOES_ON}")
    if code == KILLED:
        raise SnapvitError(
            f"{host.name}: the kernel ended the agent, probably for lack of memory. Close other programs there, add "
            f"swap, or time a family of fewer variants. {GOES_ON}"
        )
    if code != 0:
        text = told if told.startswith("error: ") else last
        kind = UsageError if code == UsageError.exit_code else SnapvitError
        raise kind(f"{host.name}: {text.removeprefix('error: ')}")


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a stream as they come, without empty ones."""
    while raw := stream.readline(LONGEST_LINE):
        if line := raw.decode(errors="replace").strip():
            yield line


def _report(line: str, progress: Progress) -> None:
    if line.startswith("warning: "):
        progress.note(line)
    elif not line.startswith("error: "):
        progress.describe(line)


@contextmanager
def _started(command: Sequence[str], said: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Start ssh; when the block ends early, so does what it started there, since its input ends."""
    try:
        ssh = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)
    except FileNotFoundError:
        raise SnapvitError("there is no ssh program here. Install an OpenSSH client") from None
    try:
        yield ssh
    finally:
        with contextlib.suppress(OSError):
            _pipe(ssh.stdin).close()
        try:
            ssh.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            ssh.terminate()
            ssh.wait()
        _pipe(ssh.stdout).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "it was asked for as a pipe"
    return stream


@contextmanager
def _signs_of_life(ssh: subprocess.Popen[bytes]) -> Iterator[None]:
    """Send a byte now and then, until the block ends."""
    over = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):  # the connection is over: whoever reads from it is told why
            while not over.wait(LIFE_SECONDS):
                _pipe(ssh.stdin).write(b"\n")
                _pipe(ssh.stdin).flush()

    thread = threading.Thread(target=send, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- Results ----------------------------------------------------------------------------------------------------------


def _fetched(host: Host, folder: str, stem: str, manifest: Manifest, family: Path) -> BoardResults:
    """Return what the agent wrote, checked as a stranger's."""
    where = f"the answer of {host.name}"
    texts = from_json(_there(host, "give", folder, stem), dict[Name, str], where)
    table = texts.pop(stem + board_side.TABLE, "")
    own = [name for name in texts if name.startswith(f"{stem}.") and name.endswith(MAIN)]
    found = {name.removeprefix(stem): texts[name] for name in own}
    if MODES in found:
        listed = from_json(found[MODES], _Modes, where)
        found = _of_sweep(found, {(mode.file or "").removeprefix(stem) for mode in listed.modes})
    read = {ending: from_json(text, dict[str, Any], where) for ending, text in found.items()}
    profiles = {e: from_json(found[e], FamilyProfile, where) for e, value in read.items() if "profiles" in value}
    if not profiles:
        raise SnapvitError(f"{where}: it has no profile. Run the command again")
    for profile in profiles.values():
        _require_same_files(host, profile, manifest, family)
    others = {ending: text.encode() for ending, text in found.items() if ending not in profiles}
    return BoardResults(profiles, others, table, f"{folder}/{board_side.ENGINES}")


def _of_sweep(found: Mapping[str, str], endings: set[str]) -> dict[str, str]:
    """Return what belongs to the modes of a sweep: one of other options, that was cut off, may have left more."""
    wanted = {MODES, *endings, *(ending.removesuffix(MAIN) + RECORD for ending in endings)}
    return {ending: text for ending, text in found.items() if ending in wanted}


def _require_same_files(host: Host, found: FamilyProfile, manifest: Manifest, family: Path) -> None:
    """Refuse latencies of other files; which variants are there is for the choice to ask."""
    own = {variant.name: variant.sha256 for variant in manifest.variants}
    timed = {name: profile.sha256 for name, profile in found.profiles.items()}
    if manifest.dense not in timed or any(own.get(name) != digest for name, digest in timed.items()):
        raise SnapvitError(f"{host.name}: timed other files than those of {family}. Run the command again")
