"""Names of classes: a model's own, ImageNet's for a timm model with such a head, none for others."""

from dataclasses import replace

import timm

from helpers.models import as_model, description, make_model
from snapvit_export.prune.models.class_names import class_names
from snapvit_export.prune.models.load import load_model


def test_the_bundled_model_names_its_digits():
    assert class_names(load_model()) == tuple("0123456789")


def test_a_timm_model_with_a_thousand_classes_has_those_of_imagenet():
    name = "deit_tiny_patch16_224"
    names = class_names(as_model(timm.create_model(name), name, {}))
    assert len(names) == 1000
    assert names[5] == "n01496331 electric ray, crampfish, numbfish, torpedo"


def test_a_model_of_somebody_has_no_names_but_its_own():
    model = make_model()
    assert class_names(model) == ()
    named = replace(model, description=description(labels=tuple("abcde")))
    assert class_names(named) == tuple("abcde")
