"""Statistics, corrections and refits go along the stream of merged tokens, and the schedule of merging is measured."""

import numpy as np
import pytest
import torch

from helpers.images import noise
from helpers.models import TINY, make_model, model_of
from helpers.rankings import random_ranking
from snapvit_export.allocation import schedule_choice as schedules
from snapvit_export.allocation.schedule_choice import ScheduleDamage, best_schedule
from snapvit_export.allocation.tokens import DEFAULT, SCHEDULES
from snapvit_export.correction.moments import Damping
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import SnapvitError
from snapvit_export.model.plan import Plan
from snapvit_export.progress import Silent
from snapvit_export.prune.blocks.timm_blocks import blocks_of, branch_of, whole_block
from snapvit_export.prune.correct.policy import Corrector
from snapvit_export.prune.correct.refit import refit
from snapvit_export.prune.correct.sequential import correct_in_sequence
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.models.tokens import with_tokens
from snapvit_export.prune.pack import pack
from snapvit_export.prune.stats import token_weights
from snapvit_export.prune.stats.observe import observe
from snapvit_export.prune.stats.schedules import Divergence, choose_schedule, measure_schedules
from snapvit_export.prune.stats.stream import Stream, capture_input


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


MERGED = (5, 0, 2)  # of 16 patches
POOLED = {"class_token": False, "global_pool": "avg"}  # all tokens weigh the same
EXACT = Damping(fraction=1e-10)


def pooled_model():
    return model_of("vit_tiny_patch16_224", **POOLED)


@torch.no_grad()
def inputs_of(module, layer, images) -> np.ndarray:
    """The input of a layer in a whole forward pass, (N, T, d)."""
    batch = torch.from_numpy(next(images.batches(len(images))))
    return capture_input(layer, lambda: module.forward_features(batch)).double().numpy()


def test_statistics_of_a_merging_model_are_those_of_its_merged_tokens():
    model = pooled_model()
    images = noise(model, 12)
    merging = with_tokens(model, MERGED)
    found = observe(merging, images)
    for i, (before, after) in enumerate(merging.anatomy.lengths()):
        block = blocks_of(merging.module)[i]
        for moments, layer, tokens in ((found.proj[i], block.attn.proj, before), (found.fc2[i], block.mlp.fc2, after)):
            x = inputs_of(merging.module, layer, images)
            assert x.shape[1] == tokens
            rows = x.reshape(-1, x.shape[-1])
            assert moments.samples == len(rows)
            covariance = np.cov(rows.T, bias=True)
            assert np.abs(moments.mean - rows.mean(0)).max() <= 1e-5 * np.abs(rows).max()
            assert np.abs(moments.covariance - covariance).max() <= 1e-5 * np.abs(covariance).max()


@pytest.mark.parametrize("tokens", [17, 12, 6])
def test_tokens_that_are_read_keep_their_share_when_others_are_merged(tokens):
    anatomy = model_of("deit_tiny_patch16_224").anatomy
    weights = token_weights.as_read(anatomy)[0]
    found = token_weights.shortened(weights, anatomy, tokens)
    assert len(found) == tokens
    assert float(found[0] / found.sum()) == pytest.approx(float(weights[0] / weights.sum()), rel=1e-6)


def test_weights_of_single_patches_have_no_place_among_merged_tokens():
    anatomy = model_of("deit_tiny_patch16_224").anatomy
    with pytest.raises(SnapvitError, match="merged tokens have no places"):
        token_weights.shortened(torch.arange(1.0, 18.0), anatomy, 12)


@pytest.mark.parametrize("fit", [refit, correct_in_sequence])
def test_a_cut_layer_is_fitted_to_the_dense_one_on_the_merged_tokens(fit):
    """One cut fc2 behind a merge: its weights are the least squares from what is kept to what the dense layer gives."""
    model = pooled_model()
    images = noise(model, 40)
    ranking = random_ranking(model.anatomy)
    neurons = (model.anatomy.neurons[0], 20, model.anatomy.neurons[2])
    plan = Plan(heads=model.anatomy.heads, neurons=neurons, merged=MERGED)
    options = {"pull": 0.0} if fit is refit else {}
    small = fit(model, ranking, plan, images, damping=EXACT, **options)
    merging = with_tokens(model, MERGED)
    full = blocks_of(merging.module)[1].mlp.fc2
    a = inputs_of(merging.module, full, images)  # (N, T, d): nothing before it is cut
    kept = np.sort(ranking.neuron_order(1)[:20])
    columns = np.concatenate([a[..., kept], np.ones((*a.shape[:2], 1))], axis=-1).reshape(-1, 21)
    wanted = a.reshape(-1, a.shape[-1]) @ full.weight.detach().double().numpy().T + full.bias.detach().double().numpy()
    solved = np.linalg.lstsq(columns, wanted, rcond=None)[0]  # (21, E)
    layer = blocks_of(small)[1].mlp.fc2
    found = np.concatenate([layer.weight.detach().numpy().T, layer.bias.detach().numpy()[None]])
    assert np.abs(found - solved).max() <= 1e-3 * np.abs(solved).max()


def test_a_refit_along_the_merged_tokens_is_nearer_to_the_dense_stream_than_one_that_knows_of_no_merge():
    model = pooled_model()
    images = noise(model, 40)
    ranking = random_ranking(model.anatomy)
    plan = Plan(heads=(2, 3, 2), neurons=tuple(n // 3 for n in model.anatomy.neurons), merged=MERGED)
    along = refit(model, ranking, plan, images)
    elsewhere = shrink(model.module, ranking, plan)
    elsewhere.load_state_dict(refit(model, ranking, plan.with_tokens(), images).state_dict())

    @torch.no_grad()
    def missing(module) -> float:
        """The squared distance of the last stream to the dense one, averaged over each group of patches."""
        cut, dense = Stream.of(model, images, merging=True), Stream.of(model, images)
        for of_dense, of_cut in zip(blocks_of(model.module), blocks_of(module)):
            dense.go_through(whole_block(of_dense))
            cut.go_through(whole_block(of_cut))
        pairs = zip(cut.chunks, dense.chunks, cut.groups)
        return sum(float((x - groups.average(y)).square().sum()) for x, y, groups in pairs)

    assert missing(along) < missing(elsewhere)


def test_tokens_alone_leave_every_weight_as_it_is():
    model = pooled_model()
    images = noise(model, 12)
    ranking = random_ranking(model.anatomy)
    corrector = Corrector(model, ranking, "refit", images, Silent())
    module, how = corrector.kept(Plan.dense(model.anatomy).with_tokens(MERGED))
    assert how is None
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


def test_elastic_correction_of_what_is_kept_takes_statistics_of_the_tokens_that_it_has():
    model = pooled_model()
    images = noise(model, 12)
    ranking = random_ranking(model.anatomy)
    corrector = Corrector(model, ranking, "elastic", images, Silent())
    plan = Plan(heads=model.anatomy.heads, neurons=(20, 20, 20), merged=MERGED)
    observed = observe(with_tokens(model, MERGED), images)
    assert np.allclose(corrector.factors(plan).fc2[2].mean, observed.fc2[2].mean[ranking.neuron_order(2)])
    kept, probe = corrector.kept(plan)[0], corrector.probe(plan)[0]
    fc2 = [blocks_of(module)[2].mlp.fc2.weight for module in (kept, probe)]
    assert not torch.equal(*fc2)  # a probe's are those of all tokens


def test_a_branch_by_itself_merges_as_the_block_does():
    model = model_of("vit_small_patch16_dinov3")
    images = noise(model, 3)
    merging = with_tokens(model, MERGED)
    stream, whole = (Stream.of(merging, images, merging=True) for _ in range(2))
    for block in blocks_of(merging.module):
        whole.go_through(block)
        for part in ("attention", "mlp"):
            stream.go_through(branch_of(part, block))
    assert all(torch.equal(a, b) for a, b in zip(stream.chunks, whole.chunks))
    assert sum(float(groups.sizes.sum()) for groups in stream.groups) == model.anatomy.tokens * len(images)


def measured(name: str, *divergence: float) -> ScheduleDamage:
    spread = np.linspace(-0.02, 0.02, 16)  # of the images, the same for all schedules
    rows = np.array([level * (1 + spread) for level in divergence])
    schedule = SCHEDULES[name]
    merged = tuple((1,) * (11 // schedule.step) for _ in divergence)
    return ScheduleDamage(schedule, merged, rows)


def test_the_schedule_with_the_least_divergence_is_taken():
    found = [measured("constant", 0.01, 0.1), measured("every third", 0.02, 0.2)]
    assert best_schedule(found).name == "constant"


def test_of_schedules_that_cannot_be_told_apart_the_one_with_the_fewest_merges_is_taken():
    found = [measured("constant", 0.01, 0.1), measured("every third", 0.01, 0.1)]
    assert best_schedule(found).name == "every third"


def test_no_level_decides_alone():
    """Twice as bad where little diverges weighs as much as twice as bad where much does."""
    a, b = measured("constant", 0.01, 0.4), measured("falling", 0.02, 0.2)
    assert a.damage == pytest.approx(b.damage)


def test_schedules_are_measured_at_equal_flops_and_come_sorted():
    model = make_model({**TINY, "depth": 8})
    images = noise(model, 6)
    found = measure_schedules(model, images)
    assert [each.damage for each in found] == sorted(each.damage for each in found)
    assert len(found) >= 3
    dense = Plan.dense(model.anatomy)
    for each in found:
        assert each.divergence.shape == (len(schedules.LEVELS), 6)
        for level, merged in zip(schedules.LEVELS, each.merged):
            assert dense.with_tokens(merged).flops_ratio(model.anatomy) <= level


def test_schedules_that_are_far_behind_at_the_first_level_are_not_measured_at_the_others(monkeypatch):
    model = make_model({**TINY, "depth": 8})
    images, dense = noise(model, 6), Plan.dense(model.anatomy)
    first = {name: shape.within(model.anatomy, dense, schedules.FIRST) for name, shape in SCHEDULES.items()}
    bad, seen = first["falling"], []

    def diverged(self, merged):
        seen.append(merged)
        return np.linspace(1.0, 1.1, 6) * (2.0 if merged == bad else 1.0)

    monkeypatch.setattr(Divergence, "__call__", diverged)
    found = measure_schedules(model, images)
    assert "falling" not in {each.schedule.name for each in found}
    assert "constant" in {each.schedule.name for each in found}
    assert all(SCHEDULES["falling"].within(model.anatomy, dense, level) not in seen for level in (0.72, 0.5))


def test_a_model_of_too_few_blocks_takes_the_default_and_says_so():
    model, notes = make_model({**TINY, "depth": 2}), Notes()
    schedule, described = choose_schedule(model, noise(model, 2), notes)
    assert schedule == SCHEDULES[DEFAULT]
    assert described == {"name": DEFAULT}
    assert "too few blocks" in notes.texts[0]


def test_an_elastic_folder_keeps_the_schedule_that_suits_its_model(tmp_path):
    model = model_of("deit_tiny_patch16_224")
    ranking = random_ranking(model.anatomy)
    pack(model, ranking, tmp_path / "measured", merging=SCHEDULES["falling"])
    pack(model, ranking, tmp_path / "unmeasured")
    assert Elastic.load(tmp_path / "measured").merging == SCHEDULES["falling"]
    assert Elastic.load(tmp_path / "unmeasured").merging == SCHEDULES[DEFAULT]
    assert b"merging" not in (tmp_path / "unmeasured" / "elastic.json").read_bytes()
