"""`snapvit report`: a family as one HTML page, as charts, as Markdown or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..visible import say
from . import options
from .output import print_json


def report(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    out: Annotated[
        Optional[Path], typer.Option(help="File or folder to write; report.html in the family by default.")
    ] = None,
    formats: Annotated[
        Optional[str], typer.Option("--format", help="html, png, svg, md, json; several with commas.")
    ] = None,
    budget: Annotated[
        Optional[str], typer.Option(help="Draw this budget, where the family was not chosen for one: 10ms.")
    ] = None,
    beside: Annotated[
        Optional[list[Path]],
        typer.Option(help="Another family of the same model in the same charts. May be repeated."),
    ] = None,
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers of the report.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Show a family as one page.

    Accuracy against latency, what each block keeps, all timings and the proof of the choice.
    """
    from ..family.layout import parse_formats
    from ..report.write import report as write
    from .progress import shown

    wanted = None if formats is None else parse_formats(formats)
    with shown(quiet) as progress:
        data, files = write(family, out, wanted, budget, beside or [], progress, force)
    if as_json:
        print_json(data)
        return
    from ..report.text import headline

    say(headline(data))
    say(f"Written to {files[0].parent}: {', '.join(path.name for path in files)}")
