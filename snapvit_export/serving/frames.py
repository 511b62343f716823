"""Images of a source through a session, one after the other or at the pace of a camera. Light.

A camera does not wait: its frames arrive at fixed times, latency counts from there, and a frame for which there was no
time is gone. It has room for one frame: after a slow run the newest goes next. Images are decoded before they arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from ..calibration.source import Source, UnreadableImage
from ..family.trace import MOST, Trace, Traced
from ..storage.json import Value
from .session import ElasticSession, Refused

NO_TIME = "no time for this frame"


class Said(Value, frozen=True, kw_only=True):
    """A class, and how sure the model is of it."""

    label: str
    probability: float


class Frame(Value, frozen=True, kw_only=True):
    """What was said of one image."""

    image: str
    at_s: float | None = None  # when it arrived, from the beginning
    variant: str | None = None  # None: nothing was run
    latency_ms: float | None = None
    met: bool | None = None
    fidelity: float | None = None
    predictions: tuple[Said, ...] = ()
    features: int | None = None  # numbers of the embedding, of a model without classes
    slowness: float | None = None  # of the machine, as the session sees it after the answer
    error: str | None = None


def frames(
    session: ElasticSession,
    source: Source,
    fps: float | None = None,
    count: int | None = None,
    top: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Frame]:
    """Answer the images of a source, or `count` frames that go through it again and again, so many a second."""
    began, number, total = -1.0, 0, source.count if count is None else count
    while number < total:
        title = source.title(number % source.count)
        try:
            picture = source.open(number % source.count)
        except UnreadableImage as error:
            yield Frame(image=title, error=str(error))
            number += 1
            continue
        arrived = clock()
        began = arrived if began < 0 else began
        if fps is not None:
            due = began + number / fps
            newest = int((arrived - began) * fps)
            if newest > number:
                for missed in range(number, min(newest, total)):
                    yield Frame(image=source.title(missed % source.count), at_s=missed / fps, met=False, error=NO_TIME)
                number = newest
                continue
            sleep(max(0.0, due - arrived))
            arrived = due
        try:
            answer = session.run_images(picture, arrived=arrived)
        except Refused as error:
            yield Frame(image=title, at_s=arrived - began, met=False, error=str(error))
        else:
            has_classes = bool(session.manifest.anatomy.classes)
            best = session.likeliest(answer, top)[0] if has_classes else []
            yield Frame(
                image=title,
                at_s=arrived - began,
                variant=answer.variant,
                latency_ms=answer.latency_ms,
                met=answer.met,
                fidelity=answer.fidelity,
                predictions=tuple(Said(label=a, probability=b) for a, b in best),
                features=None if has_classes else answer.output.shape[1],
                slowness=session.slowness,
            )
        number += 1


def traced(session: ElasticSession, found: Sequence[Frame], title: str) -> Trace:
    """Return answers as a report draws them over time."""
    requests = [
        Traced(
            at_s=frame.at_s,
            variant=frame.variant,
            latency_ms=frame.latency_ms,
            met=bool(frame.met),
            slowness=frame.slowness,
        )
        for frame in found[:MOST]
        if frame.at_s is not None
    ]
    deadline_ms, names = session.deadline_ms, session.best_first
    assert deadline_ms is not None, "without a deadline there is nothing to show"
    return Trace(title=title, deadline_ms=deadline_ms, variants=names, requests=tuple(requests))
