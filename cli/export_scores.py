"""`snapvit export-scores`: rankings as score files of the released SnapViT code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..visible import say, visible
from .options import Force
from .output import print_json


def export_scores(
    ranking: Annotated[Path, typer.Argument(help="A ranking, or a score file of the released code.")],
    out: Annotated[Path, typer.Option(help="Score file to write.")] = Path("scores.pt"),
    model_type: Annotated[
        Optional[str], typer.Option(help="The released code's name of the model, where the ranking does not tell it.")
    ] = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn a ranking into a score file of the released code.

    The file names no class, so reading it executes nothing.
    """
    from ..workflows.export_scores import export_scores

    written = export_scores(ranking, out, model_type, force)
    if as_json:
        print_json({"file": visible(str(out)), **written})
        return
    blocks, heads, neurons = (written[name] for name in ("num_blocks", "num_heads", "hidden_dim"))
    say(f"{out}: {written['model_type']}, {blocks} blocks, {blocks * heads} heads, {blocks * neurons} neurons")
    if written["left_out"]:
        say(f"left out, since the released code cuts by two ratios alone: {', '.join(written['left_out'])}")
