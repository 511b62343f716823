"""The `snapvit` program: its commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, NoReturn

import typer

from .. import __version__
from ..errors import SnapvitError
from . import (
    choose,
    compare,
    doctor,
    evaluate,
    export,
    fleet,
    import_scores,
    inspect,
    models,
    pack,
    profile,
    rank,
    report,
    validate,
)

app = typer.Typer(
    name="snapvit",
    help="Prune a Vision Transformer to the densest model that was measured to fit your device.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("export")(export.export)
app.command("rank")(rank.rank)
app.command("pack")(pack.pack)
app.command("profile")(profile.profile)
app.command("choose")(choose.choose)
app.command("evaluate")(evaluate.evaluate)
app.command("fleet")(fleet.fleet)
app.command("validate")(validate.validate)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("inspect")(inspect.inspect)
app.command("import-scores")(import_scores.import_scores)
app.command("models")(models.models)
app.command("doctor")(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"snapvit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the program."""
    signal.signal(signal.SIGTERM, _stopped)  # so that temporary folders are removed
    try:
        app()
    except SnapvitError as error:
        _refuse(str(error), error.exit_code)
    except (OSError, UnicodeError, MemoryError) as error:  # what the system refuses outside our own file handling
        _refuse(f"{type(error).__name__}: {error}", 1)


def _refuse(text: str, code: int) -> NoReturn:
    line = " ".join(text.split()).encode(errors="backslashreplace").decode()
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)


def _stopped(*_: object) -> NoReturn:
    _refuse("stopped from outside. If there is a checkpoint, it is whole: run the same command again to continue", 143)
