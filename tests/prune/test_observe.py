"""Observing: the statistics equal those of all activations at once, and what cannot be used is said by name."""

import numpy as np
import pytest
import torch

from helpers.corrections import corrected
from helpers.images import noise
from helpers.models import TINY, features, make_model, model_of
from helpers.plans import half_plan
from helpers.rankings import random_ranking
from snapvit_export.calibration.images import Images
from snapvit_export.correction import token_weights as light
from snapvit_export.correction.moments import covariance_bytes
from snapvit_export.correction.token_weights import READ, READ_LAST
from snapvit_export.errors import SnapvitError
from snapvit_export.model.plan import Plan
from snapvit_export.progress import Silent
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.correct.sequential import correct_in_sequence
from snapvit_export.prune.rank.criteria.base import Recorder
from snapvit_export.prune.stats import token_weights as tokens
from snapvit_export.prune.stats.moments import COLUMNS, RunningMoments
from snapvit_export.prune.stats.observe import observe


def test_a_model_whose_statistics_do_not_fit_into_memory_is_refused_before_the_pass(monkeypatch):
    model = make_model()
    anatomy = model.anatomy
    assert covariance_bytes(anatomy) == sum(8 * (b.hidden**2 + (b.heads * b.head_dim) ** 2) for b in anatomy.blocks)
    needed = covariance_bytes(anatomy) + 4 * anatomy.params()
    monkeypatch.setattr("snapvit_export.correction.moments.memory_bytes", lambda: needed)
    observe(model, noise(model, 2))
    monkeypatch.setattr("snapvit_export.correction.moments.memory_bytes", lambda: needed - 1)
    monkeypatch.setattr(Images, "batches", lambda *_: pytest.fail("images were read"))
    with pytest.raises(SnapvitError, match=r"covariances of its .* Do it on a larger one") as refused:
        observe(model, noise(model, 2))
    assert "\n" not in str(refused.value)


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@torch.no_grad()
def activations(model, images) -> dict[str, list[np.ndarray]]:
    """Inputs of proj and fc2 of every block, all images at once: (N, T, d) in float64."""
    blocks = blocks_of(model.module)
    found = {}
    for name, weights in (
        ("proj", [block.attn.proj.weight for block in blocks]),
        ("fc2", [block.mlp.fc2.weight for block in blocks]),
    ):
        with Recorder(weights) as record:
            model.module.forward_features(torch.from_numpy(next(images.batches(len(images)))))
        found[name] = [x.double().numpy() for x in record.inputs]
    return found


def assert_moments(moments, x: np.ndarray, weights: np.ndarray) -> None:
    """Against numpy in float64, weights (T,), at 1e-6 of the largest entry."""
    w = np.broadcast_to(weights, x.shape[:2]).ravel()
    x = x.reshape(-1, x.shape[-1])
    mean, covariance = np.average(x, axis=0, weights=w), np.cov(x.T, aweights=w, bias=True)
    assert moments.samples == pytest.approx(w.sum())
    assert np.abs(moments.mean - mean).max() <= 1e-6 * np.abs(mean).max()
    assert np.abs(moments.covariance - covariance).max() <= 1e-6 * np.abs(covariance).max()
    assert np.array_equal(moments.covariance, moments.covariance.T)
    assert moments.mean.dtype == moments.covariance.dtype == np.float64


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_giant_patch14_dinov2", "eva02_base_patch14_224"])
def test_statistics_are_those_of_all_activations_at_once(name, monkeypatch):
    monkeypatch.setattr(light, "TOKENS", 17 * 7)  # several batches, the last one shorter
    model = model_of(name)
    images = noise(model, 40)
    alike = [None] * len(model.anatomy.blocks)
    statistics, wanted = observe(model, images, token_weights=alike), activations(model, images)
    assert statistics.images == 40
    for kind in ("proj", "fc2"):
        assert len(wanted[kind]) == len(getattr(statistics, kind)) == 3
        for moments, x in zip(getattr(statistics, kind), wanted[kind]):
            assert_moments(moments, x, np.ones(x.shape[1]))


def test_wide_layers_of_any_width_are_put_together_from_blocks_of_columns():
    generator = torch.Generator().manual_seed(0)
    for width in (1, COLUMNS - 1, COLUMNS, 2 * COLUMNS + 17):
        x = torch.randn(3, 50, width, generator=generator) * 2 + 100 * torch.randn(width, generator=generator)
        sums = RunningMoments("layer", width)
        for image in x:
            sums.add(image[None])
        moments = sums.result()
        wanted = np.cov(x.flatten(0, 1).double().numpy().T, bias=True).reshape(width, width)
        assert np.abs(moments.covariance - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_tokens_count_as_their_weights_say(tiny_model):
    images = noise(tiny_model, 30)  # too few to pass tokens over
    count = tiny_model.anatomy.tokens
    some = torch.zeros(count)
    some[[0, 3]] = torch.tensor([1.0, 0.25])
    rising = torch.arange(count).float()
    statistics = observe(tiny_model, images, token_weights=[None, rising, some])
    wanted = activations(tiny_model, images)
    for kind in ("proj", "fc2"):
        for moments, x, weights in zip(getattr(statistics, kind), wanted[kind], (torch.ones(count), rising, some)):
            assert_moments(moments, x, weights.double().numpy())


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([None, None], "for 2 blocks were given, the model has 3"),
        ([None, torch.ones(5), None], "block 1: token weights of shape (5,), the model has 17 tokens"),
        ([torch.zeros(17), None, None], "block 0: token weights must be finite"),
        ([None, None, -torch.ones(17)], "block 2: token weights must be finite"),
        ([None, None, torch.full((17,), torch.nan)], "block 2: token weights must be finite"),
    ],
)
def test_token_weights_that_do_not_fit_are_refused(tiny_model, weights, says):
    with pytest.raises(SnapvitError) as refused:
        observe(tiny_model, noise(tiny_model), token_weights=weights)
    assert says in str(refused.value)


def test_weighting_the_class_token_in_the_last_block_serves_what_is_read():
    model = model_of("deit_tiny_patch16_224")
    images, ranking, plan = noise(model, 500), random_ranking(model.anatomy, seed=1), half_plan(model.anatomy)
    plan = Plan(heads=(4, 4, 2), neurons=(*model.anatomy.neurons[:2], 24))
    only_class = torch.zeros(model.anatomy.tokens).index_fill(0, torch.tensor([0]), 1.0)
    dense = features(model.module, images)

    def error(weights) -> float:
        statistics = observe(model, images, token_weights=weights)
        return float(np.square(features(corrected(model, ranking, plan, statistics), images) - dense).mean())

    alike = error([None, None, None])
    assert error([None, None, only_class]) < 0.9 * alike
    assert error(None) < 0.97 * alike  # what `as_read` does by itself


def constant(model, count: int = 3) -> Images:
    _, *size = model.preprocessing.input_size
    return Images(np.full((count, *size, 3), 128, np.uint8), None, model.preprocessing, "grey")


def test_images_that_are_all_the_same_give_finite_corrections(tiny_model):
    images, ranking, plan = constant(tiny_model), random_ranking(tiny_model.anatomy), half_plan(tiny_model.anatomy)
    statistics = observe(tiny_model, images)
    for moments in (*statistics.proj, *statistics.fc2):
        assert np.isfinite(moments.covariance).all()
    for module in (
        corrected(tiny_model, ranking, plan, statistics),
        corrected(tiny_model, ranking, plan, statistics, correction="sparsegpt"),
        correct_in_sequence(tiny_model, ranking, plan, images),
    ):
        assert np.isfinite(features(module, noise(tiny_model))).all()


def test_tokens_that_are_all_the_same_give_a_covariance_of_zero():
    sums = RunningMoments("layer", 5)
    for _ in range(3):
        sums.add(torch.full((2, 3, 5), 0.1))
    moments = sums.result()
    assert not moments.covariance.any()
    assert np.array_equal(moments.mean, np.full(5, np.float32(0.1), np.float64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_values_that_are_not_finite_name_the_layer(tiny_model, bad):
    blocks_of(tiny_model.module)[1].mlp.fc1.bias.data[4] = bad
    blocks_of(tiny_model.module)[1].mlp.fc1.weight.data[4] = bad
    message = "blocks.1.mlp.fc2: its input holds values that are not finite numbers"
    with pytest.raises(SnapvitError, match=message):
        observe(tiny_model, noise(tiny_model))
    assert not any(block.mlp.fc2._forward_pre_hooks for block in blocks_of(tiny_model.module))
    with pytest.raises(SnapvitError, match=message):
        correct_in_sequence(
            tiny_model, random_ranking(tiny_model.anatomy), half_plan(tiny_model.anatomy), noise(tiny_model)
        )
    assert not any(block.mlp.fc2._forward_pre_hooks for block in blocks_of(tiny_model.module))


def test_too_few_images_are_told_and_still_give_finite_weights():
    model = make_model({**TINY, "embed_dim": 96})  # 384 hidden units, 17 tokens an image: 23 images
    ranking, plan = random_ranking(model.anatomy), half_plan(model.anatomy)
    for count, warns in ((1, True), (22, True), (23, False)):
        notes = Notes()
        small = corrected(model, ranking, plan, observe(model, noise(model, count), notes))
        assert np.isfinite(features(small, noise(model))).all()
        assert [("at least 23 images" in text) for text in notes.texts] == [True] * warns


def test_no_images_and_no_such_device_are_refused(tiny_model):
    with pytest.raises(SnapvitError, match="need images"):
        observe(tiny_model, noise(tiny_model, 0))
    with pytest.raises(SnapvitError, match="needs images"):
        correct_in_sequence(
            tiny_model, random_ranking(tiny_model.anatomy), half_plan(tiny_model.anatomy), noise(tiny_model, 0)
        )
    with pytest.raises(SnapvitError, match="not cpu or cuda"):
        observe(tiny_model, noise(tiny_model), device="abacus")


def test_statistics_say_what_they_were_taken_from(tiny_model):
    images = noise(tiny_model)
    provenance = observe(tiny_model, images).provenance
    assert provenance["model"] == "tiny"
    assert provenance["data"] == images.fingerprint
    assert len(provenance["weights_sha256"]) == 64


@pytest.mark.parametrize(("step", "share"), [(4, 0.75), (2, 0.5)])
def test_where_tokens_are_plenty_a_part_of_the_patches_is_passed_over(tiny_model, monkeypatch, step, share):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (400, 32, 32, 3), np.uint8)
    images = Images(pixels, None, tiny_model.preprocessing, "noise")  # 400 * 17 tokens for 192 columns
    alike = [None] * len(tiny_model.anatomy.blocks)
    monkeypatch.setattr(light, "SUBSAMPLE_STEPS", (step,))
    thinned = observe(tiny_model, images, token_weights=alike)
    monkeypatch.setattr(light, "SUBSAMPLE_STEPS", ())
    whole = observe(tiny_model, images, token_weights=alike)
    assert whole.fc2[0].samples == 400 * 17
    assert thinned.fc2[0].samples == pytest.approx(share * 400 * 17)
    assert (thinned.provenance["passed_over"], whole.provenance["passed_over"]) == (step, 0)
    for some, all_of_them in zip(thinned.proj + thinned.fc2, whole.proj + whole.fc2):
        spread = np.sqrt(np.diag(all_of_them.covariance))
        assert (np.abs(some.mean - all_of_them.mean) < 0.1 * spread + 1e-9).all()
        off = np.linalg.norm(some.covariance - all_of_them.covariance) / np.linalg.norm(all_of_them.covariance)
        assert 0 < off < 0.1


def test_only_so_many_tokens_are_passed_over_that_plenty_remain(tiny_model):
    anatomy = tiny_model.anatomy  # 17 tokens, 192 columns: plenty are 1536
    assert [tokens.subsample_step(anatomy, images) for images in (100, 120, 121, 180, 181)] == [0, 0, 4, 4, 2]


@pytest.mark.parametrize("images", [181, 240, 256, 600])
def test_every_patch_counts_about_as_often_as_any_other(tiny_model, monkeypatch, images):
    seen = torch.zeros(tiny_model.anatomy.tokens)
    add = RunningMoments.add

    def counting(self, x, weights=None) -> None:
        if self.name == "blocks.0.mlp.fc2":
            seen.add_((weights > 0) * len(x))
        add(self, x, weights)

    monkeypatch.setattr(RunningMoments, "add", counting)
    observe(tiny_model, noise(tiny_model, images))
    assert seen[0] == images
    assert (seen[1:] - images / 2).abs().max() <= images / 8


def test_what_is_passed_over_is_spread_over_rows_and_columns(tiny_model):
    grid = tokens.counted(tiny_model.anatomy, 400, 0, None)[1:].reshape(4, 4)
    assert torch.equal(grid.sum(0), torch.full((4,), 2.0))
    assert torch.equal(grid.sum(1), torch.full((4,), 2.0))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("deit_tiny_patch16_224", 1),
        ("deit_tiny_distilled_patch16_224", 2),
        ("vit_small_patch14_reg4_dinov2", 1),
        ("vit_base_patch16_siglip_224", 0),
    ],
)
def test_the_tokens_that_a_model_reads_have_their_share_of_the_weight(name, read):
    anatomy = model_of(name).anatomy
    found = tokens.as_read(anatomy)
    if not read:
        assert found == [None] * len(anatomy.blocks)
        return
    shares = [float(own[:read].sum() / own.sum()) for own in found]
    least = read / anatomy.tokens  # of two tokens among eighteen, a tenth would be less than their share
    assert shares == pytest.approx([max(READ, least)] * (len(found) - 1) + [READ_LAST])
    assert all((own[read:] == 1).all() for own in found)
