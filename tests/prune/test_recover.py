"""Recovering by training: steps, looks and the loss; nothing gets worse, and bad input is refused."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.recovery import CPU, SHORT, Lesson, narrow_plan, smooth_pictures, taught
from snapvit_export.calibration.images import prepare
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.prune.recover.augment import Pictures
from snapvit_export.prune.recover.loop import look_steps, steps_within, train
from snapvit_export.prune.recover.parameters import copies
from snapvit_export.prune.recover.schedule import step_size
from snapvit_export.prune.recover.settings import RECIPES, TrainingSettings
from snapvit_export.prune.recover.student import Student, Teacher
from snapvit_export.prune.recover.targets import outputs_distance


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return Lesson()


# --- the loop


@pytest.mark.parametrize("kind", ["norms", "linear", "all"])
def test_training_lowers_the_divergence_on_held_out_images(lesson, kind):
    settings = TrainingSettings(train=kind, steps=40, batch=8, micro=8, rate={"norms": 5e-3}.get(kind, 1e-3), looks=4)
    student = lesson.student(settings)
    outcome = train(student, lesson.pictures(settings), settings)
    assert outcome.is_better
    assert outcome.after[0].divergence < 0.9 * outcome.before[0].divergence
    found = student.compared()[0].fidelity()
    assert found.divergence == pytest.approx(outcome.after[0].divergence)


def test_only_what_is_trained_changes(lesson):
    settings = TrainingSettings(train="norms", steps=4, batch=4, micro=4, rate=5e-3, looks=2)
    student = lesson.student(settings)
    before = copies(dict(student.module.named_parameters()))
    train(student, lesson.pictures(settings), settings)
    changed = {n for n, t in student.module.named_parameters() if not torch.equal(t, before[n])}
    assert changed
    assert changed <= set(student.parameters)


def test_a_training_that_does_harm_gives_back_what_it_was_given(lesson):
    settings = TrainingSettings(train="all", steps=8, batch=4, micro=4, rate=3.0, warm_up=0.0, looks=4)
    student = lesson.student(settings)
    before = copies(student.parameters)
    outcome = train(student, lesson.pictures(settings), settings)
    assert not outcome.is_better
    assert outcome.before == outcome.after
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.parameters.items())


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_best(lesson, monkeypatch):
    student, calls = lesson.student(SHORT), []
    plain = student.backward

    def backward(views, step, share):
        calls.append(step)
        plain(views, step, share)
        return float("nan") if step == 7 else 1.0

    monkeypatch.setattr(student, "backward", backward)
    outcome = train(student, lesson.pictures(SHORT), SHORT)
    assert max(calls) == 7
    assert "no number" in outcome.stopped
    assert outcome.after[0].divergence <= outcome.before[0].divergence
    assert all(bool(torch.isfinite(tensor).all()) for tensor in student.parameters.values())


def test_a_run_ends_when_held_out_fidelity_stops_rising(lesson):
    settings = TrainingSettings(train="all", steps=400, batch=4, micro=4, rate=1.0, warm_up=0.0, looks=100, patience=3)
    outcome = train(lesson.student(settings), lesson.pictures(settings), settings)
    assert outcome.steps < 100
    assert "has not risen" in outcome.stopped


def test_the_same_seed_gives_the_same_bits_and_another_does_not(lesson):
    def weights(seed):
        settings = TrainingSettings(train="linear", steps=4, batch=4, micro=2, rate=1e-3, looks=1, seed=seed)
        student = lesson.student(settings)
        train(student, lesson.pictures(settings), settings)
        return copies(student.parameters)

    one, two, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_parts_of_a_batch_add_up_to_the_whole(lesson):
    def gradient(micro):
        settings = TrainingSettings(train="all", batch=8, micro=micro, streams=0.0)
        student, pictures = lesson.student(settings), lesson.pictures(settings)
        for start in range(0, 8, micro):
            student.backward(pictures.views(range(start, start + micro), student.sizes), 0, micro / 8)
        return {name: tensor.grad for name, tensor in student.parameters.items() if tensor.grad is not None}

    whole, parts = gradient(8), gradient(2)
    assert all(torch.allclose(whole[name], parts[name], atol=1e-5, rtol=1e-4) for name in whole)


def test_recomputed_activations_give_the_same_gradients(lesson):
    def gradient(recompute):
        settings = TrainingSettings(train="all", batch=4, micro=4, recompute=recompute)
        student = lesson.student(settings)
        student.backward(lesson.pictures(settings).views(range(4), student.sizes), 0, 1.0)
        found = {name: tensor.grad.clone() for name, tensor in student.parameters.items() if tensor.grad is not None}
        student.close()
        return found

    plain, again = gradient(False), gradient(True)
    assert plain.keys() == again.keys()
    assert all(torch.allclose(plain[name], again[name], atol=1e-6) for name in plain)


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_reduced_precision_learns_too(lesson, autocast):
    settings = TrainingSettings(steps=20, batch=8, micro=8, rate=2e-3, looks=2, autocast=autocast)
    teacher = Teacher(lesson.model, lesson.held_out, CPU, {"bf16": torch.bfloat16, "fp16": torch.float16}[autocast])
    student = Student(lesson.student(settings).close(), teacher, settings)
    outcome = train(student, lesson.pictures(settings), settings)
    assert outcome.after[0].divergence < outcome.before[0].divergence


def test_labels_are_learnt_where_they_are_read(lesson):
    settings = TrainingSettings(
        train="all", steps=30, batch=8, micro=8, rate=2e-3, streams=0.0, soft=0.0, labels=1.0, looks=1
    )
    student = Student(lesson.student(settings).close(), lesson.teacher, settings, np.arange(5))
    views = lesson.pictures(settings).views(range(24), student.sizes)
    first = student.backward(views, 0, 0.0)
    before = copies(student.parameters)
    pictures, losses = lesson.pictures(settings), []
    optimiser = torch.optim.AdamW(student.parameters.values(), 2e-3)
    for step in range(20):
        optimiser.zero_grad()
        losses.append(student.backward(pictures.views(range(24), student.sizes), step, 1.0))
        optimiser.step()
    assert losses[-1] < 0.7 * first
    assert any(not torch.equal(before[name], tensor) for name, tensor in student.parameters.items())


def test_the_step_size_rises_and_falls():
    settings = TrainingSettings(steps=100, rate=1.0, warm_up=0.1)
    sizes = [step_size(settings, step) for step in range(100)]
    assert sizes[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert all(a >= b for a, b in pairwise(sizes[10:]))
    assert sizes[-1] < 0.02


def test_looks_are_spread_over_the_run_and_some_are_early():
    assert sorted(look_steps(TrainingSettings(steps=120, looks=4))) == [4, 8, 15, 30, 60, 90, 120]
    assert look_steps(TrainingSettings(steps=2, looks=12)) == {1, 2}
    assert min(look_steps(TrainingSettings(steps=1000))) <= 10  # one per cent of the run


def test_minutes_become_steps(lesson):
    settings = TrainingSettings(steps=1, batch=4, micro=4, looks=1)
    student = lesson.student(settings)
    few = steps_within(0.01, student, lesson.pictures(settings), settings).steps
    more = steps_within(0.05, student, lesson.pictures(settings), settings).steps
    assert 1 <= few < more


def test_looks_are_fewer_where_they_would_take_most_of_the_time(lesson, monkeypatch):
    import time

    settings = TrainingSettings(steps=1, batch=4, micro=4, looks=12)
    student = lesson.student(settings)
    plain = student.compared

    def slowly():
        time.sleep(0.05)
        return plain()

    monkeypatch.setattr(student, "compared", slowly)
    found = steps_within(0.02, student, lesson.pictures(settings), settings)
    assert found.looks < 12
    assert found.steps > 1


def test_fewer_images_have_smaller_steps():
    def rates(near: bool) -> list[float | None]:
        settings = TrainingSettings(train="linear")
        return [settings.for_images(count, near).rate for count in (100, 250, 500, 1000, 10**6)]

    assert rates(near=True) == pytest.approx([4e-6, 1.25e-5, 5e-5, 2e-4, 2e-4])
    assert rates(near=False) == pytest.approx([5e-5, 5e-5, 1e-4, 2e-4, 2e-4])
    assert TrainingSettings(rate=0.1).for_images(100, near=True).rate == 0.1


def test_the_papers_settings_are_its_own():
    paper = RECIPES["finetune-paper"]
    assert (paper.batch, paper.rate, paper.tau, paper.hard, paper.labels) == (1152, 2e-4, 20.0, 0.5, 0.5)


def test_the_papers_soft_loss_is_ten_thousand_times_the_mean_over_classes():
    paper, rng = RECIPES["finetune-paper"], torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(6, 1000, generator=rng) for _ in range(2))
    there, given = ((logits / paper.tau).log_softmax(1) for logits in (student, teacher))
    wanted = F.kl_div(there, given, reduction="none", log_target=True).mean()
    found = paper.soft * outputs_distance(student, teacher, True, paper.tau)
    assert float(found) == pytest.approx(10_000 * float(wanted), rel=1e-4)


def test_mixed_pictures_have_no_label():
    with pytest.raises(UsageError, match="no single right answer"):
        TrainingSettings(mixup=0.5, labels=0.5)


# --- bad input


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": "everything"}, "Known: norms, linear, all"),
        ({"steps": 0}, "one step"),
        ({"crop": (0.0, 1.0)}, "none"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        TrainingSettings(**changes)


def test_merged_tokens_cannot_be_computed_again(lesson):
    plan = narrow_plan(lesson.model).with_tokens((2, 0, 0))
    with pytest.raises(UsageError, match="Leave --recompute out"):
        lesson.student(TrainingSettings(recompute=True), plan)


def test_many_unreadable_pictures_are_refused_and_few_are_left_out(lesson):
    from dataclasses import replace

    from snapvit_export.calibration.source import UnreadableImage
    from snapvit_export.progress import Silent

    def opened(bad):
        def open_(i):
            if i in bad:
                raise UnreadableImage(f"picture {i}: cannot be read")
            return lesson.source.open(i)

        return replace(lesson.source, open=open_)

    few = Pictures(opened({3}), lesson.model.preprocessing, (0.5, 1.0))
    few.decode(Silent())
    assert len(few) == 23
    assert len(few.views(range(46), [(32, 32)]).inputs[32, 32]) == 46
    with pytest.raises(SnapvitError, match="9 of 24 images unreadable"):
        Pictures(opened(set(range(9))), lesson.model.preprocessing, (0.5, 1.0)).decode(Silent())


def test_taught_answers_differ():
    model = taught()
    images = prepare(smooth_pictures(12), model.preprocessing)
    with torch.no_grad():
        answers = model.module(torch.from_numpy(next(images.batches(12)))).argmax(1)
    assert len(set(answers.tolist())) > 1, json.dumps(answers.tolist())
