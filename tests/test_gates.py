"""The gate between two forms of one model."""

import numpy as np
import pytest

from snapvit_export.errors import GateFailed
from snapvit_export.graph.gates import require_equal

A = np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)


def test_equal_outputs_pass_and_say_how_close_they_are():
    found = require_equal("a and b", A, A + np.float32(1e-6))
    assert found.max_abs < 1e-5
    assert found.cosine > 0.999999


@pytest.mark.parametrize(
    ("reference", "other", "says"),
    [
        (A, A + np.float32(1e-2), "differ by"),
        (A, A[:, :5], "shapes"),
        (A, np.where(A > 1, np.nan, A), "not finite"),
        (np.where(A > 1, np.nan, A), A, "not finite"),
        (np.full_like(A, np.nan), np.full_like(A, np.nan), "not finite"),
    ],
)
def test_different_or_broken_outputs_do_not_pass(reference, other, says):
    with pytest.raises(GateFailed, match=f"dense and sliced: .*{says}"):
        require_equal("dense and sliced", reference, other)
