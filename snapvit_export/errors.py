"""The errors that a user can act on: one line that says what went wrong, where, and what to do next.

Code raises one of these; the command line prints its text after `error:` and exits with its code. Anything else that
escapes is a defect of ours and shows a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SnapvitError(Exception):
    """The work could not be done. The text is one line that a user can act on."""

    exit_code = 1


class UsageError(SnapvitError):
    """The request itself makes no sense (a budget of -3ms, a sparsity of 1.5)."""

    exit_code = 2


class FileFormatError(SnapvitError):
    """A file is damaged, of another version, or of another kind than its name says."""


class ModelNotUnderstood(SnapvitError):
    """The model is not a ViT this project can cut without changing what it computes."""


class BudgetNotMet(SnapvitError):
    """Nothing that can be built fits the budget; the text names the smallest latency reached."""


class GateFailed(SnapvitError):
    """Two forms of the same model disagree. The text names them and the figure."""


class MissingDependency(SnapvitError):
    """A package that this command needs is not installed. The text ends in the command that installs it."""


class Interrupted(SnapvitError):
    """The user stopped the work. The text says how it goes on."""

    exit_code = 130  # as shells have it for an interrupt


def first_line(error: BaseException) -> str:
    """The first line of a foreign library's error, short enough to stand inside our own."""
    text = str(error).strip()
    return text.splitlines()[0][:160] if text else type(error).__name__


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into one line that names the extra to install."""
    try:
        yield
    except ImportError as error:
        missing = error.name or str(error)
        raise MissingDependency(
            f"{what} needs {missing}, which is not installed. Try: pip install 'snapvit-export[{extra}]'"
        ) from error
