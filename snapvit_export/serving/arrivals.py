"""How many requests come together: what a queue does not show yet when its first request has to be run. Light, pure.

A burst is not there at once. Its first request finds nobody waiting, and a variant that takes all of its time makes the
others late that come while it runs. So the lines of late are remembered. A line begins with a request that finds nobody
before it, and ends when nobody waits.

    counted    a line counts with its length if somebody in it was late, or if nobody was because more had been
               expected; not if a run took longer than it was predicted to, which says nothing of how requests come.
               Every other line counts as one request: lines of several that all are in time need no care
    length     the largest of the last LINES, but for the share of misses that is wanted: of two burst lines in a
               hundred the second is provided for, one alone is not, for a hit rate of 0.99
"""

from __future__ import annotations

from ..storage.json import Count, Value

LINES = 100
LONGEST = 64  # that counts: a line that is longer is no burst, and the fastest variant answers all of it anyway
ROUNDING = 1e-9  # of a share times a count, so that every port counts alike


class Arrivals(Value, frozen=True, kw_only=True):
    """The line as it is, and the lines before it."""

    answered: Count = 0  # requests of this line
    late: bool = False  # one of them
    expected: bool = False  # more of them than had come
    slowed: bool = False  # by a run that took longer than predicted
    lines: tuple[Count, ...] = ()  # lengths as they count, newest last

    def to_come(self, waiting: int, hit: float) -> int:
        """Return how many more requests a line is to be expected to have, of which so many are there."""
        forgiven = int((1 - hit) * LINES + ROUNDING)
        if len(self.lines) <= forgiven:
            return 0
        return max(0, sorted(self.lines, reverse=True)[forgiven] - self.answered - waiting)

    def after(self, answered: int, waiting: int, late: bool, expected: bool, slowed: bool) -> Arrivals:
        """Return what is known after so many were answered or refused, when so many wait."""
        first = self.answered == 0  # nobody was before it: if it is late, it is so for itself
        now = Arrivals(
            answered=self.answered + answered,
            late=self.late or (late and not first),
            expected=self.expected or expected,
            slowed=self.slowed or slowed,
            lines=self.lines,
        )
        if waiting:
            return now
        length = min(now.answered, LONGEST) if (now.late or now.expected) and not now.slowed else 1
        return Arrivals(lines=(*self.lines, length)[-LINES:])
