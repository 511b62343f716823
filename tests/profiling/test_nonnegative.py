"""Least squares without negative answers: the conditions that only the best answer meets, and known answers."""

import numpy as np
import pytest

from snapvit_export.profiling.nonnegative import nonnegative_least_squares


def test_what_has_no_negative_answer_is_ordinary_least_squares():
    random = np.random.default_rng(0)
    matrix, x = random.random((9, 4)), random.random(4) + 0.5
    assert nonnegative_least_squares(matrix, matrix @ x) == pytest.approx(x)
    noisy = matrix @ x + random.normal(0, 0.01, 9)
    assert nonnegative_least_squares(matrix, noisy) == pytest.approx(np.linalg.lstsq(matrix, noisy, rcond=None)[0])


def test_every_answer_meets_the_conditions_of_the_best_one():
    random = np.random.default_rng(1)
    for _ in range(300):
        rows, columns = random.integers(2, 20), random.integers(1, 13)
        matrix = random.random((rows, columns)) * 10.0 ** random.integers(-4, 4, columns)  # other units in every column
        if random.random() < 0.3:
            matrix[:, random.integers(columns)] = 0
        wanted = random.normal(0.3, 1, rows)
        x = nonnegative_least_squares(matrix, wanted)
        slope = matrix.T @ (wanted - matrix @ x) / np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
        assert (x >= 0).all()
        assert slope.max() <= 1e-8  # no number can grow and help
        assert np.abs(slope[x > 0]).max(initial=0) <= 1e-8  # nor can one that is not at its bound move at all


def test_the_units_of_a_column_do_not_change_the_answer():
    random = np.random.default_rng(2)
    matrix, wanted, units = random.random((8, 5)), np.ones(8), 10.0 ** np.arange(-4, 6, 2)
    assert nonnegative_least_squares(matrix * units, wanted) * units == pytest.approx(
        nonnegative_least_squares(matrix, wanted), abs=1e-12
    )


def test_nothing_is_better_than_something_that_points_away():
    assert nonnegative_least_squares(np.ones((3, 2)), -np.ones(3)).tolist() == [0, 0]
