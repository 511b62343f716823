"""A budget as people write it: `10ms`, `60%` of dense, `100fps`, `15mJ`, or two at once, `10ms,15mJ`. Light."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from .errors import UsageError

_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|%|fps|mj|j)\s*", re.IGNORECASE | re.ASCII)
_NAMES: dict[str, Literal["ms", "%", "fps", "mJ"]] = {"ms": "ms", "%": "%", "fps": "fps", "mj": "mJ", "j": "mJ"}


@dataclass(frozen=True)
class Budget:
    """A budget that may depend on the dense latency or the batch size; energy is that of one run, as latency is.

    >>> Budget.parse("60%").to_ms(dense_ms=20.0, batch=1)
    12.0
    >>> Budget.parse("10ms, 0.015 J")
    Budget(value=10.0, unit='ms', most_mj=15.0)
    """

    value: float
    unit: Literal["ms", "%", "fps", "mJ"]
    most_mj: float | None = None  # beside a latency: also at most so much energy

    @staticmethod
    def parse(text: str) -> Budget:
        found = [_parse_one(part, text) for part in text.split(",")]
        latencies = [budget for budget in found if budget.unit != "mJ"]
        energies = [budget for budget in found if budget.unit == "mJ"]
        if len(latencies) > 1 or len(energies) > 1:
            raise UsageError(f"budget '{text}' is two of one kind. Write one, or one of each: 10ms,15mJ")
        if latencies and energies:
            return replace(latencies[0], most_mj=energies[0].value)
        return found[0]

    @property
    def is_relative(self) -> bool:
        """True if the budget is a percentage of the dense latency."""
        return self.unit == "%"

    @property
    def has_latency(self) -> bool:
        """False if energy alone is limited."""
        return self.unit != "mJ"

    @property
    def energy_mj(self) -> float | None:
        """The millijoules that one run may take; None: any."""
        return self.value if self.unit == "mJ" else self.most_mj

    def to_ms(self, dense_ms: float, batch: int) -> float:
        """Return the milliseconds that one batch may take."""
        if self.unit == "ms":
            return self.value
        if self.unit == "%":
            return dense_ms * self.value / 100
        return math.inf if self.unit == "mJ" else 1000 * batch / self.value  # frames per second

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}" + ("" if self.most_mj is None else f",{self.most_mj:g}mJ")


def _parse_one(text: str, whole: str) -> Budget:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(
            f"budget '{whole}' is not a latency, nor an energy. Write it as 10ms, 60% (of dense), 100fps or 15mJ"
        )
    value, unit = float(match[1]), _NAMES[match[2].lower()]
    value *= 1000 if match[2].lower() == "j" else 1
    if not 0 < value < math.inf:
        raise UsageError(f"budget '{whole}' leaves nothing. Write a number above zero, such as 10ms")
    if unit == "%" and value > 100:
        raise UsageError(f"budget '{whole}' is more than the dense model takes. Write at most 100%")
    return Budget(value, unit)
