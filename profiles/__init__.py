"""Device cards: a default target and advice for each kind of device, as data. `cpu` is any with ONNX Runtime."""

from __future__ import annotations

from importlib import resources

from ..errors import UsageError
from ..storage.json import Size, Value, from_json
from ..target import Precision, Runtime, Target

IN_TENSORRT: tuple[Runtime, ...] = ("tensorrt", "onnxruntime-tensorrt")


class Card(Value, frozen=True, kw_only=True):
    """A kind of device, the target that it defaults to, and how to hold it still while timing."""

    name: str
    description: str
    target: Target
    width_multiples: dict[Precision, Size]  # MLPs keep a multiple of so many neurons: what it would round up to anyway
    precisions: tuple[Precision, ...] = ()  # that a choice may try; empty: those of the runtime (`target.FASTER`)
    least_heads: Size = 1  # at batch 1 a block keeps none or so many: fewer are not computed in one kernel
    clock: str  # advice: what to do with its clocks before timing
    sources: tuple[str, ...]  # of the above
    measured: bool  # True: this project has timed something on such a device

    def precisions_for(self, runtime: Runtime) -> tuple[Precision, ...]:
        """Return the precisions that a choice may try in a runtime; none: the card does not say."""
        return self.precisions if runtime == self.target.runtime else ()

    def check_precision(self, target: Target) -> None:
        """Refuse a precision that this kind of device does not compute in."""
        known = self.precisions_for(target.runtime)
        if known and target.precision not in known:
            raise UsageError(f"{self.name} does not compute in {target.precision}. Give one of {', '.join(known)}")

    def width_multiple(self, precision: Precision) -> int:
        """Return the number of neurons of which an MLP keeps a multiple in that precision."""
        return self.width_multiples.get(precision, 1)

    def least_heads_for(self, target: Target) -> int:
        """Return the heads that a block keeps at least, unless it keeps none; more than 1 only where TensorRT runs."""
        return self.least_heads if target.batch == 1 and target.runtime in IN_TENSORRT else 1


def load(name: str) -> Card:
    """Read the card of a kind of device."""
    if name not in names():
        raise UsageError(f"no device card is called '{name}'. There are: {', '.join(names())}")
    file = resources.files(__name__) / f"{name}.json"
    return from_json(file.read_bytes(), Card, f"profiles/{name}.json")


def names() -> list[str]:
    """Return the names of all cards."""
    entries = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(".json") for name in entries if name.endswith(".json"))
