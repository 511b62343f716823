"""Segmentation as published: its step is that of torch, crops of image and mask go together, the best epoch is kept."""

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.models import make_model
from snapvit_export.calibration.folder import folder_source
from snapvit_export.calibration.masks import UNKNOWN, numbers_of
from snapvit_export.evaluate import paper_segmentation
from snapvit_export.evaluate.linear import Layer
from snapvit_export.evaluate.paper_segmentation import DECAY, fit_as_published, step
from snapvit_export.evaluate.segmentation import scores_of, tally

PREPROCESSING = make_model().preprocessing


def test_steps_are_those_of_torch():
    """Cross-entropy of upsampled logits, unknown pixels left out, momentum and weight decay: three steps."""
    rng = np.random.default_rng(0)
    layer = Layer(3, 5, DECAY)
    head = torch.nn.Conv2d(5, 3, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    descent = torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9, weight_decay=DECAY)
    for _ in range(3):
        tokens = rng.normal(size=(4, 3, 2, 5)).astype(np.float32)
        masks = rng.integers(0, 3, (4, 12, 10)).astype(np.uint8)
        masks[0, :4] = UNKNOWN
        step(layer, tokens, masks, 0.5)
        descent.zero_grad()
        logits = head(torch.from_numpy(tokens).permute(0, 3, 1, 2))
        full = torch.nn.functional.interpolate(logits, size=(12, 10), mode="bilinear", align_corners=False)
        torch.nn.functional.cross_entropy(full, torch.from_numpy(masks).long(), ignore_index=UNKNOWN).backward()
        descent.step()
    np.testing.assert_allclose(layer.weight, head.weight.detach().numpy()[:, :, 0, 0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(layer.bias, head.bias.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.fixture
def masked(tmp_path):
    """Images whose left part is dark, with masks that say where; the part is another in each."""
    rng = np.random.default_rng(0)
    for i in range(10):
        mask = np.full((48, 60), 7, np.uint8)
        mask[:, : int(rng.integers(12, 48))] = 2
        Image.fromarray(np.where(mask[..., None] == 7, 230, 20).repeat(3, 2).astype(np.uint8)).save(
            tmp_path / f"{i}.jpg", quality=100, subsampling=0
        )
        Image.fromarray(mask).save(tmp_path / f"{i}.png")
    return folder_source(tmp_path)


def brightness(images):
    """A token is the colour of its patch against grey."""
    n = len(images)
    return ((images.pixels.reshape(n, 8, 4, 8, 4, 3).mean((2, 4)) - 125) / 50).astype(np.float32)


def test_crops_of_image_and_mask_are_the_same(masked):
    images, masks = paper_segmentation._crops(masked, range(10), PREPROCESSING, np.random.default_rng(3))
    assert images.pixels.shape == (10, 32, 32, 3)
    bright = images.pixels.mean(3) > 125
    assert (bright == (masks == 7)).mean() > 0.97  # but for interpolation at borders
    left_is_dark = [bool(row[0] == 2) for row in masks[:, 16]]
    assert 1 <= sum(left_is_dark) <= 9  # some are mirrored
    others, _ = paper_segmentation._crops(masked, range(10), PREPROCESSING, np.random.default_rng(4))
    assert not np.array_equal(images.pixels, others.pixels)


def test_the_epoch_that_does_best_on_validation_images_is_kept(masked, monkeypatch):
    images, masks = paper_segmentation._crops(masked, range(10), PREPROCESSING, np.random.default_rng(5))
    numbers = numbers_of([2, 7])
    tokens, known = brightness(images), numbers[masks]
    seen = []
    plain = paper_segmentation.tally

    def watched(scores, truth, classes):
        counted = plain(scores, truth, classes)
        seen.append(counted.miou())
        return counted

    monkeypatch.setattr(paper_segmentation, "tally", watched)
    rates = iter([2.0, -6.0, 0.1])  # the second epoch undoes what the first has learnt
    monkeypatch.setattr(paper_segmentation, "step", lambda layer, x, y, rate: step(layer, x, y, next(rates)))
    layer = fit_as_published(brightness, masked, numbers, PREPROCESSING, tokens, known, epochs=3, batch=10)
    assert seen[0] > max(seen[1:])
    assert tally(scores_of(layer, tokens), known, 2).miou() == seen[0] > 0.8


def test_it_learns_in_its_own_schedule(masked):
    images, masks = paper_segmentation._crops(masked, range(10), PREPROCESSING, np.random.default_rng(5))
    numbers, ran, done = numbers_of([2, 7]), [], []

    def run(found):
        ran.append(len(found))
        return brightness(found)

    layer = fit_as_published(
        run, masked, numbers, PREPROCESSING, brightness(images), numbers[masks], progress=lambda: done.append(1)
    )
    assert ran == [10] * 25
    assert len(done) == 25
    assert tally(scores_of(layer, brightness(images)), numbers[masks], 2).miou() > 0.8
