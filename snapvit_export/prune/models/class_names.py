"""Names of a model's classes: its own, or those of ImageNet for a timm model with such a head.

ImageNet's are given as WordNet id and description, "n01496331 electric ray, ...": folders of images are named by the
id, and people read the rest. timm has them for each number of classes that it trained heads for.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from ...calibration.images import Images
from ...errors import SnapvitError
from ...evaluate.head import columns_for
from .load import Model


def as_outputs(images: Images, model: Model, criterion: str) -> Images:
    """Return the same images with the head's outputs for labels, as `snapvit evaluate` maps them.

    A source numbers its own classes, and may have only some of those of the head. `criterion`, which needs the labels,
    is named in the error.
    """
    if images.labels is None or not images.classes:  # without names a number can only be the output's own
        return images
    advice = f"Criterion {criterion} needs folders named as the head's classes; self-supervised needs none"
    outputs = columns_for(images.classes, model.anatomy.classes, class_names(model), advice=advice)
    return replace(images, labels=outputs[np.asarray(images.labels)])


def class_names(model: Model) -> tuple[str, ...]:
    """Return one name for each output of the head; none if they are not known."""
    if model.description.labels or not model.anatomy.classes:
        return model.description.labels
    if model.name != model.description.architecture:  # a model of the user's own, with classes of its own
        return ()
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": model.anatomy.classes})
    if subset is None:
        return ()
    known = ImageNetInfo(subset)
    numbers = range(model.anatomy.classes)
    return tuple(f"{known.index_to_label_name(i)} {known.index_to_description(i)}" for i in numbers)


def with_labels(model: Model, labels: tuple[str, ...], where: str) -> Model:
    """Return the model with names for its classes; `where` they are from begins the error."""
    if len(labels) != model.anatomy.classes:
        raise SnapvitError(f"{where}: names {len(labels)} classes, {model.name} has {model.anatomy.classes} outputs")
    return replace(model, description=msgspec.structs.replace(model.description, labels=labels))
