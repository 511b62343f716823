"""The `snapvit` program: its commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .. import __version__
from ..errors import SnapvitError, UsageError
from ..visible import finish, open_streams, say
from . import (
    choose,
    compare,
    doctor,
    evaluate,
    export,
    export_scores,
    fleet,
    import_scores,
    inspect,
    models,
    pack,
    profile,
    rank,
    recover,
    report,
    run,
    serve,
    validate,
)
from .combinations import refuse_idle
from .stopping import ends_when_stopped

# Options that name a source, a file or a list: a user who gives a second one means both. Of settings (--images, --out)
# the last one counts, as everywhere on a command line: so an alias can be overridden.
MEANS_BOTH = frozenset(
    f"--{name}"
    for name in (
        *("data", "on", "by", "classes", "features", "ranking", "checkpoint", "profile", "elastic", "target"),
        *("sparsity", "flops", "params", "pair", "pairs", "recipes", "rounds", "ignore", "format", "budget"),
        *("tokens", "resolution", "power-modes", "deadline", "calibrate", "seeds"),
    )
)
ENDLESS = frozenset(["--most-moved"])  # options that may be inf: for never


class StrictCommand(TyperCommand):
    """A command that refuses what it would otherwise drop silently.

    A second value of a single-valued option, a number that is none, and an option that has no effect beside the others.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, found = self.make_parser(ctx).parse_args(args=list(args))
        for option in found:
            if found.count(option) > 1 and option.opts[0] in MEANS_BOTH and not option.multiple:
                raise UsageError(
                    f"{option.opts[0]} is given twice, and snapvit {ctx.info_name} takes one. Give it once"
                )
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:  # as for the completion of a command line
            values = {option.opts[0]: ctx.params.get(option.name) for option in self.params}
            for name, value in values.items():
                _refuse_no_number(name, value)
            refuse_idle(ctx.info_name, {option.opts[0] for option in found}, values)
        return rest


def _refuse_no_number(option: str, value: object) -> None:
    may_be_endless = option in ENDLESS and value == math.inf
    if isinstance(value, float) and not math.isfinite(value) and not may_be_endless:
        raise UsageError(f"{option} {value} is not a finite number. Give one that is")


app = typer.Typer(
    name="snapvit",
    help="The largest version of a Vision Transformer that runs in 10 ms on your device.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("export", cls=StrictCommand)(export.export)
app.command("rank", cls=StrictCommand)(rank.rank)
app.command("pack", cls=StrictCommand)(pack.pack)
app.command("profile", cls=StrictCommand)(profile.profile)
app.command("choose", cls=StrictCommand)(choose.choose)
app.command("evaluate", cls=StrictCommand)(evaluate.evaluate)
app.command("fleet", cls=StrictCommand)(fleet.fleet)
app.command("recover", cls=StrictCommand)(recover.recover)
app.command("validate", cls=StrictCommand)(validate.validate)
app.command("compare", cls=StrictCommand)(compare.compare)
app.command("report", cls=StrictCommand)(report.report)
app.command("run", cls=StrictCommand)(run.run)
app.command("serve", cls=StrictCommand)(serve.serve)
app.command("inspect", cls=StrictCommand)(inspect.inspect)
app.command("import-scores", cls=StrictCommand)(import_scores.import_scores)
app.command("export-scores", cls=StrictCommand)(export_scores.export_scores)
app.command("models", cls=StrictCommand)(models.models)
app.command("doctor", cls=StrictCommand)(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"snapvit {__version__}")
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
    open_streams()
    out = sys.stdout  # typer puts another in its place when the reader has left
    with ends_when_stopped():
        code = _run()
    if (lost := finish(out)) is not None:
        code = _output_lost(lost)
    sys.exit(code)


def _run() -> int:
    """Run the command and return its exit code."""
    try:
        ended = app(prog_name="snapvit", standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except SnapvitError as error:
        return _refused(str(error), error.exit_code)
    except (OSError, UnicodeError, MemoryError) as error:  # refused by the system outside our own file handling
        lost = finish(sys.stdout)
        return _refused(f"{type(error).__name__}: {error}", 1) if lost is None else _output_lost(lost)
    except typer.Abort:
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):  # as errors of the parser have, whose class is typer's own affair
            raise
        return _misused(error)
    return ended if isinstance(ended, int) else 0


def _output_lost(reason: str) -> int:
    """Tell why results could not be printed; a reader that has left, as `head` does, has seen enough."""
    return _refused(reason, 1) if reason else 1


def _misused(error: Any) -> int:
    """Tell what the parser has refused; without any words it shows the help instead."""
    context = getattr(error, "ctx", None)
    if len(sys.argv) == 1:
        error.show()
        return int(error.exit_code)
    path = "snapvit" if context is None else context.command_path
    said = error.format_message().rstrip(".")
    return _refused(f"{said}{'' if said.endswith('?') else '.'} See: {path} --help", error.exit_code)


def _refused(text: str, code: int) -> int:
    say(f"error: {' '.join(text.split())}", sys.stderr)
    return code
