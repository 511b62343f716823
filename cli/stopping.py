"""SIGTERM, SIGINT and SIGHUP end a command within two seconds, also while native code runs.

The orderly way is an exception, which leaves every block and so removes what was begun. But Python handles a signal
between two of its own steps, and a call into a runtime or into torch that takes minutes has none. So the signal also
wakes a thread (`signal.set_wakeup_fd`): it waits a little for the orderly way, removes what is unfinished, and ends the
process. Processes that this one has started end with it: their input ends.

The thread needs Python's lock, which the runtimes, torch and numpy give back during long calls.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ..storage.unfinished import remove_unfinished

GRACE = 1.0  # seconds for the orderly way
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
WORDS = "stopped from outside. If there is a checkpoint, it is whole: run the same command again to continue"


class _Stop:
    """The signal that ends the command, if one came."""

    number: int | None = None

    def handle(self, number: int, _: object) -> NoReturn:
        """Begin the orderly way."""
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the tidying up
        self.number = number
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        _say()
        raise SystemExit(128 + number)


@contextmanager
def ends_when_stopped() -> Iterator[None]:
    """Let a signal end the program that runs in this block; signals that were ignored before stay ignored."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    stop = _Stop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number in SIGNALS if before[number] not in (signal.SIG_IGN, None)]  # nohup ignores one
    for number in taken:
        signal.signal(number, stop.handle)
    heard, signalled = socket.socketpair()
    signalled.setblocking(False)
    fd = signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard, stop), name="stopping", daemon=True).start()
    try:
        yield
    finally:
        if stop.number is not None:  # not through the end of the interpreter, which waits for threads in native code
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(128 + stop.number)
        signal.set_wakeup_fd(fd)
        signalled.close()  # ends the thread
        for number in taken:
            signal.signal(number, before[number])


def _watch(heard: socket.socket, stop: _Stop) -> None:
    """Wait for a signal; when the orderly way takes too long, end the process."""
    with heard:
        while number := heard.recv(1):
            if number[0] in SIGNALS:
                time.sleep(GRACE)
                remove_unfinished()
                if stop.number is None and number[0] != signal.SIGINT:
                    _say()
                os._exit(128 + number[0])


def _say() -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"error: {WORDS}\n".encode())  # whatever state sys.stderr is in
