"""Text for people: the one way out, on which control characters become visible.

Names, labels, paths and messages come from files and machines of others. Printed as they are, they could clear a
terminal, write over a line that was printed before, or reverse the order of what is read. So everything that is printed
goes through `say`, cells of tables and texts of progress through `visible`, and JSON through `visible_json`.
"""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from .errors import SnapvitError

# C0, DEL and C1; marks, embeddings, overrides and isolates of the writing direction; separators of lines; halves of
# pairs, by which Python keeps bytes of a path that are no UTF-8; and two numbers that XML forbids.
_HIDDEN = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
_CONTROLS = re.compile(f"[{_HIDDEN}]")
_CONTROLS_IN_JSON = re.compile(f"(?!\n)[{_HIDDEN}]")
_SUBSTITUTES = {
    **{"±": "+-", "–": "-", "…": "...", "━": "=", "╌": "-", "│": "|", "┊": "|", "└": "+", "×": "x"},
    **dict.fromkeys("▏▎▍▌▋▊▉█", "#"),
}
_ERRORS = "snapvit-substitute"
UNWRITABLE = "standard output cannot be written"


def visible(text: str) -> str:
    r"""Return the text on one line, with characters that control a terminal or the writing direction as escapes.

    >>> print(visible("red\x1b[31m\nand back"))
    red\x1b[31m\nand back
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_json(text: str, encoding: str = "utf-8") -> str:
    r"""Return JSON that says the same, with such characters, and those that the encoding lacks, as JSON escapes.

    >>> print(visible_json('{"name": "a\x9bb é"}', "ascii"))
    {"name": "a\u009bb \u00e9"}
    """
    text = _CONTROLS_IN_JSON.sub(_escaped, text)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:  # outside its strings JSON is ASCII
        text = re.sub(r"[^\x00-\x7f]", _escaped, text)
    return text


def _escaped(found: re.Match[str]) -> str:
    letter = found[0]
    return f"\\u{ord(letter):04x}" if ord(letter) < 2**16 else json.dumps(letter)[1:-1]  # a pair


def say(text: str = "", file: TextIO | None = None) -> None:
    """Print one line on standard output, or elsewhere."""
    _print(visible(text), file)


def say_json(text: str, file: TextIO | None = None) -> None:
    """Print JSON, still JSON whatever the encoding of the stream."""
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    _print(visible_json(text.rstrip("\n"), encoding), file)


def _print(text: str, file: TextIO | None) -> None:
    with writing_to(file or sys.stdout):
        print(text, file=file, flush=file is not None)


@contextmanager
def writing_to(stream: TextIO) -> Iterator[None]:
    """Refuse in one line to go on where results are lost; progress that nobody can read is no reason to stop."""
    try:
        yield
    except BrokenPipeError:  # a reader that has left has seen enough
        if stream is not sys.stderr:
            raise
    except OSError as error:
        if stream is not sys.stderr:
            _lead_nowhere(stream)
            raise SnapvitError(f"{UNWRITABLE}: {error.strerror or error}. Send it elsewhere") from error


@contextmanager
def heard() -> Iterator[None]:
    """Say on standard error what a foreign library prints within the block: standard output is for results."""
    told = io.StringIO()
    try:
        with redirect_stdout(told):
            yield
    finally:
        for line in told.getvalue().splitlines():
            say(line, sys.stderr)


def open_streams() -> None:
    """Make the standard streams of this process fit for any text; those that were closed lead nowhere.

    Without that the first file that is opened would take the number of a closed stream, and what a native library
    prints would be written into it.
    """
    codecs.register_error(_ERRORS, _substitute)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _substitute(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that a stream cannot write: by something like them, or by their escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_SUBSTITUTES.get(c, c.encode("ascii", "backslashreplace").decode()) for c in missing), error.end


def finish(stream: TextIO) -> str | None:
    """Write what is left in a stream; return why that failed, "" if its reader has left. It then leads nowhere."""
    try:
        stream.flush()
        return None
    except OSError as error:
        _lead_nowhere(stream)
        return "" if error.errno == errno.EPIPE else f"{UNWRITABLE}: {error.strerror or error}. Send it elsewhere"


def _lead_nowhere(stream: TextIO) -> None:
    """Throw away what is left in a stream: Python would try to write it when it ends, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
