"""What a recovery learns from: pictures, the teacher's targets, and which parameters are trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.models import model_of
from helpers.rankings import random_ranking
from helpers.recovery import SHORT, Lesson, smooth_pictures
from snapvit_export.calibration.crops import random_box
from snapvit_export.calibration.images import prepare
from snapvit_export.model.plan import Plan
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.recover.augment import Pictures
from snapvit_export.prune.recover.parameters import trained
from snapvit_export.prune.recover.settings import TrainingSettings
from snapvit_export.prune.recover.targets import Distance, Recorder, outputs_distance


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return Lesson()


# --- pictures


def test_a_sample_depends_on_seed_and_number_alone(lesson):
    first, second = (lesson.pictures(SHORT) for _ in range(2))
    second.views(range(30, 40), [(32, 32)])
    a, b = (pictures.views([5, 41], [(32, 32)]).inputs[32, 32] for pictures in (first, second))
    assert np.array_equal(a, b)
    other = lesson.pictures(TrainingSettings(seed=1)).views([5, 41], [(32, 32)]).inputs[32, 32]
    assert not np.array_equal(a, other)


def test_an_epoch_has_every_picture_once(lesson):
    pictures = lesson.pictures(SHORT)
    places = [pictures.order(epoch) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(24)) for order in places)
    assert places[0] != places[1]


def test_two_sizes_are_the_same_crop(lesson):
    views = lesson.pictures(SHORT).views(range(6), [(32, 32), (16, 16)]).inputs
    shrunk = torch.nn.functional.avg_pool2d(torch.from_numpy(views[32, 32]), 2).numpy()
    assert np.abs(shrunk - views[16, 16]).mean() < 0.05 < np.abs(np.roll(shrunk, 1, 0) - views[16, 16]).mean()


def test_a_crop_lies_within_the_picture_and_has_its_share():
    rng = np.random.default_rng(0)
    for size in ((50, 40), (300, 20), (7, 9)):
        for _ in range(50):
            left, top, right, bottom = random_box(size, (0.2, 0.5), rng)
            assert 0 <= left < right <= size[0] + 1e-9
            assert 0 <= top < bottom <= size[1] + 1e-9
            if size != (300, 20):  # a strip has no crop of these proportions
                assert 0.19 < (right - left) * (bottom - top) / (size[0] * size[1]) < 0.51


def test_mixed_pictures_are_between_two(lesson):
    mixed = Pictures(lesson.source, lesson.model.preprocessing, (0.5, 1.0), mixup=0.5)
    plain = Pictures(lesson.source, lesson.model.preprocessing, (0.5, 1.0))
    a, b = (pictures.views(range(8), [(32, 32)]).inputs[32, 32] for pictures in (mixed, plain))
    assert not np.allclose(a, b)
    assert np.abs(a).max() <= 1 + 1e-6


# --- targets


def test_a_model_has_no_distance_from_itself(lesson):
    record = Recorder(lesson.model.module)
    inputs = torch.from_numpy(next(lesson.images.batches(4)))
    with torch.no_grad():
        answers = record(inputs)
    distance = Distance(lesson.model.anatomy, lesson.model.anatomy.grid, TrainingSettings())
    assert float(distance(answers, answers)) == pytest.approx(0, abs=1e-6)
    assert len(answers.streams) == 3


def test_the_distance_of_predictions_is_their_kl():
    a, b = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.randn(6, 5)
    wanted = torch.nn.functional.kl_div(b.log_softmax(1), a.log_softmax(1), log_target=True, reduction="batchmean")
    assert float(outputs_distance(b, a, True)) == pytest.approx(float(wanted), rel=1e-5)
    assert float(outputs_distance(a, 3 * a, False)) == pytest.approx(0, abs=1e-6)


def test_merged_tokens_learn_from_the_means_of_their_patches(lesson):
    model = lesson.model
    plan = Plan.dense(model.anatomy).with_tokens((4, 2, 0))
    module = shrink(model.module, random_ranking(model.anatomy), plan)
    inputs = torch.from_numpy(next(lesson.images.batches(2)))
    with torch.no_grad():
        merged, whole = Recorder(module)(inputs), Recorder(model.module)(inputs)
    distance = Distance(model.anatomy, model.anatomy.grid, TrainingSettings())
    aligned = distance.aligned(whole.streams[0], merged.groups[0])
    assert aligned.shape == merged.streams[0].shape == (2, 13, 48)
    sizes = merged.groups[0].sizes
    assert torch.allclose((aligned * sizes[..., None]).sum(1), whole.streams[0].sum(1), atol=1e-4)


def test_a_smaller_grid_learns_from_resampled_patches(lesson):
    model = lesson.model
    y = torch.randn(2, 17, 48)
    y[:, 1:] = torch.arange(16).float()[None, :, None]  # rises along the rows and columns of the grid
    found = Distance(model.anatomy, (2, 2), TrainingSettings()).aligned(y, None)
    assert found.shape == (2, 5, 48)
    assert torch.equal(found[:, 0], y[:, 0])
    assert found[0, 1:, 0].tolist() == sorted(found[0, 1:, 0].tolist())
    assert float(found[:, 1:].mean()) == pytest.approx(7.5)


# --- parameters


def test_norms_are_vectors_and_linear_adds_proj_and_fc2(lesson):
    module, dense = lesson.student(SHORT).close(), lesson.model.module
    norms, linear, everything = (trained(module, kind, dense) for kind in ("norms", "linear", "all"))
    assert all(tensor.ndim == 1 for tensor in norms.values())
    assert {"blocks.0.norm1.weight", "blocks.0.attn.qkv.bias", "norm.weight", "head.bias"} <= set(norms)
    assert "patch_embed.proj.bias" not in norms
    more = set(linear) - set(norms)
    assert {name.split(".", 2)[2] for name in more} == {"attn.proj.weight", "mlp.fc2.weight"}
    assert set(everything) == {name for name, _ in module.named_parameters()}


def test_a_layer_scale_is_trained_where_its_layer_is_the_variants_own():
    model = model_of("deit3_small_patch16_224")
    plan = Plan(heads=(2, 4, 4), neurons=(96, 192, 192))
    images = prepare(smooth_pictures(8), model.preprocessing)
    from helpers.recovery import narrow

    names = trained(narrow(model, images, plan), "norms", model.module)
    assert "blocks.0.ls1.gamma" in names
    kept = shrink(model.module, random_ranking(model.anatomy), Plan.dense(model.anatomy))
    assert not [name for name in trained(kept, "norms", model.module) if "gamma" in name]
