"""The `snapvit` program: its commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from .. import __version__
from ..errors import SnapvitError, UsageError
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
from .stopping import ends_when_stopped

# Options that name a source, a file or a list: a user who gives a second one means both. Of settings (--images, --out)
# the last one counts, as everywhere on a command line: so an alias can be overridden.
MEANS_BOTH = frozenset(
    f"--{name}"
    for name in (
        *("data", "on", "by", "classes", "features", "ranking", "checkpoint", "profile", "elastic", "target"),
        *("sparsity", "flops", "params", "pair", "pairs", "recipes", "rounds", "ignore", "format", "budget"),
        *("tokens", "resolution"),
    )
)


class SingleValueCommand(TyperCommand):
    """A command that refuses a second value of a single-valued option, instead of silently dropping the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            if given.count(option) > 1 and option.opts[0] in MEANS_BOTH and not option.multiple:
                raise UsageError(
                    f"{option.opts[0]} is given twice, and snapvit {ctx.info_name} takes one. Give it once"
                )
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="snapvit",
    help="The largest version of a Vision Transformer that runs in 10 ms on your device.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("export", cls=SingleValueCommand)(export.export)
app.command("rank", cls=SingleValueCommand)(rank.rank)
app.command("pack", cls=SingleValueCommand)(pack.pack)
app.command("profile", cls=SingleValueCommand)(profile.profile)
app.command("choose", cls=SingleValueCommand)(choose.choose)
app.command("evaluate", cls=SingleValueCommand)(evaluate.evaluate)
app.command("fleet", cls=SingleValueCommand)(fleet.fleet)
app.command("validate", cls=SingleValueCommand)(validate.validate)
app.command("compare", cls=SingleValueCommand)(compare.compare)
app.command("report", cls=SingleValueCommand)(report.report)
app.command("inspect", cls=SingleValueCommand)(inspect.inspect)
app.command("import-scores", cls=SingleValueCommand)(import_scores.import_scores)
app.command("models", cls=SingleValueCommand)(models.models)
app.command("doctor", cls=SingleValueCommand)(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"snapvit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the program."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged metadata: images that cannot be read we name
    with ends_when_stopped():
        _run()


def _run() -> None:
    try:
        app()
    except SnapvitError as error:
        _refuse(str(error), error.exit_code)
    except (OSError, UnicodeError, MemoryError) as error:  # refused by the system outside our own file handling
        _refuse(f"{type(error).__name__}: {error}", 1)


def _refuse(text: str, code: int) -> NoReturn:
    line = " ".join(text.split()).encode(errors="backslashreplace").decode()
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)
