"""Family folders: the manifest is strict, and files are what it says."""

import json
import random
import shutil
from pathlib import Path

import msgspec
import onnx
import pytest
from msgspec import UNSET

from helpers.families import make_family
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.family.evaluation import Evaluation
from snapvit_export.family.folder import own_files, read_family
from snapvit_export.family.loaded import load_family
from snapvit_export.model.plan import Plan
from snapvit_export.storage.atomic import sha256


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """One small family, exported once for all tests here."""
    folder = tmp_path_factory.mktemp("exported")
    return make_family(folder, sparsity=[0.3])


@pytest.fixture
def family(exported, tmp_path) -> Path:
    """A copy of it that a test may damage."""
    return shutil.copytree(exported, tmp_path / "family")


def change(family, **changes) -> None:
    manifest = json.loads((family / "manifest.json").read_text())
    (family / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def test_the_manifest_has_the_keys_that_others_rely_on(family):
    manifest = json.loads((family / "manifest.json").read_text())
    keys = "format_version model anatomy preprocessing recipe target variants dense choice weights input labels"
    keys += " seconds shipped command reference"
    assert set(manifest) == set(keys.split())
    keys = "name file sparsity heads neurons params flops flops_ratio size_bytes sha256 precision precision_cosine"
    keys += " corrected correction profile evaluation weights engines parity dominated_by tokens image_size fidelity"
    keys += " evaluations recovered"
    assert [set(variant) for variant in manifest["variants"]] == [set(keys.split())] * 2
    assert [variant["name"] for variant in manifest["variants"]] == ["dense", "s30"]
    assert manifest["variants"][0]["flops_ratio"] == 1
    assert manifest["recipe"]["data"]["images"] == 16


def test_a_family_of_before_there_were_tokens_has_those_of_its_model(family):
    manifest = json.loads((family / "manifest.json").read_text())
    before = [{key: v[key] for key in v if key not in ("tokens", "image_size")} for v in manifest["variants"]]
    change(family, variants=before)
    old = read_family(family)
    for variant in old.variants:
        assert variant.tokens is variant.image_size is UNSET
        assert old.plan(variant) == Plan(heads=variant.heads, neurons=variant.neurons)
        assert old.tokens_of(variant) == (17,) * 4
        assert old.preprocessing_of(variant) == old.preprocessing


def test_the_plan_of_a_variant_is_told_by_its_tokens_and_its_image(family):
    manifest = json.loads((family / "manifest.json").read_text())
    dense, pruned = manifest["variants"]
    change(family, variants=[dense, {**pruned, "tokens": [7, 7, 5], "image_size": [24, 32]}], reference=None)
    found = read_family(family)
    variant = found.variant("s30")
    assert found.plan(variant) == Plan(**{k: tuple(pruned[k]) for k in ("heads", "neurons")}).with_tokens(
        (6, 0, 2), (3, 4)
    )
    assert found.tokens_of(variant) == (13, 7, 7, 5)
    assert found.preprocessing_of(variant) == found.preprocessing.at((24, 32))
    assert found.plan(found.variant("dense")) == Plan.dense(found.anatomy)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"tokens": [17, 17]}, "tokens"),
        ({"tokens": []}, "s30 has tokens that are not those after each block"),
        ({"tokens": [17, 12, 13]}, "s30 has tokens that are not those after each block"),
        ({"tokens": [3, 3, 3]}, "merges 14 of 16 patch tokens"),
        ({"tokens": [17, 17, 0]}, "tokens"),
        ({"image_size": [20, 32], "tokens": [9] * 3}, "s30 takes images that are no whole patches"),
        ({"image_size": [40, 32]}, "a grid of 5 x 4 patches"),
        ({"image_size": [4, 4]}, "s30"),
        ({"image_size": [32]}, "image_size"),
    ],
)
def test_tokens_that_a_variant_cannot_have_are_refused(family, damage, said):
    manifest = json.loads((family / "manifest.json").read_text())
    dense, pruned = manifest["variants"]
    change(family, variants=[dense, {**pruned, **damage}])
    with pytest.raises(FileFormatError, match=said):
        read_family(family)


def test_reading_checks_every_file(family):
    assert read_family(family).dense == "dense"
    path = family / "s30.onnx"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FileFormatError, match="s30.onnx: damaged"):
        read_family(family)
    path.unlink()
    with pytest.raises(FileFormatError, match="s30.onnx: missing"):
        read_family(family)


@pytest.mark.parametrize("which", ["the shared ones", "its own"])
def test_reading_checks_the_weights_too(family, which):
    shared, own = read_family(family).variant("s30").weights
    name = shared if which == "the shared ones" else own
    data = (family / name).read_bytes()
    (family / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FileFormatError, match=f"{name}: damaged"):
        read_family(family)
    (family / name).unlink()
    with pytest.raises(FileFormatError, match=f"{name}: missing"):
        read_family(family)


def test_weights_that_no_manifest_lists_are_refused(family):
    manifest = json.loads((family / "manifest.json").read_text())
    change(family, variants=[{**variant, "weights": []} for variant in manifest["variants"]])
    with pytest.raises(FileFormatError, match="dense.onnx: reads weights.bin, which manifest.json does not list"):
        read_family(family)
    change(family, weights=manifest["weights"][:1], variants=manifest["variants"])
    with pytest.raises(SnapvitError, match=r"corrected-\w+.bin is read by a variant and not listed"):
        read_family(family)


@pytest.mark.parametrize("name", ["../s30.onnx", "/etc/passwd", "a/../../x", "..\\x", "", "link.onnx"])
def test_names_that_leave_the_folder_are_refused(family, name, tmp_path):
    (tmp_path / "outside.onnx").write_bytes(b"x")
    (family / "link.onnx").symlink_to(tmp_path / "outside.onnx")
    variants = json.loads((family / "manifest.json").read_text())["variants"]
    variants[1]["file"] = name
    change(family, variants=variants)
    with pytest.raises(FileFormatError, match="leaves the folder" if name == "link.onnx" else r"variants\[1\].file"):
        read_family(family)


@pytest.mark.parametrize("name", ["s30.xml", "s30.model", "s30"])
def test_a_graph_is_checked_whatever_it_is_called(family, name, tmp_path):
    (tmp_path / "weights.bin").write_bytes((family / "weights.bin").read_bytes())
    model = onnx.load(family / "s30.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entry.value.replace("weights.bin", "../weights.bin")
    (family / name).write_bytes(model.SerializeToString())
    variants = json.loads((family / "manifest.json").read_text())["variants"]
    variants[1] |= {"file": name, "sha256": sha256(family / name)}
    change(family, variants=variants)
    with pytest.raises(FileFormatError, match="not a graph of OpenVINO" if name == "s30.xml" else "leaves the folder"):
        load_family(family)


def test_what_killed_runs_left_belongs_to_the_family(family):
    left = (".cut-x7f", ".tap-12-s30.onnx", ".s30.onnx.probe", ".validation-s30.safetensors")
    left += (".manifest.json.snapvit-01234567-89abcdef", ".tap.snapvit-01234567-89abcdef.onnx")
    for name in (*left, "diary"):
        (family / name).write_text("x")
    assert set(left) <= set(own_files(family))
    assert "diary" not in own_files(family)


def write_for_torch(folder: Path) -> None:
    """The files that an export writes of one variant, as far as names and the description go."""
    described = {"format_version": 1, "name": "x", "architecture": "vit", "kwargs": {}, "preprocessing": {}}
    (folder / "transformers").mkdir(parents=True)
    for name in ("model.safetensors", "load.py", "README.txt"):
        (folder / name).write_text("x")
    for name in ("model.safetensors", "config.json", "preprocessor_config.json"):
        (folder / "transformers" / name).write_text("x")
    (folder / "model.json").write_text(json.dumps(described))


def test_what_an_export_wrote_for_torch_belongs_to_the_family(family):
    assert "torch" not in own_files(family)
    write_for_torch(family / "torch" / "s30")
    assert "torch" in own_files(family)


@pytest.mark.parametrize(
    "own",
    [
        lambda torch: (torch / "model.safetensors").write_text("mine"),
        lambda torch: write_for_torch(torch / "mine"),
        lambda torch: (torch / "dense").mkdir(),
        lambda torch: (torch / "s30" / "model.json").write_text('{"name": "mine"}'),
        lambda torch: (torch / "s30" / "model.json").write_text("[1]"),
        lambda torch: (torch / "s30" / "notes").mkdir(),
        lambda torch: (torch / "s30" / "config.json").write_text("mine"),
        lambda torch: (
            (torch / "s30" / "transformers" / "config.json").unlink()
            or (torch / "s30" / "transformers" / "config.json").symlink_to("/dev/null")
        ),
        lambda torch: shutil.rmtree(torch) or torch.write_text("mine"),
        lambda torch: torch.rename(torch.parent.parent / "t") and torch.symlink_to(torch.parent.parent / "t"),
    ],
    ids=[
        "file",
        "stranger",
        "empty",
        "other description",
        "list",
        "folder",
        "misplaced",
        "link",
        "no folder",
        "linked",
    ],
)
def test_a_torch_folder_of_somebody_else_does_not_belong_to_the_family(family, own):
    write_for_torch(family / "torch" / "s30")
    own(family / "torch")
    assert "torch" not in own_files(family)


@pytest.mark.parametrize(
    "changes", [{"format_version": 2}, {"dense": "nobody"}, {"more": 1}, {"variants": []}, {"recipe": None}]
)
def test_a_manifest_that_is_not_ours_is_refused(family, changes):
    change(family, **changes)
    with pytest.raises(SnapvitError, match="manifest.json"):
        read_family(family)
    assert own_files(family) is None


def test_two_variants_of_one_name_are_refused(family):
    variants = json.loads((family / "manifest.json").read_text())["variants"]
    change(family, variants=[variants[0], variants[0]])
    with pytest.raises(FileFormatError, match="same name"):
        read_family(family)


def test_two_hundred_damaged_families_are_refused_in_one_line_or_run_what_was_exported(family, tmp_path):
    """A changed graph or weight file never passes. A changed manifest may: it then names the same files and hashes."""
    whole = shutil.copytree(family, tmp_path / "whole")
    names = sorted(path.name for path in whole.iterdir() if path.name != "ranking.safetensors")
    rng, refused = random.Random(1), 0
    for number in range(200):
        name = names[number % len(names)]
        original = (whole / name).read_bytes()
        data = bytearray(original)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        else:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (whole / name).write_bytes(data)
        try:
            read_family(whole)
            assert name == "manifest.json" or bytes(data) == original
        except SnapvitError as error:
            refused += 1
            assert "\n" not in str(error)
            assert name in str(error) or "manifest.json" in str(error)
        (whole / name).write_bytes(original)
    assert refused >= 150
    read_family(whole)


def evaluation(images: int, source: str = "pets", top1: float = 0.5) -> Evaluation:
    return Evaluation(source=source, images=images, top1=top1, standard_errors={"top1": 0.01})


def test_an_evaluation_on_fewer_images_stands_beside_one_on_more(exported):
    variant = msgspec.structs.replace(read_family(exported).variants[0], evaluation=None).evaluated(evaluation(500))
    assert variant.knows_better(evaluation(60))
    variant = variant.evaluated(evaluation(60), shown=False)
    assert (variant.evaluation.images, [each.images for each in variant.evaluations]) == (500, [60])
    again = variant.evaluated(evaluation(60, top1=0.7), shown=False)
    assert [each.top1 for each in again.evaluations] == [0.7]
    more = again.evaluated(evaluation(900))
    assert (more.evaluation.images, [each.images for each in more.evaluations]) == (900, [500, 60])


def test_an_evaluation_on_other_data_or_by_other_measures_is_shown_and_the_former_is_kept(exported):
    variant = msgspec.structs.replace(read_family(exported).variants[0], evaluation=None).evaluated(evaluation(500))
    by_knn = Evaluation(source="pets", images=60, knn=0.5)
    assert not variant.knows_better(evaluation(60, "birds"))
    assert not variant.knows_better(by_knn)
    variant = variant.evaluated(evaluation(60, "birds"))
    assert (variant.evaluation.source, [each.source for each in variant.evaluations]) == ("birds", ["pets"])
