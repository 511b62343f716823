"""The emitted graph: equal to the sliced module in every family, flavour and batch, from one shared weight file."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.graphs import FLAVOURS, close, run, writer_of
from helpers.images import noise
from helpers.models import EVERY_KIND, FAMILIES, as_model, make_model, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from helpers.reference_forward import Reference
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.elastic.folder import Elastic
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import Blueprint, GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.prune.correct.elastic import make_factors
from snapvit_export.prune.models.load import Model
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import pack
from snapvit_export.prune.stats.observe import observe
from snapvit_export.runtimes.ort import OrtSession


@pytest.mark.parametrize(("name", "extra"), EVERY_KIND, ids=[f"{n} {e}" for n, e in EVERY_KIND])
def test_graphs_equal_the_sliced_module(name, extra, tmp_path):
    module, _ = small(name, **extra)
    model = as_model(module, name, {})
    ranking = random_ranking(model.anatomy, seed=1)
    pack(model, ranking, tmp_path / "elastic")
    (tmp_path / "family").mkdir()
    drawn = Blueprint.of(Elastic.load(tmp_path / "elastic"))
    images = torch.randn(3, 3, *model.anatomy.image, generator=torch.Generator().manual_seed(0))
    for title, plan in (("dense", Plan.dense(model.anatomy)), ("cut", uneven_plan(model.anatomy))):
        with torch.no_grad():
            wanted = shrink(module, ranking, plan)(images).numpy()
        for flavour in FLAVOURS:
            emitter = writer_of(drawn, tmp_path / "family", flavour)
            path = emitter.write(f"{title}-{flavour}", plan, format=GraphFormat(flavour=flavour)).graph
            onnx.checker.check_model(str(path), full_check=True)
            with OrtSession(path, 1) as session:
                assert close(session.run(images.numpy()), wanted), flavour
                assert close(session.run(images[:1].numpy()), wanted[:1]), flavour


def emitter_of(name: str, folder: Path, factors: bool = False, **extra) -> tuple[Model, GraphWriter, Elastic]:
    """A small model of that family, packed in a random order, and an emitter into `folder`/family."""
    module, _ = small(name, **extra)
    model = as_model(module, name, {})
    images = noise(model, 40) if factors else None
    ranking = random_ranking(model.anatomy, seed=1)
    made = make_factors(model, ranking, observe(model, images)) if images is not None else None
    pack(model, ranking, folder / "elastic", made)
    (folder / "family").mkdir()
    elastic = Elastic.load(folder / "elastic")
    return model, GraphWriter(Blueprint.of(elastic), folder / "family"), elastic


@pytest.mark.parametrize(
    "name",
    ["deit3_small_patch16_224", "vit_giant_patch14_dinov2", "vit_base_patch16_siglip_224", "eva02_tiny_patch14_224"],
)
def test_corrected_variants_share_all_but_their_proj_and_fc2(name, tmp_path):
    model, emitter, elastic = emitter_of(name, tmp_path, factors=True)
    plan = uneven_plan(model.anatomy)
    images = np.random.default_rng(0).standard_normal((2, 3, *model.anatomy.image)).astype(np.float32)
    wanted = Reference(elastic, plan, corrected=True)(images.astype(np.float64))
    written = emitter.write("cut", plan, elastic.corrected_layers(plan))
    assert close(run(written.graph, images), wanted)
    shared, own_file = (path.name for path in written.weights)
    assert (shared, own_file.startswith("corrected-")) == ("weights.bin", True)
    initialisers = onnx.load(written.graph, load_external_data=False).graph.initializer
    stored = {t.name for t in initialisers if t.external_data}
    own = {t.name for t in initialisers if in_file(t, own_file)}
    cut = [i for i, (k, b) in enumerate(zip(plan.heads, model.anatomy.blocks)) if k < b.heads]
    cut_mlp = [i for i, (k, b) in enumerate(zip(plan.neurons, model.anatomy.blocks)) if k < b.hidden]
    assert own == {f"blocks.{i}.proj.weight" for i in cut} | {f"blocks.{i}.fc2.weight" for i in cut_mlp}
    assert own < stored


def in_file(tensor, file: str) -> bool:
    return any(entry.key == "location" and entry.value == file for entry in tensor.external_data)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_base_patch16_siglip_224", "vit_small_patch16_dinov3"])
def test_a_graph_that_takes_bytes_normalises_as_the_preprocessing_says(name, tmp_path):
    model, emitter, _ = emitter_of(name, tmp_path)
    pre = Preprocessing(input_size=(3, 64, 64), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    emitter = GraphWriter(replace(emitter.blueprint, preprocessing=pre), emitter.folder)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    plan = uneven_plan(model.anatomy)
    plain = run(emitter.write("plain", plan).graph, pre.normalise(pixels))
    (tmp_path / "bytes").mkdir()
    of_bytes = GraphWriter(emitter.blueprint, tmp_path / "bytes", takes_bytes=True)
    assert close(run(of_bytes.write("bytes", plan).graph, pixels), plain)


def test_features_and_static_batches_and_single_files(tmp_path):
    model, emitter, _ = emitter_of("deit_tiny_patch16_224", tmp_path)
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    plan, module = Plan.dense(model.anatomy), model.module
    with torch.no_grad():
        embedding = module.forward_head(module.forward_features(images), pre_logits=True).numpy()
        logits = module(images).numpy()
    assert close(
        run(emitter.write("features", plan, format=GraphFormat(features=True)).graph, images.numpy()), embedding
    )
    fixed = emitter.write("fixed", plan, format=GraphFormat(batch=2)).graph
    assert close(run(fixed, images.numpy()), logits)
    shape = onnx.load(fixed, load_external_data=False).graph.input[0].type.tensor_type.shape
    assert [d.dim_value for d in shape.dim] == [2, 3, 64, 64]
    alone = tmp_path / "elsewhere" / "alone.onnx"
    alone.parent.mkdir()
    alone.write_bytes(emitter.write("alone", plan, format=GraphFormat(single_file=True)).graph.read_bytes())
    assert close(run(alone, images.numpy()), logits)


def test_ten_variants_take_hardly_more_room_than_the_dense_model(tmp_path):
    model = make_model(dict(img_size=224, patch_size=16, embed_dim=192, depth=12, num_heads=3, num_classes=1000))
    pack(model, random_ranking(model.anatomy), tmp_path / "elastic")
    (tmp_path / "family").mkdir()
    elastic = Elastic.load(tmp_path / "elastic")
    emitter = GraphWriter(Blueprint.of(elastic), tmp_path / "family")
    alone = emitter.write("alone", Plan.dense(model.anatomy), format=GraphFormat(single_file=True)).graph
    dense_bytes = alone.stat().st_size
    alone.unlink()
    for percent in range(0, 60, 6):
        emitter.write(f"s{percent}", elastic.planner.sparsity(percent / 100))
    assert len(list((tmp_path / "family").glob("*.onnx"))) == 10
    total = sum(path.stat().st_size for path in (tmp_path / "family").iterdir())
    assert total <= 1.05 * dense_bytes


def test_all_offsets_are_aligned_and_metadata_says_what_it_is(tmp_path):
    model, emitter, _ = emitter_of("deit_tiny_patch16_224", tmp_path)
    loaded = onnx.load(emitter.write("x", uneven_plan(model.anatomy)).graph, load_external_data=False)
    offsets = [int(e.value) for t in loaded.graph.initializer for e in t.external_data if e.key == "offset"]
    assert offsets
    assert not any(offset % 4096 for offset in offsets)
    properties = {p.key: p.value for p in loaded.metadata_props}
    assert properties["snapvit.variant"] == "x"
    assert json.loads(properties["snapvit.preprocessing"])["input_size"] == [3, 64, 64]


def test_a_device_without_torch_cuts_corrects_emits_and_runs(tmp_path):
    model, _, elastic = emitter_of("deit_tiny_patch16_224", tmp_path, factors=True)
    plan = elastic.planner.flops(0.6)
    script = f"""
import sys
for name in ("torch", "timm", "torchvision"):
    sys.modules[name] = None
import numpy as np
from pathlib import Path
from snapvit_export.elastic.folder import Elastic
from snapvit_export.graph.writer import Blueprint, GraphWriter
from snapvit_export.runtimes.ort import OrtSession
elastic = Elastic.load({str(tmp_path / "elastic")!r})
plan = elastic.planner.flops(0.6)
emitter = GraphWriter(Blueprint.of(elastic), Path({str(tmp_path / "family")!r}))
written = emitter.write("x", plan, elastic.corrected_layers(plan))
with OrtSession(written.graph, 1) as session:
    np.save({str(tmp_path / "got.npy")!r}, session.run(np.load({str(tmp_path / "images.npy")!r})))
"""
    images = np.random.default_rng(0).standard_normal((2, 3, *model.anatomy.image)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    subprocess.run([sys.executable, "-c", script], check=True)
    assert close(np.load(tmp_path / "got.npy"), Reference(elastic, plan, corrected=True)(images.astype(np.float64)))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_counts_in_any_block(data):
    name = data.draw(st.sampled_from(sorted(FAMILIES.values())))
    module, _ = small(name)
    model = as_model(module, name, {})
    heads = tuple(data.draw(st.integers(1, b.heads)) for b in model.anatomy.blocks)
    plan = Plan(heads=heads, neurons=tuple(data.draw(st.integers(1, b.hidden)) for b in model.anatomy.blocks))
    ranking = random_ranking(model.anatomy, seed=2)
    images = torch.randn(2, 3, *model.anatomy.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = shrink(module, ranking, plan)(images).numpy()
    with tempfile.TemporaryDirectory() as folder:
        pack(model, ranking, Path(folder) / "elastic")
        drawn = Blueprint.of(Elastic.load(Path(folder) / "elastic"))
        for flavour in FLAVOURS:
            written = writer_of(drawn, Path(folder), flavour).write(flavour, plan, format=GraphFormat(flavour=flavour))
            assert close(run(written.graph, images.numpy()), wanted)
