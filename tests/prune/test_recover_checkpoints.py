"""Checkpoints of a recovery: a killed run goes on to the same bits, and what is damaged is refused."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from helpers.programs import python, torchrun
from helpers.recovery import SHORT, Lesson
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.prune.rank.checkpoint import Checkpoint
from snapvit_export.prune.recover.checkpoint import TrainingState, restore, save
from snapvit_export.prune.recover.loop import checkpoint_at, train
from snapvit_export.prune.recover.schedule import make_optimiser
from snapvit_export.prune.recover.settings import TrainingSettings


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return Lesson()


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
