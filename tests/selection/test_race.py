"""The race: the best of many candidates is found by looking at few of them, and at all images for the leaders only."""

from itertools import product

import numpy as np
import pytest

from snapvit_export.selection.race import LEADERS, MOST_LOOKED_AT, race

ROWS, COLUMNS, IMAGES = 8, 5, 16
FIRST = [(0, 0), (0, 2), (3, 0), (3, 2), (7, 0), (7, 2)]


def around(place):
    row, column = place
    return [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]


class Bowl:
    """A measure that is smooth in both directions, with its least value at one place."""

    def __init__(self, lowest, missing=()) -> None:
        self.lowest, self.missing, self.looked_at, self.final = lowest, missing, [], []

    def value(self, place) -> float:
        (row, column), (y, x) = place, self.lowest
        return 0.1 + (row - y) ** 2 / ROWS**2 + (column - x) ** 2 / COLUMNS**2

    def __call__(self, places, on_all):
        (self.final if on_all else self.looked_at).extend(places)
        inside = [(r, c) for r, c in places if 0 <= r < ROWS and 0 <= c < COLUMNS and (r, c) not in self.missing]
        return {place: np.full(4 * IMAGES if on_all else IMAGES, self.value(place)) for place in inside}


@pytest.mark.parametrize("lowest", list(product(range(ROWS), range(COLUMNS))))
def test_the_lowest_place_of_a_bowl_is_found_without_looking_at_most_of_them(lowest):
    bowl = Bowl(lowest)
    found = race(FIRST, around, bowl)
    assert next(iter(found)) == lowest
    inside = [(r, c) for r, c in bowl.looked_at if 0 <= r < ROWS and 0 <= c < COLUMNS]
    assert len(inside) <= ROWS * COLUMNS * 2 / 3
    assert len(bowl.looked_at) == len(set(bowl.looked_at)) <= MOST_LOOKED_AT


def test_what_cannot_be_made_is_skipped_and_the_best_of_the_rest_is_found():
    bowl = Bowl((3, 3), missing={(3, 3), (3, 2), (0, 0)})
    found = race(FIRST, around, bowl)
    assert next(iter(found)) in {(2, 3), (4, 3)}
    assert not bowl.missing & set(found)
    assert race([(0, 0)], around, Bowl((0, 0), missing={(0, 0)})) == {}


def test_no_more_are_looked_at_than_is_allowed():
    for most in (1, 4, 9):
        bowl = Bowl((7, 4))
        race(FIRST, around, bowl, most=most)
        assert len(bowl.looked_at) == most


def test_the_limit_holds_where_every_step_is_better_than_the_last():
    looked_at = []

    def measure(keys, on_all):
        looked_at.extend([] if on_all else keys)
        return {key: np.array([-float(key)]) for key in keys}

    found = race([0], lambda n: [n + 1], measure, most=12)
    assert looked_at == list(range(12))
    assert list(found) == [11, 10, 9, 8, 7]


def test_only_leaders_are_measured_on_all_images_and_come_best_first():
    bowl = Bowl((4, 2))
    found = race(FIRST, around, bowl)
    assert len(bowl.final) == LEADERS == len(found)
    assert all(len(values) == 4 * IMAGES for values in found.values())
    means = [values.mean() for values in found.values()]
    assert means == sorted(means)
    best = sorted(bowl.value(place) for place in set(bowl.looked_at) if min(place) >= 0 and place[1] < COLUMNS)
    assert means == pytest.approx(best[:LEADERS])


def test_all_images_overrule_the_few():
    few, every = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 2.0, "b": 1.0, "c": 0.0}

    def measure(keys, on_all):
        return {key: np.array([(every if on_all else few)[key]]) for key in keys}

    assert list(race(["a", "b", "c"], lambda key: [], measure, leaders=2)) == ["b", "a"]


def test_ties_keep_the_order_in_which_they_were_looked_at():
    for order in (["x", "y", "z"], ["z", "x", "y"]):
        found = race(order, lambda key: [], lambda keys, on_all: {key: np.ones(3) for key in keys}, leaders=2)
        assert list(found) == order[:2]
