"""`snapvit report`: a family, or a ranking alone, as one HTML page, as charts, as Markdown or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..visible import say
from . import options
from .output import print_json


def report(
    family: Annotated[Path, typer.Argument(help="A family folder, or a ranking file.")],
    out: Annotated[
        Optional[Path],
        typer.Option(help="File or folder to write: report.html in the family, or beside a ranking, by default."),
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
    sparsity: Annotated[
        Optional[str], typer.Option(help="Of a ranking: fractions of prunable parameters to cut: 0.1,0.3")
    ] = None,
    flops: Annotated[
        Optional[str], typer.Option(help="Of a ranking: fractions of the blocks' FLOPs to keep: 0.72,0.5")
    ] = None,
    pair: Annotated[
        Optional[str], typer.Option(help="Of a ranking: ratios of neurons and heads to cut: 0.35:0.2,0.65:0.5")
    ] = None,
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers of the report.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Show a family as one page, or a ranking alone.

    Of a family: accuracy against latency, what each block keeps, all timings and the proof of the choice. Of a ranking:
    what each block keeps at several sizes, the search, and how long it took.
    """
    from ..errors import UsageError
    from ..family.layout import parse_formats
    from ..report.write import is_ranking
    from ..report.write import report as write
    from . import parsing
    from .progress import shown

    wanted = None if formats is None else parse_formats(formats)
    sizes = {
        "--sparsity": parsing.fractions(sparsity, "--sparsity"),
        "--flops": parsing.fractions(flops, "--flops"),
        "--pair": parsing.pairs(pair, "--pair"),
    }
    if is_ranking(family):
        of_family = {"--budget": budget, "--beside": beside}
        if given := [option for option, value in of_family.items() if value]:
            raise UsageError(f"{given[0]} is for the report of a family, and {family} is a ranking. Leave it out")
        _report_ranking(family, out, wanted, sizes, force, as_json, quiet)
        return
    if given := [option for option, value in sizes.items() if value]:
        raise UsageError(f"{given[0]} says what a ranking keeps, and {family} is a family. Leave it out")
    with shown(quiet) as progress:
        data, files = write(family, out, wanted, budget, beside or [], progress, force)
    if as_json:
        print_json(data)
        return
    from ..report.text import headline

    say(headline(data))
    _say_files(files)


def _report_ranking(
    file: Path,
    out: Path | None,
    formats: Any,
    sizes: dict[str, Any],
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from ..report.ranking_text import headline
    from ..report.write import report_ranking
    from .progress import shown

    with shown(quiet) as progress:
        data, files = report_ranking(
            file, out, formats, sizes["--sparsity"], sizes["--flops"], sizes["--pair"], progress, force
        )
    if as_json:
        print_json(data)
        return
    say(headline(data))
    _say_files(files)


def _say_files(files: list[Path]) -> None:
    say(f"Written to {files[0].parent}: {', '.join(path.name for path in files)}")
