"""Scores written to the released layout: the golden file's fields, the same bits back, and no class in the file."""

import enum
import json
import pickletools
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import snapvit_export as sv
from helpers.models import model_of
from helpers.rankings import random_ranking
from snapvit_export.errors import SnapvitError
from snapvit_export.model.published import PUBLISHED, RELEASED_NAMES, published
from snapvit_export.model.ranking import MIXED, Ranking
from snapvit_export.prune.import_scores import import_scores
from snapvit_export.prune.importance_scores import ElasticImportanceScores

# A denormal, both zeros, and nearly the largest: whatever float32 holds must come back.
ODD = np.array([1e-45, 0.0, -0.0, 1.0, 3.4e38], np.float32)


def same_bits(one: Ranking, other: Ranking) -> bool:
    pairs = zip(one.head_scores + one.neuron_scores, other.head_scores + other.neuron_scores)
    return all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in pairs)


def odd_ranking(name: str = "vit_base_patch16_224.dino") -> Ranking:
    anatomy = model_of("vit_tiny_patch16_224").anatomy
    ranking = random_ranking(anatomy)
    neurons = tuple(np.concatenate([ODD, scores[len(ODD) :]]) for scores in ranking.neuron_scores)
    return Ranking(ranking.head_scores, neurons, name, anatomy, {"criterion": "magnitude", "seed": 3})


class ModelType(str, enum.Enum):
    """As the released loader has it: it passes what the file says through an enum of texts."""

    DINO = "dino_vitb16"


def test_a_file_has_the_fields_and_types_of_the_golden_one(shared: Path, tmp_path: Path):
    golden = shared / "golden" / "tiny_scores_reference_format.pt"
    sv.ElasticImportanceScores.load(golden).save(tmp_path / "scores.pt")
    names = [(_EnumText, f"src.models.enums.{name}") for name in ("ModelType", "MLPArchitecture")]
    with torch.serialization.safe_globals(names):
        wanted = torch.load(golden, weights_only=True)
    got = torch.load(tmp_path / "scores.pt", weights_only=True)
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype
            assert torch.equal(got[name].view(torch.int32), value.view(torch.int32))
        else:
            assert got[name] == value
            assert type(got[name]) is (str if isinstance(value, _EnumText) else type(value))
    assert ModelType(got["model_type"]) is ModelType.DINO


class _EnumText(str):
    """A member of the enums in the golden file."""


def test_import_export_import_gives_the_same_bits(tmp_path: Path):
    ranking = odd_ranking()
    ElasticImportanceScores(ranking).save(tmp_path / "one.pt")
    first = import_scores(tmp_path / "one.pt")
    ElasticImportanceScores(first).save(tmp_path / "two.pt")
    second = import_scores(tmp_path / "two.pt")
    assert same_bits(ranking, first)
    assert same_bits(first, second)
    assert second.provenance == {**first.provenance, "file": "two.pt"}
    assert second.protection == ranking.protection
    assert second.model == "dino_vitb16"


def test_the_file_names_no_class(tmp_path: Path):
    ElasticImportanceScores(odd_ranking()).save(tmp_path / "scores.pt")
    with zipfile.ZipFile(tmp_path / "scores.pt") as file:
        pickled = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    named = {argument for opcode, argument, _ in pickletools.genops(pickled) if opcode.name in ("GLOBAL", "INST")}
    assert named == {"torch._utils _rebuild_tensor_v2", "torch FloatStorage", "collections OrderedDict"}
    assert "STACK_GLOBAL" not in {opcode.name for opcode, _, _ in pickletools.genops(pickled)}


def test_our_rankings_are_read_under_the_same_name(tmp_path: Path):
    ranking = odd_ranking("mine")
    ranking.save(tmp_path / "r.safetensors")
    scores = sv.ElasticImportanceScores.load(tmp_path / "r.safetensors", device="cpu")
    assert same_bits(scores.ranking, ranking)
    assert scores.mlp_scores.shape == (3, 192)
    assert (scores.num_blocks, scores.hidden_dim, scores.embed_dim) == (3, 192, 48)
    assert (scores.num_heads, scores.head_dim, scores.mlp_architecture) == (4, 12, "standard")
    assert (scores.min_hidden_dim_keep_ratio, scores.min_head_keep_ratio) == (0.05, 0.2)
    assert scores.metadata["seed"] == 3
    with pytest.raises(SnapvitError, match="stay on the CPU"):
        sv.ElasticImportanceScores.load(tmp_path / "r.safetensors", device="cuda")


def test_a_gated_mlp_is_swiglu():
    anatomy = model_of("vit_small_plus_patch16_dinov3").anatomy
    scores = ElasticImportanceScores(random_ranking(anatomy))
    assert scores.released("dinov3_vith16plus")["mlp_architecture"] == "swiglu"


def test_what_the_layout_cannot_say_is_refused(tmp_path: Path):
    with pytest.raises(SnapvitError, match="no name for mine. Give --model-type, one of augreg"):
        ElasticImportanceScores(odd_ranking("mine")).save(tmp_path / "x.pt")
    with pytest.raises(SnapvitError, match="knows no model type 'vit'"):
        ElasticImportanceScores(odd_ranking()).save(tmp_path / "x.pt", "vit")
    uneven = Ranking((np.ones(2), np.ones(3)), (np.ones(4), np.ones(4)), "dino_vitb16")
    with pytest.raises(SnapvitError, match="the blocks have 2, 3 heads"):
        ElasticImportanceScores(uneven).save(tmp_path / "x.pt")
    unknown = Ranking((np.ones(2),), (np.ones(4),), "dino_vitb16")
    with pytest.raises(SnapvitError, match="does not say its embed_dim"):
        ElasticImportanceScores(unknown).save(tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_what_import_scores_reads(tmp_path: Path, snapvit):
    ranking, out = odd_ranking("deit3_small_patch16_224.fb_in22k_ft_in1k"), tmp_path / "scores.pt"
    ranking.save(tmp_path / "r.safetensors")
    outcome = snapvit("export-scores", tmp_path / "r.safetensors", "--out", out)
    assert outcome.code == 0
    assert "deit-3-vit-s-16, 3 blocks, 12 heads, 576 neurons" in outcome.out
    assert snapvit("export-scores", tmp_path / "r.safetensors", "--out", out).code == 0  # again
    assert snapvit("import-scores", out, "--out", tmp_path / "back.safetensors").code == 0
    assert same_bits(Ranking.load(tmp_path / "back.safetensors"), ranking)


def test_the_command_says_what_it_leaves_out_and_refuses_what_it_would_harm(tmp_path: Path, snapvit):
    anatomy = model_of("vit_tiny_patch16_224").anatomy
    rng = np.random.default_rng(0)
    damage = tuple((np.sort(rng.random(5))[::-1] * [1, 1, 1, 1, 0], np.arange(193.0)[::-1]) for _ in range(3))
    orders = [rng.permutation(4) for _ in range(3)], [rng.permutation(192) for _ in range(3)]
    made = {"protection": {"sublayers": False}}
    Ranking.from_orders(*orders, damage, "mine", anatomy, made).save(tmp_path / "r.safetensors")
    given = ("export-scores", tmp_path / "r.safetensors", "--out", tmp_path / "scores.pt")
    assert "no name for mine" in snapvit(*given).error_line
    told = json.loads(snapvit(*given, "--model-type", "dino_vitb16", "--json").out)
    assert told["left_out"] == [
        "damage curves",
        "removable sub-layers",
    ]
    (tmp_path / "diary.txt").write_text("dear diary")
    outcome = snapvit(*given, "--model-type", "dino_vitb16", "--out", tmp_path / "diary.txt")
    assert outcome.code == 1
    assert "not a score file" in outcome.error_line
    assert (tmp_path / "diary.txt").read_text() == "dear diary"
    assert "no such ranking" in snapvit("export-scores", tmp_path / "none", "--out", tmp_path / "x.pt").error_line


def test_published_models_have_one_name_each():
    assert len(RELEASED_NAMES) == len(set(RELEASED_NAMES)) == 14
    assert len({model.timm for model in PUBLISHED}) == len(PUBLISHED) == 16
    assert published("deit3_base_patch16_224") is None  # timm's default weights are others
    assert published("vit_base_patch16_dinov3").released == published("dinov3_vitb16").released == "dinov3_vitb16"


def test_the_command_says_that_one_order_of_heads_and_neurons_becomes_two(tmp_path: Path, snapvit):
    ranking = random_ranking(model_of("vit_tiny_patch16_224").anatomy)
    for provenance, left_out in (({}, []), ({MIXED: True}, ["one order of heads and neurons"])):
        replace(ranking, provenance=provenance).save(tmp_path / "r.safetensors")
        given = ("export-scores", tmp_path / "r.safetensors", "--out", tmp_path / "scores.pt")
        told = json.loads(snapvit(*given, "--model-type", "dino_vitb16", "--json").out)
        assert told["left_out"] == left_out
