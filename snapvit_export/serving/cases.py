"""The controller as a table of cases, state in and variant out: `cases.json`, for those who port it. Light.

`python tools/controller_cases.py` writes the file, and a test replays it. Names and units are those of `controller`; a
port gives the same variant, and the same numbers to 1e-9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..storage.json import Count, Finite, Size, Value, read_json
from .controller import Decision, Runnable, Settings, State, decide, learn

FILE = Path(__file__).with_name("cases.json")
CLOSE = 1e-9


class Choosing(Value, frozen=True, kw_only=True):
    """A state and the requests that wait, and which variant answers the first of them."""

    what: str  # shows this case
    settings: Settings
    runnable: tuple[Runnable, ...]
    state: State
    left_ms: tuple[Finite, ...]
    now_ms: Finite
    images: Size = 1
    together: Size = 1
    decision: Decision

    def replayed(self) -> Decision:
        return decide(self.runnable, self.settings, self.state, self.left_ms, self.now_ms, self.images, self.together)


class Learning(Value, frozen=True, kw_only=True):
    """A state and a run, and the state after it."""

    what: str
    settings: Settings
    state: State
    decision: Decision
    ran_ms: Finite
    now_ms: Finite
    answered: Size = 1
    waiting: Count = 0
    late: bool = False
    after: State

    def replayed(self) -> State:
        run = self.decision, self.ran_ms, self.now_ms
        return learn(self.settings, self.state, *run, self.answered, self.waiting, self.late)


class Cases(Value, frozen=True, kw_only=True):
    """The whole table."""

    format_version: Literal[1] = 1
    choosing: tuple[Choosing, ...]
    learning: tuple[Learning, ...]


def read_cases() -> Cases:
    """Read the table that comes with the package.

    >>> read_cases().choosing[0].decision.variant
    's25'
    """
    return read_json(FILE, Cases)
