"""Progress on standard error: a live bar in a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..progress import Intervals, Progress, Silent

DRAWN_EVERY = 0.2  # seconds


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
        print(what if total is None else f"{what} ({total})", file=sys.stderr, flush=True)

    def advance(self, steps: int = 1) -> None:
        pass

    def describe(self, what: str) -> None:
        print(f"  {what}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    def latencies(self, found: Intervals, budget_ms: float | None) -> None:
        pass  # the last of them becomes a note


class _JsonLines:
    """One JSON object per line: the phase, how far it is, and notes."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {}

    def _print(self, **changes: object) -> None:
        import json

        self.state |= changes
        print(json.dumps(self.state), file=sys.stderr, flush=True)

    def phase(self, what: str, total: int | None = None) -> None:
        self.state = {}
        self._print(phase=what, done=0, total=total)

    def advance(self, steps: int = 1) -> None:
        self._print(done=int(str(self.state.get("done", 0))) + steps)

    def describe(self, what: str) -> None:
        self._print(status=what)

    def note(self, text: str) -> None:
        import json

        print(json.dumps({"note": text}), file=sys.stderr, flush=True)

    def latencies(self, found: Intervals, budget_ms: float | None) -> None:
        self._print(latencies_ms=found, budget_ms=budget_ms)


@contextmanager
def _live() -> Iterator[Progress]:
    from rich.console import Console, Group
    from rich.live import Live as Screen
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, highlight=False)
    # Drawn only when something is reported: a refresh thread of its own would disturb what is timed.
    screen = Screen(bars, console=console, transient=True, auto_refresh=False)

    class Live:
        task = bars.add_task("starting", total=None)
        drawn = time.monotonic()

        def phase(self, what: str, total: int | None = None) -> None:
            bars.remove_task(self.task)  # a reset would keep the old total where there is none
            self.task = bars.add_task(what, total=total)
            screen.update(bars, refresh=True)

        def advance(self, steps: int = 1) -> None:
            bars.advance(self.task, steps)
            if time.monotonic() - self.drawn > DRAWN_EVERY:
                screen.refresh()
                self.drawn = time.monotonic()

        def describe(self, what: str) -> None:
            bars.update(self.task, description=what)
            screen.refresh()

        def note(self, text: str) -> None:
            console.print(text, style="dim", markup=False)

        def latencies(self, found: Intervals, budget_ms: float | None) -> None:
            from rich.text import Text

            screen.update(Group(bars, Text("\n".join(drawn(found, budget_ms)))), refresh=True)

    with screen:
        yield Live()


def drawn(found: Intervals, budget_ms: float | None, width: int = 40) -> list[str]:
    """Draw latencies as bars with their intervals, and the budget as a line through all of them."""
    most = max([high for _, _, high in found.values()] + [budget_ms or 0.0]) * 1.05
    name_width = max(len(name) for name in found)
    mark = None if budget_ms is None else min(width - 1, int(width * budget_ms / most))
    lines = []
    for name, (ms, low, high) in found.items():
        first, last = int(width * low / most), max(int(width * low / most) + 1, int(width * high / most))
        cells = ["━" if cell < first else "╌" if cell < last else " " for cell in range(width)]
        if mark is not None:
            cells[mark] = "│"
        lines.append(f"  {name:<{name_width}} {''.join(cells)} {ms:8.2f} ms ({low:.2f} to {high:.2f})")
    if budget_ms is not None:
        lines.append(f"  {'':<{name_width}} {' ' * (mark or 0)}└ budget {budget_ms:.4g} ms")
    return lines
