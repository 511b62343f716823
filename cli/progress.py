"""Progress on standard error: a live bar in a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..progress import Progress, Silent


@contextmanager
def shown(quiet: bool, as_json: bool = False) -> Iterator[Progress]:
    """The Progress that suits where standard error goes; `as_json` for programs that read it."""
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


class _JsonLines:
    """One JSON object per line: what is being done, how far it is, and remarks."""

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


@contextmanager
def _live() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
        transient=True,
    )

    class Live:
        task = bars.add_task("starting", total=None)

        def phase(self, what: str, total: int | None = None) -> None:
            bars.remove_task(self.task)  # a reset would keep the old total where there is none
            self.task = bars.add_task(what, total=total)

        def advance(self, steps: int = 1) -> None:
            bars.advance(self.task, steps)

        def describe(self, what: str) -> None:
            bars.update(self.task, description=what)

        def note(self, text: str) -> None:
            bars.console.print(text, style="dim", markup=False)

    with bars:
        yield Live()
