"""`snapvit models`: the models that can be pruned."""

from __future__ import annotations

from typing import Annotated

import typer

from ..visible import say
from .output import print_json


def models(
    pattern: Annotated[str, typer.Argument(help="Part of a name or family, or a pattern such as 'deit*'.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that go in, with sizes.

    Others of the same timm classes and transformers types work too, and ONNX files: see docs/models.md.
    """
    from ..workflows.inputs import list_models

    found = list_models(pattern)
    if as_json:
        print_json(found)
        return
    from ..report.terminal import print_rows

    titles = {
        "timm": ("family", "timm name"),
        "transformers": ("model type", "transformers, on the hub or as a folder"),
    }
    for source, names in titles.items():
        rows = [
            (
                entry.family if entry.paper is None else f"{entry.family} *",
                entry.name,
                f"{entry.params / 1e6:.1f} M",
                f"{entry.flops / 1e9:.1f} ({entry.flops / 2e9:.1f})",
                f"{entry.blocks} x {entry.heads}",
                f"{entry.input_size[0]} px",
            )
            for entry in found
            if entry.source == source
        ]
        if rows:
            print_rows((*names, "params", "GFLOPs (GMACs)", "blocks x heads", "input"), rows, left=set(names))
    if any(entry.paper is not None for entry in found):
        say("* of the SnapViT paper, all listed by: snapvit models paper")
    for options in sorted({entry.paper for entry in found if entry.paper}):
        families = sorted({entry.family for entry in found if entry.paper == options})
        say(f"  {', '.join(families)}: there with {options}")
    if pattern == "*":
        say("Also: checkpoints of these of your own, of any size, and ONNX files of plain ViTs: see docs/models.md")
