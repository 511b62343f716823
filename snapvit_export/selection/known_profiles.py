"""Selection by latencies that were measured before: on another device, or for a fleet of devices at once. Light.

`snapvit profile` and the Jetson agent write a `FamilyProfile`. `known_candidates` makes candidates of one, which are
neither built nor timed here; `pick_all` gives each of many devices the best variant that meets its budget, by the rule
of every choice: the most faithful, or the densest where the fidelity of some is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..budget import Budget
from ..checks.comparison import Compared
from ..errors import BudgetNotMet, FileFormatError, GateFailed, UsageError
from ..family.folder import parts_beside
from ..family.manifest import Choice, Limits, Manifest, MeasuredOn, Prefer, Variant, Verdict
from ..profiling.drift import Latency
from ..profiling.energy import Energy
from ..profiling.profile import LEAST_RUNS, Percentile, Profile
from ..progress import Silent
from ..storage.json import Name, Value, read_json, write_json
from ..storage.places import check_output, is_json_of
from ..target import TAKES, Runtime, Target
from .candidates import DENSE, BuiltVariant, Candidates, Latencies
from .choice import select_among

OWN = "cpu"  # the device that the family's own manifest was measured on


class Failed(Value, frozen=True, kw_only=True):
    """A variant that was not timed: its answers on the device are not those of its graph."""

    sha256: str  # of the graph
    compared: Compared


class LeftOut(Value, frozen=True, kw_only=True):
    """A variant that the device cannot run: it has no fp8."""

    sha256: str  # of the graph
    reason: str


class FamilyProfile(Value, frozen=True, kw_only=True):
    """The latencies of a family's variants on one device, as `snapvit profile` writes them."""

    format_version: Literal[1] = 1
    model: str
    target: MeasuredOn
    profiles: dict[Name, Profile]  # by variant
    failed: dict[Name, Failed] = msgspec.field(default_factory=dict)  # by variant; none in older files
    left_out: dict[Name, LeftOut] = msgspec.field(default_factory=dict)  # by variant; likewise

    def is_left_out(self, variant: Variant) -> bool:
        """Whether the device cannot run a variant, which then has no latencies there and is never chosen."""
        found = self.left_out.get(variant.name)
        return found is not None and found.sha256 == variant.sha256

    def save(self, path: Path | str) -> None:
        """Write it as JSON."""
        write_json(Path(path), self)

    @staticmethod
    def load(path: Path | str) -> FamilyProfile:
        """Read what `save` wrote."""
        return read_json(Path(path), FamilyProfile)


def check_profile_place(path: Path, force: bool = False) -> None:
    """Refuse, before anything is timed, to write a profile over something else; `force`: do it all the same."""
    check_output(path, "a profile", is_json_of(FamilyProfile), parts_beside(path), force)


def taken_by(manifest: Manifest, runtime: Runtime) -> list[Variant]:
    """Return the variants of a family whose precision a runtime computes in."""
    return [variant for variant in manifest.variants if variant.precision in TAKES[runtime]]


def not_to_choose(manifest: Manifest, known: FamilyProfile) -> dict[str, Compared]:
    """Return the variants whose answers were compared on the device and found to differ; they are never chosen.

    What is asked is what this version asks of their precision, whatever asked there.
    """
    found: dict[str, Compared] = {}
    for variant in manifest.variants:
        failed, profile = known.failed.get(variant.name), known.profiles.get(variant.name)
        if failed is not None and failed.sha256 == variant.sha256:
            found[variant.name] = failed.compared
        elif profile is not None and profile.compared is not None:
            compared = profile.compared.as_asked_of(variant.precision)
            if not compared.passed:
                found[variant.name] = compared
    if manifest.dense in found:
        raise GateFailed(
            f"{manifest.dense}: did not answer as its graph does where it was timed: {found[manifest.dense].told}. "
            "Nothing can be chosen without it: time another --precision there"
        )
    return found


def known_candidates(folder: Path, manifest: Manifest, known: FamilyProfile, at: Percentile) -> Candidates:
    """Return the variants of a family with latencies from elsewhere: nothing can be built or timed."""
    profiles, refused = {}, not_to_choose(manifest, known)
    for variant in taken_by(manifest, known.target.runtime):
        if variant.name in refused or (known.is_left_out(variant) and variant.name != manifest.dense):
            continue
        profile = known.profiles.get(variant.name)
        if profile is None or profile.sha256 != variant.sha256:
            raise FileFormatError(
                f"the given latencies of {variant.name} are missing or of another file. Time this family again"
            )
        require_runs(variant.name, profile, at)
        profiles[variant.name] = profile
    if manifest.dense not in profiles:
        raise FileFormatError(
            f"the given latencies are of {known.target.runtime}, which does not take {manifest.dense}. "
            "Time this family in another runtime"
        )
    return _timed_candidates(folder, manifest, known.target.target, manifest.variants, profiles)


def _timed_candidates(
    folder: Path,
    manifest: Manifest,
    target: Target,
    variants: Sequence[Variant],
    profiles: Mapping[str, Profile],
    latencies: Latencies | None = None,
    energies: Mapping[str, Energy] | None = None,
) -> Candidates:
    require_dense(manifest)
    built = [BuiltVariant.of(folder, variant, manifest.anatomy) for variant in variants]
    advice = "export sparser variants and time them there"
    candidates = Candidates(
        manifest.anatomy, target, Silent(), built=built, advice=advice, latencies=latencies, energies=energies
    )
    candidates.record(profiles)
    return candidates


def require_dense(manifest: Manifest) -> None:
    """Refuse a family whose dense variant has another name than every export gives it: others are compared with it."""
    if manifest.dense != DENSE:
        raise FileFormatError(f"the manifest calls the dense variant {manifest.dense}, not {DENSE}. Export it again")


def require_runs(name: str, profile: Profile, at: Percentile) -> None:
    """Refuse latencies of too few runs to tell a percentile."""
    if profile.runs < LEAST_RUNS[at]:
        raise FileFormatError(
            f"the given latencies of {name} are of {profile.runs} runs, and {at} needs {LEAST_RUNS[at]}. "
            "Profile for more --seconds"
        )


class ChoiceLatencies:
    """The latencies that a manifest's choice rests on: of all its runs, not only of the last one of each variant."""

    def __init__(self, manifest: Manifest, choice: Choice) -> None:
        self.dense, self._found = manifest.dense, {row.variant: row for row in choice.measurements}

    @staticmethod
    def of(manifest: Manifest, at: Percentile) -> ChoiceLatencies | None:
        """Return those of a manifest at a percentile; None if it has none, or variants were timed again since."""
        choice = manifest.choice
        if choice is None or choice.limits.at != at:
            return None
        if not _is_timed_by(choice, manifest) or manifest.dense not in {row.variant for row in choice.measurements}:
            return None
        latencies = ChoiceLatencies(manifest, choice)
        dense = latencies.latency(manifest.dense, at)
        is_relative = dense.low == dense.high  # a budget in per cent: intervals of ratios, not of milliseconds
        return None if is_relative else latencies

    def add(self, run: Mapping[str, Profile]) -> None:
        """Take no notice of single runs: they are among all that are known."""

    def runs(self, name: str) -> int:
        """Return 1 for all that were timed: their number is not kept."""
        return int(name in self._found)

    def is_contended(self, name: str) -> bool:
        return self._found[name].profile.is_contended

    def reference_ms(self, at: Percentile) -> float:
        return self._found[self.dense].latency_ms

    def latency(self, name: str, at: Percentile, relative: bool = False) -> Latency:
        return Latency(self._found[name].latency_ms, *self._found[name].between_ms)


def _is_timed_by(choice: Choice, manifest: Manifest) -> bool:
    """Return True if no variant was timed again since a choice."""
    found = {row.variant: row.profile for row in choice.measurements}
    return all(found.get(each.name) == each.profile for each in manifest.variants if each.profile is not None)


def choice_energies(manifest: Manifest) -> dict[str, Energy]:
    """Return the energies that a manifest's choice rests on, of all its runs; none if variants were timed since."""
    choice = manifest.choice
    if choice is None or not _is_timed_by(choice, manifest):
        return {}
    return {
        row.variant: Energy(row.energy_mj, *row.energy_between_mj)
        for row in choice.measurements
        if row.energy_mj is not None and row.energy_between_mj is not None
    }


class Pick(Value, frozen=True, kw_only=True):
    """The variant for one device."""

    device: str
    budget_ms: float | None  # None: energy alone is limited
    variant: str
    latency_ms: float
    verdict: Verdict  # fits, or unsure where nothing surely does
    next_denser: str | None  # the next better one, which does not fit; None: the best of the family fits
    next_denser_ms: float | None
    compared: bool | None = None  # False: its answers on that device were not compared; None: ONNX Runtime on the CPU
    left_out: tuple[str, ...] = ()  # variants whose answers differ there, so that they are never chosen
    budget_mj: float | None = None  # None: energy is not limited
    energy_mj: float | None = None  # of one run; None: not measured
    next_denser_mj: float | None = None


def parse_budgets(text: str) -> dict[str, Budget]:
    """Read cpu=40ms,orin.json=10ms; an energy may follow a latency: orin.json=10ms,15mJ."""
    found: dict[str, Budget] = {}
    written: dict[str, str] = {}
    last = None
    for part in text.split(","):
        name, equals, budget = part.strip().rpartition("=")
        if not equals and last is not None:
            written[last] += f",{budget}"  # beside the latency of the same device
            found[last] = Budget.parse(written[last])
            continue
        if not equals or not name:
            raise UsageError(f"--budget '{part}' does not name a device. Write it like cpu=40ms,orin.json=10ms")
        if name in found:
            raise UsageError(f"--budget names {name} twice. Give each device once")
        found[name], written[name], last = Budget.parse(budget), budget, name
    return found


def profiles_of(name: str, manifest: Manifest) -> FamilyProfile:
    """Return the Profiles of a device: a file that `snapvit profile` wrote, or `cpu` for those in the manifest."""
    path = Path(name)
    if not path.is_file() and name == OWN:
        if (gpu := manifest.target.device.accelerator) is not None:
            raise UsageError(
                f"{OWN}: the family's own latencies are of {gpu.name}. Run snapvit choose or profile here first"
            )
        known = {variant.name: variant.profile for variant in manifest.variants if variant.profile is not None}
        return FamilyProfile(model=manifest.model, target=manifest.target, profiles=known)
    return FamilyProfile.load(path)


def pick(
    device: str, found: FamilyProfile, manifest: Manifest, budget: Budget, at: Percentile, strict: bool = False
) -> Pick:
    """Return the best variant of a family that meets a budget on a device, of those that were timed there."""
    refused = not_to_choose(manifest, found)
    timed = [each for each in manifest.variants if each.name in found.profiles and each.name not in refused]
    profiles = {variant.name: found.profiles[variant.name] for variant in timed}
    if manifest.dense not in profiles or any(profiles[each.name].sha256 != each.sha256 for each in timed):
        raise FileFormatError(
            f"{device}: its latencies are of other files than this family has. Run snapvit profile again"
        )
    if device != OWN:
        for name, profile in profiles.items():
            require_runs(name, profile, at)
    latencies = ChoiceLatencies.of(manifest, at) if device == OWN else None
    energies = choice_energies(manifest) if device == OWN else None
    candidates = _timed_candidates(Path(), manifest, found.target.target, timed, profiles, latencies, energies)
    try:
        choice = select_among(candidates, budget, *_as_chosen(device, manifest, at), strict=strict)
    except (BudgetNotMet, UsageError) as error:
        raise type(error)(f"{device}: {error}") from error
    measured = {measurement.variant: measurement for measurement in choice.measurements}
    chosen, denser = measured[choice.variant], measured.get(choice.next_denser or "")
    assert chosen.verdict is not None, "it was measured just now"
    return Pick(
        device=device,
        budget_ms=choice.budget_ms,
        variant=choice.variant,
        latency_ms=chosen.latency_ms,
        verdict=chosen.verdict,
        next_denser=choice.next_denser,
        next_denser_ms=None if denser is None else denser.latency_ms,
        budget_mj=choice.budget_mj,
        energy_mj=chosen.energy_mj,
        next_denser_mj=None if denser is None else denser.energy_mj,
        compared=choice.compared,
        left_out=tuple(refused),
    )


def _as_chosen(device: str, manifest: Manifest, at: Percentile) -> tuple[Limits, Prefer]:
    """Return limits and preference: on the family's own device those of its choice."""
    choice = manifest.choice
    if device != OWN or choice is None:
        return Limits(at=at), "fidelity"
    return msgspec.structs.replace(choice.limits, at=at), choice.prefer or "fidelity"


def pick_all(manifest: Manifest, budgets: Mapping[str, Budget], at: Percentile, strict: bool = False) -> list[Pick]:
    """Pick one variant for every device."""
    return [pick(name, profiles_of(name, manifest), manifest, budget, at, strict) for name, budget in budgets.items()]
