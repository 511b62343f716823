"""The settings of a recovery, and its recipes: minutes without labels, or the long fine-tuning of the paper.

| setting    | meaning                                                                                            |
|------------|----------------------------------------------------------------------------------------------------|
| train      | norms: norms, biases, LayerScale; linear: also proj and fc2, which are a variant's own; all: all   |
| batch      | images of one step, over all processes; `micro` of them pass through the model at once              |
| rate       | largest step size of AdamW; None: that of `RATES` for what is trained and for the number of images  |
| streams    | weight of the relative error of the stream after every block                                        |
| soft, tau  | weight of tau^2 KL of the teacher's predictions at that temperature; without a classifier, 1 - cosine |
| hard       | weight of the cross-entropy of the teacher's top answer                                             |
| labels     | weight of the cross-entropy of the labels; 0: labels are not read                                   |
| average    | the weights that are kept are a moving average over about this share of the steps                    |

Nothing random is left in a run but what the seed decides: crops, flips, the order of the images, the nested Plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ...errors import UsageError

Train = Literal["norms", "linear", "all"]
Autocast = Literal["none", "bf16", "fp16"]
TRAINS: tuple[Train, ...] = get_args(Train)
RATES: dict[Train, float] = {"norms": 2e-3, "linear": 2e-4, "all": 1e-4}  # where there are `MANY` images
# With fewer images steps are smaller, down to a share. A start that is near what these images can give (a variant of an
# export, corrected and refitted) is best left by many small steps: larger ones learn a few hundred images by heart
# within twenty. One that is far from it (nested models, a cut without a refit) has a long way to go.
MANY, LEAST_NEAR, LEAST_FAR = 1000, 0.02, 0.25
DEFAULT_RECIPE = "short"


@dataclass(frozen=True)
class TrainingSettings:
    """All that decides a recovery, beside the model and the images."""

    train: Train = "linear"
    steps: int = 100
    batch: int = 32
    micro: int = 8
    rate: float | None = None
    warm_up: float = 0.1  # share of the steps in which the step size rises
    weight_decay: float = 0.0  # of matrices
    most_gradient: float = 1.0  # length to which a longer gradient is cut
    average: float = 0.1
    streams: float = 1.0
    soft: float = 1.0
    tau: float = 1.0
    hard: float = 0.0
    labels: float = 0.0
    crop: tuple[float, float] = (0.8, 1.0)  # share of the picture that a crop has; small ones are other pictures
    flip: bool = True  # half of the pictures are mirrored
    mixup: float = 0.0  # parameter of the Beta distribution of shares; 0: pictures are not mixed
    looks: int = 12  # at the held-out images during the run, beside some early ones
    patience: int = 12  # looks without a better one after which the run ends
    seed: int = 0
    autocast: Autocast = "none"
    recompute: bool = False  # activations are computed again on the way back: slower, in far less memory

    def __post_init__(self) -> None:
        if self.train not in TRAINS:
            raise UsageError(f"nothing is called '{self.train}' to train. Known: {', '.join(TRAINS)}")
        if self.steps < 1 or self.batch < 1 or self.micro < 1:
            raise UsageError("a recovery needs one step of one image at least. Give more --minutes or --epochs")
        if not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise UsageError(f"crops of {self.crop[0]:g} to {self.crop[1]:g} of a picture are none")
        if self.mixup and (self.labels or self.hard):
            raise UsageError("pictures that are mixed have no single right answer. Leave mixup or labels out")
        if not self.streams + self.soft + self.hard + self.labels > 0:
            raise UsageError("nothing is left that a recovery could learn from")

    @property
    def largest_rate(self) -> float:
        """The largest step size."""
        return RATES[self.train] if self.rate is None else self.rate

    def for_images(self, images: int, near: bool) -> TrainingSettings:
        """Return the same settings with a step size that suits so many images, unless one is given.

        `near`: the start is near what can be reached, as a refitted variant is.

        >>> TrainingSettings(train="linear").for_images(500, near=True).rate
        5e-05
        """
        if self.rate is not None:
            return self
        share = min(1.0, images / MANY)
        smaller = max(LEAST_NEAR, share**2) if near else max(LEAST_FAR, share)
        return replace(self, rate=RATES[self.train] * smaller)

    def for_epochs(self, epochs: float, images: int) -> TrainingSettings:
        """Return the same settings with the steps of so many passes over the images."""
        return replace(self, steps=max(1, math.ceil(epochs * images / self.batch)))


# The paper's own long fine-tuning (Simoncini et al., 2025, appendix; NViT's settings): DeiT-B/16 at 50 % sparsity, 300
# epochs, 8 GPUs x 144 images, float16, largest step 2e-4, L = L_hard + 10000 L_soft with alpha 0.5 and tau 20. L_soft
# is the mean over the 1000 classes, without tau^2; ours is tau^2 times the sum. Its teacher was a RegNetY-16GF; here it
# is the dense model. Crops and flips alone: mixed pictures, erasing and the rest of NViT's augmentation are not here.
RECIPES: dict[str, TrainingSettings] = {
    "short": TrainingSettings(),
    "finetune-paper": TrainingSettings(
        train="all",
        batch=8 * 144,
        micro=36,
        rate=2e-4,
        warm_up=5 / 300,
        weight_decay=0.05,
        streams=0.0,
        soft=10_000 / (1000 * 20.0**2),
        tau=20.0,
        hard=0.5,
        labels=0.5,
        crop=(0.08, 1.0),
        average=0.0,
        looks=300,
        patience=400,
    ),
}
EPOCHS = {"finetune-paper": 300.0}


def recipe_of(name: str) -> TrainingSettings:
    """Return the settings of a recipe."""
    if name not in RECIPES:
        raise UsageError(f"no recipe of a recovery is called '{name}'. Known: {', '.join(RECIPES)}")
    return RECIPES[name]
