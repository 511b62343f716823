"""Every public function takes what `load_model` returned or a timm module, and does the same with both."""

import numpy as np
import pytest
import timm
import torch

import snapvit_export as sv
from helpers.models import FAMILIES, TINY, randomise, small
from helpers.rankings import random_ranking
from snapvit_export.calibration.images import Images
from snapvit_export.errors import SnapvitError
from snapvit_export.prune.models.load import Model, ModelDescription

PIXELS = np.random.default_rng(0).integers(0, 255, (16, 32, 32, 3), np.uint8)
SETTINGS = {name: sv.make_settings(name, images=16, evaluations=0) for name in ("default", "local")}


@pytest.fixture
def module() -> torch.nn.Module:
    return randomise(timm.create_model("vit_tiny_patch16_224", **TINY))


@pytest.fixture
def loaded(module, tmp_path) -> Model:
    """The same weights through a folder, under the name that timm has for them."""
    described = sv.as_model(module).description
    named = ModelDescription(
        name="vit_tiny_patch16_224",
        architecture="vit_tiny_patch16_224",
        kwargs=TINY,
        preprocessing=described.preprocessing,
    )
    sv.save_model(module, named, tmp_path / "loaded")
    return sv.load_model(str(tmp_path / "loaded"))


def outputs(module: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return module(torch.from_numpy(np.random.default_rng(1).normal(size=(2, 3, 32, 32)).astype(np.float32))).numpy()


def tensors(ranking: sv.Ranking) -> list[np.ndarray]:
    return [ranking.arrays()[name] for name in sorted(ranking.arrays())]


def packed(model, ranking, folder) -> list[np.ndarray]:
    sv.pack(model, ranking, folder)
    return [np.frombuffer((folder / name).read_bytes(), np.uint8) for name in ("weights.bin", "elastic.json")]


def saved(model, folder) -> list[np.ndarray]:
    sv.save_model(model, sv.as_model(model).description, folder)
    return [outputs(sv.load_model(str(folder)).module)]


DOES = {  # public function → what it makes of a model
    "as_model": lambda model, t: [outputs(sv.as_model(model).module)],
    "shrink": lambda model, t: [outputs(sv.shrink(model, t.ranking, t.plan))],
    "ElasticViT": lambda model, t: [outputs(sv.ElasticViT(model, t.ranking).prune(0.3))],
    "refit": lambda model, t: [outputs(sv.refit(model, t.ranking, t.plan, t.images))],
    "rank": lambda model, t: tensors(sv.rank(model, t.images, SETTINGS["default"])),
    "rank by a criterion": lambda model, t: tensors(sv.rank(model, t.images, SETTINGS["local"])),
    "pack": lambda model, t: packed(model, t.ranking, t.folder / f"elastic-{type(model).__name__}"),
    "save_model": lambda model, t: saved(model, t.folder / f"saved-{type(model).__name__}"),
    "Planner": lambda model, t: [np.array(sv.Planner(t.ranking, sv.as_model(model).anatomy).sparsity(0.3).heads)],
}


class Tools:
    def __init__(self, loaded: Model, folder) -> None:
        self.ranking = random_ranking(loaded.anatomy)
        self.plan = sv.Planner(self.ranking, loaded.anatomy).sparsity(0.3)
        self.images, self.folder = Images(PIXELS, None, loaded.preprocessing, "noise"), folder


@pytest.mark.parametrize("function", sorted(DOES))
def test_a_loaded_model_and_its_module_give_the_same(function, module, loaded, tmp_path):
    tools = Tools(loaded, tmp_path)
    of_model, of_module = (DOES[function](model, tools) for model in (loaded, module))
    assert len(of_model) == len(of_module) > 0
    for one, other in zip(of_model, of_module):
        np.testing.assert_array_equal(one, other)


def test_a_module_is_described_as_loading_its_weights_would(shared):
    model = sv.load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    described = sv.as_model(model.module)
    assert (described.name, described.anatomy) == (model.name, model.anatomy)
    assert described.preprocessing == model.preprocessing
    assert sv.as_model(model) is model


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_module_cut_and_saved_with_its_own_description_comes_back(name, tmp_path):
    module, _ = small(name)
    model = sv.as_model(module)
    ranking = random_ranking(model.anatomy)
    cut = sv.shrink(module, ranking, sv.Planner(ranking, model.anatomy).sparsity(0.3))
    sv.save_model(cut, model.description, tmp_path / "small")
    back = sv.load_model(str(tmp_path / "small"))
    images = torch.randn(2, 3, *model.anatomy.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(back.module(images), cut(images), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda module: module.half(), "float16 on cpu.*float"),
        (lambda module: timm.create_model("vit_tiny_patch16_224", **TINY, drop_path_rate=0.2), "trained.*eval"),
        (lambda module: torch.nn.Linear(2, 2), "Linear is not a plain ViT"),
    ],
)
def test_a_module_that_is_not_ready_is_refused_in_one_line(spoil, says, module, loaded):
    with pytest.raises(SnapvitError, match=says) as error:
        sv.rank(spoil(module), Images(PIXELS, None, loaded.preprocessing, "noise"), SETTINGS["local"])
    assert "\n" not in str(error.value)


def test_a_description_of_another_model_is_refused_when_saving(module, loaded, tmp_path):
    bare = timm.models.VisionTransformer(**TINY).eval()  # not made by name, so timm cannot make it again
    with pytest.raises(SnapvitError, match="VisionTransformer"):
        sv.save_model(bare, sv.as_model(bare).description, tmp_path / "bare")
    deeper = timm.create_model("vit_tiny_patch16_224", **{**TINY, "depth": 4}).eval()
    with pytest.raises(SnapvitError, match="is another model"):
        sv.save_model(deeper, loaded.description, tmp_path / "deeper")
