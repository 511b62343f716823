"""Nested models of one set of weights learn together, and are corrected from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.models import model_of
from helpers.rankings import random_ranking
from helpers.recovery import Lesson, narrow_plan, smooth_pictures
from snapvit_export.calibration.images import prepare
from snapvit_export.model.plan import Plan
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.recover.elastic import NestedModel, NestedStudents, factors_after
from snapvit_export.prune.recover.loop import train
from snapvit_export.prune.recover.settings import TrainingSettings
from snapvit_export.prune.stats.observe import observe


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return Lesson()


def plans_of(model) -> list[Plan]:
    anatomy = model.anatomy
    removed = Plan(heads=(4, 0, 4), neurons=(96, 96, 0))
    widths = [Plan(heads=anatomy.heads, neurons=tuple(n // 2 for n in anatomy.neurons)), narrow_plan(model)]
    return [*widths, removed, Plan.dense(anatomy).with_tokens((3, 0, 2))]


@pytest.mark.parametrize(
    "name", ["deit_tiny_patch16_224", "deit3_small_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3"]
)
def test_nested_weights_give_the_corrected_modules_of_their_plans(name):
    from snapvit_export.correction.moments import Damping
    from snapvit_export.prune.correct.elastic import correct_module, make_factors

    model = model_of(name)
    images = prepare(smooth_pictures(8), model.preprocessing)
    ranking, statistics = random_ranking(model.anatomy), observe(model, images, warn=False)
    factors = make_factors(model, ranking, statistics)
    inputs = torch.from_numpy(next(images.batches(4)))
    for plan in plans_of(model):
        small = shrink(model.module, ranking, plan)
        correct_module(small, ranking, plan, factors)
        nested = NestedModel(model.module, ranking, plan, statistics, Damping())
        shared = {**dict(model.module.named_buffers()), **dict(model.module.named_parameters())}
        with torch.no_grad():
            found, wanted = nested.record(inputs, nested.weights(shared)).outputs, small(inputs)
        assert torch.allclose(found, wanted, atol=2e-4 * max(1.0, float(wanted.abs().max()))), plan


@pytest.mark.parametrize("chosen", [slice(0, 3), slice(1, 4)], ids=["widths", "with merged tokens"])
def test_nested_models_learn_together_and_share_their_weights(lesson, chosen):
    import copy
    from dataclasses import replace

    from snapvit_export.correction.moments import Damping

    model = lesson.model
    settings = TrainingSettings(train="linear", steps=40, batch=8, micro=8, rate=1e-3, looks=4)
    ranking, statistics = random_ranking(model.anatomy), observe(model, lesson.images, warn=False)
    own = replace(model, module=copy.deepcopy(model.module))
    plans = plans_of(model)[chosen]
    learner = NestedStudents(own, ranking, plans, lesson.teacher, settings, statistics)
    before = [found.divergence.mean() for found in learner.compared()]
    outcome = train(learner, lesson.pictures(settings), settings)
    after = [found.divergence.mean() for found in learner.compared()]
    assert outcome.is_better
    assert before[0] == pytest.approx(0, abs=1e-6)  # the dense one
    assert np.mean(after) < np.mean(before)
    learnt = learner.close()
    factors = factors_after(learnt, ranking, statistics, Damping())
    from snapvit_export.prune.correct.elastic import correct_module

    smallest = learner.plans[-1]
    small = shrink(learnt.module, ranking, smallest)
    correct_module(small, ranking, smallest, factors)
    inputs = torch.from_numpy(next(lesson.held_out.batches(12)))
    with torch.no_grad():
        found = lesson.teacher.compare(small(inputs).numpy()).divergence.mean()
    assert found == pytest.approx(after[-1], rel=1e-2)


def test_every_step_of_nested_models_has_the_dense_and_the_smallest(lesson):
    import copy
    from dataclasses import replace

    model = lesson.model
    own = replace(model, module=copy.deepcopy(model.module))
    learner = NestedStudents(
        own, random_ranking(model.anatomy), plans_of(model), lesson.teacher, TrainingSettings(), None
    )
    steps = [learner.sampled(step) for step in range(30)]
    assert all(chosen[:2] == [None, 3] and len(set(chosen)) == 4 for chosen in steps)
    assert steps == [learner.sampled(step) for step in range(30)]
    assert {number for chosen in steps for number in chosen[2:]} == {0, 1, 2}
