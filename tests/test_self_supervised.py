"""The label-free ranking: its crops, and what the words promise."""

import numpy as np
import pytest
import torch

from snapvit_export.calibration.images import Images
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.errors import SnapvitError
from snapvit_export.prune.self_supervised import rank_by_gradients
from snapvit_export.prune.views import DISTINCT_WEIGHTS, PAIRED_WEIGHTS, make_views


def test_views_have_the_promised_sizes_and_depend_on_the_seed():
    batch = torch.rand(2, 3, 48, 48)
    first, again, other = (make_views(batch, "distinct", torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert first.images.shape == (12, 2, 3, 48, 48)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert len({view.sum().item() for view in first.images}) == 12
    assert make_views(batch, "paired", torch.Generator().manual_seed(0)).images.shape[0] == 2
    assert float(PAIRED_WEIGHTS.sum()) == float(DISTINCT_WEIGHTS.sum()) == 22


def pictures(count: int) -> Images:
    pixels = np.random.default_rng(0).integers(0, 255, (count, 32, 32, 3), np.uint8)
    return Images(pixels, None, Preprocessing(input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3), "noise")


def test_the_ranking_is_reproducible_and_says_how_it_was_made(tiny_model):
    heard: list[int] = []
    first = rank_by_gradients(tiny_model, pictures(20), seed=5, on_batch=heard.append)
    again = rank_by_gradients(tiny_model, pictures(20), seed=5)
    other = rank_by_gradients(tiny_model, pictures(20), seed=6)
    assert all(np.array_equal(a, b) for a, b in zip(first.neuron_scores, again.neuron_scores))
    assert not np.array_equal(first.neuron_scores[0], other.neuron_scores[0])
    assert heard == [16, 20]
    assert first.provenance["seed"] == 5
    assert first.provenance["data"]["images"] == 20
    assert first.anatomy == tiny_model.anatomy
    assert all(parameter.grad is None for parameter in tiny_model.module.parameters())


def test_a_neuron_that_reaches_nothing_scores_zero(tiny_model):
    with torch.no_grad():
        tiny_model.module.blocks[1].mlp.fc2.weight[:, 7] = 0
    ranking = rank_by_gradients(tiny_model, pictures(8))
    assert ranking.neuron_scores[1][7] == 0
    assert (ranking.neuron_scores[1] > 0).sum() == len(ranking.neuron_scores[1]) - 1
    assert ranking.neuron_order(1)[-1] == 7


def test_a_broken_model_stops_with_one_line(tiny_model):
    tiny_model.module.blocks[0].mlp.fc1.weight.data.fill_(torch.inf)
    with pytest.raises(SnapvitError, match="not a finite number"):
        rank_by_gradients(tiny_model, pictures(4))
