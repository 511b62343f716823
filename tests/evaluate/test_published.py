"""Published results: the file says what the released page says, and a value is only given where all is the same."""

import json

import msgspec
import pytest

from helpers.models import small
from snapvit_export.calibration.known_sets import SEVEN
from snapvit_export.evaluate.published import published_results, set_name
from snapvit_export.prune.models.catalogue import FAMILIES
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.timm_modules import anatomy_without_weights

PAGE = published_results()
NAMES = {"FGVC": "fgvc-aircraft", "CIFAR 10": "cifar10", "CIFAR 100": "cifar100", "ESAT": "eurosat"}
NAMES |= {"ImageNet-1k": "imagenet-1k", "Pets": "oxford-pets", "DTD": "dtd"}
TITLES = {"DeIT": "DeiT", "SigLIPv2": "SigLIP2", "DINOv1": "DINO"}


def test_every_number_is_that_of_the_released_page(shared):
    released = json.loads((shared / "published" / "snapvit_in1k_knn.json").read_text())["models"]
    ours = {model.title: model for model in PAGE.models}
    for title, pairs in released.items():
        for word, other in TITLES.items():
            title = title.replace(word, other)
        model = ours.pop(title)
        for pair, values in pairs.items():
            mlp, head = map(float, pair.split(":"))
            for name, percent in values.items():
                set_ = NAMES[name]
                found = PAGE.value(model, (mlp, head), set_, PAGE.sets[set_])
                assert found == pytest.approx(percent / 100, abs=1e-12)
        assert len(model.rows) == len(pairs)
    assert ours == {}


def test_its_models_and_sets_are_those_that_the_commands_know():
    assert set(PAGE.sets) == set(SEVEN)
    assert all(len(row.percent) == len(PAGE.sets) for model in PAGE.models for row in model.rows)
    for model in PAGE.models:
        anatomy = anatomy_without_weights(model.names[0], {} if "dinov3" not in model.names[0] else AS_IN_THE_PAPER)
        assert PAGE.of(model.names[0], anatomy) is model, model.title


AS_IN_THE_PAPER = {"global_pool": "token", "img_size": 224}


def test_dinov3_as_timm_has_it_is_another_model():
    """timm averages the patches of larger images, where the page has the class token at 224 pixels."""
    name = "vit_base_patch16_dinov3"
    assert PAGE.of(name, anatomy_without_weights(name, {})) is None
    assert PAGE.of(name, anatomy_without_weights(name, {**AS_IN_THE_PAPER, "img_size": 256})) is None
    assert PAGE.of(name, anatomy_without_weights(name, {**AS_IN_THE_PAPER, "global_pool": "avg"})) is None


def test_a_value_is_of_the_same_pair_set_and_number_of_images_alone():
    model = PAGE.models[0]
    assert PAGE.value(model, (0.35, 0.2), "imagenet-1k", 50000) == pytest.approx(0.5893)
    assert PAGE.value(model, (0.35, 0.2), "/data/imagenet-1k", 50000) == pytest.approx(0.5893)
    assert PAGE.value(model, (0.35, 0.2), "imagenet-1k", 49999) is None
    assert PAGE.value(model, (0.35, 0.3), "imagenet-1k", 50000) is None
    assert PAGE.value(model, (0.35, 0.2), "tiny-imagenet", 50000) is None


def test_other_weights_of_the_same_architecture_have_no_published_values():
    anatomy = anatomy_without_weights("vit_base_patch16_224", {})
    named = {name for model in PAGE.models for name in model.names}
    assert PAGE.of("vit_base_patch16_224.augreg_in21k_ft_in1k", anatomy) is not None
    assert PAGE.of("timm/vit_base_patch16_224.augreg_in21k_ft_in1k", anatomy) is not None
    for name in ("vit_base_patch16_224", "vit_base_patch16_224.augreg2_in21k_ft_in1k", "deit_base_patch16_224"):
        assert PAGE.of(name, anatomy) is None
    assert not named & {name for name in FAMILIES["DeiT-III"] if "." not in name}  # those were trained on less


def test_a_model_of_another_shape_has_none_whatever_its_name():
    module, _ = small("vit_base_patch16_224.dino")
    assert PAGE.of("vit_base_patch16_224.dino", read_anatomy(module, "x")) is None


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("pets", "oxford-pets"),
        ("imagenet", "imagenet-1k"),
        ("/x/cifar10", "cifar10"),
        ("hf:uoft-cs/cifar100", "cifar100"),
    ],
)
def test_a_data_set_is_known_by_the_last_part_of_its_name(data, name):
    assert set_name(data) == name


def test_the_file_is_strict():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"source": "x", "more": 1}, type(PAGE))
