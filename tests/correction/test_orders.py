"""Orders: greedy in the sense of their names at every step, and never a NaN."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapvit_export.correction.cholesky import columns_of, make_factor
from snapvit_export.correction.moments import Damping, Moments
from snapvit_export.correction.orders import BLOCK, ORDER_RULES, _varying, backward, pivoted, product, variance
from snapvit_export.errors import SnapvitError
from snapvit_export.model.scores import strictly_falling


def layer(seed: int, structures: int, unit: int, tokens: int = 200, common: int = 3) -> tuple[np.ndarray, Moments]:
    """A weight and the moments of inputs that have much in common."""
    rng = np.random.default_rng(seed)
    d = structures * unit
    x = rng.normal(size=(tokens, common)) @ rng.normal(size=(common, d)) + 0.3 * rng.normal(size=(tokens, d))
    x = np.maximum(x * rng.uniform(0.1, 3, d) + rng.normal(size=d), 0)
    moments = Moments(tokens, x.mean(0), np.cov(x.T, bias=True).reshape(d, d))
    # What all but never varies belongs to the bias, as in a Factor: damping must not make an error of it.
    return np.where(_varying(moments), rng.normal(size=(5, d)), 0.0), moments


def naive_error(w: np.ndarray, s: np.ndarray, kept: list[int], unit: int) -> float:
    """What remains of W x when the columns of the kept structures are fitted to it: straight from the definition."""
    columns = columns_of(sorted(kept), unit)
    total = float(np.trace(w @ s @ w.T))
    if not len(columns):
        return total
    cross = w @ s[:, columns]
    return total - float(np.trace(cross @ np.linalg.solve(s[np.ix_(columns, columns)], cross.T)))


SIZES = st.sampled_from([(1, 1), (7, 1), (12, 1), (5, 3), (4, 2)])


@settings(deadline=None)
@given(st.integers(0, 10**6), SIZES)
def test_pivoted_takes_the_structure_that_lowers_the_error_most_at_every_step(seed, size):
    w, moments = layer(seed, *size)
    s = Damping().added_to(moments.covariance)
    order = pivoted(w, moments, size[1], Damping()).order.tolist()
    tolerance = 1e-6 * naive_error(w, s, [], size[1])
    for k in range(len(order)):
        errors = [naive_error(w, s, [*order[:k], u], size[1]) for u in order[k:]]
        assert errors[0] <= min(errors) + tolerance


@settings(deadline=None)
@given(st.integers(0, 10**6), SIZES)
@example(478, (12, 1))  # an input of variance 1e-11
def test_backward_gives_up_the_structure_that_is_missed_least_at_every_step(seed, size):
    w, moments = layer(seed, *size)
    s = Damping().added_to(moments.covariance)
    order = backward(w, moments, size[1], Damping()).order.tolist()
    tolerance = 1e-6 * naive_error(w, s, [], size[1])
    for k in range(len(order), 0, -1):
        errors = [naive_error(w, s, [v for v in order[:k] if v != u], size[1]) for u in order[:k]]
        assert errors[-1] <= min(errors) + tolerance


@pytest.mark.parametrize("rule", [pivoted, backward])
def test_saving_updates_up_in_blocks_changes_nothing(rule, monkeypatch):
    w, moments = layer(3, 2 * BLOCK + 9, 1, tokens=500)
    in_blocks = rule(w, moments, 1, Damping())
    monkeypatch.setattr("snapvit_export.correction.orders.BLOCK", 1)
    one_by_one = rule(w, moments, 1, Damping())
    assert in_blocks.order.tolist() == one_by_one.order.tolist()
    np.testing.assert_allclose(in_blocks.scores, one_by_one.scores, rtol=1e-6)


@pytest.mark.parametrize(("structures", "unit"), [(60, 1), (16, 4)])
def test_the_greedy_orders_leave_less_error_than_variance(structures, unit):
    areas = dict.fromkeys(ORDER_RULES, 0.0)
    for seed in range(5):
        w, moments = layer(seed, structures, unit, tokens=400, common=12)
        for name, rule in ORDER_RULES.items():
            errors = make_factor(w, moments, rule(w, moments, unit, Damping()).order, unit).errors()
            areas[name] += float((errors / errors[0]).mean())
    assert max(areas["pivoted"], areas["backward"]) < 0.98 * areas["variance"]


@given(st.integers(0, 10**6), SIZES, st.sampled_from(sorted(ORDER_RULES)))
def test_an_order_names_each_structure_once_and_its_scores_fall_along_it(seed, size, name):
    w, moments = layer(seed, *size)
    made = ORDER_RULES[name](w, moments, size[1], Damping())
    assert sorted(made.order) == list(range(size[0]))
    assert np.argsort(-made.scores, kind="stable").tolist() == made.order.tolist()


@pytest.mark.parametrize("name", sorted(ORDER_RULES))
@pytest.mark.parametrize("fraction", [0.0, 0.01])
@pytest.mark.parametrize("unit", [1, 4])
def test_few_tokens_copies_and_dead_inputs_give_finite_scores_and_the_dead_go_last(name, fraction, unit):
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(3, 5)), 8, axis=1)  # 3 tokens, 40 columns, each eight times
    x[:, 4:8] = 7.0  # constant
    x[:, 16:20] = 0.0
    x[:, 20] = 0.0  # dead beside live ones of the same head
    mean = x.mean(0)
    covariance = x.T @ x / len(x) - np.outer(mean, mean)  # rounding leaves a little of the constant
    made = ORDER_RULES[name](rng.normal(size=(6, 40)), Moments(3, mean, covariance), unit, Damping(fraction=fraction))
    dead = {1, 4} if unit == 4 else {4, 5, 6, 7, 16, 17, 18, 19, 20}
    assert set(made.order[-len(dead) :].tolist()) == dead
    assert made.order[-len(dead) :].tolist() == sorted(dead)
    assert np.isfinite(made.scores).all()
    assert (made.scores >= 0).all()


@pytest.mark.parametrize("name", sorted(ORDER_RULES))
@pytest.mark.parametrize("unit", [1, 3])
def test_a_layer_that_is_dead_altogether_keeps_its_order(name, unit):
    made = ORDER_RULES[name](np.ones((2, 12)), Moments(9, np.ones(12), np.zeros((12, 12))), unit, Damping())
    assert made.order.tolist() == list(range(12 // unit))
    assert np.isfinite(made.scores).all()


@pytest.mark.parametrize("name", sorted(ORDER_RULES))
def test_equal_structures_stand_by_index(name):
    made = ORDER_RULES[name](np.ones((1, 6)), Moments(9, np.zeros(6), np.eye(6)), 1, Damping())
    assert made.order.tolist() == list(range(6))


def test_a_pair_that_only_helps_together_is_kept_by_backward():
    # The output is x0 - x1, nearly equal inputs: each alone says little, x2 alone says more.
    rng = np.random.default_rng(1)
    base, small = rng.normal(size=5000), rng.normal(size=5000)
    x = np.stack([base + 0.1 * small, base, small + 1.5 * rng.normal(size=5000)], 1)
    moments = Moments(5000, x.mean(0), np.cov(x.T))
    w = np.array([[1.0, -1.0, 0.0]])
    assert pivoted(w, moments, 1, Damping(fraction=1e-6)).order[0] == 2
    assert set(backward(w, moments, 1, Damping(fraction=1e-6)).order[:2].tolist()) == {0, 1}


def test_product_is_the_geometric_mean():
    w, moments = layer(0, 6, 1)
    own = variance(w, moments, 1)
    gradient = np.array([1.0, 0.0, 2.0, 4.0, 1.0, 3.0])
    both = product(own, gradient)
    np.testing.assert_allclose(both.scores, np.sqrt(own.scores * gradient))
    assert both.order[-1] == 1
    with pytest.raises(SnapvitError, match="6 finite scores"):
        product(own, -gradient)


def test_statistics_of_another_layer_are_refused():
    w, moments = layer(0, 6, 1)
    for rule in ORDER_RULES.values():
        with pytest.raises(SnapvitError, match=r"\(5, 4\).*statistics of 6"):
            rule(w[:, :4], moments, 1, Damping())
        with pytest.raises(SnapvitError, match="structures of 4"):
            rule(w, moments, 4, Damping())


@given(st.lists(st.sampled_from([0.0, -0.0, 1e-45, 1.0, 2.5, 1e30]), min_size=1, max_size=20))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_strictly_falling_raises_as_little_as_possible(dtype, values):
    given_values = np.array(values, dtype)
    made = strictly_falling(given_values)
    expected = [max(given_values[-1], dtype(0))]
    for value in given_values[-2::-1]:
        expected.insert(0, max(value, np.nextafter(expected[0], dtype(np.inf))))
    assert made.tolist() == [float(v) for v in expected]
