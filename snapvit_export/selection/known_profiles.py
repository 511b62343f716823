"""One family, many devices: for each the densest variant that keeps its budget, by Profiles taken there. Light."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..budget import Budget
from ..errors import BudgetNotMet, FileFormatError, UsageError
from ..family.manifest import Manifest
from ..profiling.drift import Pace
from ..profiling.profile import Percentile
from ..storage.json import Value
from .on_device import FamilyProfile

OWN = "cpu"  # the device that the family's own manifest was measured on


class Pick(Value, frozen=True, kw_only=True):
    """What one device gets."""

    device: str
    budget_ms: float
    variant: str
    latency_ms: float
    next_denser: str | None  # None: the densest of the family fits
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
    """The Profiles of a device: a file that `snapvit profile` wrote, or `cpu` for those in the manifest."""
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
    """The densest variant of a family that keeps a budget on a device."""
    dense = found.profiles.get(manifest.dense)
    timed = [
        (variant, found.profiles[variant.name])
        for variant in sorted(manifest.variants, key=lambda v: -v.flops)
        if variant.name in found.profiles
    ]
    if dense is None or any(profile.sha256 != variant.sha256 for variant, profile in timed):
        raise FileFormatError(
            f"{device}: its latencies are of other files than this family has. Run snapvit profile again"
        )
    pace = Pace(manifest.dense)
    pace.add({variant.name: profile for variant, profile in timed})
    budget_ms = budget.to_ms(pace.usual_ms(at), found.target.batch)
    before: tuple[str, float] | None = None
    for variant, _ in timed:
        latency = pace.latency(variant.name, at, budget.is_relative)
        if latency.high <= budget_ms:  # as a choice has it
            name, ms = before or (None, None)
            return Pick(
                device=device,
                budget_ms=budget_ms,
                variant=variant.name,
                latency_ms=latency.ms,
                next_denser=name,
                next_denser_ms=ms,
            )
        before = (variant.name, latency.ms)
    assert before is not None
    raise BudgetNotMet(
        f"{device}: no variant fits {budget_ms:.3g} ms, the smallest takes {before[1]:.3g} ms. Export sparser ones"
    )


def pick_all(manifest: Manifest, budgets: Mapping[str, Budget], at: Percentile) -> list[Pick]:
    """One variant for every device."""
    return [pick(name, profiles_of(name, manifest), manifest, budget, at) for name, budget in budgets.items()]
