"""`snapvit doctor`: versions, runtimes that really load, and what each command lacks."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import print_json


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what works on this machine, and what is missing.

    Versions, runtimes that really load, the machine, and what each command lacks.
    """
    from ..workflows.doctor import diagnose

    found = diagnose()
    if as_json:
        print_json(found)
        return
    from ..report.terminal import print_rows

    device = found.device
    rows = [
        ("snapvit", found.snapvit),
        ("python", found.python),
        ("system", device.system),
        ("cpu", f"{device.cpu}, {device.cores} usable cores, governor {device.governor}"),
        ("memory", f"{device.memory_bytes / 2**30:.1f} GiB"),
        *((name, version or "not installed") for name, version in found.packages.items()),
        *((f"runtime {r.runtime}", f"{r.state} ({r.detail}){_advice(r.remedy)}") for r in found.runtimes),
        *(
            (f"snapvit {c.command}", "ready" if c.works else f"lacks {', '.join(c.missing)}{_advice(c.remedy)}")
            for c in found.commands
        ),
    ]
    print_rows(("what", "state"), rows, left={"what", "state"})


def _advice(remedy: str) -> str:
    return f". Try: {remedy}" if remedy else ""
