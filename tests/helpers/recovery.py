"""Tiny models that learn: a source of smooth pictures, a teacher whose answers differ, and what a recovery needs."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from helpers.models import TINY, make_model
from helpers.rankings import random_ranking
from snapvit_export.calibration.images import Images, prepare
from snapvit_export.calibration.source import Source
from snapvit_export.model.plan import Plan
from snapvit_export.prune.correct.refit import refit
from snapvit_export.prune.models.load import Model
from snapvit_export.prune.recover.augment import Pictures
from snapvit_export.prune.recover.settings import TrainingSettings
from snapvit_export.prune.recover.student import Student, Teacher

CPU = torch.device("cpu")
HALF = 0.5
SHORT = TrainingSettings(train="linear", steps=12, batch=8, micro=4, rate=2e-3, looks=4)


def smooth_pictures(count: int, seed: int = 0) -> Source:
    """Pictures with large structures, as a crop of noise has none that a model could learn."""
    rng = np.random.default_rng(seed)
    pictures = [
        Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8)).resize((50, 40), Image.Resampling.BICUBIC)
        for _ in range(count)
    ]
    return Source("smooth", pictures.__getitem__, count, lambda i: f"picture {i}", [i % 5 for i in range(count)])


def taught(scale: float = 0.15) -> Model:
    """The tiny model with weights at which it can be learnt from: those of `randomise` make it chaotic."""
    model = make_model()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.module.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0, scale, generator=generator)
    model.module.head.weight.data *= 4
    return model


def narrow_plan(model: Model) -> Plan:
    """Half of the heads and a quarter of the neurons."""
    anatomy = model.anatomy
    return Plan(heads=tuple(n // 2 for n in anatomy.heads), neurons=tuple(n // 4 for n in anatomy.neurons))


def narrow(model: Model, images: Images, plan: Plan | None = None) -> torch.nn.Module:
    """A cut and refitted copy."""
    return refit(model, random_ranking(model.anatomy), plan or narrow_plan(model), images)


class Lesson:
    """A teacher, pictures and held-out images, and new students as often as a test wants one."""

    def __init__(self, model: Model | None = None, pictures: int = 24, seed: int = 0) -> None:
        self.model = model or taught()
        self.source = smooth_pictures(pictures)
        self.images = prepare(self.source, self.model.preprocessing)
        self.held_out = prepare(smooth_pictures(12, seed=9), self.model.preprocessing)
        self.teacher = Teacher(self.model, self.held_out, CPU, None)

    def pictures(self, settings: TrainingSettings) -> Pictures:
        return Pictures(
            self.source, self.model.preprocessing, settings.crop, settings.seed, settings.mixup, settings.flip
        )

    def student(self, settings: TrainingSettings, plan: Plan | None = None) -> Student:
        return Student(narrow(self.model, self.images, plan), self.teacher, settings)


__all__ = ["CPU", "TINY", "Lesson", "narrow", "narrow_plan", "smooth_pictures", "taught"]
