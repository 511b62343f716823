"""k-nearest neighbours against scikit-learn, ties and all, in blocks of any size."""

import numpy as np
import pytest

from snapvit_export.errors import SnapvitError
from snapvit_export.evaluate import neighbours
from snapvit_export.evaluate.knn import majority, nearest_neighbours, neighbours_right
from snapvit_export.evaluate.neighbours import nearest


def features(seed: int, count: int, width: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, count)
    centres = np.random.default_rng(99).normal(size=(5, width))
    return (centres[labels] + 1.5 * rng.normal(size=(count, width))) * rng.uniform(0.5, 2, (count, 1)), labels


@pytest.mark.parametrize("k", [1, 5, 20])
def test_it_votes_as_scikit_learn_does(k):
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.preprocessing import normalize

    (train, train_labels), (test, test_labels) = features(0, 300), features(1, 1500)
    reference = KNeighborsClassifier(k).fit(normalize(train), train_labels)
    guesses = reference.predict(normalize(test))
    assert 0.3 < (guesses == test_labels).mean() < 0.99
    np.testing.assert_array_equal(neighbours_right(train, train_labels, test, test_labels, k), guesses == test_labels)


@pytest.mark.parametrize("block", [(7, 40), (1000, 45), (13, 1000)])
def test_the_neighbours_do_not_depend_on_the_blocks(block):
    (bank, _), (queries, _) = features(2, 500), features(3, 60)
    rows, cosines = nearest(bank.astype(np.float32), queries, 10, block=block)
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (bank.astype(np.float32), queries)]
    wanted = np.argsort(-(unit[1] @ unit[0].T.astype(np.float64)), axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_allclose(cosines, np.take_along_axis(unit[1] @ unit[0].T, wanted, 1), atol=1e-7)


def test_no_block_is_larger_than_was_asked_for(monkeypatch):
    seen = []
    plain = neighbours._better
    monkeypatch.setattr(neighbours, "_better", lambda s, least: (seen.append(s.shape), plain(s, least))[1])
    (bank, _), (queries, _) = features(4, 333), features(5, 50)
    nearest(bank, queries, 5, block=(16, 100))
    assert max(rows for rows, _ in seen) == 16
    assert max(columns for _, columns in seen) == 100
    assert sum(rows * columns for rows, columns in seen) == 333 * 50


def test_of_equally_near_images_the_first_are_taken_however_many_there_are():
    """More copies than are compared again, in several blocks: found by the whole bank."""
    (bank, _), (queries, _) = features(6, 40), features(7, 8)
    copies = np.concatenate([bank, np.tile(bank[3], (90, 1)) * np.linspace(1, 2, 90)[:, None]])
    copies[40:] = bank[3]
    rows, _ = nearest(copies.astype(np.float32), bank[3:4] + 1e-9, 5, block=(4, 25))
    assert rows.tolist() == [[3, 40, 41, 42, 43]]
    assert nearest(copies, queries, 5)[0].shape == (8, 5)


def test_neighbours_that_float32_cannot_tell_apart_are_told_apart():
    """Cosines that differ by less than float32 shows, with the better ones last."""
    angles = np.linspace(1e-4, 0.9e-4, 200)
    bank = np.stack([np.cos(angles), np.sin(angles)], 1)
    queries = np.tile([[1.0, 0.0], [0.0, 1.0]], (3, 1))
    rows, _ = nearest(bank, queries, 4, block=(6, 50))
    assert rows.tolist() == [[199, 198, 197, 196], [0, 1, 2, 3]] * 3


def test_the_smallest_class_wins_a_tie():
    from scipy.stats import mode

    votes = np.random.default_rng(0).integers(0, 6, (3000, 4)) * 10
    np.testing.assert_array_equal(majority(votes), mode(votes, axis=1, keepdims=False).mode)


def test_too_few_images_for_the_vote_are_refused():
    train, labels = features(0, 10)
    with pytest.raises(SnapvitError, match="20 neighbours cannot be found among 10 training images"):
        nearest_neighbours(train, labels, train, labels)
