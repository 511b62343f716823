"""`snapvit profile`: the latencies of a family's variants on this machine, or on another."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ..visible import say
from . import options
from .output import print_json

if TYPE_CHECKING:
    from ..budget import Budget
    from ..family.manifest import Limits
    from ..selection.known_profiles import FamilyProfile
    from ..selection.remote_agent import BoardResults

JETSON = "jetson://"


@dataclass(frozen=True)
class Output:
    """Where results go."""

    out: Path
    force: bool
    as_json: bool
    quiet: bool


@dataclass(frozen=True)
class Choosing:
    """A budget that a board's latencies must meet."""

    budget: Budget
    limits: Limits
    strict: bool

    @staticmethod
    def parse(budget: str, at: str, strict: bool) -> Choosing:
        """Read the options."""
        from ..budget import Budget
        from . import parsing

        return Choosing(Budget.parse(budget), parsing.limits(at, None, None), strict)

    def choose(self, family: Path, known: FamilyProfile, output: Output) -> None:
        """Choose as `snapvit choose --profile` does, and print it."""
        from ..selection.on_device import TimingOptions, choose_in_family
        from .progress import shown

        with shown(output.quiet) as progress:
            manifest = choose_in_family(
                family, self.budget, self.limits, TimingOptions(), progress, known=known, strict=self.strict
            )
        if output.as_json:
            print_json(manifest)
            return
        from ..report.terminal import print_family

        print_family(manifest, folder=family)


def profile(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    target: Annotated[
        str,
        typer.Option(help="Where to time: local, ssh://user@host[:port], or TensorRT on jetson://user@host[:port]."),
    ] = "local",
    agent: Annotated[
        bool, typer.Option("--agent", help="On ssh://, time in TensorRT by trtexec there, as on jetson://.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("profile.json"),
    budget: Annotated[
        Optional[str],
        typer.Option(help="On a board: also choose, to meet 10ms, 60% (of dense), 100fps or 15mJ; or 10ms,15mJ."),
    ] = None,
    at: Annotated[str, typer.Option(help="Percentile that must meet the budget: p50, p90 or p99.")] = "p50",
    strict: options.Strict = False,
    runtime: options.Runtime = None,
    threads: options.Threads = None,
    batch: options.Batch = None,
    seconds: Annotated[
        Optional[float], typer.Option(min=0.1, max=3600, help="Of each variant: 2, on a board 10.")
    ] = None,
    pause: options.Pause = 0.0,
    pin: options.Pin = None,
    soak: Annotated[
        Optional[float],
        typer.Option(min=0.1, max=1440, help="On a board: then run each variant so many minutes, and watch its heat."),
    ] = None,
    power_modes: Annotated[
        Optional[str], typer.Option(help="On a board, as root: time in these power modes, by number: 0,2; or all.")
    ] = None,
    trtexec: Annotated[Optional[str], typer.Option(help="On a board: its trtexec, if it is not found.")] = None,
    force: options.Force = False,
    python: Annotated[str, typer.Option(help="Python of another machine.")] = "python3",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the profile instead of a table; with --budget the manifest.")
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Time the variants of a family side by side.

    Writes the latencies with the device that they belong to.
    """
    if agent or target.startswith(JETSON):
        given = {
            "--batch": batch,
            "--seconds": seconds,
            "--soak": soak,
            "--power-modes": power_modes,
            "--trtexec": trtexec,
        }
        choosing = None if budget is None else Choosing.parse(budget, at, strict)
        _on_board(family, target, python, _words(given), choosing, Output(out, force, as_json, quiet))
        return
    from ..runtimes.device import pin_to
    from ..selection.known_profiles import check_profile_place
    from ..selection.on_device import TimingOptions, profile_family
    from ..target import check_runtime
    from .progress import shown

    seconds = 2.0 if seconds is None else seconds
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
            found = profile_there(family, Host.parse(target, python), _words(given), progress)
    found.save(out)
    if as_json:
        print_json(found)
    else:
        _print(found, out)


def _words(given: Mapping[str, object]) -> list[str]:
    return [word for name, value in given.items() if value is not None for word in (name, str(value))]


def _print(found: FamilyProfile, out: Path) -> None:
    from ..report.terminal import print_profiles

    print_profiles(found)
    say(f"Written to {out}")


def _on_board(
    family: Path, target: str, python: str, words: list[str], choosing: Choosing | None, output: Output
) -> None:
    """Time by the agent on a board, and choose if there is a budget."""
    from ..family.folder import read_family
    from ..family.shipped import check_place
    from ..selection.remote import Host
    from ..selection.remote_agent import SWEEP, check_board_places, profile_on_board
    from .progress import shown

    host = Host.parse(target, python)
    check_board_places(output.out, output.force, SWEEP in words)
    if choosing is not None:
        check_place(family, read_family(family), "tensorrt")
    with shown(output.quiet) as progress:
        found = profile_on_board(family, host, words, progress)
    found.save(output.out, output.force)
    if not output.as_json:
        _print_board(found, output.out, host.name)
    if choosing is not None and found.profile is not None:
        choosing.choose(family, found.profile, output)
    elif output.as_json:
        print_json(found.profile or found.profiles)
    elif found.profile is not None:
        where, latencies = shlex.quote(str(family)), shlex.quote(str(output.out))
        say(f"Choose:       snapvit choose {where} --budget 10ms --profile {latencies}")
        say(f"Many devices: snapvit fleet {where} --budget {latencies}=10ms")


def _print_board(found: BoardResults, out: Path, host: str) -> None:
    """Print the agent's own tables, which tell more of a board than ours, and where everything is."""
    for line in found.table.splitlines():
        if not line.startswith("Written to "):  # places on the board
            say(line)
    say(f"Written to {', '.join(str(place) for place in found.places(out))}")
    say(f"Engines on {host}: {found.engines}")
