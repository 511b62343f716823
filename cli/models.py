"""`snapvit models`: the models that can be pruned."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import print_json


def models(
    pattern: Annotated[str, typer.Argument(help="Part of a name or family, or a pattern such as 'deit*'.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the supported model families, with sizes.

    Other checkpoints of these timm classes work too.
    """
    from ..workflows.inputs import list_models

    found = list_models(pattern)
    if as_json:
        print_json(found)
        return
    from ..report.terminal import print_rows

    rows = [
        (
            entry.family,
            entry.name,
            f"{entry.params / 1e6:.1f} M",
            f"{entry.flops / 1e9:.1f} ({entry.flops / 2e9:.1f})",
            f"{entry.blocks} x {entry.heads}",
            f"{entry.input_size[0]} px",
        )
        for entry in found
    ]
    columns = ("family", "model", "params", "GFLOPs (GMACs)", "blocks x heads", "input")
    print_rows(columns, rows, left={"family", "model"})
