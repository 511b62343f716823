"""Selection by latencies that were measured before: on another device, or for a fleet of devices at once. Light.

`snapvit profile` and the Jetson agent write a `FamilyProfile`. `known_candidates` makes candidates of one, which are
neither built nor timed here; `pick_all` gives each of many devices the best variant that meets its budget, by the rule
of every choice: the most faithful, or the densest where the fidelity of some is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from ..budget import Budget
from ..errors import BudgetNotMet, FileFormatError, UsageError
from ..family.manifest import Limits, Manifest, MeasuredOn, Variant
from ..profiling.profile import LEAST_RUNS, Percentile, Profile
from ..progress import Silent
from ..storage.json import Value, read_json, write_json
from ..target import TAKES, Runtime, Target
from .candidates import BuiltVariant, Candidates
from .choice import select_among

OWN = "cpu"  # the device that the family's own manifest was measured on


class FamilyProfile(Value, frozen=True, kw_only=True):
    """The latencies of a family's variants on one device, as `snapvit profile` writes them."""

    format_version: Literal[1] = 1
    model: str
    target: MeasuredOn
    profiles: dict[str, Profile]  # by variant

    def save(self, path: Path | str) -> None:
        """Write it as JSON."""
        write_json(Path(path), self)

    @staticmethod
    def load(path: Path | str) -> FamilyProfile:
        """Read what `save` wrote."""
        return read_json(Path(path), FamilyProfile)


def taken_by(manifest: Manifest, runtime: Runtime) -> list[Variant]:
    """Return the variants of a family whose precision a runtime computes in."""
    return [variant for variant in manifest.variants if variant.precision in TAKES[runtime]]


def known_candidates(folder: Path, manifest: Manifest, known: FamilyProfile, at: Percentile) -> Candidates:
    """Return the variants of a family with latencies from elsewhere: nothing can be built or timed."""
    profiles = {}
    for variant in taken_by(manifest, known.target.runtime):
        profile = known.profiles.get(variant.name)
        if profile is None or profile.sha256 != variant.sha256:
            raise FileFormatError(
                f"the given latencies of {variant.name} are missing or of another file. Time this family again"
            )
        require_runs(variant.name, profile, at)
        profiles[variant.name] = profile
    return _timed_candidates(folder, manifest, known.target.target, manifest.variants, profiles)


def _timed_candidates(
    folder: Path, manifest: Manifest, target: Target, variants: Sequence[Variant], profiles: Mapping[str, Profile]
) -> Candidates:
    built = [BuiltVariant.of(folder, variant, manifest.anatomy) for variant in variants]
    advice = "export sparser variants and time them there"
    candidates = Candidates(manifest.anatomy, target, Silent(), built=built, advice=advice)
    candidates.record(profiles)
    return candidates


def require_runs(name: str, profile: Profile, at: Percentile) -> None:
    """Refuse latencies of too few runs to tell a percentile."""
    if profile.runs < LEAST_RUNS[at]:
        raise FileFormatError(
            f"the given latencies of {name} are of {profile.runs} runs, and {at} needs {LEAST_RUNS[at]}. "
            "Profile for more --seconds, or leave --profile out"
        )


class Pick(Value, frozen=True, kw_only=True):
    """The variant for one device."""

    device: str
    budget_ms: float
    variant: str
    latency_ms: float
    next_denser: str | None  # the next better one, which does not fit; None: the best of the family fits
    next_denser_ms: float | None


def parse_budgets(text: str) -> dict[str, Budget]:
    """Read cpu=40ms,orin.json=10ms."""
    found: dict[str, Budget] = {}
    for part in text.split(","):
        name, equals, budget = part.strip().rpartition("=")
        if not equals or not name:
            raise UsageError(f"--budget '{part}' does not name a device. Write it like cpu=40ms,orin.json=10ms")
        if name in found:
            raise UsageError(f"--budget names {name} twice. Give each device once")
        found[name] = Budget.parse(budget)
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


def pick(device: str, found: FamilyProfile, manifest: Manifest, budget: Budget, at: Percentile) -> Pick:
    """Return the best variant of a family that meets a budget on a device, of those that were timed there."""
    timed = [variant for variant in manifest.variants if variant.name in found.profiles]
    profiles = {variant.name: found.profiles[variant.name] for variant in timed}
    if manifest.dense not in profiles or any(profiles[each.name].sha256 != each.sha256 for each in timed):
        raise FileFormatError(
            f"{device}: its latencies are of other files than this family has. Run snapvit profile again"
        )
    candidates = _timed_candidates(Path(), manifest, found.target.target, timed, profiles)
    try:
        choice = select_among(candidates, budget, Limits(at=at))
    except BudgetNotMet as error:
        raise BudgetNotMet(f"{device}: {error}") from error
    latencies = {measurement.variant: measurement.latency_ms for measurement in choice.measurements}
    return Pick(
        device=device,
        budget_ms=choice.budget_ms,
        variant=choice.variant,
        latency_ms=latencies[choice.variant],
        next_denser=choice.next_denser,
        next_denser_ms=None if choice.next_denser is None else latencies[choice.next_denser],
    )


def pick_all(manifest: Manifest, budgets: Mapping[str, Budget], at: Percentile) -> list[Pick]:
    """Pick one variant for every device."""
    return [pick(name, profiles_of(name, manifest), manifest, budget, at) for name, budget in budgets.items()]
