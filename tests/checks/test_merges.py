"""Decisions of merging: how clear they are, where patches go, and which images a gate may leave out."""

import numpy as np
import pytest

from helpers.plans import anatomy_of
from snapvit_export.checks.gates import _left_out
from snapvit_export.checks.merging import Matches, _shortfall, margins, places
from snapvit_export.errors import GateFailed
from snapvit_export.model.plan import Plan

# Three tokens of A, three of B. Best: 0.9, 0.8, 0.5; leads over the next partner: 0.05, 0.3, 0.01
COSINES = np.array([[[0.9, 0.85, 0.0], [0.5, 0.8, 0.1], [0.5, 0.49, 0.3]]])


@pytest.mark.parametrize(
    ("merged", "ordered", "gap"),
    [
        (1, False, 0.05),  # its own lead is smaller than the step to the second, 0.1
        (2, False, 0.05),  # 0.3 from 0.8 to 0.5
        (1, True, 0.05),
        (3, True, 0.01),  # all go, so only their partners are decided
    ],
)
def test_the_margin_is_the_smallest_gap_that_decides(merged, ordered, gap):
    assert margins(COSINES, merged, ordered)[0] == pytest.approx(gap)


def test_the_order_of_those_that_stay_counts_where_tokens_are_merged_again():
    close = np.array([[[0.9, 0.0], [0.5, 0.1], [0.499, 0.1]]])
    assert margins(close, 1, ordered=False)[0] == pytest.approx(0.4)
    assert margins(close, 1, ordered=True)[0] == pytest.approx(0.001)


def test_nothing_merged_is_always_decided_and_equals_are_never():
    assert margins(COSINES, 0)[0] == np.inf
    assert margins(np.ones((2, 3, 3)), 1).tolist() == [0, 0]


def test_one_partner_for_all_leaves_only_the_order_to_decide():
    assert margins(np.array([[[0.9], [0.6]]]), 1)[0] == pytest.approx(0.3)
    assert margins(np.array([[[0.9]]]), 1)[0] == np.inf


def test_patches_follow_their_tokens_through_two_merges():
    anatomy = anatomy_of([1, 1], [8, 8])  # 16 patches and a class token
    anatomy = anatomy.with_counts(Plan.dense(anatomy).with_tokens((2, 1)))
    first = Matches(np.zeros((1, 8, 8)), np.array([[3, 5, 0, 1, 2, 4, 6, 7]]), np.array([[0, 0, 0, 7, 0, 7, 0, 0]]))
    # After it: the class token, A 0 1 2 4 6 7, B 0 to 7. Patches 6 and 10 are with B 7, which is place 14.
    second = Matches(np.zeros((1, 7, 7)), np.array([[6, 0, 1, 2, 3, 4, 5]]), np.array([[0, 0, 0, 0, 0, 0, 6]]))
    found = places({0: first, 1: second}, anatomy)
    assert found[0][0].tolist() == [1, 7, 2, 8, 3, 9, 14, 10, 4, 11, 14, 12, 5, 13, 6, 14]
    # Places among patches 0 to 13 are split again: 12 goes to the last of the odd ones, 13.
    assert found[1][0, 13] == found[1][0, 15] == 13
    assert found[1][0, 0] == 1


def test_a_shortfall_is_by_how_much_decisions_miss_the_best():
    best, order = np.array([[0, 1, 0]]), np.array([[0, 1, 2]])
    assert _shortfall(COSINES, order, best) == 0
    assert _shortfall(COSINES, order, np.array([[1, 1, 0]])) == pytest.approx(0.05)
    assert _shortfall(COSINES, np.array([[0, 2, 1]]), best) == pytest.approx(0.3)
    assert _shortfall(COSINES, np.array([[0, 0, 1]]), best) == np.inf  # no order at all


def test_only_undecided_images_that_differ_are_left_out_and_at_most_half():
    differs, gaps = np.array([True, True, False, False]), np.array([1e-6, 0.1, 1e-6, 0.1])
    assert _left_out("a and b", differs, gaps, 1e-3).tolist() == [True, False, False, False]
    with pytest.raises(GateFailed, match="a and b: 3 of 4 images differ, all of them with matches .* Use more images"):
        _left_out("a and b", np.array([True, True, True, False]), np.full(4, 1e-6), 1e-3)
