"""Files written by the last commit before the tree was rebuilt still load, and give the same bytes or outputs."""

import hashlib
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file

from helpers.graphs import run, step_by_step
from helpers.shared import ROOT
from snapvit_export.allocation.planner import Planner
from snapvit_export.checks.gates import TOLERANCE, agreement
from snapvit_export.elastic.folder import Elastic
from snapvit_export.family.folder import read_family
from snapvit_export.family.manifest import Manifest
from snapvit_export.family.validation import Validation
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import Blueprint, GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.models.load import load_model
from snapvit_export.selection.known_profiles import FamilyProfile
from snapvit_export.storage.atomic import sha256
from snapvit_export.storage.json import read_json, to_json

ARCHIVE = ROOT / "tests" / "fixtures" / "before_the_move" / "files.tar.xz"
EPS = float(np.finfo(np.float32).eps)
LAYERS = 2 * 3  # that int8 quantises the inputs of, one after the other: attention and MLP of three blocks


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """The folder as it was written."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


@pytest.fixture(scope="module")
def outputs(old) -> dict[str, np.ndarray]:
    return load_file(old / "outputs.safetensors")


@pytest.fixture(scope="module")
def plans(old) -> dict[str, Plan]:
    written = json.loads((old / "plans.json").read_text())
    return {name: msgspec.convert(counts, Plan) for name, counts in written.items()}


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """As near as the gates ask of two forms of one model in float32: sums have another order on another CPU."""
    return agreement(wanted, found).max_abs <= TOLERANCE


def changes(before: object, after: object, where: str = "") -> list[str]:
    """Where a value differs from what was written; keys that are new since may be there if they say nothing."""
    if isinstance(before, dict) and isinstance(after, dict):
        added = [f"{where}.{key} is new" for key in after.keys() - before.keys() if after[key] not in (None, [], {})]
        lost = [f"{where}.{key} is lost" for key in before.keys() - after.keys()]
        both = [changes(before[key], after[key], f"{where}.{key}") for key in before.keys() & after.keys()]
        return added + lost + [each for found in both for each in found]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [each for n, pair in enumerate(zip(before, after)) for each in changes(*pair, f"{where}[{n}]")]
    return [] if before == after else [f"{where} differs"]


@pytest.mark.parametrize("name", ["family", "family-int8"])
def test_a_family_loads_with_every_value_and_its_variants_give_the_same_outputs(old, outputs, name):
    manifest = read_family(old / name)  # checks all hashes
    written = json.loads((old / name / "manifest.json").read_text())
    assert changes(written, json.loads(to_json(manifest))) == []
    for variant in manifest.variants:
        path, wanted = old / name / variant.file, outputs[f"{name}/{variant.name}"]
        if name == "family":
            assert same(run(path, outputs["images"]), wanted), variant.name
        else:  # exact sums: ONNX Runtime saturates these old weights on a CPU without VNNI
            found = step_by_step(SimpleNamespace(graph=path), outputs["images"])
            # Rounding may move an input by one of 255 steps in every layer: that turns the output by at most so much.
            assert agreement(wanted, found).cosine >= 1 - (LAYERS / 255) ** 2 / 2, variant.name


def test_the_choice_and_the_target_are_what_they_were(old):
    manifest = read_family(old / "family")
    written = json.loads((old / "family" / "manifest.json").read_text())
    assert manifest.choice.variant == written["choice"]["variant"]
    assert manifest.choice.next_denser == written["choice"]["next_denser"]
    alone = json.loads(to_json(manifest.target.target))
    assert alone == {key: written["target"][key] for key in ("runtime", "precision", "batch", "threads")}
    assert manifest.target.device.cpu == written["target"]["device"]["cpu"]
    judged = json.loads((old / "family" / "validation.json").read_text())
    assert Validation.load(old / "family").images == judged["images"]


def test_a_profile_loads_with_every_value(old):
    found = FamilyProfile.load(old / "profile.json")
    written = json.loads((old / "profile.json").read_text())
    assert changes(written, json.loads(to_json(found))) == []


def test_a_ranking_gives_the_same_order_and_the_same_plans(old, plans):
    ranking = Ranking.load(old / "family" / "ranking.safetensors")
    assert ranking.order_sha256 == json.loads((old / "hashes.json").read_text())["order"]
    planner = Planner(ranking, load_model(str(old / "model")).anatomy)
    assert planner.sparsity(0.3) == plans["sparsity30"]
    assert planner.flops(0.5) == plans["flops50"]
    assert planner.pair(0.35, 0.3) == plans["pair"]


def test_a_ranking_is_written_with_the_same_bytes(old, tmp_path):
    path = old / "family" / "ranking.safetensors"
    Ranking.load(path).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def digest(weights: dict[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(np.ascontiguousarray(weights[name]).tobytes())
    return found.hexdigest()


def test_an_elastic_folder_gives_the_same_weights_for_every_plan(old, plans):
    elastic, hashes = Elastic.load(old / "elastic"), json.loads((old / "hashes.json").read_text())
    for name, plan in plans.items():
        assert digest(elastic.weights(plan, corrected=False)) == hashes[f"{name} uncorrected"]
    corrected = load_file(old / "corrected.safetensors")
    for name, wanted in corrected.items():
        plan, _, tensor = name.partition("/")
        found = elastic.weights(plans[plan], corrected=True)[tensor]
        # Solved in float64, so only the last rounding to float32 may differ between CPUs.
        np.testing.assert_allclose(found, wanted, rtol=0, atol=EPS * float(np.abs(wanted).max()), err_msg=name)


def test_an_elastic_folder_gives_the_same_dense_graph_and_weight_file(old, tmp_path):
    elastic, family = Elastic.load(old / "elastic"), read_family(old / "family")
    writer = GraphWriter(Blueprint.of(elastic), tmp_path)
    written = writer.write("dense", Plan.dense(elastic.anatomy), format=GraphFormat("ort"))
    assert sha256(tmp_path / "weights.bin") == sha256(old / "family" / "weights.bin")
    before = onnx.load(old / "family" / family.variant("dense").file, load_external_data=False)
    after = onnx.load(written.graph, load_external_data=False)
    assert after.graph.SerializeToString(deterministic=True) == before.graph.SerializeToString(deterministic=True)


def test_model_folders_load_and_compute_the_same(old, outputs):
    images = torch.from_numpy(outputs["images"])
    for name in ("model", "pruned"):
        with torch.no_grad():
            assert same(load_model(str(old / name)).module(images).numpy(), outputs[name]), name


def test_the_manifest_is_still_of_format_version_1(old):
    assert read_json(old / "family" / "manifest.json", Manifest).format_version == 1
