"""Which variant answers a request: the most faithful that will meet its deadline on the machine as it is now. Light.

Pure: no clock, no threads, no numpy; times come in as arguments, and `State` is a plain value, so that it can be ported
(`cases.json` has states and what must come out). In logarithms, where factors are sums:

    r        log(time of a run / latency of the variant in its profile): how slow the machine was
    level    the machine now: weighted median of the last 9 r, of any variant; weights halve with every 3 runs, and with
             every 2 s that a run is older than the newest. So 3 runs move it, and 2 do not
    highest  the machine at its slowest: the largest of the last 31 r
    margin   how far r is above the level but for the share of misses that is wanted, tracked online: + STEP (1 - q)
             after a miss beyond it, - STEP q after every other run; q = (1 - hit) / 2. A miss is a run that was
             predicted to be in time and was not: what is slower than predicted, and still in time, costs nobody
             anything. `above` is the same for r - highest. Of the two only the one that gives the lesser sum is moved
    regime   r of the runs since the machine last changed, 200 at most. It changed when 3 runs in a row are below nine
             tenths of those before, or 3 of 4 are above 95 % of them, by GAP at least
    factor   what latencies are multiplied with. By caution the lesser of level + margin and highest + above: the first
             follows steps, the second knows a machine that is slow every now and then. Boldly what all runs of the
             regime stay below but for 1 - hit of them, if that is less still. A bold run that misses costs a token of
             the probe budget: there are q new ones with every run, 2 at most, and without a whole one nothing is bold.
             After a run beyond the factor it is at least r.

A larger factor holds at once. A smaller one holds after CALM runs in a row that all asked for one lower by LOWER at
least, and then it is the largest of theirs. A queue: latency counts from arrival, and a variant may not take so long
that requests behind it, which the fastest variant could still answer in time, become late. So with those that are to
be expected behind it (`arrivals`), unless no variant is as fast as that: then it is the fastest.

What follows for T runs, however the machine behaves (E: the largest r - level or r - highest):

    missed though a variant was predicted to fit    at most (1 - hit) T + 2 ((E - START_MARGIN) / STEP + 1)
                                                    + START_TOKENS

Such a run was beyond the factor. If it was bold it cost a token, of which there were START_TOKENS + q T. Otherwise it
was a miss beyond the lesser of the two sums. A margin is moved in t of the runs and moves by STEP (n - q t), for n
misses beyond it, or by more where it is held at LEAST_NOISE; it begins at START_MARGIN, and ends below E + STEP, since
no run is beyond a margin of E. So n is q t + (E - START_MARGIN) / STEP + 1 at most, and the t of both are T together.

    moves to slower variants, of a fixed deadline   at most T / CALM
    a step of the machine to slower                 no second run is predicted by the old factor
    a step to faster                                3 + CALM runs later the factor is that of the new regime + LOWER at
                                                    most; without a token up to 1 / q runs later (200 for a hit rate of
                                                    0.99); one of less than GAP, up to 200 + CALM later
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ..storage.json import Count, Finite, Positive, Value
from .arrivals import ROUNDING, Arrivals

RUNS, HALVING_RUNS, HALVING_MS = 9, 3.0, 2000.0  # that make the level: older ones have a weight below 1/8
REMEMBERED = 31  # runs: of a machine that is slow in a tenth of them, fewer than 4 % have none of these
REGIME = 200  # runs: with a hit rate of 0.99 two of them are left out, so that a spike now and then costs no quality
GAP = 0.08  # between regimes: more than clocks and caches do, less than variants are apart
FASTER, SLOWER = 3, 3  # runs that show it
TYPICAL, USUAL_MOST = 0.1, 0.95  # quantiles of a regime, for a run that is below and one that is above
BEFORE = 70  # runs of a new regime that are taken to have been like those that it has
LEAST_NOISE = 0.02  # clocks, caches and Python, 2 %
START_NOISE = 0.1  # of the first run of a regime; of later ones the less the more there are
FEW = 3
STEP = 0.25  # of the margin: three misses in a row cover a machine that is twice as slow every now and then
START_MARGIN = 0.25
START_TOKENS, MOST_TOKENS = 1.0, 2.0
CALM = 4  # where every second run is slow, four fast ones in a row are a chance of 6 %
LOWER = 0.05  # variants are seldom closer to each other
MOST_LOG = 3.0  # a run 20 times slower than its profile tells no more: a clock that jumped, a machine that slept
STALE_MS = 1000.0  # after so long without a run a refusal would rest on what is no longer known
LEAST_MS = 1e-4  # a coarse clock tells 0

Late = Literal["run", "refuse"]
Hit = Annotated[float, msgspec.Meta(ge=0.5, le=0.9999)]


class Runnable(Value, frozen=True, kw_only=True):
    """A variant as the controller sees it."""

    name: str
    ms: Positive  # of one image on the machine at rest
    more_ms: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0  # of each further image of a batch
    quality: Finite  # larger is better

    def batch_ms(self, images: int) -> float:
        """Return the latency of a batch on the machine at rest."""
        return self.ms + (images - 1) * self.more_ms


class Settings(Value, frozen=True, kw_only=True):
    """What a caller wants of the controller."""

    hit: Hit = 0.99  # share of the requests that are answered in time, where a variant can
    late: Late = "run"  # what nothing can answer in time: run it on the fastest, or refuse it

    @property
    def allowed(self) -> float:
        """The share of runs that may be beyond a margin, and of tokens: half of the misses each."""
        return (1 - self.hit) / 2


class State(Value, frozen=True, kw_only=True):
    """All that the controller remembers."""

    ratios: tuple[tuple[Finite, Finite], ...] = ()  # when a run ended, ms, and its r; newest last
    regime: tuple[Finite, ...] = ()  # r since the machine last changed, newest last
    margin: Finite = START_MARGIN
    above: Finite = START_MARGIN
    tokens: Finite = START_TOKENS
    factor: Finite = START_MARGIN  # that predictions use now, a logarithm
    lower_runs: Count = 0  # in a row that asked for a lower one
    lower_to: Finite = -2 * MOST_LOG  # the largest that they asked for
    arrivals: Arrivals = Arrivals()

    @property
    def level(self) -> float:
        """How slow the machine is, a logarithm; 0 is as in the profiles."""
        return _level(self.ratios[-RUNS:])

    @property
    def highest(self) -> float:
        """How slow the machine was at worst, of late."""
        return max((ratio for _, ratio in self.ratios), default=0.0)

    @property
    def cautious(self) -> float:
        """The factor by caution."""
        return min(self.level + self.margin, self.highest + self.above)

    def bold(self, hit: float) -> float:
        """The factor that all runs of the regime stay below but for the share of misses that is wanted."""
        runs = len(self.regime)
        if runs < FEW:
            return self.level + START_NOISE
        beyond = min(int((1 - hit) * (runs + BEFORE) + ROUNDING), runs // 2)
        return sorted(self.regime, reverse=True)[beyond] + max(LEAST_NOISE, START_NOISE / runs)


class Decision(Value, frozen=True, kw_only=True):
    """What becomes of a request."""

    variant: str
    fits: bool  # it is predicted to be in time
    refused: bool  # it is not run at all
    expected_ms: Positive  # by the level
    at_most_ms: Positive  # by the factor
    base_ms: Positive  # on the machine at rest
    within_ms: Finite  # what it may take, so that it and those behind it are in time
    coming: Count = 0  # requests that are to be expected behind those
    factor: Finite  # that was used
    cautious: Finite  # that caution would have used


def decide(
    runnable: Sequence[Runnable],
    settings: Settings,
    state: State,
    left_ms: Sequence[float],
    now_ms: float,
    images: int = 1,
    together: int = 1,
) -> Decision:
    """Choose for the first of the waiting requests; `left_ms`: until the deadline of each, in the order they came.

    `together`: so many requests at the head of the queue are run at once, which have so many `images` in sum.
    """
    fastest = min(runnable, key=lambda each: (each.batch_ms(images), -each.quality))
    scale = math.exp(state.factor)
    least_ms = min(each.ms for each in runnable)
    speeds = least_ms * min(math.exp(state.level), scale), least_ms * scale
    within_ms = _most_ms(left_ms, together, *speeds)
    coming = state.arrivals.to_come(len(left_ms), settings.hit)
    wary_ms = _most_ms([*left_ms, *[left_ms[-1]] * coming], together, *speeds)
    fitting = [each for each in runnable if scale * each.batch_ms(images) <= wary_ms]
    found = max(fitting, key=lambda each: (each.quality, -each.batch_ms(images)), default=fastest)
    fits = scale * found.batch_ms(images) <= within_ms
    base_ms = found.batch_ms(images)
    expected_ms = base_ms * math.exp(state.level)
    fresh = bool(state.ratios) and now_ms - state.ratios[-1][0] <= STALE_MS
    hopeless = not fits and expected_ms > min(left_ms[:together]) and fresh
    return Decision(
        variant=found.name,
        fits=fits,
        refused=hopeless and settings.late == "refuse",
        expected_ms=expected_ms,
        at_most_ms=base_ms * scale,
        base_ms=base_ms,
        within_ms=within_ms,
        coming=coming,
        factor=state.factor,
        cautious=state.cautious,
    )


def learn(
    settings: Settings,
    state: State,
    decision: Decision,
    ran_ms: float,
    now_ms: float,
    answered: int = 1,
    waiting: int = 0,
    late: bool = False,
) -> State:
    """Return the state after a run that took `ran_ms` and ended now.

    It `answered` so many requests, of which one was `late`; so many are `waiting` now.
    """
    ratio = math.log(max(ran_ms, LEAST_MS) / decision.base_ms)
    ratio = min(max(ratio, -MOST_LOG), MOST_LOG)
    missed = decision.fits and ran_ms > decision.within_ms
    spent = missed and decision.factor < decision.cautious
    by_level = state.level + state.margin <= state.highest + state.above
    margin, above = state.margin, state.above
    if by_level:
        margin = _tracked(margin, missed and ratio - state.level > margin, settings.allowed)
    else:
        above = _tracked(above, missed and ratio - state.highest > above, settings.allowed)
    after = State(
        ratios=(*state.ratios, (now_ms, ratio))[-REMEMBERED:],
        regime=_regime((*state.regime, ratio)),
        margin=margin,
        above=above,
        tokens=min(max(state.tokens - spent, 0.0) + settings.allowed, MOST_TOKENS),
        factor=state.factor,
        lower_runs=state.lower_runs,
        lower_to=state.lower_to,
        arrivals=state.arrivals.after(answered, waiting, late, decision.coming > 0, ran_ms > decision.at_most_ms),
    )
    return _with_factor(after, _wanted(settings, after, ratio if ratio > decision.factor else None))


def refuse(state: State, waiting: int) -> State:
    """Return the state after a request was refused; so many are waiting now."""
    arrivals = state.arrivals.after(1, waiting, late=True, expected=False, slowed=False)
    return msgspec.structs.replace(state, arrivals=arrivals)


def _tracked(margin: float, was_beyond: bool, allowed: float) -> float:
    """Return a margin after one more run, so that this share of them comes to be missed beyond it."""
    return max(margin + STEP * (was_beyond - allowed), LEAST_NOISE)


def _regime(runs: tuple[float, ...]) -> tuple[float, ...]:
    """Return the runs since the machine last changed: all of them, or the last few, which are unlike those before."""
    if len(runs) > 2 * FASTER:
        if max(runs[-FASTER:]) < _quantile(runs[:-FASTER], TYPICAL) - GAP:
            return runs[-FASTER:]
        last = runs[-SLOWER - 1 :]
        usual = _quantile(runs[: -SLOWER - 1], USUAL_MOST)
        if sum(each > usual + GAP for each in last) >= SLOWER:
            return last
    return runs[-REGIME:]


def _most_ms(left_ms: Sequence[float], together: int, expected_ms: float, at_most_ms: float) -> float:
    """Return how long the next run may take, so that those behind it can still be answered by the fastest variant.

    That one is expected to take `expected_ms`, and `at_most_ms` by the factor.
    """
    most = min(left_ms[:together])
    for behind, left in enumerate(left_ms[together:], 1):
        if left >= (behind + 1) * expected_ms:  # otherwise it is lost, whatever is done
            most = min(most, left - behind * at_most_ms)
    return most


def _wanted(settings: Settings, state: State, beyond: float | None) -> float:
    """Return the factor that the last runs ask for; `beyond`: the ratio of the last one, if it was beyond the old."""
    wanted = state.cautious
    if state.tokens >= 1:
        wanted = min(wanted, state.bold(settings.hit))
    return wanted if beyond is None else max(wanted, beyond + LEAST_NOISE)


def _with_factor(state: State, wanted: float) -> State:
    """Take a larger factor at once, and a smaller one when enough runs in a row have asked for it."""
    factor, runs, to = state.factor, 0, -2 * MOST_LOG
    if wanted > factor:
        factor = wanted
    elif wanted < factor - LOWER:
        runs, to = state.lower_runs + 1, max(state.lower_to, wanted)
        if runs >= CALM:
            factor, runs, to = to, 0, -2 * MOST_LOG
    return msgspec.structs.replace(state, factor=factor, lower_runs=runs, lower_to=to)


def _level(ratios: Sequence[tuple[float, float]]) -> float:
    """Return the weighted median; without any run the machine is taken to be as in the profiles."""
    if not ratios:
        return 0.0
    newest, last = ratios[-1][0], len(ratios) - 1
    weighted = sorted(
        (ratio, 0.5 ** ((last - i) / HALVING_RUNS + max(newest - at, 0.0) / HALVING_MS))
        for i, (at, ratio) in enumerate(ratios)
    )
    half, passed = sum(weight for _, weight in weighted) / 2, 0.0
    for ratio, weight in weighted:
        passed += weight
        if passed >= half:
            return ratio
    return weighted[-1][0]  # but for rounding


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values) + ROUNDING), len(values) - 1)]


class Controller:
    """The state of one machine, and what is asked of it.

    >>> variants = Runnable(name="dense", ms=12.0, quality=1.0), Runnable(name="s60", ms=5.0, quality=0.8)
    >>> controller = Controller(variants)
    >>> decision = controller.decide([10.0], now_ms=0.0)
    >>> decision.variant
    's60'
    >>> controller.learn(decision, ran_ms=5.1, now_ms=5.1)
    """

    def __init__(self, runnable: Sequence[Runnable], settings: Settings = Settings(), state: State = State()) -> None:
        assert runnable, "there is nothing to choose from"
        self.runnable, self.settings, self.state = list(runnable), settings, state

    def decide(
        self,
        left_ms: Sequence[float],
        now_ms: float,
        images: int = 1,
        together: int = 1,
        among: Sequence[Runnable] | None = None,
    ) -> Decision:
        """Choose for the first of the waiting requests; `among`: only from these."""
        chosen_from = self.runnable if among is None else among
        return decide(chosen_from, self.settings, self.state, left_ms, now_ms, images, together)

    def learn(
        self,
        decision: Decision,
        ran_ms: float,
        now_ms: float,
        answered: int = 1,
        waiting: int = 0,
        late: bool = False,
    ) -> None:
        """Take note of a run."""
        self.state = learn(self.settings, self.state, decision, ran_ms, now_ms, answered, waiting, late)

    def refuse(self, waiting: int = 0) -> None:
        """Take note of a request that was refused."""
        self.state = refuse(self.state, waiting)
