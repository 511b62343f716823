"""`snapvit run`: what a family says of images, each answered before a deadline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..visible import say
from . import options
from .output import print_json

if TYPE_CHECKING:
    from ..serving.frames import Frame


def run(
    family: Annotated[Path, typer.Argument(help="A family folder.")],
    images: Annotated[str, typer.Argument(help=f"Images: a file, or {options.SOURCES}.")],
    deadline: options.Deadline = None,
    hit: options.Hit = 0.99,
    late: options.Late = "run",
    fps: Annotated[
        Optional[float], typer.Option(min=0.01, max=10000, help="As a camera: so many a second, those in time.")
    ] = None,
    count: Annotated[
        Optional[int], typer.Option("--frames", min=1, max=10**7, help="With --fps: so many, over and over.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Classes to show of each image.")] = 3,
    variant: Annotated[Optional[str], typer.Option(help="Always this variant.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Keep the answers in the family, for its report.")] = False,
    runtime: options.Runtime = None,
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, at the end.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what a family says of images.

    With a deadline each image goes to the best variant that will be in time; otherwise to the chosen one.
    """
    from ..calibration.open_source import open_images
    from ..errors import SnapvitError
    from ..serving.frames import frames, traced
    from ..serving.session import ElasticSession
    from ..target import check_runtime
    from .parsing import late_choice
    from .progress import shown

    due = deadline if deadline is not None or fps is None else 1000 / fps
    source = open_images(images)
    found: list[Any] = []
    with shown(quiet) as progress:
        progress.phase(f"opening {family}")
        session = ElasticSession(
            family,
            due,
            hit=hit,
            late=late_choice(late),
            only=_only(family, due is not None, variant),
            runtime=None if runtime is None else check_runtime(runtime),
            threads=threads,
        )
    with session:
        for frame in frames(session, source, fps, count, top):
            found.append(frame)
            if not as_json:
                say(line_of(frame))
        stats = session.stats
        if record:
            traced(session, found, f"{len(found)} images").save(family)
    if as_json:
        print_json({"deadline_ms": due if due is None else session.deadline_ms, "images": found, "stats": stats})
    else:
        say(_summary(found, due is not None), sys.stderr)
    if not any(frame.variant for frame in found):
        raise SnapvitError(f"{images}: no image was answered. The first says: {found[0].error}")


def _only(family: Path, has_deadline: bool, variant: str | None) -> list[str] | None:
    """Return the variants to open: all for a deadline, otherwise one."""
    from ..family.folder import read_manifest

    if variant is not None:
        return [variant]
    if has_deadline:
        return None
    manifest = read_manifest(family)
    return [manifest.dense if manifest.choice is None else manifest.choice.variant]


def line_of(frame: Frame) -> str:
    """Write an answer on one line."""
    if frame.variant is None or frame.latency_ms is None:
        return f"{frame.image}  {frame.error}"
    said = ", ".join(f"{each.label} {100 * each.probability:.0f} %" for each in frame.predictions)
    said = said or f"an embedding of {frame.features} numbers"
    return f"{frame.image}  {said}  {frame.variant}  {frame.latency_ms:.1f} ms{'' if frame.met else '  late'}"


def _summary(found: list[Any], has_deadline: bool) -> str:
    answered = [frame for frame in found if frame.variant]
    text = f"{len(answered)} of {len(found)} images answered"
    if has_deadline:
        met = sum(bool(frame.met) for frame in found)
        text += f", {100 * met / len(found):.1f} % in time"
    fidelities = [frame.fidelity for frame in answered if frame.fidelity is not None]
    if fidelities:
        text += f", mean fidelity {sum(fidelities) / len(fidelities):.3f}"
    return text
