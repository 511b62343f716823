"""Graphs for smaller images, cut without torch: equal to the sliced module at that resolution in every family."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import onnx
import pytest
import torch
from msgspec import UNSET

from helpers.graphs import FLAVOURS, close, run, writer_of
from helpers.models import FAMILIES, as_model, small
from helpers.plans import plan_without, uneven_plan
from helpers.rankings import random_ranking
from helpers.reference_forward import Reference
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.elastic.folder import Elastic
from snapvit_export.elastic.format import read_description, write_description
from snapvit_export.errors import SnapvitError
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.precision import GraphPrecision
from snapvit_export.graph.writer import Blueprint, GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import pack
from snapvit_export.storage.json import to_json

PRE = Preprocessing(input_size=(3, 64, 64), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
OTHERS = [
    ("vit_tiny_patch16_224", {"pos_embed": "none"}),
    ("vit_tiny_patch16_224", {"dynamic_img_size": True}),
    ("vit_medium_patch16_rope_reg1_gap_256", {}),
    ("vit_small_patch16_dinov3", {"dynamic_img_size": True}),
]
CASES = [(name, {}) for name in FAMILIES.values()] + OTHERS


def packed(name: str, folder, **extra):
    """A small model of that family, its ranking, and its Elastic folder."""
    module, _ = small(name, **extra)
    model = as_model(module, name, {})
    ranking = random_ranking(model.anatomy, seed=1)
    pack(model, ranking, folder)
    return model, ranking, Elastic.load(folder)


@pytest.mark.parametrize(("name", "extra"), CASES, ids=[f"{n} {e}" for n, e in CASES])
def test_graphs_of_smaller_images_equal_the_sliced_module(name, extra, tmp_path):
    model, ranking, elastic = packed(name, tmp_path / "elastic", **extra)
    drawn = replace(Blueprint.of(elastic), preprocessing=PRE)
    for folder in ("floats", "bytes"):
        (tmp_path / folder).mkdir()
    for grid in ((3, 3), (2, 4)):
        plan = uneven_plan(model.anatomy).with_tokens(grid=grid)
        pixels = np.random.default_rng(0).integers(0, 256, (2, 16 * grid[0], 16 * grid[1], 3), np.uint8)
        images = PRE.normalise(pixels)
        with torch.no_grad():
            wanted = shrink(model, ranking, plan)(torch.from_numpy(images)).numpy()
        for flavour in FLAVOURS:
            floats = writer_of(drawn, tmp_path / "floats", flavour)
            of_bytes = writer_of(drawn, tmp_path / "bytes", flavour, takes_bytes=True)
            named = f"g{grid[0]}{grid[1]}-{flavour}"
            path = floats.write(named, plan, format=GraphFormat(flavour=flavour)).graph
            onnx.checker.check_model(str(path), full_check=True)
            assert close(run(path, images), wanted), flavour
            assert close(run(of_bytes.write(named, plan, format=GraphFormat(flavour=flavour)).graph, pixels), wanted)
        assert close(Reference(elastic, plan)(images.astype(np.float64)), wanted)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_base_patch16_siglip_224", "vit_small_patch16_dinov3"])
def test_what_removed_first_sub_layers_add_goes_into_the_positions_of_the_resolution(name, tmp_path):
    model, ranking, elastic = packed(name, tmp_path / "elastic")
    plan = plan_without(model.anatomy, {0}, {0}).with_tokens(grid=(2, 3))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), np.uint8)
    pre = model.preprocessing.at((32, 48))
    with torch.no_grad():
        wanted = shrink(model, ranking, plan)(torch.from_numpy(pre.normalise(pixels))).numpy()
    for takes_bytes, given in ((False, pre.normalise(pixels)), (True, pixels)):
        folder = tmp_path / str(takes_bytes)
        folder.mkdir()
        written = GraphWriter(Blueprint.of(elastic), folder, takes_bytes).write("x", plan)
        assert close(run(written.graph, given), wanted)


def test_a_graph_says_what_images_it_takes(tmp_path):
    model, _, elastic = packed("deit_tiny_patch16_224", tmp_path / "elastic")
    plan = Plan.dense(model.anatomy).with_tokens(grid=(2, 3))
    writer = GraphWriter(Blueprint.of(elastic), tmp_path)
    loaded = onnx.load(writer.write("x", plan).graph, load_external_data=False)
    shape = [d.dim_value for d in loaded.graph.input[0].type.tensor_type.shape.dim]
    assert shape[1:] == [3, 32, 48]
    properties = {p.key: p.value for p in loaded.metadata_props}
    assert json.loads(properties["snapvit.preprocessing"])["input_size"] == [3, 32, 48]
    assert json.loads(properties["snapvit.plan"])["grid"] == [2, 3]


def test_the_own_grid_named_in_a_plan_needs_no_tensors_of_its_own(tmp_path):
    model, _, elastic = packed("vit_small_patch16_dinov3", tmp_path / "elastic")
    writer = GraphWriter(Blueprint.of(elastic), tmp_path)
    dense = Plan.dense(model.anatomy)
    plain, named = writer.write("a", dense), writer.write("b", dense.with_tokens(grid=model.anatomy.grid))
    assert named.weights == plain.weights
    assert named.read_bytes == plain.read_bytes


@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic"])
def test_other_precisions_take_smaller_images_too(precision, tmp_path):
    model, ranking, elastic = packed("eva02_tiny_patch14_224", tmp_path / "elastic")
    plan = Plan.dense(model.anatomy).with_tokens(grid=(3, 2))
    images = torch.randn(2, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    writer = GraphWriter(Blueprint.of(elastic), tmp_path, precision=precision)
    written = writer.write("x", plan, precision=GraphPrecision(precision))
    with torch.no_grad():
        wanted = shrink(model, ranking, plan)(images).numpy()
    got = run(written.graph, images.numpy())
    cosine = (got * wanted).sum() / np.linalg.norm(got) / np.linalg.norm(wanted)
    assert cosine > {"fp16": 0.9999, "int8-dynamic": 0.9}[precision]  # the gates of these precisions


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3"])
def test_a_folder_that_does_not_say_how_rotary_tables_are_made_refuses_another_grid(name, tmp_path):
    model, _, elastic = packed(name, tmp_path / "elastic")
    assert elastic.description.wiring.rotary is not UNSET
    described = read_description(tmp_path / "elastic")
    wiring = msgspec.structs.replace(described.wiring, rotary=UNSET)
    write_description(tmp_path / "elastic", msgspec.structs.replace(described, wiring=wiring))
    old = Elastic.load(tmp_path / "elastic")
    dense = Plan.dense(model.anatomy)
    writer = GraphWriter(Blueprint.of(old), tmp_path)
    for ask in (old.weights, lambda plan, _: writer.write("x", plan)):
        with pytest.raises(SnapvitError, match=r"images of 64 x 64 alone. Pack it again") as refused:
            ask(dense.with_tokens(grid=(3, 3)), False)
        assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("x.*"))  # nothing half-written
    assert old.weights(dense, False).keys() == elastic.weights(dense, False).keys()


def test_a_model_without_rotary_tables_is_described_as_before(tmp_path):
    _, _, elastic = packed("deit_tiny_patch16_224", tmp_path / "elastic")
    assert b"rotary" not in to_json(elastic.description.wiring).replace(b"rotate_half", b"")


def test_a_folder_written_by_hand_without_the_key_still_matches_its_hash(tmp_path):
    packed("eva02_tiny_patch14_224", tmp_path / "elastic")
    path = tmp_path / "elastic" / "elastic.json"
    raw = json.loads(path.read_text())
    del raw["wiring"]["rotary"]  # as an older version wrote it
    raw["seal"] = ""
    raw["seal"] = hashlib.sha256(to_json(raw)).hexdigest()
    path.write_bytes(to_json(raw))
    assert Elastic.load(tmp_path / "elastic").description.wiring.rotary is UNSET


def test_tables_that_are_made_otherwise_are_not_described(tmp_path):
    module, _ = small("eva02_tiny_patch14_224")
    module.rope.pos_embed.mul_(0.5)  # as if somebody had tables of their own
    model = as_model(module, "odd", {})
    pack(model, random_ranking(model.anatomy), tmp_path / "elastic")
    assert Elastic.load(tmp_path / "elastic").description.wiring.rotary is UNSET


def test_a_device_without_torch_cuts_a_smaller_resolution(tmp_path):
    model, ranking, _ = packed("vit_small_patch16_dinov3", tmp_path / "elastic")
    plan = uneven_plan(model.anatomy).with_tokens(grid=(3, 2))
    plan.save(tmp_path / "plan.json")
    images = torch.randn(2, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "images.npy", images.numpy())
    script = f"""
import sys
for name in ("torch", "timm", "torchvision"):
    sys.modules[name] = None
import numpy as np
from pathlib import Path
from snapvit_export.elastic.folder import Elastic
from snapvit_export.graph.writer import Blueprint, GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.runtimes.ort import OrtSession
folder = Path({str(tmp_path)!r})
writer = GraphWriter(Blueprint.of(Elastic.load(folder / "elastic")), folder)
with OrtSession(writer.write("x", Plan.load(folder / "plan.json")).graph, 1) as session:
    np.save(folder / "got.npy", session.run(np.load(folder / "images.npy")))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    with torch.no_grad():
        wanted = shrink(model, ranking, plan)(images).numpy()
    assert close(np.load(tmp_path / "got.npy"), wanted)
