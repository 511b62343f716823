"""Loading models: names, folders, checkpoints, and all that can be wrong with them."""

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.hostile import Bomb
from helpers.models import TINY, description, randomise
from snapvit_export.errors import FileFormatError, SnapvitError, UsageError
from snapvit_export.prune.models import load
from snapvit_export.prune.models.load import load_model, save_model

NAME = "vit_tiny_patch16_224"


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    import timm

    return randomise(timm.create_model(NAME, num_classes=12)).state_dict()


@pytest.mark.parametrize("wrap", ["bare", "model", "state_dict", "prefixed"])
def test_checkpoints_load_however_they_are_wrapped(weights, tmp_path, wrap):
    content = {"bare": weights, "model": {"model": weights}, "state_dict": {"state_dict": weights}}.get(wrap)
    content = content or {f"module.{name}": value for name, value in weights.items()}
    torch.save(content, tmp_path / "w.pth")
    model = load_model(NAME, tmp_path / "w.pth")
    assert model.anatomy.classes == 12  # the head of the checkpoint, not of the name
    assert torch.equal(model.module.state_dict()["blocks.3.mlp.fc1.weight"], weights["blocks.3.mlp.fc1.weight"])
    assert not model.module.training


@pytest.mark.parametrize(
    "prefix", ["model.", "module.model.", "_orig_mod.", "net.backbone.", "ema_model.module.", "model._orig_mod."]
)
def test_prefixes_of_trainers_are_taken_off(weights, tmp_path, prefix):
    content = {f"{prefix}{name}": value for name, value in weights.items()}
    content["criterion.weight"] = torch.ones(3)  # what else a trainer keeps
    torch.save({"state_dict": content, "epoch": 3, "hyper_parameters": argparse.Namespace(lr=0.1)}, tmp_path / "w.ckpt")
    model = load_model(NAME, tmp_path / "w.ckpt")
    assert model.anatomy.classes == 12
    assert torch.equal(model.module.state_dict()["blocks.3.mlp.fc1.weight"], weights["blocks.3.mlp.fc1.weight"])


def test_of_a_model_and_its_moving_average_the_average_is_taken(weights, tmp_path):
    content = {f"model.{name}": torch.zeros_like(value) for name, value in weights.items()}
    content |= {f"model_ema.{name}": value for name, value in weights.items()}
    torch.save(content, tmp_path / "w.pth")
    model = load_model(NAME, tmp_path / "w.pth")
    assert torch.equal(model.module.state_dict()["head.weight"], weights["head.weight"])
    assert model.notes == ("w.pth: the weights of model_ema are taken, which are beside those of model",)


@pytest.mark.parametrize("inside", [False, True])
def test_of_two_keys_the_one_that_is_taken_is_told(weights, tmp_path, inside):
    others = {name: torch.zeros_like(value) for name, value in weights.items()}
    average = {"state_dict": weights, "decay": 0.9} if inside else weights
    torch.save({"model": others, "model_ema": average, "optimizer": {"lr": 0.1}}, tmp_path / "w.pth")
    model = load_model(NAME, tmp_path / "w.pth")
    assert torch.equal(model.module.state_dict()["head.weight"], weights["head.weight"])
    assert model.notes == ("w.pth: the weights of model_ema are taken, which are beside those of model",)
    torch.save({"model_ema": average, "optimizer": {"lr": 0.1}}, tmp_path / "w.pth")
    assert load_model(NAME, tmp_path / "w.pth").notes == ()


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        (["weight"], "classification_head.weight is not of the ViT and is left out"),
        (["weight", "bias"], "classification_head.weight and 1 more are not of the ViT and are left out"),
    ],
)
def test_what_stands_beside_the_backbone_and_is_left_out_is_told(weights, tmp_path, kinds, says):
    content = {f"backbone.{name}": value for name, value in weights.items() if not name.startswith("head.")}
    content |= {f"classification_head.{kind}": weights[f"head.{kind}"] for kind in kinds}
    torch.save(content, tmp_path / "mine.pth")
    model = load_model(NAME, tmp_path / "mine.pth")
    assert (model.anatomy.classes, model.notes) == (0, (f"mine.pth: {says}",))


def test_a_classifier_beside_a_model_with_a_head_of_its_own_is_left_out_and_told(weights, tmp_path):
    content = {f"backbone.{name}": value for name, value in weights.items()}
    torch.save(content | {"fc.weight": torch.zeros(7, 192), "fc.bias": torch.zeros(7)}, tmp_path / "mine.pth")
    model = load_model(NAME, tmp_path / "mine.pth")
    assert model.anatomy.classes == 12
    assert model.notes == ("mine.pth: fc.weight and 1 more are not of the ViT and are left out",)


def test_of_several_models_none_is_guessed(weights, tmp_path):
    content = {f"{prefix}.{name}": value for name, value in weights.items() for prefix in ("student", "teacher")}
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(FileFormatError, match=r"holds several ViTs \(student\., teacher\.\)"):
        load_model(NAME, tmp_path / "w.pth")


def test_a_key_that_holds_no_weights_is_passed_over(weights, tmp_path):
    torch.save({"ema": {"decay": 0.999}, "model": {}, "state_dict": weights}, tmp_path / "w.pth")
    assert load_model(NAME, tmp_path / "w.pth").anatomy.classes == 12


@pytest.mark.parametrize("head", ["head", "classifier", "fc"])
def test_a_classifier_beside_the_backbone_is_the_models_own(weights, tmp_path, head):
    content = {f"net.backbone.{name}": value for name, value in weights.items() if not name.startswith("head.")}
    content |= {f"net.{head}.{kind}": weights[f"head.{kind}"] for kind in ("weight", "bias")}
    torch.save(content, tmp_path / "w.pth")
    assert load_model(NAME, tmp_path / "w.pth").anatomy.classes == 12


def test_a_pickled_module_is_refused_in_one_plain_line(weights, tmp_path):
    import timm

    torch.save(timm.create_model(NAME), tmp_path / "w.pth")
    with pytest.raises(FileFormatError, match="holds pickled objects") as error:
        load_model(NAME, tmp_path / "w.pth")
    assert str(error.value).isprintable()
    assert "torch.save(model.state_dict(), FILE)" in str(error.value)


def test_safetensors_load_and_preprocessing_is_the_models_own(weights, tmp_path):
    save_file(weights, tmp_path / "w.safetensors")
    model = load_model(NAME, tmp_path / "w.safetensors")
    assert model.preprocessing.input_size == (3, 224, 224)
    assert (model.preprocessing.mean, model.preprocessing.crop_pct) == ((0.5, 0.5, 0.5), 0.9)  # AugReg, not ImageNet's


def test_a_checkpoint_without_a_head_gives_features(weights, tmp_path):
    headless = {name: value for name, value in weights.items() if not name.startswith("head.")}
    save_file(headless, tmp_path / "w.safetensors")
    assert load_model(NAME, tmp_path / "w.safetensors").anatomy.classes == 0


def test_the_real_model_loads(shared):
    model = load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    assert model.anatomy.params() == 5_717_416
    assert model.preprocessing.crop_pct == 0.9


def test_unknown_names_come_with_a_suggestion():
    with pytest.raises(SnapvitError, match="timm knows no model.*deit_tiny_patch16_224"):
        load_model("deit_tiny_patch16_24")
    with pytest.raises(SnapvitError, match="snapvit models"):
        load_model("qqqqqqqqqq")


def test_a_folder_that_is_not_ours_is_refused(tmp_path):
    with pytest.raises(SnapvitError, match="not a model folder"):
        load_model(str(tmp_path))


def test_damaged_and_foreign_checkpoints_are_refused(weights, tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(SnapvitError, match="no such checkpoint"):
        load_model(NAME, path)
    save_file(weights, path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(FileFormatError, match="not a readable checkpoint"):
        load_model(NAME, path)
    (tmp_path / "w.pth").write_bytes(b"not a zip at all")
    with pytest.raises(FileFormatError, match="not a readable checkpoint"):
        load_model(NAME, tmp_path / "w.pth")
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(FileFormatError, match="holds no state dict"):
        load_model(NAME, tmp_path / "w.pth")


def test_pickled_code_in_a_checkpoint_does_not_run(tmp_path):
    torch.save({"model": Bomb(tmp_path / "proof")}, tmp_path / "w.pth")
    with pytest.raises(FileFormatError, match="holds pickled objects"):
        load_model(NAME, tmp_path / "w.pth")
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("blocks.2.mlp.fc1.weight"), r"lacks blocks\.2\.mlp\.fc1\.weight"),
        (lambda w: w.update({"blocks.2.mlp.fc1.weight": torch.ones(3, 4)}), r"has shape \(3, 4\)"),
        (lambda w: w.update({"blocks.99.x": torch.ones(3)}), r"has unknown blocks\.99\.x"),
        (lambda w: w["norm.weight"].fill_(torch.nan), "norm.weight holds values that are not finite"),
    ],
)
def test_weights_that_do_not_match_are_named(weights, tmp_path, change, says):
    change(weights)
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(FileFormatError, match=says):
        load_model(NAME, tmp_path / "w.safetensors")


def test_weights_of_another_architecture_are_refused(weights, tmp_path):
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(FileFormatError, match="Is it a checkpoint of this model"):
        load_model("vit_small_patch16_224", tmp_path / "w.safetensors")


def test_a_checkpoint_does_not_go_with_a_folder(tiny_folder, tmp_path):
    with pytest.raises(UsageError, match="its own weights"):
        load_model(str(tiny_folder), tmp_path / "w.safetensors")


def test_no_network_is_one_clear_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SnapvitError, match="could not be fetched.*--checkpoint FILE") as refused:
        load_model("vit_tiny_patch16_224.augreg_in21k")
    assert "\n" not in str(refused.value)


def test_a_saved_model_replaces_only_a_saved_model(tiny_model, tmp_path):
    folder = tmp_path / "m"
    save_model(tiny_model.module, tiny_model.description, folder)
    save_model(tiny_model.module, tiny_model.description, folder)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(SnapvitError, match=r"not ours \(thesis.txt\)"):
        save_model(tiny_model.module, tiny_model.description, folder)
    assert (folder / "thesis.txt").read_text() == "mine"


def test_a_damaged_description_is_refused(tiny_folder):
    path = tiny_folder / "model.json"
    content = json.loads(path.read_text())
    for change, says in (
        ({"format_version": 2}, "format_version"),
        ({"architecture": "nonsense"}, "timm knows no model"),
        ({"kwargs": {"depth": "many"}}, "cannot build"),
        ({"extra": 1}, "extra"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(SnapvitError, match=says):
            load_model(str(tiny_folder))


def test_dense_models_are_saved_without_a_plan(tiny_folder):
    assert json.loads((tiny_folder / "model.json").read_text())["plan"] is None
    assert set(load_file(tiny_folder / "model.safetensors")) > {"cls_token", "pos_embed"}
    assert description().kwargs == TINY


def original_dinov3(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights under the names of the release, with the biases of zeros that timm's model does not have."""
    renamed = {}
    for name, value in module.state_dict().items():
        for ours, theirs in (("gamma_1", "ls1.gamma"), ("gamma_2", "ls2.gamma"), ("reg_token", "storage_tokens")):
            name = name.replace(ours, theirs)
        renamed[name] = value
    width = module.embed_dim
    return renamed | {f"blocks.{i}.attn.qkv.bias": torch.zeros(3 * width) for i in range(len(module.blocks))}


def test_reading_an_original_dinov3_prints_nothing_on_standard_output(tmp_path, capsys, snapvit, image_folder):
    import timm

    name = "vit_small_patch16_dinov3"
    module = timm.create_model(name, num_classes=0).eval()
    torch.save(original_dinov3(module), tmp_path / "dinov3.pth")
    model = load_model(name, tmp_path / "dinov3.pth")
    told = capsys.readouterr()
    assert told.out == ""
    assert "q_bias" in told.err  # what timm says is not lost
    assert torch.equal(
        model.module.state_dict()["blocks.3.mlp.fc1.weight"], module.state_dict()["blocks.3.mlp.fc1.weight"]
    )
    given = ["rank", name, "--checkpoint", tmp_path / "dinov3.pth", "--out", tmp_path / "r", "--quiet", "--json"]
    outcome = snapvit(*given, "--recipe", "local", "--criterion", "magnitude")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["model"] == name


def test_the_hash_of_the_weights_is_computed_once_per_model(tiny_model, monkeypatch):
    first, hashed, fingerprint = tiny_model.weights_sha256, [], load.weights_fingerprint
    monkeypatch.setattr(load, "weights_fingerprint", lambda module: hashed.append(module) or fingerprint(module))
    assert tiny_model.weights_sha256 == first
    assert hashed == []
    with torch.no_grad():
        tiny_model.module.blocks[0].mlp.fc1.weight.add_(1)  # as an optimiser does
    assert tiny_model.weights_sha256 != first
    assert len(hashed) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["kwargs"].update(depth=0), "has no block"),
        (lambda m: m["kwargs"].update(img_size=5), "is smaller than a patch"),
        (lambda m: m["preprocessing"].update(input_size=[3, 2, 2]), "its images are 3 x 2 x 2, and the model takes"),
        (lambda m: m.update(plan={"heads": [1], "neurons": [1]}), "the plan is for 1 blocks, the model has 3"),
        (lambda m: m.update(plan={"heads": [99] * 3, "neurons": [1] * 3}), "keeps 99 heads of 4"),
    ],
)
def test_a_model_folder_whose_description_is_of_no_model_is_refused_in_one_line(tiny_folder, change, says):
    path = tiny_folder / "model.json"
    written = json.loads(path.read_text())
    change(written)
    path.write_text(json.dumps(written))
    with pytest.raises(SnapvitError) as refused:
        load_model(str(tiny_folder))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


# Own models: any number of classes, any input size, arguments for timm, and modules inside other modules.


def tuned(**shape):
    """Weights of a model that somebody made in another shape."""
    import timm

    return randomise(timm.create_model(NAME, **shape)).state_dict()


@pytest.mark.parametrize(
    ("shape", "image", "patch"),
    [
        ({"img_size": 96}, (96, 96), (16, 16)),
        ({"img_size": 64, "patch_size": 8, "num_classes": 3}, (64, 64), (8, 8)),
        ({"img_size": 224, "num_classes": 0}, (224, 224), (16, 16)),
    ],
)
def test_the_input_size_is_that_of_the_positions_in_the_checkpoint(shape, image, patch, tmp_path):
    weights = tuned(**shape)
    save_file(weights, tmp_path / "w.safetensors")
    model = load_model(NAME, tmp_path / "w.safetensors")
    assert (model.anatomy.image, model.anatomy.patch) == (image, patch)
    assert model.preprocessing.input_size == (3, *image)
    assert torch.equal(model.module.state_dict()["pos_embed"], weights["pos_embed"])  # not resampled
    assert len(model.notes) == (image != (224, 224)) + (patch != (16, 16))
    assert all("w.safetensors" in note for note in model.notes)
    save_model(model, model.description, tmp_path / "again")
    assert load_model(str(tmp_path / "again")).anatomy == model.anatomy


def test_positions_of_an_oblong_need_the_size_by_name(tmp_path):
    weights = tuned(img_size=(64, 96))
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(FileFormatError, match="25 positions are of no square.*--image-size HEIGHTxWIDTH"):
        load_model(NAME, tmp_path / "w.safetensors")
    model = load_model(NAME, tmp_path / "w.safetensors", {"img_size": [64, 96]})
    assert model.anatomy.image == (64, 96)
    assert torch.equal(model.module.state_dict()["pos_embed"], weights["pos_embed"])


def test_a_size_that_is_asked_for_resamples_the_positions(tmp_path):
    save_file(tuned(img_size=96), tmp_path / "w.safetensors")
    model = load_model(NAME, tmp_path / "w.safetensors", {"img_size": 64})
    assert (model.anatomy.image, model.notes) == ((64, 64), ())


def test_arguments_for_timm_shape_the_model_and_are_kept(tmp_path):
    shape = dict(img_size=32, patch_size=8, depth=2, mlp_ratio=2.5, global_pool="avg", qkv_bias=False, num_classes=4)
    save_file(tuned(**shape), tmp_path / "w.safetensors")
    arguments = {"depth": 2, "mlp_ratio": 2.5, "global_pool": "avg", "qkv_bias": False}
    model = load_model(NAME, tmp_path / "w.safetensors", arguments)
    assert arguments.items() <= model.description.kwargs.items()
    assert (len(model.anatomy.blocks), model.anatomy.blocks[0].hidden, model.anatomy.pooling) == (2, 480, "avg")
    save_model(model, model.description, tmp_path / "again")
    again = load_model(str(tmp_path / "again"))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again.module(images), model.module(images))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"drop_rate": 0.1}, "drop_rate is not an argument that shapes a model. Those are act_layer"),
        ({"pretrained_cfg": "x"}, "pretrained_cfg is not an argument"),
        ({"act_layer": "os.system"}, "act_layer os.system is none of gelu"),
        ({"norm_eps": 2.0}, "norm_eps 2.0 is not a number between 0 and 1"),
        ({"depth": "many"}, "timm cannot build"),
    ],
)
def test_arguments_that_do_not_shape_a_model_are_refused_by_name(weights, arguments, says, tmp_path):
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(SnapvitError, match=says):
        load_model(NAME, tmp_path / "w.safetensors", arguments)


def test_the_eps_of_all_norms_can_be_given(weights, tmp_path):
    save_file(weights, tmp_path / "w.safetensors")
    model = load_model(NAME, tmp_path / "w.safetensors", {"norm_eps": 1e-3})
    assert model.anatomy.norm_eps == 1e-3
    assert {part.eps for part in model.module.modules() if isinstance(part, torch.nn.LayerNorm)} == {1e-3}


def test_arguments_go_with_weights_from_the_hub_too(monkeypatch):
    import timm

    plain = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, **more: plain(name, pretrained=False, **more))
    model = load_model(NAME, arguments={"img_size": 32, "depth": 2, "norm_eps": 1e-3})
    assert (model.anatomy.image, len(model.anatomy.blocks), model.anatomy.norm_eps) == ((32, 32), 2, 1e-3)


@pytest.mark.parametrize("key", ["ema", "state_dict_ema", "model_ema", "module", "model_state_dict"])
def test_the_keys_of_trainers_are_known(weights, tmp_path, key):
    torch.save({key: weights, "optimizer": {"lr": 0.1}, "epoch": 3}, tmp_path / "w.pth")
    assert load_model(NAME, tmp_path / "w.pth").anatomy.classes == 12


def test_a_state_dict_inside_a_trainers_key_is_found(weights, tmp_path):
    torch.save(
        {"ema": {"state_dict": {f"module.{n}": v for n, v in weights.items()}, "decay": 0.9}}, tmp_path / "w.pth"
    )
    assert load_model(NAME, tmp_path / "w.pth").anatomy.classes == 12


class Detector(torch.nn.Module):
    """A larger model around some ViTs."""

    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        self.neck = torch.nn.Linear(4, 4)
        self.inner = torch.nn.ModuleDict(parts)


def test_the_only_vit_inside_a_larger_model_is_found(tiny_model):
    found = load.as_model(Detector(backbone=tiny_model.module))
    assert found.module is tiny_model.module
    assert found.anatomy == tiny_model.anatomy


def test_of_several_vits_inside_a_larger_model_the_path_names_one(tiny_model):
    other = randomise(load.load_model().module)
    both = Detector(student=tiny_model.module, teacher=other)
    with pytest.raises(SnapvitError, match=r"several ViTs \(inner\.student, inner\.teacher\)"):
        load.as_model(both)
    assert load.as_model(both, path="inner.teacher").module is other
    with pytest.raises(SnapvitError, match="no module at 'inner.nobody'"):
        load.as_model(both, path="inner.nobody")
    with pytest.raises(SnapvitError, match="Linear is not a plain ViT"):
        load.as_model(both, path="neck")
    with pytest.raises(SnapvitError, match="Detector is not a plain ViT"):
        load.as_model(Detector())


def test_a_vit_inside_a_larger_model_is_cut_and_put_back(tiny_model):
    from helpers.rankings import random_ranking
    from snapvit_export.model.plan import Plan
    from snapvit_export.prune.models.slicing import shrink

    whole = Detector(backbone=tiny_model.module)
    found = load.as_model(whole)
    plan = Plan(heads=(1, 2, 4), neurons=(3, 50, 192))
    whole.inner["backbone"] = shrink(found, random_ranking(found.anatomy), plan)
    assert load.as_model(whole).anatomy == tiny_model.anatomy.with_counts(plan)
