"""Progress on standard error: a live line in a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..progress import Intervals, Progress, Silent, clock
from ..visible import say, say_json, visible

if TYPE_CHECKING:
    from rich.console import Console

DRAWN_EVERY = 0.2  # seconds
BAR_WIDTH = 24
BESIDE = len("* ") + len(" 10000/10000, 1:00:00 left") + 2  # letters of a line that are not of its phase


@contextmanager
def shown(quiet: bool, as_json: bool = False) -> Iterator[Progress]:
    """Yield the Progress that suits standard error; `as_json` for programs that read it."""
    if quiet:
        yield Silent()
    elif as_json:
        yield _JsonLines()
    elif sys.stderr.isatty():
        with _live() as progress:
            yield progress
    else:
        yield _Lines()


class _Lines:
    def phase(self, what: str, total: int | None = None) -> None:
        say(what if total is None else f"{what} ({total})", sys.stderr)

    def advance(self, steps: int = 1) -> None:
        pass

    def describe(self, what: str) -> None:
        say(f"  {what}", sys.stderr)

    def note(self, text: str) -> None:
        say(f"  {text}", sys.stderr)

    def latencies(self, found: Intervals, budget_ms: float | None) -> None:
        pass  # the last of them becomes a note


class _JsonLines:
    """One JSON object per line: the phase, how far it is, and notes."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {}

    def _print(self, **changes: object) -> None:
        import json

        self.state |= changes
        say_json(json.dumps(self.state), sys.stderr)

    def phase(self, what: str, total: int | None = None) -> None:
        self.state = {}
        self._print(phase=what, done=0, total=total)

    def advance(self, steps: int = 1) -> None:
        self._print(done=int(str(self.state.get("done", 0))) + steps)

    def describe(self, what: str) -> None:
        self._print(status=what)

    def note(self, text: str) -> None:
        import json

        say_json(json.dumps({"note": text}), sys.stderr)

    def latencies(self, found: Intervals, budget_ms: float | None) -> None:
        self._print(latencies_ms=found, budget_ms=budget_ms)


def how_far(done: float, total: float | None, elapsed: float | None, left: float | None) -> str:
    """Write how far a phase is: steps and the time left, or the time so far where its steps are not known.

    >>> how_far(30, 120, 10.0, 31.0), how_far(0, None, 75.0, None)
    ('30/120, 0:31 left', '1:15')
    """
    if total is None:
        return "" if elapsed is None or elapsed < 1 else clock(elapsed)
    steps = f"{done:.0f}/{total:.0f}"
    return steps if left is None else f"{steps}, {clock(left)} left"


def shortened(what: str, room: int) -> str:
    """Cut a text to its room, so that a phase stays on one line."""
    what = visible(what)
    return what if len(what) <= max(room, 12) else f"{what[: max(room, 12) - 1]}…"


@contextmanager
def _live(on: Console | None = None) -> Iterator[Progress]:
    from rich.console import Console, Group
    from rich.live import Live as Screen
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.progress import Progress as Bars
    from rich.text import Text

    class HowFar(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(how_far(task.completed, task.total, task.elapsed, task.time_remaining))

    what = TextColumn("{task.description}", markup=False)
    bars = Bars(SpinnerColumn(), what, BarColumn(bar_width=BAR_WIDTH), HowFar(), get_time=time.monotonic)
    without_bar = Bars(SpinnerColumn(), what, HowFar(), get_time=time.monotonic)  # for steps that are not known
    console = on or Console(stderr=True, highlight=False)
    # Drawn only when something is reported: a refresh thread of its own would disturb what is timed.
    screen = Screen(without_bar, console=console, transient=True, auto_refresh=False)

    class Live:
        line = without_bar
        task = without_bar.add_task("starting", total=None)
        drawn = time.monotonic()

        def room(self) -> int:
            """Return the letters that a line has for the phase, beside the bar and the steps."""
            return console.width - BESIDE - (BAR_WIDTH if self.line is bars else 0)

        def phase(self, what: str, total: int | None = None) -> None:
            self.line.remove_task(self.task)  # a reset would keep the old total where there is none
            self.line = without_bar if total is None else bars
            self.task = self.line.add_task(shortened(what, self.room()), total=total)
            screen.update(self.line, refresh=True)

        def advance(self, steps: int = 1) -> None:
            self.line.advance(self.task, steps)
            if time.monotonic() - self.drawn > DRAWN_EVERY:
                screen.refresh()
                self.drawn = time.monotonic()

        def describe(self, what: str) -> None:
            self.line.update(self.task, description=shortened(what, self.room()))
            screen.refresh()

        def note(self, text: str) -> None:
            console.print(visible(text), style="dim", markup=False)

        def latencies(self, found: Intervals, budget_ms: float | None) -> None:
            screen.update(Group(self.line, Text("\n".join(drawn(found, budget_ms)))), refresh=True)

    with screen:
        yield Live()


def drawn(found: Intervals, budget_ms: float | None, width: int = 40) -> list[str]:
    """Draw latencies as bars with their intervals, and the budget as a line through all of them."""
    most = max([high for _, _, high in found.values()] + [budget_ms or 0.0]) * 1.05
    shown_names = [visible(name) for name in found]
    name_width = max(map(len, shown_names))
    mark = None if budget_ms is None else min(width - 1, int(width * budget_ms / most))
    lines = []
    for name, (ms, low, high) in zip(shown_names, found.values()):
        first, last = int(width * low / most), max(int(width * low / most) + 1, int(width * high / most))
        cells = ["━" if cell < first else "╌" if cell < last else " " for cell in range(width)]
        if mark is not None:
            cells[mark] = "│"
        lines.append(f"  {name:<{name_width}} {''.join(cells)} {ms:8.2f} ms ({low:.2f} to {high:.2f})")
    if budget_ms is not None:
        lines.append(f"  {'':<{name_width}} {' ' * (mark or 0)}└ budget {budget_ms:.4g} ms")
    return lines
