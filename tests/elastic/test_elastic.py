"""The Elastic folder: what goes in comes out, every Plan is a prefix, and damage is refused in one line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from helpers.models import make_model, make_model_folder
from helpers.rankings import random_ranking
from helpers.reference_forward import Reference
from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.correction.cholesky import Factors, make_factor
from snapvit_export.correction.moments import Damping, Moments
from snapvit_export.elastic.folder import Elastic
from snapvit_export.elastic.format import read_description
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.family.fidelity import Comparison
from snapvit_export.model.plan import Plan
from snapvit_export.model.tensor_names import weight_shapes
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.correct.elastic import correct_module, make_factors
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import pack
from snapvit_export.prune.stats.observe import observe
from snapvit_export.storage.json import to_json
from snapvit_export.storage.mapped import ALIGNMENT

PLAN = Plan(heads=(1, 4, 3), neurons=(96, 7, 192))
DAMPED = (Damping(), 16)  # how factors say they were made


def factors_of(model, ranking, damping=Damping()) -> Factors:
    """Factors from correlated random inputs: only their algebra matters here."""
    rng = np.random.default_rng(0)

    def moments(width):
        mixed = rng.normal(size=(4 * width, width)) @ rng.normal(size=(width, width)) / width**0.5
        return Moments(len(mixed), rng.normal(size=width), np.cov(mixed.T, bias=True))

    def factor(linear, order, unit):
        return make_factor(linear.weight.detach().numpy(), moments(linear.in_features), order, unit, damping)

    blocks = list(enumerate(blocks_of(model.module)))
    proj = tuple(factor(block.attn.proj, ranking.head_order(i), block.attn.head_dim) for i, block in blocks)
    fc2 = tuple(factor(block.mlp.fc2, ranking.neuron_order(i), 1) for i, block in blocks)
    return Factors(proj, fc2, ranking.order_sha256, damping, images=17)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """One model, packed once with factors: (model, ranking, factors, folder)."""
    model = make_model()
    ranking = random_ranking(model.anatomy, seed=3)
    factors = factors_of(model, ranking)
    folder = tmp_path_factory.mktemp("packed") / "elastic"
    pack(model, ranking, folder, factors)
    return model, ranking, factors, folder


@pytest.fixture
def folder(packed, tmp_path) -> Path:
    """A copy of it that a test may damage."""
    return shutil.copytree(packed[3], tmp_path / "elastic")


def test_everything_comes_back(packed):
    model, ranking, factors, folder = packed
    elastic = Elastic.load(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "correction.bin",
        "elastic.json",
        "ranking.safetensors",
        "weights.bin",
    ]
    described = elastic.description
    assert (described.model, described.anatomy) == (model.name, model.anatomy)
    assert (described.preprocessing, described.labels) == (model.preprocessing, model.description.labels)
    assert all(map(np.array_equal, elastic.ranking.head_scores, ranking.head_scores))
    assert all(map(np.array_equal, elastic.ranking.neuron_scores, ranking.neuron_scores))
    assert elastic.ranking.provenance == ranking.provenance
    assert elastic.planner.sparsity(0.3).sparsity(model.anatomy) >= 0.3
    assert described.correction is not None
    assert (described.correction.damping, described.correction.images) == (factors.damping, factors.images)
    assert described.correction.order_sha256 == ranking.order_sha256


def test_the_dense_weights_are_the_module_in_rank_order(packed):
    model, ranking, _, folder = packed
    weights = Elastic.load(folder).weights(Plan.dense(model.anatomy))
    assert {name: array.shape for name, array in weights.items()} == weight_shapes(model.anatomy)
    block = blocks_of(model.module)[1]
    neurons, heads = ranking.neuron_order(1), ranking.head_order(1)
    fc1, fc2 = block.mlp.fc1, block.mlp.fc2
    assert np.array_equal(weights["blocks.1.fc1.weight"], fc1.weight.detach().numpy()[neurons])
    assert np.array_equal(weights["blocks.1.fc1.bias"], fc1.bias.detach().numpy()[neurons])
    assert np.array_equal(weights["blocks.1.fc2.weight"], fc2.weight.detach().numpy().T[neurons])
    values = block.attn.qkv.weight.detach().numpy().reshape(3, 4, 12, 48)[2][heads]
    assert np.array_equal(weights["blocks.1.v.weight"], values.reshape(48, 48))
    columns = block.attn.proj.weight.detach().numpy().T.reshape(4, 12, 48)[heads]
    assert np.array_equal(weights["blocks.1.proj.weight"], columns.reshape(48, 48))
    assert np.array_equal(weights["head.weight"], model.module.head.weight.detach().numpy())
    token_and_its_position = 48  # two parameters of the module, one sum here
    assert sum(array.size for array in weights.values()) == model.anatomy.params() - token_and_its_position


def test_a_plan_is_prefixes_of_the_same_bytes(packed):
    model, _, _, folder = packed
    elastic = Elastic.load(folder)
    dense = elastic.weights(Plan.dense(model.anatomy), corrected=False)
    cut = elastic.weights(PLAN, corrected=False)
    assert cut["blocks.0.q.weight"].shape == (12, 48)
    assert cut["blocks.1.fc2.weight"].shape == (7, 48)
    for name, array in cut.items():
        assert array.ctypes.data == dense[name].ctypes.data
        assert array.flags.c_contiguous
        assert not array.flags.writeable
        assert np.array_equal(array, dense[name][: len(array)])


def test_every_tensor_begins_a_page(packed):
    elastic = Elastic.load(packed[3])
    whole = (packed[3] / "weights.bin").read_bytes()
    for name, tensor in elastic.tensors.items():
        assert tensor.offset % ALIGNMENT == 0
        raw = whole[tensor.offset : tensor.offset + tensor.size_bytes]
        assert np.array_equal(np.frombuffer(raw, "<f4").reshape(tensor.shape), elastic.dense[name])


def test_equal_models_give_equal_files(packed, tmp_path):
    model, ranking, factors, folder = packed
    pack(model, ranking, tmp_path / "again", factors)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_corrected_weights_are_those_of_the_factors(packed):
    _, _, factors, folder = packed
    weights = Elastic.load(folder).weights(PLAN)
    for i in range(3):
        kept = (("proj", factors.proj[i], PLAN.heads[i]), ("fc2", factors.fc2[i], PLAN.neurons[i]))
        for layer, factor, keep in kept:
            weight, shift = factor.corrected(keep)
            name = f"blocks.{i}.{layer}"
            bias = shift + Elastic.load(folder).dense[f"{name}.bias"]
            assert weights[f"{name}.weight"].dtype == weights[f"{name}.bias"].dtype == np.float32
            got = weights[f"{name}.weight"].T
            assert np.linalg.norm(got - weight) <= 1e-6 * np.linalg.norm(weight)
            assert np.linalg.norm(weights[f"{name}.bias"] - bias) <= 1e-5 * np.linalg.norm(bias)


def test_corrected_weights_equal_a_direct_solve_on_real_covariances(shared, tmp_path):
    """Float32 is enough: DeiT-Tiny's last block on real images, against float64 least squares."""
    from PIL import Image

    from snapvit_export.prune.models.load import load_model

    model = load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    files = sorted((shared / "data" / "imagenet-sample").glob("*.jpg"))[:16]
    pixels = np.stack([model.preprocessing.pixels(Image.open(file)) for file in files])
    inputs: list[torch.Tensor] = []
    fc2 = blocks_of(model.module)[-1].mlp.fc2
    watching = fc2.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad():
        model.module(torch.from_numpy(model.preprocessing.normalise(pixels)))
    watching.remove()
    x = inputs[0].flatten(0, 1).double().numpy()  # (images*T, d)
    ranking = random_ranking(model.anatomy)
    order, keep, w = ranking.neuron_order(11), 400, fc2.weight.detach().double().numpy()
    moments = Moments(len(x), x.mean(0), np.cov(x.T, bias=True))
    real = make_factor(w, moments, order, 1)
    heads = make_factor(np.eye(192), Moments(1, np.zeros(192), np.eye(192)), range(3), 64)  # not asked for below
    pack(model, ranking, tmp_path / "deit", Factors((heads,) * 12, (real,) * 12, ranking.order_sha256, *DAMPED))
    plan = msgspec.structs.replace(Plan.dense(model.anatomy), neurons=(*model.anatomy.neurons[:-1], keep))
    got = Elastic.load(tmp_path / "deit").weights(plan)["blocks.11.fc2.weight"].T
    s = Damping().added_to(moments.covariance[np.ix_(order, order)])
    wanted = np.linalg.solve(s[:keep, :keep], (w[:, order] @ s)[:, :keep].T).T
    assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted)


def test_a_layer_that_keeps_all_is_not_touched(packed):
    elastic = Elastic.load(packed[3])
    corrected, plain = elastic.weights(PLAN), elastic.weights(PLAN, corrected=False)
    for name in ("blocks.1.proj.weight", "blocks.1.proj.bias", "blocks.2.fc2.weight", "blocks.0.fc1.weight"):
        assert corrected[name].ctypes.data == plain[name].ctypes.data
    assert not np.allclose(corrected["blocks.0.proj.weight"], plain["blocks.0.proj.weight"])


def test_a_whole_factor_comes_back(packed):
    _, _, factors, folder = packed
    elastic = Elastic.load(folder)
    for layer, made in (("proj", factors.proj[2]), ("fc2", factors.fc2[2])):
        got = elastic.factor(2, layer)
        assert got.unit == made.unit
        for part in ("mean", "lower", "projected", "constant", "layer_scale"):
            assert np.allclose(getattr(got, part), getattr(made, part), rtol=1e-6, atol=1e-6)
        assert np.allclose(got.errors(), made.errors(), rtol=1e-5)
    with pytest.raises(ValueError, match="cannot keep 193"):
        elastic.factor(2, "fc2", keep=193)


def test_corrected_weights_compute_what_the_corrected_module_computes(packed):
    model, ranking, factors, folder = packed
    small = shrink(model.module, ranking, PLAN)
    for i, block in enumerate(blocks_of(small)):
        for linear, order, factor, keep in (
            (block.attn.proj, ranking.head_order(i), factors.proj[i], PLAN.heads[i]),
            (block.mlp.fc2, ranking.neuron_order(i), factors.fc2[i], PLAN.neurons[i]),
        ):
            weight, shift = factor.corrected(keep)
            columns = np.argsort(order[:keep])  # the module keeps the original order
            weight = weight.reshape(len(weight), keep, -1)[:, columns].reshape(len(weight), -1)
            linear.weight.data.copy_(torch.from_numpy(weight))
            linear.bias.data += torch.from_numpy(shift).float()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = small(images).numpy()
    got = Reference(Elastic.load(folder), PLAN, corrected=True)(images.numpy())
    assert np.abs(got - wanted).max() <= 1e-4 * max(1, np.abs(wanted).max())


def test_correction_must_be_there_to_be_asked_for(packed, tmp_path):
    model, ranking, _, _ = packed
    pack(model, ranking, tmp_path / "plain")
    elastic = Elastic.load(tmp_path / "plain")
    assert not elastic.corrects
    with pytest.raises(SnapvitError, match="has no correction.bin, so its weights cannot be corrected"):
        elastic.weights(PLAN)
    assert elastic.weights(PLAN, corrected=False)


def test_factors_of_another_ranking_or_model_are_refused(packed, tmp_path):
    model, ranking, factors, _ = packed
    other = random_ranking(model.anatomy, seed=4)
    with pytest.raises(SnapvitError, match="made for another ranking"):
        pack(model, other, tmp_path / "x", factors)
    short = Factors(factors.proj, factors.fc2[:2], ranking.order_sha256, *DAMPED)
    with pytest.raises(SnapvitError, match="factors of fc2 are of another model"):
        pack(model, ranking, tmp_path / "x", short)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_another_model_is_refused(packed):
    with pytest.raises(SnapvitError, match="keeps 5 heads of 4"):
        Elastic.load(packed[3]).weights(Plan(heads=(5, 1, 1), neurons=(1, 1, 1)))


def test_packing_again_replaces_only_what_is_ours(packed, folder):
    model, ranking, _, _ = packed
    pack(model, ranking, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["elastic.json", "ranking.safetensors", "weights.bin"]
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(SnapvitError, match="holds files that are not ours"):
        pack(model, ranking, folder)
    assert (folder / "thesis.txt").read_text() == "mine"


# Damage


def refused(folder: Path, match: str, corrected: bool = False) -> None:
    with pytest.raises(SnapvitError, match=match) as refusal:
        Elastic.load(folder).weights(PLAN, corrected)
    assert "\n" not in str(refusal.value)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def reseal(folder: Path, **changes) -> None:
    """Change what elastic.json says and seal it again, as somebody with bad intentions would."""
    changed = msgspec.structs.replace(read_description(folder), **changes).with_checksum()
    (folder / "elastic.json").write_bytes(to_json(changed))


def with_tensor(folder: Path, number: int, buffer: str = "weights", **changes) -> None:
    """Change one entry of the index."""
    description = read_description(folder)
    index = description.weights if buffer == "weights" else description.correction.buffer
    tensors = list(index.tensors)
    tensors[number] = msgspec.structs.replace(tensors[number], **changes)
    index = msgspec.structs.replace(index, tensors=tuple(tensors))
    if buffer == "correction":
        reseal(folder, correction=msgspec.structs.replace(description.correction, buffer=index))
    else:
        reseal(folder, weights=index)


def test_a_changed_byte_is_refused(folder):
    tensors = read_description(folder).weights.tensors
    flip(folder / "weights.bin", tensors[5].offset + 3)
    refused(folder, f"weights.bin: damaged: {tensors[5].name} does not match its hash")


def test_a_changed_byte_of_the_correction_is_refused_when_it_is_used(folder):
    tensor = next(t for t in read_description(folder).correction.buffer.tensors if t.name == "blocks.0.fc2.lower")
    flip(folder / "correction.bin", tensor.offset)
    assert Elastic.load(folder).weights(PLAN, corrected=False)
    refused(folder, "correction.bin: damaged: blocks.0.fc2.lower does not match its hash", corrected=True)


@pytest.mark.parametrize("name", ["weights.bin", "correction.bin", "ranking.safetensors", "elastic.json"])
def test_a_truncated_or_missing_file_is_refused(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    if name != "elastic.json":  # its last byte is a line end
        refused(folder, f"{name}: damaged")
    path.write_bytes(path.read_bytes()[:100])
    refused(folder, name)
    path.unlink()
    refused(folder, f"{name}: (missing|cannot be read)")


def test_a_longer_file_is_refused(folder):
    with open(folder / "weights.bin", "ab") as file:
        file.write(b"x")
    refused(folder, "weights.bin: damaged: it has .* bytes")


def test_an_edited_description_is_refused(folder):
    text = (folder / "elastic.json").read_text()
    assert '"norm_eps": 1e-6' in text
    (folder / "elastic.json").write_text(text.replace('"norm_eps": 1e-6', '"norm_eps": 1e-5'))
    refused(folder, "elastic.json: damaged: its contents do not match its hash")


def test_another_version_is_refused(folder):
    described = json.loads((folder / "elastic.json").read_text())
    (folder / "elastic.json").write_text(json.dumps({**described, "format_version": 2}))
    refused(folder, "elastic.json: not a valid Description: .*format_version")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(offset=2**40), "reaches beyond the end of the file"),
        (dict(offset=0), "overlaps what lies before it"),
        (dict(offset=4097), "begins at byte 4097, which is not a multiple of 4096"),
        (dict(shape=(47,)), r"is float32 \(47,\), the anatomy needs float32 \(48,\)"),
        (dict(dtype="float64"), "is float64 .*, the anatomy needs float32"),
        (dict(size_bytes=4), "has 4 bytes, which is not what its shape needs"),
        (dict(name="surprise"), "has unknown surprise|lacks patch.bias"),
        (dict(name="patch.weight"), "lacks patch.bias"),
        (dict(sha256="0" * 64), "patch.bias does not match its hash"),
    ],
)
def test_an_index_that_lies_is_refused(folder, changes, match):
    with_tensor(folder, 1, **changes)  # patch.bias
    refused(folder, match)


def test_a_tensor_that_is_named_twice_is_refused(folder):
    weights = read_description(folder).weights
    reseal(folder, weights=msgspec.structs.replace(weights, tensors=(*weights.tensors, weights.tensors[0])))
    refused(folder, "names a tensor twice")


def test_the_index_of_the_correction_is_checked_too(folder):
    with_tensor(folder, 1, "correction", offset=0)
    refused(folder, "in correction.bin overlaps")


@pytest.mark.parametrize("name", ["../weights.bin", "/etc/passwd", "", "a\\..\\b"])
def test_names_that_leave_the_folder_are_refused(folder, name):
    described = read_description(folder)
    whole = (folder / "elastic.json").read_bytes()
    shutil.copy(folder / "weights.bin", folder.parent / "weights.bin")
    reseal(folder, weights=msgspec.structs.replace(described.weights, file=name))
    refused(folder, r"Expected a name of letters, .* at `\$\.weights\.file`")
    (folder / "elastic.json").write_bytes(whole)
    reseal(folder, ranking=msgspec.structs.replace(described.ranking, file=name))
    refused(folder, r"Expected a name of letters, .* at `\$\.ranking\.file`")


def test_a_name_that_ends_early_is_refused_wherever_it_stands(folder):
    written = (folder / "elastic.json").read_text()
    (folder / "elastic.json").write_text(written.replace('"weights.bin"', '"weights.bin\\u0000x"'))
    refused(folder, "NUL character")


def test_links_that_leave_the_folder_are_refused(folder):
    shutil.move(folder / "weights.bin", folder.parent / "elsewhere.bin")
    (folder / "weights.bin").symlink_to(folder.parent / "elsewhere.bin")
    refused(folder, "a link that leaves the folder")


def test_a_ranking_that_was_swapped_is_refused(packed, folder):
    model, _, _, _ = packed
    random_ranking(model.anatomy, seed=9).save(folder / "ranking.safetensors")
    refused(folder, "ranking.safetensors: damaged: it is not the file that elastic.json describes")
    from snapvit_export.storage.atomic import sha256

    described = read_description(folder).ranking
    changed = msgspec.structs.replace(described, sha256=sha256(folder / "ranking.safetensors"))
    reseal(folder, ranking=changed)
    refused(folder, "correction.bin was made for another ranking")


def test_an_anatomy_that_the_files_do_not_fit_is_refused(folder):
    anatomy = read_description(folder).anatomy
    reseal(folder, anatomy=msgspec.structs.replace(anatomy, classes=6))
    refused(folder, "head.weight in weights.bin is float32")
    reseal(folder, anatomy=msgspec.structs.replace(anatomy, blocks=anatomy.blocks[:2]))
    refused(folder, "the (ranking was made for another model|ranking orders)")


def test_what_is_not_an_elastic_is_refused(tmp_path):
    with pytest.raises(SnapvitError, match="elastic.json: cannot be read"):
        Elastic.load(tmp_path)
    (tmp_path / "elastic.json").write_bytes(b"\xff\x00 not json")
    with pytest.raises(FileFormatError, match="elastic.json: not a valid Description"):
        Elastic.load(tmp_path)


def test_plans_are_made_real_without_torch(packed):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'timm', 'onnx', 'sklearn')));"
        "from snapvit_export import Elastic;"
        f"e = Elastic.load({str(packed[3])!r});"
        "plan = e.planner.sparsity(0.5);"
        "print(e.weights(plan)['blocks.0.fc2.weight'].shape == (plan.neurons[0], e.anatomy.embed_dim))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "True", result.stderr


# The command


def test_the_command_packs_and_tells(snapvit, tiny_folder, tmp_path, tiny_model):
    ranking = random_ranking(tiny_model.anatomy)
    ranking.save(tmp_path / "r.safetensors")
    out = tmp_path / "e"
    arguments = ("pack", "--model", tiny_folder, "--ranking", tmp_path / "r.safetensors", "--out", out, "--no-correct")
    outcome = snapvit(*arguments)
    assert outcome.code == 0
    assert outcome.out.startswith(f"{out}: tiny, 3 blocks, ")
    assert "no correction" in outcome.out
    assert "packing blocks" in outcome.err
    elastic = Elastic.load(out)
    assert snapvit(*arguments, "--quiet").err == ""  # and again: an older Elastic is replaced
    told = json.loads(snapvit(*arguments, "--json").out)
    assert told == {
        "folder": str(out),
        "model": "tiny",
        "blocks": 3,
        "tensors": len(elastic.tensors),
        "weights_bytes": (out / "weights.bin").stat().st_size,
        "correction_bytes": 0,
        "corrected": False,
        "fidelity_plans": 0,
    }


def test_the_command_refuses_before_it_works(snapvit, tiny_folder, tmp_path, tiny_model):
    ranking = tmp_path / "r.safetensors"
    random_ranking(tiny_model.anatomy).save(ranking)
    outcome = snapvit("pack", "--model", tiny_folder, "--out", tmp_path / "e")
    assert (outcome.code, "needs images to calibrate on" in outcome.error_line) == (2, True)
    outcome = snapvit("pack", "--ranking", tmp_path / "none.safetensors", "--out", tmp_path / "e")
    assert outcome.code == 1
    assert "none.safetensors: cannot be read" in outcome.error_line
    outcome = snapvit("pack", "--ranking", ranking, "--out", tmp_path / "e")  # of the bundled model
    assert "r.safetensors: the ranking was made for another model" in outcome.error_line
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "elastic.json").write_text(to_json({"thesis": 1}).decode())
    outcome = snapvit("pack", "--model", tiny_folder, "--ranking", ranking, "--out", mine)
    assert "holds files that are not ours (elastic.json)" in outcome.error_line
    assert not (tmp_path / "e").exists()


def test_the_command_ranks_and_corrects_by_images(snapvit, tiny_folder, image_folder, tmp_path):
    """What the folder gives without torch is what the torch half would have made of the same plan."""
    out = tmp_path / "e"
    outcome = snapvit("pack", "--model", tiny_folder, "--data", image_folder, "--images", 16, "--out", out)
    assert outcome.code == 0, outcome.err
    assert ", 3 blocks, " in outcome.out
    assert "  correction " in outcome.out
    assert {path.name for path in tmp_path.iterdir()} >= {"e"}
    assert not (tmp_path / "e.checkpoint").exists()
    elastic = Elastic.load(out)
    assert elastic.corrects
    assert elastic.ranking.damage is not None
    plan = elastic.planner.flops(0.6)
    model = load_model(str(tiny_folder))
    source, _ = calibration_and_held_out(str(image_folder), 16, 0, 0)
    factors = make_factors(model, elastic.ranking, observe(model, prepare(source, model.preprocessing)))
    mended, plain = elastic.weights(plan), elastic.weights(plan, corrected=False)
    for i, block in enumerate(model.module.blocks):
        weight, shift = factors.fc2[i].corrected(plan.neurons[i])
        if plan.neurons[i] == factors.fc2[i].structures:
            continue
        np.testing.assert_allclose(mended[f"blocks.{i}.fc2.weight"], weight.T, rtol=1e-3, atol=1e-5)
        bias = block.mlp.fc2.bias.detach().numpy() + shift
        np.testing.assert_allclose(mended[f"blocks.{i}.fc2.bias"], bias, rtol=1e-3, atol=1e-5)
        assert np.abs(mended[f"blocks.{i}.fc2.weight"] - plain[f"blocks.{i}.fc2.weight"]).max() > 1e-3


def test_the_command_measures_fidelity_on_images_that_nothing_was_fitted_on(snapvit, image_folder, tmp_path):
    """The table says what torch says of the same Plans, corrected as the folder corrects them."""
    out, folder = tmp_path / "e", make_model_folder(tmp_path / "telling", head=30.0)
    outcome = snapvit("pack", "--model", folder, "--data", image_folder, "--images", 16, "--out", out)
    assert outcome.code == 0, outcome.err
    elastic = Elastic.load(out)
    table, model = elastic.fidelity, load_model(str(folder))
    assert (table.by, table.images, table.grids[0]) == ("predictions", 60 - 16, model.anatomy.grid)
    assert f"fidelity of {len(table.values)} Plans" in outcome.out
    source, others = calibration_and_held_out(str(image_folder), 16, 0, 64)
    factors = make_factors(model, elastic.ranking, observe(model, prepare(source, model.preprocessing)))
    (images,) = prepare(others, model.preprocessing).batches(64)
    with torch.no_grad():
        dense = model.module(torch.from_numpy(images)).numpy()
    for number, width in enumerate(table.widths):
        plan = Plan.dense(model.anatomy) if width == 1 else elastic.planner.flops(width)
        module = shrink(model, elastic.ranking, plan)
        correct_module(module, elastic.ranking, plan, factors)
        with torch.no_grad():
            outputs = module(torch.from_numpy(images)).numpy()
        told = table.values[number * len(table.tokens)]  # of the model's own grid, nothing merged
        # The slope of KL in the logits is p' - p, of 2 at most in sum; graphs equal modules to 1e-4 of the largest.
        tolerance = 2 * 1e-4 * float(np.abs(dense).max())
        found = Comparison.of(outputs, dense, classifies=True).fidelity()
        assert told.divergence == pytest.approx(found.divergence, abs=tolerance)
    assert told.divergence > 10 * tolerance  # so that it could have failed


def test_a_table_of_fidelity_is_left_out_on_request_and_without_images_for_it(
    snapvit, tiny_folder, image_folder, tmp_path
):
    few = tmp_path / "few.txt"
    paths = sorted(image_folder.rglob("*.png"))[:20]
    few.write_text("".join(f"{path}\n" for path in paths))
    for options, said in (
        (("--data", image_folder, "--images", 16, "--no-fidelity"), ""),
        (("--data", few, "--images", 20), "no images to measure fidelity on"),
    ):
        outcome = snapvit("pack", "--model", tiny_folder, "--recipe", "local", *options, "--out", tmp_path / "e")
        assert outcome.code == 0, outcome.err
        assert "fidelity no table" in outcome.out
        assert said in outcome.err
        assert "fidelity" not in json.loads((tmp_path / "e" / "elastic.json").read_text())
        assert Elastic.load(tmp_path / "e").fidelity is None
    assert Elastic.load(tmp_path / "e").description.correction.images == 20  # none is held out for nothing


def test_an_unwritable_place_is_told_before_the_work(snapvit, tmp_path):
    outcome = snapvit("pack", "--out", "/proc/snapvit/elastic")
    assert outcome.code == 1
    assert "/proc/snapvit/elastic: cannot be written" in outcome.error_line
    assert "reading images" not in outcome.err
