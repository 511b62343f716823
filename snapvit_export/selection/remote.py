"""Times a family on another machine over the system's ssh, and brings the Profile back. Light.

Keys, host names and known hosts are ssh's own business and stay as the user has set them: an unknown host is refused
without a prompt. The files of the family go there in one stream, into a folder that is removed afterwards; the other
machine needs Python with `snapvit-export[ort]`, and checks every hash before it times anything.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import SnapvitError, UsageError
from ..family.folder import own_files, read_family
from ..family.layout import MANIFEST
from ..progress import Progress
from ..storage.json import from_json
from ..storage.reading import MOST_JSON
from .known_profiles import FamilyProfile, taken_by

CONNECT_SECONDS = 15
_ADDRESS = re.compile(
    r"(?:ssh|jetson)://(?:(?P<user>[\w.-]+)@)?"
    r"(?P<host>\[[0-9a-fA-F:]+\]|[\w.-]+)(?::(?P<port>\d+))?/?"
)
ALIVE_SECONDS = 15  # between two signs of life; after three without one the connection is given up
UNPACK = """
import os, sys, tarfile
archive = tarfile.open(fileobj=sys.stdin.buffer, mode="r|")
for member in archive:
    assert member.isfile() and member.name == os.path.basename(member.name), member.name
    with open(os.path.join(sys.argv[1], member.name), "wb") as file:
        file.write(archive.extractfile(member).read())
"""
MOST_ANSWER = MOST_JSON  # bytes: what comes back is JSON
MOST_SAID = 1 << 16  # bytes of errors that are looked at
NO_CONNECTION = 255  # exit code of ssh itself
NO_PROGRAM = 127  # exit code of a shell


@dataclass(frozen=True)
class Host:
    """Another machine, and its Python."""

    name: str
    user: str | None = None
    port: int | None = None
    python: str = "python3"
    options: tuple[str, ...] = ()  # for ssh, such as a file with keys

    @staticmethod
    def parse(text: str, python: str = "python3") -> Host:
        """Read ssh://user@host:port, or jetson:// likewise."""
        match = _ADDRESS.fullmatch(text)
        if match is None or match["host"].startswith("-") or (match["user"] or "").startswith("-"):
            raise UsageError(
                f"--target '{text}' is neither local nor ssh://user@host nor jetson://user@host. Write it like "
                "ssh://pi@192.168.1.5"
            )
        if python.startswith("~"):
            raise UsageError(f"--python {python}: the other machine's shell does not expand it. Write the whole path")
        port = None if match["port"] is None else int(match["port"])
        return Host(match["host"].strip("[]"), match["user"], port, python)

    def command(self, *words: str) -> list[str]:
        """The ssh call that runs a command there."""
        where = self.name if self.user is None else f"{self.user}@{self.name}"
        port = [] if self.port is None else ["-p", str(self.port)]
        safe = ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT_SECONDS}", f"-oServerAliveInterval={ALIVE_SECONDS}"]
        return ["ssh", *safe, *self.options, *port, "--", where, shlex.join(words)]

    @property
    def by_hand(self) -> str:
        """The ssh call that a person would type."""
        where = self.name if self.user is None else f"{self.user}@{self.name}"
        return f"ssh {where}" if self.port is None else f"ssh -p {self.port} {where}"

    def run(self, *words: str, given: bytes = b"") -> bytes:
        """Run a command there and return its standard output, or raise an error that names the cause."""
        with tempfile.TemporaryFile() as brought, tempfile.TemporaryFile() as said:
            brought.write(given)
            brought.seek(0)
            try:
                ssh = subprocess.Popen(self.command(*words), stdin=brought, stdout=subprocess.PIPE, stderr=said)
            except FileNotFoundError:
                raise SnapvitError("there is no ssh program here. Install an OpenSSH client") from None
            with ssh:
                try:
                    answer = self._answer(ssh)
                except BaseException:
                    ssh.kill()
                    raise
            if ssh.returncode != 0:
                raise self.failure(ssh.returncode, end_of(said), words[0])
        return answer

    def _answer(self, ssh: subprocess.Popen[bytes]) -> bytes:
        """Return all that comes back, which is bounded: no machine there may fill the memory here."""
        assert ssh.stdout is not None, "it was asked for as a pipe"
        answer = bytearray()
        while chunk := ssh.stdout.read(1 << 16):
            answer += chunk
            if len(answer) > MOST_ANSWER:
                most = f"{MOST_ANSWER >> 20} MB"
                raise SnapvitError(f"{self.name}: answers with more than {most}. Is its shell quiet at login?")
        return bytes(answer)

    def failure(self, code: int, said: bytes, program: str) -> SnapvitError:
        """Return the error for a command that ended with another code than 0; `said`: on its standard error."""
        reason = last_line(said)
        if code == NO_CONNECTION:
            return SnapvitError(f"{self.name}: no connection: {reason}. Try it by hand: {self.by_hand}")
        if code == NO_PROGRAM:
            return SnapvitError(f"{self.name}: no program is called {program} there. Give --python PATH")
        return SnapvitError(f"{self.name}: {reason.removeprefix('error: ')}")


def profile_there(family: Path, host: Host, options: Sequence[str], progress: Progress) -> FamilyProfile:
    """Copy a family to a machine, time it there, and return the latencies."""
    manifest = read_family(family)
    progress.phase(f"asking {host.name}")
    _require_package(host)
    folder = host.run(host.python, "-c", "import tempfile; print(tempfile.mkdtemp(prefix='snapvit-'))").decode().strip()
    if not folder.startswith("/"):
        raise SnapvitError(
            f"{host.name}: printed '{folder[:80]}' where a folder was expected. Is its shell quiet at login?"
        )
    try:
        progress.phase(f"copying {len(manifest.variants)} variants to {host.name}")
        host.run(host.python, "-c", UNPACK, folder, given=_packed(family))
        progress.phase(f"timing on {host.name}")
        program = (
            "-m",
            "snapvit_export.cli",
            "profile",
            folder,
            "--json",
            "--quiet",
            "--out",
            f"{folder}/profile.json",
        )
        answer = host.run(host.python, *program, *options)
    finally:
        try:
            host.run(host.python, "-c", "import shutil, sys; shutil.rmtree(sys.argv[1])", folder)
        except SnapvitError as error:  # the measurements are worth more than a clean folder
            progress.note(f"{folder} stays on {host.name}: {error}")
    found = from_json(answer, FamilyProfile, f"the answer of {host.name}")
    wanted = {variant.name: variant.sha256 for variant in taken_by(manifest, found.target.runtime)}
    given = {name: profile.sha256 for name, profile in found.profiles.items()}
    given |= {name: failed.sha256 for name, failed in found.failed.items()}
    if given != wanted:
        raise SnapvitError(f"{host.name}: timed other files than those of {family}")
    return found


def _require_package(host: Host) -> None:
    try:
        host.run(host.python, "-c", "import snapvit_export.selection.on_device, onnxruntime")
    except SnapvitError as error:
        if "No module named" in str(error):
            raise SnapvitError(
                f"{error}. Install it there: {host.python} -m pip install 'snapvit-export[ort]'"
            ) from error
        raise


def _packed(family: Path) -> bytes:
    """Pack the files of a family into one archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in own_files(family) or [MANIFEST]:
            if (family / name).is_file():
                archive.add(family / name, arcname=name)
    return buffer.getvalue()


def end_of(file: IO[bytes]) -> bytes:
    """Return the end of what a program has said, however much it was."""
    file.seek(max(0, file.seek(0, io.SEEK_END) - MOST_SAID))
    return file.read()


def last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it gave no reason"
