"""Write the controller's table of cases, `snapvit_export/serving/cases.json`, from simulated machines.

python tools/controller_cases.py            # write it again, after the controller has changed
python tools/controller_cases.py --check    # fail if it is not what the controller does: a test does the same
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator

import msgspec

from snapvit_export.serving.cases import FILE, Cases, Choosing, Learning
from snapvit_export.serving.controller import Late, Runnable, Settings, State, decide, learn

RUNNABLE = tuple(
    Runnable(name=name, ms=ms, more_ms=0.75 * ms, quality=quality)
    for name, ms, quality in (("dense", 20.0, 1.0), ("s25", 16.0, 0.97), ("s50", 11.0, 0.9), ("s75", 6.0, 0.7))
)
EVERY_MS = 32.0
QUEUES = ([24.0], [12.5], [40.0, 56.0], [20.0, 20.0, 20.0], [3.0], [-1.0, 60.0])
Slowness = Callable[[int], float]
MACHINES: dict[str, tuple[Slowness, float, Late, int]] = {  # slowness by run, hit rate, what is late, runs
    "a machine at rest": (lambda n: 1.0, 0.99, "run", 12),
    "one that becomes twice as slow at run 12, and fast again at run 18": (
        lambda n: 2.0 if 12 <= n < 18 else 1.0,
        0.99,
        "run",
        32,
    ),
    "a spike at run 10": (lambda n: 6.0 if n == 10 else 1.0, 0.95, "run", 18),
    "every third run takes twice as long": (lambda n: 2.0 if n % 3 == 0 else 1.0, 0.9, "run", 40),
    "heat: one per cent slower with every run": (lambda n: 1.01**n, 0.99, "run", 60),
    "eight times too slow, and late requests are refused": (lambda n: 8.0, 0.99, "refuse", 6),
    "a clock that tells nothing at run 5 and an hour at run 6": (
        lambda n: {5: 0.0, 6: 1e5}.get(n, 1.0),
        0.99,
        "run",
        14,
    ),
}
BURSTS = [800.0 * n + k for n in range(5) for k in range(4)]  # of four requests; a dense run leaves room for two
BURST_MS = 30.0  # deadline of each
SHOWN = 9  # runs of each machine that become cases, evenly spread


def made() -> Cases:
    choosing: list[Choosing] = []
    learning: list[Learning] = []
    for what, (slowness, hit, late, count) in MACHINES.items():
        settings = Settings(hit=hit, late=late)
        shown = {round(n * (count - 1) / (SHOWN - 1)) for n in range(SHOWN)}
        for number, (state, now, choice, learnt) in enumerate(_runs(settings, slowness, count)):
            if number in shown:
                choosing.append(_choosing(f"{what}: run {number}", settings, state, QUEUES[0], now))
                learning.append(
                    Learning(what=f"{what}: run {number}", settings=settings, state=state, **choice, after=learnt)
                )
    for case, learnt in _bursts():
        choosing.append(case)
        learning.append(learnt)
    settings, states = Settings(), [case.state for case in choosing]
    random.Random(0).shuffle(states)
    for state, left in zip(states, [queue for queue in QUEUES for _ in range(4)]):
        now = state.ratios[-1][0] + EVERY_MS if state.ratios else 0.0
        choosing.append(_choosing(f"{len(left)} waiting", settings, state, left, now))
    choosing.append(
        _choosing(
            "three images of two requests together", settings, states[0], [40.0, 44.0, 90.0], 9e3, images=3, together=2
        )
    )
    choosing.append(_choosing("the last run is long ago", Settings(late="refuse"), states[1], [1.0], 9e9))
    return Cases(choosing=tuple(choosing), learning=tuple(learning))


def _runs(settings: Settings, slowness: Slowness, count: int) -> Iterator[tuple[State, float, dict, State]]:  # type: ignore[type-arg]
    """Yield every state, the time, what is learnt there, and the state after it."""
    state, now = State(), 0.0
    for number in range(count):
        decision = decide(RUNNABLE, settings, state, QUEUES[0], now)
        ran = decision.base_ms * slowness(number)
        after = learn(settings, state, decision, ran, now + ran)
        yield state, now, dict(decision=decision, ran_ms=ran, now_ms=now + ran), after
        state, now = after, now + max(EVERY_MS, ran)


def _bursts() -> Iterator[tuple[Choosing, Learning]]:
    """Yield every decision and run of bursts that nobody knows of before they come."""
    settings, state, free = Settings(), State(), 0.0
    for number, arrived in enumerate(BURSTS):
        now = max(free, arrived)
        what = f"bursts of four: request {number}"
        case = _choosing(what, settings, state, [at + BURST_MS - now for at in BURSTS[number:] if at <= now], now)
        free = now + case.decision.base_ms
        run = dict(decision=case.decision, ran_ms=case.decision.base_ms, now_ms=free)
        line = dict(waiting=sum(at <= free for at in BURSTS[number + 1 :]), late=free > arrived + BURST_MS)
        after = learn(settings, state, **run, **line)
        yield case, Learning(what=what, settings=settings, state=state, **run, **line, after=after)
        state = after


def _choosing(
    what: str, settings: Settings, state: State, left: list[float], now: float, images: int = 1, together: int = 1
) -> Choosing:
    decision = decide(RUNNABLE, settings, state, left, now, images, together)
    return Choosing(
        what=what,
        settings=settings,
        runnable=RUNNABLE,
        state=state,
        left_ms=tuple(left),
        now_ms=now,
        images=images,
        together=together,
        decision=decision,
    )


def _lines(cases: Cases) -> bytes:
    """Return the table as JSON with a line for each case."""
    parts = {name: [msgspec.json.encode(case) for case in getattr(cases, name)] for name in ("choosing", "learning")}
    lists = [f'"{name}": [\n'.encode() + b",\n".join(part) + b"\n]" for name, part in parts.items()]
    return f'{{"format_version": {cases.format_version},\n'.encode() + b",\n".join(lists) + b"}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    written = _lines(made())
    if not parser.parse_args().check:
        FILE.write_bytes(written)
    elif not FILE.is_file() or FILE.read_bytes() != written:
        sys.exit(f"{FILE.name} is not what the controller does. Run: python tools/controller_cases.py")


if __name__ == "__main__":
    main()
