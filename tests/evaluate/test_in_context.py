"""In-context segmentation: on toy patches with a known answer, and against the formula over all pairs."""

import numpy as np
import pytest

from snapvit_export.calibration.masks import UNKNOWN
from snapvit_export.errors import SnapvitError
from snapvit_export.evaluate.in_context import NEIGHBOURS, TEMPERATURE, fill_bank, shares_in_context
from snapvit_export.evaluate.segmentation import tally


def toy(count: int, seed: int, classes: int = 3, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Images of 4x4 patches whose direction is their class, and masks of 8x8 pixels."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, classes, (count, 4, 4))
    tokens = np.eye(6)[numbers] + noise * rng.normal(size=(count, 4, 4, 6))
    lengths = rng.uniform(0.1, 9, (count, 4, 4, 1))
    masks = numbers.repeat(2, 1).repeat(2, 2).astype(np.uint8)
    return (tokens * lengths).astype(np.float32), masks


def test_patches_take_the_classes_of_patches_like_them():
    bank = fill_bank([toy(20, 0), toy(5, 1)], 3, images=25, most=400)
    assert len(bank) == 400
    tokens, masks = toy(10, 2)
    found = np.stack(list(shares_in_context(bank, tokens)))
    np.testing.assert_array_equal(found.argmax(3).repeat(2, 1).repeat(2, 2), masks)
    np.testing.assert_allclose(found.sum(3), 1, atol=1e-5)
    assert tally(found, masks, 3).miou() > 0.8  # borders are blurred by upsampling


def test_the_vote_is_the_softmax_of_cosines_over_the_nearest():
    bank = fill_bank([toy(6, 3, noise=0.6)], 3, images=6, most=96)
    tokens, _ = toy(2, 4, noise=0.6)
    x = tokens.reshape(-1, 6).astype(np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    wanted = []
    for query in x:
        cosines = bank.features.astype(np.float64) @ query
        rows = np.argsort(-cosines)[:NEIGHBOURS]
        weights = np.exp(cosines[rows] / TEMPERATURE)
        wanted.append(weights / weights.sum() @ bank.shares[rows])
    found = np.concatenate([part.reshape(-1, 3) for part in shares_in_context(bank, tokens)])
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_bank_draws_equally_many_patches_of_each_image_and_none_that_are_unknown():
    tokens, masks = toy(10, 5)
    masks[:, :2] = UNKNOWN  # the first row of patches
    masks[:, 2, 0] = UNKNOWN  # half of a patch
    bank = fill_bank([(tokens, masks)], 3, images=10, most=50, seed=1)
    assert len(bank) == 50
    np.testing.assert_allclose(bank.shares.sum(1), 1)
    np.testing.assert_allclose(np.linalg.norm(bank.features, axis=1), 1, rtol=1e-6)
    known = tokens[:, 1:].reshape(10, 12, 6)
    unit = known / np.linalg.norm(known, axis=2, keepdims=True)
    for image in range(10):
        own = bank.features[5 * image : 5 * image + 5]
        assert (np.abs(own[:, None] - unit[image]).max(2).min(1) < 1e-6).all()
    whole = fill_bank([(tokens, masks)], 3, images=10, most=10**6)
    assert len(whole) == 120
    again = fill_bank([(tokens, masks)], 3, images=10, most=50, seed=1)
    np.testing.assert_array_equal(again.features, bank.features)


def test_too_few_patches_are_refused():
    with pytest.raises(SnapvitError, match="16 patches with known classes are too few: 30 vote. Give more"):
        fill_bank([toy(1, 6)], 3, images=1, most=400)
