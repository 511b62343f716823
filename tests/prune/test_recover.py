"""Recovering by training: losses fall, nothing gets worse, and a run is the same however often it is interrupted."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.models import model_of
from helpers.programs import python, torchrun
from helpers.rankings import random_ranking
from helpers.recovery import CPU, Lesson, narrow_plan, smooth_pictures, taught
from snapvit_export.calibration.crops import random_box
from snapvit_export.calibration.images import prepare
from snapvit_export.errors import FileFormatError, SnapvitError, UsageError
from snapvit_export.model.plan import Plan
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.rank.checkpoint import Checkpoint
from snapvit_export.prune.recover.augment import Pictures
from snapvit_export.prune.recover.checkpoint import TrainingState, restore, save
from snapvit_export.prune.recover.elastic import NestedModel, NestedStudents, factors_after
from snapvit_export.prune.recover.loop import checkpoint_at, look_steps, steps_within, train
from snapvit_export.prune.recover.parameters import copies, trained
from snapvit_export.prune.recover.schedule import make_optimiser, step_size
from snapvit_export.prune.recover.settings import RECIPES, TrainingSettings
from snapvit_export.prune.recover.student import Student, Teacher
from snapvit_export.prune.recover.targets import Distance, Recorder, outputs_distance
from snapvit_export.prune.stats.observe import observe

SHORT = TrainingSettings(train="linear", steps=12, batch=8, micro=4, rate=2e-3, looks=4)


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
    rates = [TrainingSettings(train="linear").for_images(count).rate for count in (100, 250, 500, 1000, 10**6)]
    assert rates == pytest.approx([4e-6, 1.25e-5, 5e-5, 2e-4, 2e-4])
    nested = [TrainingSettings(train="linear").for_images(count, nested=True).rate for count in (100, 500, 10**6)]
    assert nested == pytest.approx([5e-5, 1e-4, 2e-4])
    assert TrainingSettings(rate=0.1).for_images(100).rate == 0.1


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


# --- checkpoints


class Killed(Exception):
    pass


def test_a_run_whose_steps_all_overflowed_so_far_is_kept(lesson, tmp_path):
    student = lesson.student(TrainingSettings(autocast="fp16"))
    optimiser = make_optimiser(student.parameters, student.settings)
    checkpoint = Checkpoint(tmp_path / "run.checkpoint", {})
    state = TrainingState(step=3, scaler={"scale": 2.0**11, "good": 0.0, "left_out": 3.0})
    save(checkpoint, state, student.parameters, optimiser, (10, 2))
    found = restore(checkpoint.load(), "here", student.parameters, optimiser)
    assert (found.step, found.scaler) == (state.step, state.scaler)
    for tensor in student.parameters.values():
        assert float(optimiser.state[tensor]["step"]) == 0
        assert not optimiser.state[tensor]["exp_avg"].any()


def interrupted(lesson, settings, path, monkeypatch, after):
    """Train until that many checkpoints are written, and die there."""
    saves = 0
    plain = Checkpoint.save

    def save(self, *arguments):
        nonlocal saves
        plain(self, *arguments)
        saves += 1
        if saves == after:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoint, "save", save)
        student = lesson.student(settings)
        train(student, lesson.pictures(settings), settings, checkpoint=checkpoint_at(path, settings, {}, None))


@pytest.mark.parametrize("after", [1, 3])
def test_a_resumed_run_ends_with_the_same_bits(lesson, tmp_path, monkeypatch, after):
    whole = lesson.student(SHORT)
    wanted = train(whole, lesson.pictures(SHORT), SHORT)
    path = tmp_path / "run.checkpoint"
    interrupted(lesson, SHORT, path, monkeypatch, after)
    again = lesson.student(SHORT)
    found = train(again, lesson.pictures(SHORT), SHORT, checkpoint=checkpoint_at(path, SHORT, {}, None))
    assert all(torch.equal(tensor, again.parameters[name]) for name, tensor in whole.parameters.items())
    assert [row["divergence"] for row in found.history] == [row["divergence"] for row in wanted.history]
    assert (found.after, found.best_step) == (wanted.after, wanted.best_step)


def test_a_checkpoint_of_other_settings_or_a_damaged_one_is_refused(lesson, tmp_path, monkeypatch):
    path = tmp_path / "run.checkpoint"
    interrupted(lesson, SHORT, path, monkeypatch, 1)
    other = TrainingSettings(train="norms", steps=12, batch=8, micro=4, looks=4)
    with pytest.raises(SnapvitError, match="another run: recover.train was"):
        checkpoint_at(path, other, {}, None).load()
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))
    with pytest.raises(FileFormatError, match="Remove it to start again"):
        checkpoint_at(path, SHORT, {}, None).load()


PROCESSES = """
import sys
import torch
from helpers.recovery import Lesson
from snapvit_export.prune.rank.distributed import join
from snapvit_export.prune.recover.loop import train
from snapvit_export.prune.recover.settings import TrainingSettings
from safetensors.torch import save_file

torch.set_num_threads(1)
settings = TrainingSettings(train="all", steps=6, batch=8, micro=2, rate=1e-3, looks=2)
with join("cpu") as processes:
    lesson = Lesson()
    student = lesson.student(settings)
    train(student, lesson.pictures(settings), settings, processes=processes)
    if processes.is_first:
        save_file({name: tensor.detach() for name, tensor in student.parameters.items()}, sys.argv[1])
"""


@pytest.mark.slow  # every process imports torch anew
def test_one_two_and_four_processes_take_the_same_steps(tmp_path):
    from safetensors.torch import load_file

    script, tests = tmp_path / "run.py", os.path.dirname(os.path.dirname(__file__))
    script.write_text(f"import sys\nsys.path.insert(0, {tests!r})\n{PROCESSES}")
    found = []
    for count in (1, 2, 4):
        out = tmp_path / f"{count}.safetensors"
        done = python(script, out) if count == 1 else torchrun(count, str(script), str(out))
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(load_file(out))
    for other in found[1:]:
        assert max(float((found[0][name] - other[name]).abs().max()) for name in other) < 1e-5


KILLED = """
import os, signal, sys
import torch
from helpers.recovery import Lesson
from pathlib import Path
from snapvit_export.prune.rank.checkpoint import Checkpoint
from snapvit_export.prune.recover.loop import checkpoint_at, train
from snapvit_export.prune.recover.settings import TrainingSettings
from safetensors.torch import save_file

torch.set_num_threads(1)
out, path, when = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
settings = TrainingSettings(train="linear", steps=9, batch=4, micro=4, rate=1e-3, looks=3)
plain, saves = Checkpoint.save, 0

def save(self, *arguments):
    global saves
    plain(self, *arguments)
    saves += 1
    if saves == when:
        os.kill(os.getpid(), signal.SIGKILL)

Checkpoint.save = save
lesson = Lesson()
student = lesson.student(settings)
train(student, lesson.pictures(settings), settings, checkpoint=checkpoint_at(path, settings, {}, None))
save_file({name: tensor.detach() for name, tensor in student.parameters.items()}, out)
"""


@pytest.mark.slow  # every process imports torch anew
def test_a_run_after_kill_9_gives_the_same_file(tmp_path):
    script, tests = tmp_path / "run.py", os.path.dirname(os.path.dirname(__file__))
    script.write_text(f"import sys\nsys.path.insert(0, {tests!r})\n{KILLED}")
    whole = python(script, tmp_path / "whole", tmp_path / "w.checkpoint", 0)
    assert whole.returncode == 0, whole.stderr[-3000:]
    killed = python(script, tmp_path / "killed", tmp_path / "k.checkpoint", 2)
    assert killed.returncode == -signal.SIGKILL
    again = python(script, tmp_path / "killed", tmp_path / "k.checkpoint", 0)
    assert again.returncode == 0, again.stderr[-3000:]
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "killed").read_bytes()


# --- nested models


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
