"""Time files in a new Python process: the latency of one file differs from process to process. Light.

The new process runs this very module. What they say to each other is JSON, a line each, and one array:

    to it      the Job, a line; the length of the inputs, a line; the inputs as .npy; then a byte for every `Taken`
    from it    `Taken` twice a second, with the samples since the last; at the end `Timed` or `Failed`

It waits for that byte, so that whatever is shown of the samples is drawn between rounds and never beside them. When its
input ends, the process that wanted the Profiles is gone, and it ends too. No file is left on disk.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from .in_process import Job, time_in_process
from .profile import Profile
from .sampling import Report, Samples

METHOD = "new process"
SENT_EVERY = 0.5  # seconds
# With the import path of the process that starts it, so that it is the same package, cloned or installed; not `-m`,
# which would look in the working folder first.
START = "import sys; sys.path[:] = sys.argv[1:]; from snapvit_export.profiling.new_process import main; main()"


class Taken(msgspec.Struct, tag="taken"):
    """Samples since the last ones, by name."""

    burst: int
    wall_ms: dict[str, list[float]]
    cpu_ms: dict[str, list[float]]


class Timed(msgspec.Struct, tag="timed"):
    """The Profiles of all files: the end."""

    profiles: dict[str, Profile]


class Failed(msgspec.Struct, tag="failed"):
    """The one line of an error that a user can act on: the end."""

    text: str


Message = Taken | Timed | Failed


def time_in_new_process(job: Job, inputs: npt.NDArray[Any], report: Report) -> dict[str, Profile]:
    """Do a job as `time_in_process` does it, in a new process; `report` is called twice a second."""
    with tempfile.TemporaryFile() as said, _start(said) as process:
        try:
            end = _talk(process, _request(job, inputs), report)
        except BaseException:  # interrupted: nobody wants its Profiles any more
            process.kill()
            raise
        code = process.wait()
        if isinstance(end, Timed):
            return end.profiles
        raise SnapvitError(end.text if end else f"timing {_names(job)} in a new process failed: {_why(code, said)}")


def _start(said: IO[bytes]) -> subprocess.Popen[bytes]:
    command, pipe = [sys.executable, "-c", START, *sys.path], subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said)
    except OSError as error:
        raise SnapvitError(f"a new process to time in cannot be started: {error.strerror or error}") from error


def _talk(process: subprocess.Popen[bytes], request: bytes, report: Report) -> Timed | Failed | None:
    """Hand over the request and report samples until the end; None: it died before."""
    assert process.stdin is not None
    assert process.stdout is not None
    taken: dict[str, Samples] = {}
    try:
        _send(process.stdin, request)
        for line in process.stdout:
            if not line.endswith(b"\n"):  # it died while it wrote
                return None
            message = msgspec.json.decode(line, type=Message)
            if not isinstance(message, Taken):
                return message
            for name, wall_ms in message.wall_ms.items():
                samples = taken.setdefault(name, Samples(message.burst))
                samples.wall_ms += wall_ms
                samples.cpu_ms += message.cpu_ms[name]
            report(taken)
            _send(process.stdin, b"\n")
    except BrokenPipeError:  # its exit code and last words say why
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    return None


def _send(to: IO[bytes], data: bytes) -> None:
    to.write(data)
    to.flush()


def _request(job: Job, inputs: npt.NDArray[Any]) -> bytes:
    array = io.BytesIO()
    np.save(array, inputs, allow_pickle=False)
    return b"%b\n%d\n%b" % (msgspec.json.encode(job, enc_hook=os.fspath), array.tell(), array.getvalue())


def _names(job: Job) -> str:
    return textwrap.shorten(", ".join(job.files), 60, placeholder=" ...")


def _why(code: int, said: IO[bytes]) -> str:
    """Return why a process ended that gave no reason itself: the signal that ended it, or its last words."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    said.seek(0)
    words = said.read().decode(errors="replace").strip().splitlines()
    return words[-1].strip()[:200] if words else f"it ended with code {code} and said nothing"


# --- The new process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Do the job that comes from the input, in this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a runtime prints is no message
    job, inputs = _read_request(sys.stdin.buffer)
    sender = Sender(answers)
    end: Timed | Failed
    try:
        end = Timed(time_in_process(job, inputs, sender.report, METHOD))
    except SnapvitError as error:
        end = Failed(str(error))
    sender.send(end)


def _read_request(stream: IO[bytes]) -> tuple[Job, npt.NDArray[Any]]:
    job = msgspec.json.decode(stream.readline(), type=Job, dec_hook=lambda kind, given: kind(given))  # Paths
    array = io.BytesIO(stream.read(int(stream.readline())))
    return job, np.load(array, allow_pickle=False)


class Sender:
    """Sends messages, and waits after samples until they have been shown."""

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers, self._sent_at = answers, time.monotonic()
        self._sent: dict[str, int] = {}  # samples, by name
        self._shown = threading.Semaphore(0)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: Message) -> None:
        _send(self._answers, msgspec.json.encode(message) + b"\n")

    def report(self, samples: Mapping[str, Samples]) -> None:
        """Send the samples since the last ones, twice a second."""
        if time.monotonic() - self._sent_at < SENT_EVERY:
            return
        since = {name: self._sent.get(name, 0) for name in samples}
        wall_ms = {name: taken.wall_ms[since[name] :] for name, taken in samples.items()}
        cpu_ms = {name: taken.cpu_ms[since[name] :] for name, taken in samples.items()}
        self.send(Taken(next(iter(samples.values())).burst, wall_ms, cpu_ms))
        self._shown.acquire()
        self._sent = {name: len(taken) for name, taken in samples.items()}
        self._sent_at = time.monotonic()

    def _listen(self) -> None:
        """Count what was shown; end at once when the input ends, as nobody is left to time for."""
        while os.read(0, 1):
            self._shown.release()
        os._exit(1)
