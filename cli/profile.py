"""`snapvit profile`: the latencies of a family's variants on this machine, or on another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..visible import say
from . import options
from .output import print_json


def profile(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    target: Annotated[str, typer.Option(help="Where to time: local, or ssh://user@host[:port].")] = "local",
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("profile.json"),
    runtime: options.Runtime = None,
    threads: options.Threads = None,
    batch: options.Batch = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Of each variant.")] = 2.0,
    pause: options.Pause = 0.0,
    pin: options.Pin = None,
    force: options.Force = False,
    python: Annotated[str, typer.Option(help="Python of another machine.")] = "python3",
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of a table.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Time the variants of a family side by side.

    Writes the latencies with the device that they belong to.
    """
    from ..runtimes.device import pin_to
    from ..selection.known_profiles import check_profile_place
    from ..selection.on_device import TimingOptions, profile_family
    from ..target import check_runtime
    from .progress import shown

    timing = TimingOptions(None if runtime is None else check_runtime(runtime), threads, batch, pause)
    check_profile_place(out, force)
    with shown(quiet) as progress:
        if target == "local":
            pin_to(pin)
            found = profile_family(family, timing, progress, seconds)
        else:
            from ..selection.remote import Host, profile_there

            given = {
                "--runtime": runtime,
                "--threads": threads,
                "--batch": batch,
                "--seconds": seconds,
                "--pause": pause,
                "--pin": pin,
            }
            words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
            found = profile_there(family, Host.parse(target, python), words, progress)
    found.save(out)
    if as_json:
        print_json(found)
        return
    from ..report.terminal import print_profiles

    print_profiles(found)
    say(f"Written to {out}")
