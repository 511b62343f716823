"""Models of `transformers`: read without it, and equal to what it computes."""

import json
import shutil
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.graphs import close, run
from helpers.hostile import Bomb
from helpers.images import make_image_folder
from helpers.rankings import random_ranking
from helpers.transformers_models import CASES, make, save, wanted, write_preprocessing
from snapvit_export.calibration.images import prepare
from snapvit_export.calibration.open_source import open_source
from snapvit_export.errors import FileFormatError, ModelNotUnderstood, SnapvitError, UsageError
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.prune.models.load import load_model, save_model
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.models.transformers_config import KINDS
from snapvit_export.prune.pack import blueprint

SOME = ["vit", "deit", "deit with teacher", "dinov2 with registers", "dinov3 gated", "clip classifier", "siglip"]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a plain ViT, made once."""
    return save(make(CASES["vit"]), tmp_path_factory.mktemp("transformers") / "theirs")


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it, to spoil."""
    return shutil.copytree(saved, tmp_path / "theirs")


def images_for(model, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, *model.anatomy.image, generator=torch.Generator().manual_seed(0))


def outputs(module: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(images)


def assert_equal(got: torch.Tensor, reference: torch.Tensor) -> None:
    assert got.shape == reference.shape
    assert reference.std() > 0.05  # otherwise equality would say little
    assert (got - reference).abs().max() <= 1e-5 * max(1, reference.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_model_computes_what_transformers_computes(name, tmp_path):
    case = CASES[name]
    theirs = make(case)
    ours = load_model(str(save(theirs, tmp_path / "theirs")))
    images = images_for(ours)
    assert_equal(outputs(ours.module, images), wanted(case, theirs, images))
    assert ours.name == "theirs"
    assert ours.preprocessing.mean == (0.4, 0.5, 0.6)
    # The names inside its modules are others than those in its files: both come in.
    save_file({key: value.contiguous() for key, value in theirs.state_dict().items()}, tmp_path / "theirs" / WEIGHTS)
    assert_equal(outputs(load_model(str(tmp_path / "theirs")).module, images), wanted(case, theirs, images))


def test_every_supported_type_is_compared():
    types = set()
    for case in CASES.values():
        config = make(case).config
        types.add(config.model_type.removesuffix("_vision_model"))
    assert types == set(KINDS)


@pytest.mark.parametrize("name", SOME)
def test_it_is_cut_written_saved_and_loaded_as_any_other(name, tmp_path):
    ours = load_model(str(save(make(CASES[name]), tmp_path / "theirs")))
    anatomy, images = ours.anatomy, images_for(ours, 3)
    ranking = random_ranking(anatomy)
    plan = Plan(heads=(1, 3, 2), neurons=(anatomy.neurons[0] // 2, 7, anatomy.neurons[2]))
    small = shrink(ours, ranking, plan)
    written = GraphWriter(blueprint(ours, ranking), tmp_path).write("small", plan)
    assert close(run(written.graph, images.numpy()), outputs(small, images).numpy())
    save_model(small, ours.description, tmp_path / "small")
    again = load_model(str(tmp_path / "small"))
    assert torch.equal(outputs(again.module, images), outputs(small, images))
    assert again.anatomy == anatomy.with_counts(plan)
    assert again.anatomy.norm_eps == anatomy.norm_eps


def test_the_classes_have_the_names_of_its_config(tmp_path):
    theirs = make(CASES["vit"])
    theirs.config.id2label = dict(enumerate(["ant", "bee", "crane", "dog", "eel", "fox", "crane"]))
    folder = save(theirs, tmp_path / "theirs")
    assert load_model(str(folder)).description.labels == ("ant", "bee", "crane", "dog", "eel", "fox", "crane (6)")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "id2label": {str(i): f"LABEL_{i}" for i in range(7)}}))
    assert load_model(str(folder)).description.labels == ()  # nobody named them


def test_a_classifier_that_no_timm_model_has_is_left_out_and_said_so(tmp_path):
    from dataclasses import replace

    case = CASES["dinov2"]
    theirs = make(replace(case, model="Dinov2ForImageClassification", arguments={**case.arguments, "num_labels": 4}))
    ours = load_model(str(save(theirs, tmp_path / "theirs")))
    images = images_for(ours)
    with torch.no_grad():
        assert_equal(outputs(ours.module, images), theirs.dinov2(images).pooler_output)
    assert ours.anatomy.classes == 0
    assert ["classifier" in note and "left out" in note for note in ours.notes] == [True]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vit features", ["pooler"]),
        ("vit_mae with decoder", ["decoder"]),
        ("clip of images and texts", ["texts", "projection"]),
        ("siglip2", ["proportions"]),
        ("vit", []),
    ],
)
def test_what_is_left_out_is_told(name, words, tmp_path):
    notes = load_model(str(save(make(CASES[name]), tmp_path / "theirs"))).notes
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes))


@pytest.mark.parametrize("size", [24, 56, (24, 40)])
@pytest.mark.parametrize("name", ["dinov2", "dinov2 with registers", "dinov3"])
def test_types_that_take_any_size_are_built_for_that_of_the_preprocessing(name, size, tmp_path):
    case, sides = CASES[name], size if isinstance(size, tuple) else (size, size)
    theirs = make(case)
    folder = save(theirs, tmp_path / "theirs", size={"height": sides[0], "width": sides[1]})
    ours = load_model(str(folder))
    assert ours.anatomy.image == sides
    images = images_for(ours)
    assert_equal(outputs(ours.module, images), wanted(case, theirs, images))


def test_weights_in_shards_are_the_same_model(tmp_path):
    theirs = make(CASES["vit"])
    whole = load_model(str(save(theirs, tmp_path / "whole")))
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="40kB")
    write_preprocessing(tmp_path / "shards", theirs.config)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    parts = load_model(str(tmp_path / "shards"))
    assert parts.weights_sha256 == whole.weights_sha256
    index = tmp_path / "shards" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = next(iter(content["weight_map"]))
    for name, says in (
        ("../../secret.safetensors", "not the name of a weight file"),
        ("gone.safetensors", "not there"),
    ):
        index.write_text(json.dumps({"weight_map": {**content["weight_map"], first: name}}))
        with pytest.raises(FileFormatError, match=says):
            load_model(str(tmp_path / "shards"))


def test_half_precision_weights_come_in_as_floats(tmp_path):
    folder = save(make(CASES["vit"]).bfloat16(), tmp_path / "theirs")
    assert {tensor.dtype for tensor in load_file(folder / WEIGHTS).values()} == {torch.bfloat16}
    ours = load_model(str(folder))
    assert {parameter.dtype for parameter in ours.module.parameters()} == {torch.float32}
    assert outputs(ours.module, images_for(ours)).isfinite().all()


def test_a_torch_file_is_read_only_without_executing_it(folder, tmp_path):
    reference = load_model(str(folder)).weights_sha256
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert load_model(str(folder)).weights_sha256 == reference
    torch.save({"vit.embeddings.cls_token": Bomb(tmp_path / "proof")}, folder / "pytorch_model.bin")
    with pytest.raises(FileFormatError, match="holds pickled objects"):
        load_model(str(folder))
    assert not (tmp_path / "proof").exists()
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(SnapvitError, match="has no weights in it"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "beit"}, "type 'beit' adds relative positions in the attention of every block"),
        ({"model_type": "data2vec-vision"}, "relative positions"),
        ({"model_type": "swin"}, "attends within windows"),
        ({"model_type": "bert"}, "model type 'bert' is not supported. Supported are vit, deit"),
        ({"model_type": None}, "model type 'None' is not supported"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is none of gelu"),
        ({"num_attention_heads": 5}, "hidden_size 48 is not a multiple of 5 heads"),
        ({"head_dim": 20}, "heads of 20"),
        ({"num_channels": 4}, "takes 4 channels"),
        ({"pruned_heads": {"1": [0]}}, "pruned_heads"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": "48"}, "hidden_size 48 is not a whole number"),
        ({"layer_norm_eps": -1}, "layer_norm_eps -1 is not a number above 0"),
        ({"image_size": 48}, "makes images of 40x40 pixels, but the model takes 48x48"),
        ({"image_size": [1, 2, 3]}, "image_size"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, but the weights are of 3 layers"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but the weights are of 3 layers"),
        ({"intermediate_size": 76}, "has shape"),
        ({"patch_size": 10}, "has 26 positions"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(change, says, folder):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **change}))
    with pytest.raises((ModelNotUnderstood, FileFormatError, SnapvitError), match=says) as refused:
        load_model(str(folder))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key_bias": True}, "key_bias is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported in this type"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_a_dinov3_that_does_not_fit_is_refused_by_name(change, says, tmp_path):
    folder = save(make(CASES["dinov3"]), tmp_path / "theirs")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(ModelNotUnderstood if "rope" not in says else FileFormatError, match=says):
        load_model(str(folder))


def test_every_tensor_is_accounted_for(folder):
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    query = next(name for name in names if "query.weight" in name or "q_proj.weight" in name)
    norm = next(name for name in names if "layernorm_before.weight" in name)
    for change, says in (
        ({query: None}, "has no weight of q"),
        ({norm: None}, r"lacks blocks\.\d\.norm1\.weight"),
        ({"vit.embeddings.surprise": torch.ones(3)}, r"has unknown embeddings\.surprise"),
        ({"other.embeddings.patch_embeddings.projection.weight": torch.ones(3)}, "several ViTs"),
        ({norm: torch.full_like(tensors[norm], torch.nan)}, "not finite"),
        ({"classifier.weight": torch.ones(7, 50)}, "the classifier has shape"),
    ):
        changed = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        save_file(changed, folder / WEIGHTS)
        with pytest.raises(FileFormatError, match=says):
            load_model(str(folder))


NASTY = [None, -1, 0, 10**6, 10**12, 1e308, float("nan"), "x", [], {}, [1, 2], True, {"height": 10**6, "width": 10**6}]


@pytest.mark.parametrize("name", ["vit", "dinov2 with registers", "dinov3 gated", "siglip2"])
def test_whatever_the_files_say_an_error_is_one_line(name, tmp_path):
    folder = save(make(CASES[name]), tmp_path / "theirs")
    rng = np.random.default_rng(0)
    for file in ("config.json", "preprocessor_config.json"):
        sound = (folder / file).read_text()
        content = json.loads(sound)
        for key in content:
            value = NASTY[rng.integers(len(NASTY))]
            (folder / file).write_text(json.dumps({**content, key: value}).replace("NaN", "1e999"))
            refused_or_loaded(folder)
        (folder / file).write_text(sound)
    sound = load_file(folder / WEIGHTS)
    for key, tensor in sound.items():
        other = [torch.zeros(()), torch.zeros(0), tensor[..., :-1], tensor.flatten()[:7], tensor[None]][rng.integers(5)]
        save_file({**sound, key: other.contiguous()}, folder / WEIGHTS)
        refused_or_loaded(folder)


def refused_or_loaded(folder) -> None:
    try:
        load_model(str(folder))
    except SnapvitError as error:
        assert str(error).isprintable(), str(error)


def test_a_folder_says_itself_what_it_is(folder):
    with pytest.raises(UsageError, match="its own weights"):
        load_model(str(folder), checkpoint=folder / WEIGHTS)
    with pytest.raises(UsageError, match="--model-arg, --pool and --image-size do not go with"):
        load_model(str(folder), arguments={"img_size": 64})
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(SnapvitError, match=r"no preprocessor_config\.json.*Copy that file"):
        load_model(str(folder))


def test_a_name_on_the_hub_is_fetched_file_by_file(folder, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    asked = []

    def download(repository: str, name: str) -> str:
        asked.append(name)
        assert repository == "some-one/my_vit.v2"
        if not (folder / name).is_file():
            raise EntryNotFoundError(name, response=None)
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    ours = load_model("some-one/my_vit.v2")
    assert ours.name == load_model("hf:some-one/my_vit.v2").name == "some-one/my_vit.v2"
    assert set(asked) == {"config.json", "preprocessor_config.json", WEIGHTS}
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "model_type": "beit"}))
    asked.clear()
    with pytest.raises(ModelNotUnderstood):
        load_model("some-one/my_vit.v2")
    assert set(asked) == {"config.json"}  # refused before a long download


def test_without_a_network_a_name_on_the_hub_is_one_clear_line(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SnapvitError, match="no such folder, and it could not be fetched.*give the path") as refused:
        load_model("nobody/nothing-of-this-name")
    assert str(refused.value).isprintable()


def test_transformers_itself_is_not_needed(tmp_path):
    folder = save(make(CASES["siglip"]), tmp_path / "theirs")
    program = (
        "import sys; sys.modules['transformers'] = None\nfrom snapvit_export.prune.models.load import load_model\n"
    )
    subprocess.run([sys.executable, "-c", program + f"load_model({str(folder)!r})"], check=True)


def test_what_timm_saved_for_the_hub_comes_in_too(tmp_path):
    import timm

    module = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=3).eval()
    cfg = {"mean": [0.1, 0.2, 0.3], "std": [0.5] * 3, "interpolation": "bilinear", "crop_pct": 1.0}
    cfg |= {"crop_mode": "squash", "input_size": [3, 32, 32]}
    content = {"architecture": "vit_tiny_patch16_224", "model_args": {"depth": 2}, "num_classes": 3}
    content |= {"pretrained_cfg": cfg, "label_names": ["a", "b", "c"], "label_descriptions": {"b": "bee"}}
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    save_file(module.state_dict(), folder / WEIGHTS)
    ours = load_model(str(folder))
    assert torch.equal(outputs(ours.module, images_for(ours)), outputs(module, images_for(ours)))
    assert (ours.anatomy.image, ours.anatomy.patch) == ((32, 32), (8, 8))
    assert (ours.preprocessing.mean, ours.preprocessing.crop_mode) == ((0.1, 0.2, 0.3), "squash")
    assert ours.description.labels == ("a", "b bee", "c")
    save_file({f"timm_model.{name}": value for name, value in module.state_dict().items()}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({**content, "model_type": "timm_wrapper"}))
    assert load_model(str(folder)).weights_sha256 == ours.weights_sha256
    (folder / "config.json").write_text(json.dumps({**content, "model_args": {"block_fn": "os.system"}}))
    with pytest.raises(SnapvitError, match="block_fn is not an argument"):
        load_model(str(folder))


def test_the_command_line_exports_it(tmp_path, snapvit, short_timings):
    theirs = make(CASES["vit"])
    theirs.config.id2label = {i: f"kind {i}" for i in range(7)}
    folder = save(theirs, tmp_path / "theirs")
    make_image_folder(tmp_path / "images", 24)
    common = ["--model", folder, "--data", tmp_path / "images", "--images", "12"]
    outcome = snapvit("export", *common, "--sparsity", "0.3", "--out", tmp_path / "family", "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    manifest = json.loads(outcome.out)
    assert manifest["model"] == "theirs"
    assert manifest["labels"] == [f"kind {i}" for i in range(7)]
    assert manifest["anatomy"]["norm_eps"] == 1e-12
    ranking = tmp_path / "family" / "ranking.safetensors"
    outcome = snapvit("pack", *common, "--ranking", ranking, "--out", tmp_path / "elastic", "--no-fidelity")
    assert outcome.code == 0, outcome.err
    outcome = snapvit(
        "rank", folder, "--data", tmp_path / "images", "--images", "12", "--out", tmp_path / "r.safetensors"
    )
    assert outcome.code == 0, outcome.err


def test_notes_are_told_on_standard_error(tmp_path, snapvit):
    folder = save(make(CASES["vit features"]), tmp_path / "theirs")
    outcome = snapvit(
        "rank", folder, "--recipe", "local", "--criterion", "magnitude", "--out", tmp_path / "r.safetensors"
    )
    assert outcome.code == 0, outcome.err
    assert "theirs: the pooler" in outcome.err
    assert "pooler" not in outcome.out


def as_deit_of_transformers(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """timm's DeiT under the names of `ViTForImageClassification`, as the hub has such models."""
    names = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    found = {}
    for name, value in weights.items():
        if not name.startswith("blocks."):
            stem, dot, part = name.rpartition(".")
            found[f"{names[stem]}{dot}{part}" if stem in names else names[name]] = value
            continue
        _, i, rest = name.split(".", 2)
        stem, _, part = rest.rpartition(".")
        layer = f"vit.encoder.layer.{i}."
        if stem == "attn.qkv":
            for letter, rows in zip(("query", "key", "value"), value.chunk(3)):
                found[f"{layer}attention.attention.{letter}.{part}"] = rows.clone()
        else:
            found[f"{layer}{names[stem]}.{part}"] = value
    return found


@pytest.fixture
def deit_folder(shared, tmp_path):
    """The real DeiT-Tiny as a folder of `transformers`."""
    weights = load_file(shared / "data" / "deit_tiny_patch16_224.safetensors")
    folder = tmp_path / "deit-tiny-patch16-224"
    folder.mkdir()
    save_file(as_deit_of_transformers(weights), folder / WEIGHTS)
    config = {"model_type": "vit", "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-6}))
    pixels = {"size": {"shortest_edge": 248}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
    normal = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3}
    kind = {"image_processor_type": "ViTImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({**kind, **pixels, **normal}))
    return folder


def test_the_real_deit_tiny_gives_the_same_answers_as_from_timm(deit_folder, shared):
    ours = load_model(str(deit_folder))
    timms = load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    source = open_source(str(shared / "data" / "imagenet-sample")).subset(range(24))
    as_timm_crops = msgspec.structs.replace(ours.preprocessing, margin=msgspec.UNSET)
    one, other = (prepare(source, steps) for steps in (as_timm_crops, timms.preprocessing))
    np.testing.assert_array_equal(one.pixels, other.pixels)
    batch = torch.from_numpy(next(prepare(source, ours.preprocessing).batches(24)))
    assert torch.equal(outputs(ours.module, batch), outputs(timms.module, batch))


@pytest.mark.slow  # a ranking of a real DeiT-Tiny and an export to a budget
def test_the_real_deit_tiny_is_exported_to_a_budget_with_the_same_top_answers(
    deit_folder, shared, tmp_path, snapvit, short_timings
):
    data = tmp_path / "images"
    data.mkdir()
    for path in sorted((shared / "data" / "imagenet-sample").iterdir())[:48]:
        shutil.copy(path, data / path.name)
    given = ["--data", data, "--images", "16", "--budget", "80%", "--quiet", "--json", "--levers", "width"]
    outcome = snapvit("export", "--model", deit_folder, *given, "--out", tmp_path / "family")
    assert outcome.code == 0, outcome.err
    manifest = json.loads(outcome.out)
    assert manifest["choice"]["variant"]
    timms = load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    batch = torch.from_numpy(next(prepare(open_source(str(data)), timms.preprocessing).batches(48)))
    dense = run(tmp_path / "family" / "dense.onnx", batch.numpy())
    assert (dense.argmax(1) == outputs(timms.module, batch).argmax(1).numpy()).all()
