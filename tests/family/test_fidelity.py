"""Fidelity by hand: divergence and agreement of two images, neighbours of three, and paired comparisons."""

import math

import numpy as np
import pytest

from snapvit_export.errors import SnapvitError
from snapvit_export.family.fidelity import TEMPERATURE, Comparison, is_worse


def kl(p, q) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q))


def test_divergence_is_the_mean_kl_from_the_dense_predictions_and_agreement_the_share_of_equal_classes():
    dense, other = [(0.7, 0.2, 0.1), (0.5, 0.3, 0.2)], [(0.6, 0.3, 0.1), (0.2, 0.7, 0.1)]
    logits = [
        np.log(rows) + np.array([[3.0], [-2.0]]) for rows in (other, dense)
    ]  # any constant added to an image's logits
    found = Comparison.of(*logits, classifies=True)
    by_hand = [kl(p, q) for p, q in zip(dense, other)]
    assert found.divergence == pytest.approx(by_hand)
    assert by_hand != pytest.approx([kl(q, p) for p, q in zip(dense, other)])  # the direction shows
    assert found.agrees.tolist() == [True, False]
    fidelity = found.fidelity()
    assert (fidelity.by, fidelity.images, fidelity.agreement, fidelity.estimated) == ("predictions", 2, 0.5, False)
    assert fidelity.divergence == pytest.approx(np.mean(by_hand))
    assert fidelity.standard_error == pytest.approx(np.std(by_hand, ddof=1) / math.sqrt(2))
    assert fidelity.agreement_error > 0


def test_a_model_beside_itself_has_no_divergence_and_agrees_with_all():
    outputs = np.random.default_rng(0).normal(size=(12, 7))
    for classifies in (True, False):
        found = Comparison.of(outputs, outputs, classifies).fidelity()
        assert (found.divergence, found.agreement) == (pytest.approx(0, abs=1e-12), 1.0)


def test_without_a_classifier_the_neighbours_among_the_dense_embeddings_are_compared():
    dense = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    other = 5 * np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])  # the length of an embedding does not count
    found = Comparison.of(other, dense, classifies=False)
    assert found.by == "neighbours"

    def neighbours(cosines):
        weights = np.exp(np.array(cosines) / TEMPERATURE)
        return weights / weights.sum()

    # of the second image to the first and the third: 0.8 and 0.6 in the dense model, 0 and 1 in the other
    assert found.divergence[1] == pytest.approx(kl(neighbours([0.8, 0.6]), neighbours([0.0, 1.0])))
    assert found.divergence[[0, 2]] == pytest.approx([0, 0], abs=1e-9)
    assert found.agrees.tolist() == [True, False, True]


def test_an_image_is_no_neighbour_of_itself():
    embeddings = np.eye(4) + 0.1
    found = Comparison.of(embeddings[[1, 0, 3, 2]], embeddings, classifies=False)
    assert not found.agrees.all()  # each is now nearest to another than before


def test_joined_comparisons_are_those_of_all_images_at_once():
    rng = np.random.default_rng(1)
    dense, other = rng.normal(size=(2, 10, 4))
    parts = [Comparison.of(other[part], dense[part], True) for part in (slice(3), slice(3, None))]
    assert parts[0].joined(parts[1]).fidelity() == Comparison.of(other, dense, True).fidelity()


def test_two_candidates_are_compared_image_by_image():
    hard = np.array([0.0, 1.0, 10.0, 100.0])  # images that are hard for both
    assert is_worse(hard + np.array([0.1, 0.11, 0.09, 0.1]), hard)  # far within the spread of the images
    assert not is_worse(hard, hard + 0.1)
    assert not is_worse(hard, hard)
    assert not is_worse(hard + np.array([0.3, -0.2, 0.2, -0.25]), hard)  # a difference of nothing but noise


def test_how_many_standard_errors_count_can_be_given():
    difference = np.array([1.0, 3.0, 2.0, 2.0])  # mean 2, standard error 0.408: 4.9 of them
    assert is_worse(difference, np.zeros(4), errors=4.8)
    assert not is_worse(difference, np.zeros(4), errors=5.0)


@pytest.mark.parametrize(
    ("outputs", "dense", "says"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), r"\(2, 3\) cannot be compared with the dense model's \(2, 4\)"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "cannot be compared"),
        (np.zeros(3), np.zeros(3), "cannot be compared"),
        (np.full((2, 3), np.nan), np.zeros((2, 3)), "not finite"),
        (np.zeros((2, 3)), np.full((2, 3), np.inf), "not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(outputs, dense, says):
    for classifies in (True, False):
        with pytest.raises(SnapvitError, match=says) as error:
            Comparison.of(outputs, dense, classifies)
        assert "\n" not in str(error.value)


def test_neighbours_need_three_images():
    with pytest.raises(SnapvitError, match="three images at least"):
        Comparison.of(np.eye(2), np.eye(2), classifies=False)
