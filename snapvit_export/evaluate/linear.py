"""A linear probe: the accuracy of one linear layer that is trained on features. Light: numpy.

Softmax regression by stochastic gradient descent, as the SnapViT paper does it: 100 epochs, momentum 0.9, a rate that
falls from 0.001 to 0 along a cosine, epoch by epoch, batches of 256 in a new order each epoch, no weight decay. The
state of the best epoch on the validation split is what is reported on the test split. The layer starts at zero: the
problem has one minimum, so a random start would only add noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..calibration.sampling import spread
from ..errors import SnapvitError
from .features import Array, Features, Split, Targets

EPOCHS = 100
RATE = 0.001
MOMENTUM = 0.9
BATCH = 256
VALID_SHARE = 0.2  # of the training images, where the dataset has no validation split


@dataclass(frozen=True, eq=False)
class Probe:
    """The layer of the best epoch, and the validation accuracy of every epoch."""

    weight: Array  # (C, E)
    bias: Array  # (C,)
    epoch: int  # the best one, from 0
    valid_accuracy: tuple[float, ...]  # after each epoch

    def guesses(self, features: Array) -> Targets:
        """The class of each image: (N,)."""
        return np.asarray((features @ self.weight.T + self.bias).argmax(1))


def linear_right(
    features: Features, seed: int = 0, progress: Callable[[], None] = lambda: None
) -> npt.NDArray[np.bool_]:
    """Fit a probe on the training split; return for each test image True if it is right: (N,)."""
    if features.train is None or features.train.targets is None or features.test.targets is None:
        raise SnapvitError("a linear probe needs labelled images to train and to test on. Give --data a labelled set")
    train, valid = features.train, features.valid
    if valid is None:
        train, valid = set_aside(train, seed)
    probe = fit_probe(train, valid, len(features.classes), seed, progress=progress)
    return np.asarray(probe.guesses(features.test.features) == features.test.targets)


def set_aside(train: Split, seed: int) -> tuple[Split, Split]:
    """Set a fifth of the training images aside for validation, each class in its proportion."""
    assert train.targets is not None
    if len(train) < 2:
        raise SnapvitError(f"{len(train)} training image cannot be split for validation. Give --data more")
    order = spread(train.targets.tolist(), len(train), seed)
    cut = min(len(train) - 1, round((1 - VALID_SHARE) * len(train)))
    first, second = (Split(train.features[rows], train.targets[rows]) for rows in (order[:cut], order[cut:]))
    return first, second


def fit_probe(
    train: Split,
    valid: Split,
    classes: int,
    seed: int = 0,
    epochs: int = EPOCHS,
    rate: float = RATE,
    batch: int = BATCH,
    progress: Callable[[], None] = lambda: None,
) -> Probe:
    """Train a layer and keep a copy of the first epoch that does best on `valid`."""
    x, y = train.features, train.targets
    assert y is not None
    assert valid.targets is not None
    rng = np.random.default_rng(seed)
    layer = Layer(classes, x.shape[1])
    best: Probe | None = None
    history: list[float] = []
    for epoch in range(epochs):
        order = rng.permutation(len(x))
        now = rate / 2 * (1 + math.cos(math.pi * epoch / epochs))
        for start in range(0, len(x), batch):
            rows = order[start : start + batch]
            layer.step(x[rows], _one_hot(y[rows], classes), now)
        probe = Probe(layer.weight.copy(), layer.bias.copy(), epoch, ())
        history.append(float((probe.guesses(valid.features) == valid.targets).mean()))
        if best is None or history[-1] > history[best.epoch]:
            best = probe
        progress()
    assert best is not None
    return Probe(best.weight, best.bias, best.epoch, tuple(history))


class Layer:
    """A linear layer with softmax and cross-entropy on it, and the momentum of its descent."""

    def __init__(self, classes: int, width: int) -> None:
        self.weight = np.zeros((classes, width), np.float32)
        self.bias = np.zeros(classes, np.float32)
        self._pull, self._bias_pull = np.zeros_like(self.weight), np.zeros_like(self.bias)

    def step(self, x: Array, wanted: Array, rate: float) -> None:
        """One step down the mean cross-entropy to `wanted` (B, C), whose entries weigh what they say."""
        weights = wanted.sum(1, keepdims=True)  # (B, 1)
        off = (weights * softmax(x @ self.weight.T + self.bias) - wanted) / weights.sum()  # (B, C)
        self._pull = np.float32(MOMENTUM) * self._pull + off.T @ x
        self._bias_pull = np.float32(MOMENTUM) * self._bias_pull + off.sum(0)
        self.weight = self.weight - np.float32(rate) * self._pull
        self.bias = self.bias - np.float32(rate) * self._bias_pull


def softmax(logits: Array) -> Array:
    """Probabilities of the last axis."""
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _one_hot(targets: Targets, classes: int) -> Array:
    wanted = np.zeros((len(targets), classes), np.float32)
    wanted[np.arange(len(targets)), targets] = 1
    return wanted
