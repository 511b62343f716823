"""Dominated variants, by hand and as a law."""

from hypothesis import given
from hypothesis import strategies as st

from snapvit_export.evaluate.pareto import Tradeoff, dominated


def test_the_best_of_those_that_dominate_is_named():
    points = {"dense": Tradeoff(16, 0.97), "a": Tradeoff(12, 0.98), "b": Tradeoff(9, 0.99), "c": Tradeoff(4, 0.5)}
    assert dominated(points) == {"dense": "b", "a": "b"}


def test_equals_do_not_dominate_each_other():
    assert dominated({"a": Tradeoff(5, 0.5), "b": Tradeoff(5, 0.5)}) == {}
    assert dominated({"a": Tradeoff(5, 0.5), "b": Tradeoff(5, 0.6)}) == {"a": "b"}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_what_is_left_is_faster_or_better_than_all_others(pairs):
    points = {str(i): Tradeoff(*pair) for i, pair in enumerate(pairs)}
    lost = dominated(points)
    left = set(points) - set(lost)
    assert left
    assert all(winner in left for winner in lost.values())
    for name in left:
        assert all(
            points[name].ms < other.ms or points[name].quality > other.quality or points[name] == other
            for other in points.values()
        )
