"""Student's t: quantiles as the tables have them."""

import math

import pytest

from snapvit_export.profiling.student_t import MOST_FREEDOM, t_quantile

# Exceeded with probability 10, 5 and 1 %, from the tables.
TABLE = {
    1: (3.07768, 6.31375, 31.82052),
    2: (1.88562, 2.91999, 6.96456),
    3: (1.63774, 2.35336, 4.54070),
    5: (1.47588, 2.01505, 3.36493),
    10: (1.37218, 1.81246, 2.76377),
    30: (1.31042, 1.69726, 2.45726),
    120: (1.28865, 1.65765, 2.35782),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_tables(freedom):
    for share, known in zip((0.90, 0.95, 0.99), TABLE[freedom]):
        assert t_quantile(share, freedom) == pytest.approx(known, rel=1e-4)


def test_quantiles_fall_with_the_degrees_of_freedom_to_the_normal_distribution():
    found = [t_quantile(0.95, freedom) for freedom in (1, 1.3, 2, 2.5, 7.9, 40, MOST_FREEDOM)]
    assert found == sorted(found, reverse=True)
    assert t_quantile(0.95, 1e9) == found[-1] == pytest.approx(1.64485, rel=2e-3)
    assert t_quantile(0.5, 3) == 0


def test_one_degree_is_the_cauchy_distribution():
    assert t_quantile(0.875, 1) == pytest.approx(math.tan(0.375 * math.pi), rel=1e-6)
