"""A latency budget as people write it: `10ms`, `8.5 ms`, `60%` of dense, `100fps`. Light: standard library."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from .errors import UsageError

_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|%|fps)\s*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Budget:
    """A budget that may depend on the dense latency or the batch size.

    >>> Budget.parse("60%").to_ms(dense_ms=20.0, batch=1)
    12.0
    """

    value: float
    unit: Literal["ms", "%", "fps"]

    @staticmethod
    def parse(text: str) -> Budget:
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise UsageError(f"budget '{text}' is not a latency. Write it as 10ms, 60% (of dense) or 100fps")
        value, unit = float(match[1]), match[2].lower()
        if not 0 < value < math.inf:
            raise UsageError(f"budget '{text}' leaves no time. Write a number above zero, such as 10ms")
        if unit == "%" and value > 100:
            raise UsageError(f"budget '{text}' is more than the dense model takes. Write at most 100%")
        return Budget(value, unit)  # type: ignore[arg-type]

    @property
    def is_relative(self) -> bool:
        """True if the budget is a percentage of the dense latency."""
        return self.unit == "%"

    def to_ms(self, dense_ms: float, batch: int) -> float:
        """Return the milliseconds that one batch may take."""
        if self.unit == "ms":
            return self.value
        if self.unit == "%":
            return dense_ms * self.value / 100
        return 1000 * batch / self.value  # frames per second

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}"
