"""`snapvit profile`: how long the variants of a family take on this machine, or on another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def profile(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    target: Annotated[str, typer.Option(help="Where to time: local, or ssh://user@host[:port].")] = "local",
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("profile.json"),
    runtime: Annotated[
        Optional[str], typer.Option(help="As in export; without it, what the family was made for.")
    ] = None,
    threads: Annotated[
        Optional[int], typer.Option(min=1, max=1024, help="CPU threads; without it, as the family was made for.")
    ] = None,
    batch: Annotated[
        Optional[int], typer.Option(min=1, max=65536, help="Images per run; without it, as the family was made for.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Of each variant.")] = 2.0,
    pause: Annotated[float, typer.Option(min=0, max=10000, help="Milliseconds to sleep before every run.")] = 0.0,
    pin: Annotated[Optional[str], typer.Option(help="Cores to run on: 0 or 0,2.")] = None,
    python: Annotated[str, typer.Option(help="Python of another machine.")] = "python3",
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")] = False,
) -> None:
    """Time the variants of a family side by side, and write the latencies with the device they belong to."""
    from ..on_device import Way, profile_family
    from ..profiling.affinity import pin_to
    from ..target import check_runtime
    from .progress import shown

    way = Way(None if runtime is None else check_runtime(runtime), threads, batch, pause)
    with shown(quiet) as progress:
        if target == "local":
            pin_to(pin)
            found = profile_family(family, way, progress, seconds)
        else:
            from ..remote import Host, profile_there

            given = {
                "--runtime": runtime,
                "--threads": threads,
                "--batch": batch,
                "--seconds": seconds,
                "--pause": pause,
                "--pin": pin,
            }
            options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
            found = profile_there(family, Host.parse(target, python), options, progress)
    found.save(out)
    if as_json:
        from ..values import to_json

        print(to_json(found).decode(), end="")
        return
    from ..report.table import print_profiles

    print_profiles(found)
    print(f"Written to {out}")
