"""Budgets as people write them, and as they should not."""

import math

import pytest

from snapvit_export.budget import Budget
from snapvit_export.errors import UsageError

GOOD = {  # text: milliseconds of a batch of 2, where the dense model takes 20
    "10ms": 10.0,
    "8.5 ms": 8.5,
    " 10 MS ": 10.0,
    ".5ms": 0.5,
    "10.ms": 10.0,
    "60%": 12.0,
    "100%": 20.0,
    "100fps": 20.0,
}
ENERGIES = {  # text: millijoules, and whether a latency is limited too
    "15mJ": (15.0, False),
    "0.5 J": (500.0, False),
    "10ms,15mJ": (15.0, True),
    "15 mj , 60%": (15.0, True),
    "10ms": (None, True),
}
BAD = [
    *("15", "0mJ", "-1mJ", "15 kJ", "10ms,", ",15mJ", "10ms,20ms", "15mJ,1J", "10ms,15mJ,1mJ", "10ms+15mJ"),
    *("", "10", "ms", "-3ms", "0ms", "0%", "101%", "nan ms", "inf ms", "1e3ms", "10s", "10,5ms", "10ms 20ms"),
    *("0x10ms", "١٠ms", "10 ms; ls", "10ms\n5ms", f"{'9' * 400}ms", f"0.{'0' * 400}1ms", "\x1b[31m10ms"),
]


@pytest.mark.parametrize("text", GOOD)
def test_a_budget_is_read_as_it_is_meant(text):
    assert Budget.parse(text).to_ms(dense_ms=20.0, batch=2) == pytest.approx(GOOD[text])


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_what_is_no_budget_is_refused_with_what_to_write(text):
    with pytest.raises(UsageError, match=r"(?s)^budget '.*' (is|leaves) .* Write ") as refused:
        Budget.parse(text)
    assert "10ms" in str(refused.value) or "100%" in str(refused.value)


@pytest.mark.parametrize("text", ENERGIES)
def test_an_energy_is_read_beside_a_latency_or_alone(text):
    found = Budget.parse(text)
    assert (found.energy_mj, found.has_latency) == ENERGIES[text]
    assert Budget.parse(str(found)) == found
    assert math.isinf(found.to_ms(dense_ms=20.0, batch=1)) != found.has_latency
