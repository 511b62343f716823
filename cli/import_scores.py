"""`snapvit import-scores`: rankings from score files of the released SnapViT code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..visible import say, visible
from .options import Force
from .output import print_json


def import_scores(
    file: Annotated[Path, typer.Argument(help="A .pt score file of the released SnapViT code.")],
    out: Annotated[Path, typer.Option(help="Ranking to write.")] = Path("ranking.safetensors"),
    model: Annotated[Optional[str], typer.Option(help="timm name, to check that the scores are of this model.")] = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn a released score file into a ranking.

    Nothing that is pickled in it is executed.
    """
    from ..workflows.rank import import_ranking

    ranking = import_ranking(file, out, model, force)
    if as_json:
        described = {
            "file": visible(str(out)),
            "model": ranking.model,
            "heads": ranking.heads,
            "neurons": ranking.neurons,
        }
        print_json(described)
        return
    sizes = f"{len(ranking.heads)} blocks, {sum(ranking.heads)} heads, {sum(ranking.neurons)} neurons"
    say(f"{out}: {ranking.model}, {sizes}")
