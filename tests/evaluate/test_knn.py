"""k-nearest neighbours against scikit-learn."""

import numpy as np
import pytest

from snapvit_export.errors import SnapvitError
from snapvit_export.evaluate.knn import nearest_neighbours


def features(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, count)
    centres = np.random.default_rng(99).normal(size=(5, 16))
    return (centres[labels] + 1.5 * rng.normal(size=(count, 16))) * rng.uniform(0.5, 2, (count, 1)), labels


@pytest.mark.parametrize("k", [1, 5, 20])
def test_it_votes_as_scikit_learn_does(k):
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.preprocessing import normalize

    (train, train_labels), (test, test_labels) = features(0, 300), features(1, 1500)
    reference = KNeighborsClassifier(k).fit(normalize(train), train_labels).score(normalize(test), test_labels)
    assert 0.3 < reference < 0.99
    assert nearest_neighbours(train, train_labels, test, test_labels, k) == pytest.approx(reference, abs=1e-9)


def test_too_few_images_for_the_vote_are_refused():
    train, labels = features(0, 10)
    with pytest.raises(SnapvitError, match="20 neighbours cannot be found among 10 training images"):
        nearest_neighbours(train, labels, train, labels)
