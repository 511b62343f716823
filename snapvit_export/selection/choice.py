"""Chooses among variants that are built and timed, and writes the Choice with its proof and its doubts. Light.

Better is what loses less: divergence from the dense model, or wrong answers where accuracy is preferred. Variants are
compared image by image where their losses are known; of those that images cannot tell apart the denser is better. Where
some have no fidelity, as in older families, or width and depth are the only levers, denser is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..allocation.levers import PUBLISHED, Lever, in_order
from ..budget import Budget
from ..errors import BudgetNotMet, UsageError
from ..family.fidelity import is_worse
from ..family.manifest import Alternative, Choice, DroppedPrecision, Limits, Measurement, Prefer
from ..profiling.drift import Latency
from ..profiling.energy import ADVICE, Energy
from ..profiling.latency_model import LatencyModel
from .candidates import DENSE, BuiltVariant, Candidates
from .options import Options


class Chooser:
    """Variants under one budget: which of them fit, and which is the best."""

    def __init__(self, candidates: Candidates, budget: Budget, limits: Limits, options: Options) -> None:
        self.candidates, self.budget, self.limits, self.options = candidates, budget, limits, options
        self.anatomy = candidates.anatomy

    @property
    def budget_ms(self) -> float:
        """The budget now: one in percent moves with the dense latency."""
        return self.budget.to_ms(self.candidates.drift.reference_ms(self.limits.at), self.candidates.target.batch)

    def latency(self, name: str) -> Latency:
        return self.candidates.latency(name, self.limits, self.budget.is_relative)

    def energy(self, name: str) -> Energy:
        """Return the energy of a variant that was timed; one that was not measured is refused."""
        found = self.candidates.energy(name)
        if found is None:
            raise UsageError(f"the energy of {name} was not measured, or in too few rounds. {ADVICE}")
        return found

    def surely_fits(self, name: str) -> bool:
        if not self.runs(name) or not self.latency(name).high <= self.budget_ms:
            return False
        most = self.budget.energy_mj
        return self.candidates.meets_limits(name, self.limits) and (most is None or self.energy(name).high <= most)

    def may_fit(self, name: str) -> bool:
        """Return True if a variant fits by what was measured, though its intervals may reach beyond the budget."""
        if not self.runs(name) or not self.latency(name).ms <= self.budget_ms:
            return False
        most = self.budget.energy_mj
        return self.candidates.meets_limits(name, self.limits) and (most is None or self.energy(name).mj <= most)

    def cost(self, name: str) -> float:
        """Return what variants that do not fit are compared by: milliseconds, or millijoules where they alone count."""
        return self.measured_ms(name) if self.budget.has_latency else self.energy(name).mj

    def runs(self, name: str) -> int:
        """Return how often a variant was timed."""
        built = self.candidates.built[name]
        return 0 if built.profile is None else self.candidates.drift.runs(name)  # of this file, not of one before it

    def measured_ms(self, name: str) -> float:
        """Return the latency of a variant, whether it meets other limits or not."""
        return self.candidates.drift.latency(name, self.limits.at, self.budget.is_relative).ms

    def best(self, names: Sequence[str]) -> str:
        """Return the best of some variants; of those that images cannot tell from it, the one with the most FLOPs."""
        built = [self.candidates.built[name] for name in names]
        if self.is_densest_best or any(each.fidelity is None for each in built):
            return max(built, key=lambda each: self.anatomy.flops(each.plan)).name
        best = min(built, key=self._mean_loss)
        alike = [each for each in built if not self._is_worse(each, best)]
        return max(alike, key=lambda each: (self.anatomy.flops(each.plan), -self._mean_loss(each))).name

    @property
    def is_densest_best(self) -> bool:
        """True where width and depth are the only levers: there the published methods take the densest."""
        levers = set(self.options.levers)
        return self.options.prefer == "fidelity" and bool(levers) and levers <= set(PUBLISHED)

    def _mean_loss(self, built: BuiltVariant) -> float:
        assert built.fidelity is not None
        if self.options.prefer == "accuracy" and built.evaluation is not None and built.evaluation.top1 is not None:
            return 1 - built.evaluation.top1
        return built.fidelity.divergence

    def _error(self, built: BuiltVariant) -> float:
        assert built.fidelity is not None
        if self.options.prefer == "accuracy" and built.evaluation is not None and built.evaluation.top1 is not None:
            return built.evaluation.error("top1")
        return built.fidelity.standard_error

    def _is_worse(self, built: BuiltVariant, best: BuiltVariant) -> bool:
        if _is_estimate(built) and _is_estimate(best):
            return self._mean_loss(built) > self._mean_loss(best)  # of one table: their errors are those of its images
        if built.losses is None or best.losses is None:
            return self._mean_loss(built) - self._mean_loss(best) > math.hypot(self._error(built), self._error(best))
        if self.options.prefer == "accuracy" and built.losses.wrong is not None and best.losses.wrong is not None:
            return is_worse(built.losses.wrong, best.losses.wrong)
        return is_worse(built.losses.divergence, best.losses.divergence)

    def best_unsure(self, names: Sequence[str]) -> str | None:
        """Return the best that fits by its latency though not by its interval; None if there is none, or refused.

        The machine is too noisy to tell more, so whoever must be sure (`Options.strict`) gets an error instead.
        """
        unsure = [name for name in names if self.may_fit(name)]
        if not unsure:
            return None
        best = self.best(unsure)
        if self.options.strict:
            raise BudgetNotMet(self._not_sure(best))
        return best

    def _not_sure(self, name: str) -> str:
        """Say that the best variant may fit and does not surely, and what would help."""
        found, most = self.latency(name), self.budget.energy_mj
        if most is not None and found.high <= self.budget_ms:
            spent = self.energy(name)
            return (
                f"no variant surely fits {most:.3g} mJ: {name} takes {spent.low:.2f} to {spent.high:.2f} mJ. "
                f"Measure for longer, allow {rounded_up(spent.high)}mJ, or leave --strict out"
            )
        return (
            f"no variant surely fits {self.budget_ms:.3g} ms: {name} takes {found.low:.2f} to {found.high:.2f} ms. "
            f"Choose again when the machine is idle, allow {rounded_up(found.high)}ms, or leave --strict out"
        )

    def next_better(self, chosen: str) -> str | None:
        """Return the fastest of the better variants, none of which fits, or that of the least energy."""
        better = [
            name
            for name, built in self.candidates.built.items()
            if built.profile is not None and not self.surely_fits(name) and self._is_better(name, chosen)
        ]
        return min(better, key=self.cost, default=None)

    def _is_better(self, name: str, than: str) -> bool:
        one, other = self.candidates.built[name], self.candidates.built[than]
        if self.is_densest_best or one.fidelity is None or other.fidelity is None:
            return self.anatomy.flops(one.plan) > self.anatomy.flops(other.plan)
        is_denser = self.anatomy.flops(one.plan) > self.anatomy.flops(other.plan)
        return self._mean_loss(one) < self._mean_loss(other) or (is_denser and not self._is_worse(one, other))

    def choice(
        self,
        chosen: str,
        model: LatencyModel | None = None,
        alternatives: Mapping[Lever, str] = MappingProxyType({}),
        dropped: Sequence[DroppedPrecision] = (),
    ) -> Choice:
        """Return the choice of a variant with its proof: all measurements, and the next better one.

        `alternatives`: the best of each single lever; those that the budget allows are told.
        """
        budget_ms, limits, denser = self.budget_ms, self.limits, self.next_better(chosen)
        target, most = self.candidates.target, self.budget.energy_mj
        measurements = self.candidates.measurements(budget_ms, limits, self.budget.is_relative, most)
        found = {m.variant: m for m in measurements}
        beside = found[denser] if denser is not None and self.candidates.meets_limits(denser, limits) else None
        pair = [chosen] if beside is None else [chosen, beside.variant]
        contended = any(self.candidates.drift.is_contended(name) for name in pair)
        doubt = _doubt(found[chosen], beside, budget_ms, contended) or _energy_doubt(found[chosen], beside, most)
        reached = [
            Alternative(
                lever=lever,
                variant=name,
                latency_ms=found[name].latency_ms,
                between_ms=found[name].between_ms,
                fidelity=found[name].fidelity,
            )
            for lever, name in alternatives.items()
            if name in found and found[name].latency_ms <= budget_ms
        ]
        return Choice(
            variant=chosen,
            budget_ms=budget_ms if self.budget.has_latency else None,
            budget_mj=most,
            next_denser=denser,
            decided=doubt is None,
            doubt=doubt,
            compared=None if target.runtime == "onnxruntime" else found[chosen].profile.compared is not None,
            limits=limits,
            model=model,
            measurements=measurements,
            levers=self.options.levers,
            prefer=self.options.prefer,
            alternatives=tuple(reached),
            dropped=tuple(dropped),
        )


def _is_estimate(built: BuiltVariant) -> bool:
    return built.fidelity is not None and built.fidelity.estimated


def select_among(
    candidates: Candidates, budget: Budget, limits: Limits, prefer: Prefer = "fidelity", strict: bool = False
) -> Choice:
    """Choose among variants that exist and were timed; where some have no fidelity, the densest that fits.

    Their levers are those that the variants use: of widths alone the densest is taken too.
    """
    own = candidates.target.precision
    used = [lever for each in candidates.built.values() for lever in each.point.levers(candidates.anatomy, own)]
    chooser = Chooser(candidates, budget, limits, Options(levers=in_order(used), prefer=prefer, strict=strict))
    fitting = [name for name in candidates.built if chooser.surely_fits(name)]
    timed = [name for name, built in candidates.built.items() if built.profile is not None]
    chosen = chooser.best(fitting) if fitting else chooser.best_unsure(timed)
    if chosen is None:
        raise BudgetNotMet(_why_none(chooser, timed))
    return chooser.choice(chosen)


def _doubt(chosen: Measurement, denser: Measurement | None, budget_ms: float, contended: bool) -> str | None:
    """Return the reason why a choice is not beyond doubt, and advice; None if it is."""
    if contended:
        return "other work kept the model from its cores. Stop it and choose again"
    unsure = chosen if chosen.between_ms[1] > budget_ms else denser
    if unsure is None or unsure.latency_ms > budget_ms or unsure.verdict == "no":
        return None
    if unsure.between_ms[1] <= budget_ms:  # then its energy is in doubt
        return None
    low, high = unsure.between_ms
    return (
        f"{unsure.variant} takes {low:.2f} to {high:.2f} ms and may fit or not. Choose again when the machine is idle, "
        f"or allow {rounded_up(high)}ms"
    )


def _energy_doubt(chosen: Measurement, denser: Measurement | None, most: float | None) -> str | None:
    """Return the reason why an energy leaves a choice in doubt, and advice; None if it does not."""
    for row in (chosen, denser):
        if row is None or row.energy_mj is None or row.energy_between_mj is None or most is None:
            continue
        low, high = row.energy_between_mj
        if row.energy_mj <= most < high and row.verdict == "unsure":
            return (
                f"{row.variant} takes {low:.2f} to {high:.2f} mJ and may fit or not. Measure for longer, or allow "
                f"{rounded_up(high)}mJ"
            )
    return None


def _why_none(chooser: Chooser, timed: Sequence[str]) -> str:
    """Say why no variant fits: too slow, too large, or too much energy."""
    candidates, limits, most = chooser.candidates, chooser.limits, chooser.budget.energy_mj
    fast = [name for name in timed if chooser.latency(name).ms <= chooser.budget_ms]
    small = [name for name in fast if candidates.meets_limits(name, limits)]
    if most is None or not small:
        least = min(timed, key=lambda name: (chooser.latency(name).ms, candidates.built[name].size_bytes))
        return no_variant(candidates, least, chooser.latency(least), chooser.budget_ms, limits)
    least = min(small, key=lambda name: chooser.energy(name).mj)
    among = f" of those that fit {chooser.budget_ms:.3g} ms" if chooser.budget.has_latency else ""
    return (
        f"no variant fits {most:.3g} mJ: {least}, the least{among}, takes {chooser.energy(least).mj:.3g} mJ, dense "
        f"{chooser.energy(DENSE).mj:.3g} mJ. Allow at least {rounded_up(chooser.energy(least).high)}mJ, or "
        f"{candidates.advice}"
    )


def no_variant(candidates: Candidates, least: str, latency: Latency, budget_ms: float, limits: Limits) -> str:
    """Return why no variant meets a budget, given the smallest, and what would help."""
    if not math.isfinite(latency.ms):
        return _too_large(candidates, least, limits)
    dense_ms = candidates.drift.reference_ms(limits.at)
    return (
        f"no variant fits {budget_ms:.3g} ms: the smallest reaches {latency.ms:.3g} ms, dense {dense_ms:.3g} ms. "
        f"Allow at least {rounded_up(latency.high)}ms, or {candidates.advice}"
    )


def _too_large(candidates: Candidates, last: str, limits: Limits) -> str:
    built = candidates.built[last]
    params = built.params(candidates.anatomy)
    asked = [f"{size / 1e6:.3g} MB" for size in [limits.max_size_bytes] if size]
    asked += [f"{params / 1e6:.3g} M parameters" for params in [limits.max_params] if params]
    return (
        f"no variant is as small as {' and '.join(asked)}: the smallest has {built.size_bytes / 1e6:.3g} MB and "
        f"{params / 1e6:.3g} M parameters. Allow that, or {candidates.advice}"
    )


def rounded_up(ms: float) -> str:
    """Format a latency in three digits, rounded up so that it is enough as a budget."""
    step = 10.0 ** (math.floor(math.log10(ms)) - 2)
    return f"{math.ceil(ms / step) * step:.6g}"
