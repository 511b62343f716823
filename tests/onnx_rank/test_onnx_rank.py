"""A model ranked by its tensors alone, in ONNX Runtime, is ranked as in torch."""

import numpy as np
import pytest

from helpers.images import noise
from helpers.models import model_of
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.correction.moments import Damping
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.onnx_rank.cutter import TensorCutter
from snapvit_export.onnx_rank.observe import observe
from snapvit_export.onnx_rank.rank import check_settings, choose_schedule, factors_for, in_rank_order, rank
from snapvit_export.onnx_rank.sublayers import measure_sublayers
from snapvit_export.progress import Silent
from snapvit_export.prune.correct.elastic import correct_module
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import blueprint
from snapvit_export.prune.rank.damage import damage_ranking
from snapvit_export.prune.stats.observe import observe as observe_in_torch
from snapvit_export.prune.stats.schedules import choose_schedule as choose_in_torch
from snapvit_export.prune.stats.sublayer_stats import measure_sublayers as measure_in_torch
from snapvit_export.runtimes.ort import OrtSession

FAMILIES = [
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_giant_patch14_dinov2",  # LayerScale, SwiGLU
    "vit_base_patch16_siglip_224",  # attention pooling
    "eva02_base_patch14_224",  # rotary, norm inside the MLP
    "vit_small_patch16_dinov3",
]
ROUNDING = 2e-4  # of the largest value: two runtimes sum float32 in another order, block after block


def close(a, b, tolerance=ROUNDING) -> bool:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return a.shape == b.shape and np.abs(a - b).max(initial=0) <= tolerance * max(np.abs(b).max(initial=0), 1e-12)


def unranked(model):
    """The model as a file gives it: heads and neurons in its own order."""
    return blueprint(model, Ranking.flat(model.anatomy))


@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_are_those_of_torch(name):
    model = model_of(name)
    images = noise(model, 10)
    found, wanted = observe(unranked(model), images, Silent()), observe_in_torch(model, images, warn=False)
    for ours, theirs in zip((*found.proj, *found.fc2), (*wanted.proj, *wanted.fc2)):
        assert ours.samples == pytest.approx(theirs.samples)
        assert close(ours.mean, theirs.mean)
        assert close(ours.covariance, theirs.covariance)


@pytest.mark.parametrize("name", [FAMILIES[0], FAMILIES[2], FAMILIES[3]])
def test_sublayers_are_measured_as_in_torch(name):
    model = model_of(name)
    images, dense = noise(model, 12), unranked(model)
    found = measure_sublayers(dense, images, observe(dense, images, Silent()), Silent())
    wanted = measure_in_torch(model, images)
    for ours, theirs in zip(found, wanted):
        assert (ours.block, ours.part) == (theirs.block, theirs.part)
        assert ours.divergence == pytest.approx(theirs.divergence, rel=1e-3)
        assert ours.turned == pytest.approx(theirs.turned, rel=1e-3, abs=1e-6)
        assert ours.damage == pytest.approx(theirs.damage, rel=0.02, abs=1e-5)
        assert (ours.onward is None) == (theirs.onward is None)
        if ours.onward is not None:
            assert ours.onward == pytest.approx(theirs.onward, rel=0.02, abs=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_plans_and_corrections_as_in_torch(name):
    model = model_of(name)
    images, dense = noise(model, 24), unranked(model)
    ranking, _ = rank(dense, images, make_settings("default"), Silent())
    statistics = observe_in_torch(model, images, warn=False)
    theirs, their_factors = damage_ranking(model, statistics)
    for i, (ours, wanted) in enumerate(zip(ranking.damage, theirs.damage)):
        assert close(ours[0], wanted[0], 0.01), i
        assert close(ours[1], wanted[1], 0.01), i
    planners = [Planner(each, model.anatomy, corrected=True) for each in (ranking, theirs)]
    ours, wanted = (planner.flops(0.6) for planner in planners)
    assert np.abs(np.subtract(ours.heads + ours.neurons, wanted.heads + wanted.neurons)).max() <= 1
    same = Planner(theirs, model.anatomy, corrected=True).flops(0.6)
    small = shrink(model.module, theirs, same)
    correct_module(small, theirs, same, their_factors)
    again = factors_for(dense, theirs, images, Damping(), Silent())
    assert again.order_sha256 == their_factors.order_sha256
    for a, b in zip((*again.proj, *again.fc2), (*their_factors.proj, *their_factors.fc2)):
        assert close(a.projected, b.projected, 0.01)


def test_a_cut_by_tensors_is_the_corrected_module_of_torch(tmp_path):
    import torch

    model = model_of("deit_tiny_patch16_224")
    images, dense = noise(model, 24), unranked(model)
    ranking, factors = damage_ranking(model, observe_in_torch(model, images, warn=False))
    plan = Planner(ranking, model.anatomy, corrected=True).flops(0.6)
    cutter = TensorCutter(in_rank_order(dense, ranking), factors)
    written = GraphWriter(cutter.blueprint, tmp_path).write("cut", plan, cutter.cut(plan, keep=True).layers())
    small = shrink(model.module, ranking, plan)
    correct_module(small, ranking, plan, factors)
    batch = next(images.batches(4))
    with OrtSession(written.graph, 1) as session, torch.no_grad():
        assert close(session.run(batch), small(torch.from_numpy(batch)).numpy(), 1e-4)


def test_a_cut_that_keeps_everything_is_not_corrected():
    model = model_of("deit_tiny_patch16_224")
    images, dense = noise(model, 24), unranked(model)
    ranking, factors = rank(dense, images, make_settings("default"), Silent())
    cutter = TensorCutter(in_rank_order(dense, ranking), factors)
    whole = Plan.dense(model.anatomy)
    assert cutter.cut(whole, keep=True).correction is None
    assert cutter.cut(whole.with_tokens((2, 0, 0)), keep=True).correction is None
    assert cutter.cut(Planner(ranking, model.anatomy).flops(0.5), keep=True).correction == "elastic"


def test_the_schedule_of_merging_is_chosen_as_in_torch(tmp_path):
    from helpers.models import TINY, make_model

    model = make_model({**TINY, "depth": 8})
    images = noise(model, 6)
    ours, described = choose_schedule(unranked(model), images, tmp_path, Silent())
    theirs, wanted = choose_in_torch(model, images)
    assert ours == theirs
    for name, value in wanted["divergence"].items():
        assert described["divergence"][name] == pytest.approx(value, rel=0.01, abs=2e-6)
    assert not list(tmp_path.glob("*.onnx"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(recipe="snapvit"), "default recipe alone"),
        (dict(evaluations=10), "a search needs it"),
        (dict(correction="sequential"), "--correction"),
    ],
)
def test_settings_that_need_torch_are_refused(changes, says):
    settings = make_settings(changes.pop("recipe", "default"), **changes)
    with pytest.raises(UsageError, match=says):
        check_settings(settings)


def test_without_images_there_are_no_statistics():
    model = model_of("deit_tiny_patch16_224")
    with pytest.raises(SnapvitError, match="Give --data"):
        observe(unranked(model), noise(model, 1).first(0), Silent())
