"""Graphs that merge tokens: equal to the merging module in every family, flavour, batch and precision, ties or not."""

import importlib
import os
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import shape_inference

from helpers.graphs import FLAVOURS, close, exact_and, run, writer_of
from helpers.images import noise, noise_arrays
from helpers.models import EVERY_KIND, FAMILIES, SOME_MODELS, model_of
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.checks import gates
from snapvit_export.checks.activations import all_values
from snapvit_export.checks.gates import (
    LEAST_COSINE,
    TOLERANCE,
    agreement,
    require_close_graph,
    require_same_graph,
    require_same_in_runtime,
)
from snapvit_export.checks.inspect import inspect, why_not
from snapvit_export.checks.merging import follow, places, read_matches, run_and_read, smallest_margins
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import GateFailed
from snapvit_export.family.folder import read_family
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.progress import Silent
from snapvit_export.prune.blocks.merging import holder_of, outputs_and_matches
from snapvit_export.prune.build import ModuleCutter
from snapvit_export.prune.correct.policy import Corrector
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes.session import open_session
from snapvit_export.selection.elastic_builder import ElasticBuilder
from snapvit_export.selection.on_device import noise as device_noise
from snapvit_export.selection.point import Point
from snapvit_export.selection.variant_builder import VariantBuilder
from snapvit_export.target import Target

FEWER = ["fp16", "int8-dynamic", "int8-static"]
ROUNDING = 2e-5  # of the largest output, between torch and ONNX Runtime in float32
FORBIDDEN = {"NonZero", "Loop", "If", "Scan", "Range", "Size", "Where"}


def merging_plan(anatomy) -> Plan:
    """Other heads, neurons and merges in every block; the 9 patch tokens that block 2 sees are an odd number."""
    return uneven_plan(anatomy).with_tokens((3, 4, 2))


def merging_plans(anatomy) -> dict[str, Plan]:
    """Plans that merge with different heads, without an attention or an MLP, and in numbers that are special."""
    hidden = anatomy.neurons
    return {
        "uneven": merging_plan(anatomy),
        "without an attention": Plan(heads=(2, 0, 4), neurons=(9, 7, hidden[2]), merged=(5, 0, 3)),
        "as many as possible": Plan(heads=(4, 4, 4), neurons=hidden, merged=(8, 4, 2)),
        "without an MLP": Plan(heads=(4, 3, 4), neurons=(0, 8, 0), merged=(1, 2, 3)),
        "five in B": Plan(heads=(4, 4, 4), neurons=hidden, merged=(6, 2, 1)),  # as many as DINOv3 has prefix tokens
    }


@pytest.fixture
def deit(tmp_path):
    """A model, its ranking, a writer of float32 graphs, a merging Plan, and images."""
    model = model_of("deit_tiny_patch16_224")
    ranking = random_ranking(model.anatomy, seed=1)
    writer = GraphWriter(blueprint(model, ranking), tmp_path)
    return model, ranking, writer, merging_plan(model.anatomy), noise_arrays(model.anatomy, 6)


def test_rotations_follow_where_as_many_tokens_stay_in_place_as_are_in_front(tmp_path):
    model = model_of("vit_small_patch16_dinov3")
    plan = uneven_plan(model.anatomy).with_tokens((6, 1, 0))
    assert model.anatomy.prefix == (model.anatomy.patches - 6) // 2 == 5  # of both block 1 notes the places
    ranking, images = random_ranking(model.anatomy, seed=1), noise_arrays(model.anatomy, 3)
    path = GraphWriter(blueprint(model, ranking), tmp_path).write("x", plan).graph
    wanted, _ = outputs_and_matches(shrink(model.module, ranking, plan), torch.from_numpy(images))
    assert close(run(path, images), wanted)


@pytest.mark.parametrize(("name", "extra"), EVERY_KIND, ids=[f"{n} {e}" for n, e in EVERY_KIND])
def test_graphs_equal_the_merging_module(name, extra, tmp_path):
    model = model_of(name, **extra)
    ranking = random_ranking(model.anatomy, seed=1)
    drawn, images = blueprint(model, ranking), noise_arrays(model.anatomy, 3)
    for title, plan in merging_plans(model.anatomy).items():
        wanted, matches = outputs_and_matches(shrink(model.module, ranking, plan), torch.from_numpy(images))
        unmerged = shrink(model.module, ranking, plan.with_tokens())(torch.from_numpy(images)).detach().numpy()
        assert not close(unmerged, wanted), "merging must matter for this test to say anything"
        for flavour in FLAVOURS:
            path = writer_of(drawn, tmp_path, flavour).write("x", plan, format=GraphFormat(flavour)).graph
            onnx.checker.check_model(str(path), full_check=True)
            what = f"{title} {flavour}"
            require_same_graph(what, wanted, matches, path, images, ROUNDING)
            one = {i: match.of(np.arange(1)) for i, match in matches.items()}
            require_same_graph(what, wanted[:1], one, path, images[:1], ROUNDING)  # the same file, another batch


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", SOME_MODELS)
def test_all_shapes_are_known_but_for_the_batch_and_no_sizes_are_computed(name, flavour, tmp_path):
    model = model_of(name)
    writer = writer_of(blueprint(model, random_ranking(model.anatomy)), tmp_path, flavour)
    plan, format = merging_plan(model.anatomy), GraphFormat(flavour)
    merged = onnx.load(writer.write("x", plan, format=format).graph, load_external_data=False)
    dense = onnx.load(writer.write("y", plan.with_tokens(), format=format).graph, load_external_data=False)
    inferred = shape_inference.infer_shapes(merged, check_type=True, strict_mode=True, data_prop=True)
    shapes = {v.name: v.type.tensor_type.shape.dim for v in inferred.graph.value_info if ".merge." in v.name}
    assert len(shapes) > 50
    assert not {name: dims for name, dims in shapes.items() if not all(d.dim_value for d in dims[1:])}
    ops = [[node.op_type for node in graph.graph.node] for graph in (merged, dense)]
    assert not {op for op in ops[0] if op.startswith("Scatter") or op in FORBIDDEN}
    assert ops[0].count("Shape") == ops[1].count("Shape")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_fixed_batch_merges_the_same(deit, flavour, tmp_path):
    _, _, writer, plan, images = deit
    writer = writer_of(writer.blueprint, tmp_path, flavour)
    wanted = run_and_read(writer.write("any", plan, format=GraphFormat(flavour)).graph, images[:3])
    fixed = writer.write("two", plan, format=GraphFormat(flavour, batch=2)).graph
    require_same_graph("batches", *wanted, fixed, images[:3], ROUNDING)
    assert np.array_equal(read_matches(fixed, images[:3])[0].order, wanted[1][0].order)


def test_a_merge_that_nothing_reads_is_not_written(tmp_path):
    for pooling, blocks in (("token", [0, 1]), ("avg", [0, 1, 2])):
        model = model_of("vit_tiny_patch16_224", global_pool=pooling)
        writer = GraphWriter(blueprint(model, random_ranking(model.anatomy)), tmp_path)
        path = writer.write("x", merging_plan(model.anatomy)).graph
        assert sorted(read_matches(path, noise_arrays(model.anatomy, 1))) == blocks


@pytest.mark.parametrize("precision", FEWER)
@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_fewer_bits_pass_their_gates(name, precision, tmp_path):
    model = model_of(name)
    drawn, plan = blueprint(model, random_ranking(model.anatomy, seed=1)), merging_plan(model.anatomy)
    images = noise_arrays(model.anatomy, 6)
    for flavour in FLAVOURS:
        exact, written, _ = exact_and(precision, drawn, plan, tmp_path, images, flavour)
        onnx.checker.check_model(str(written.graph), full_check=True)
        require_close_graph(f"{precision} {flavour}", exact.graph, written.graph, images, precision)


@pytest.mark.parametrize("precision", FEWER)
def test_sizes_are_whole_numbers_of_float32_in_every_precision(deit, precision, tmp_path):
    model, ranking, _, plan, images = deit
    _, written, _ = exact_and(precision, blueprint(model, ranking), plan, tmp_path, images, "portable")
    nodes = onnx.load(written.graph, load_external_data=False).graph.node
    names = [node.input[0] for node in nodes if node.op_type == "Log"]
    assert len(names) == 2  # blocks 1 and 2 see merged tokens
    found = next(all_values(written.graph, names, [images]))
    for name in names:
        assert found[name].dtype == np.float32
        assert np.array_equal(found[name], np.rint(found[name]))
        assert (found[name].sum(1) == model.anatomy.tokens).all()


@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_openvino_gives_what_onnx_runtime_gives(name, tmp_path):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'snapvit-export[openvino]'")
    from snapvit_export.runtimes.openvino import OpenVinoSession

    model = model_of(name)
    images = noise_arrays(model.anatomy, 4)
    writer = GraphWriter(blueprint(model, random_ranking(model.anatomy, seed=1)), tmp_path)
    path = writer.write("x", merging_plan(model.anatomy)).graph
    with OpenVinoSession(path, 1) as session:
        assert close(session.run(images), run(path, images))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8-static", "fp8"])
@pytest.mark.parametrize("name", SOME_MODELS)
def test_tensorrt_builds_it_in_the_precision_it_is_called(name, precision, tmp_path):
    if os.environ.get("SNAPVIT_REQUIRE_RUNTIMES"):
        importlib.import_module("tensorrt_rtx")  # a failure there, not a skip
    package = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install tensorrt-rtx")
    from snapvit_export.runtimes.tensorrt.network import BuildSettings, TensorRT
    from snapvit_export.runtimes.tensorrt.session import build_engine

    model = model_of(name)
    drawn, plan = blueprint(model, random_ranking(model.anatomy, seed=1)), merging_plan(model.anatomy)
    if precision == "fp32":
        graph = writer_of(drawn, tmp_path, "tensorrt").write("x", plan, format=GraphFormat("tensorrt")).graph
    else:
        graph = exact_and(precision, drawn, plan, tmp_path, noise_arrays(model.anatomy, 4), "tensorrt")[1].graph
    found = build_engine(graph, precision, BuildSettings(), TensorRT(package), None)
    kinds = {"fp32": {"fp32"}, "fp16": {"fp16"}, "int8-static": {"int8", "fp16"}, "fp8": {"fp8", "fp16"}}
    assert set(found.counts) == kinds[precision]
    assert why_not(graph, inspect(graph), "tensorrt") is None


def test_a_stream_that_does_not_fit_fp16_is_merged_in_float32_and_tensorrt_is_told(tmp_path):
    model = model_of("deit_tiny_patch16_224")
    model.module.blocks[0].mlp.fc2.bias.data[3] = 60_000  # more than fp16 has, with a margin
    drawn, plan = blueprint(model, random_ranking(model.anatomy, seed=1)), merging_plan(model.anatomy)
    images = noise_arrays(model.anatomy, 4)
    exact, written, numerics = exact_and("fp16", drawn, plan, tmp_path, images, "tensorrt")
    assert "stream" in numerics.wide
    require_close_graph("fp16", exact.graph, written.graph, images, "fp16")
    package = pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install tensorrt-rtx")
    from snapvit_export.runtimes.tensorrt.network import BuildSettings, TensorRT
    from snapvit_export.runtimes.tensorrt.session import build_engine

    assert "fp32" in build_engine(written.graph, "fp16", BuildSettings(), TensorRT(package), None).counts


def test_decisions_are_those_of_the_module(deit):
    model, ranking, writer, plan, images = deit
    module = shrink(model.module, ranking, plan)
    _, wanted = outputs_and_matches(module, torch.from_numpy(images))
    path = writer.write("x", plan).graph
    assert (smallest_margins(path, images) > 1e-6).all()  # no ties here
    found = read_matches(path, images)
    assert sorted(found) == [0, 1]
    for i, match in found.items():
        assert np.abs(match.cosines - wanted[i].cosines).max() < 1e-5
        assert np.array_equal(match.order, wanted[i].order)
        assert np.array_equal(match.best, wanted[i].best)
    here = places(wanted, model.anatomy.with_counts(plan))
    assert np.array_equal(here[2], holder_of(module).groups.places.numpy())
    assert [len(np.unique(here[i][0])) for i in range(3)] == [13, 9, 7]


def test_inspecting_a_file_tells_its_tokens(deit):
    _, _, writer, plan, _ = deit
    assert inspect(writer.write("x", plan).graph).tokens == (14, 10, 8)
    assert inspect(writer.write("y", plan.with_tokens()).graph).tokens == (17, 17, 17)


# Ties. Every patch of a constant image is the same where there are no positions, and so is every cosine: rounding alone
# decides what is merged, and every decision is right.


@pytest.fixture
def tied(tmp_path):
    model = model_of("vit_tiny_patch16_224", pos_embed="none")
    ranking = random_ranking(model.anatomy, seed=1)
    images = np.stack([np.full((3, *model.anatomy.image), value, np.float32) for value in (0.5, -1.0, 0.1)])
    return model, ranking, GraphWriter(blueprint(model, ranking), tmp_path), merging_plan(model.anatomy), images


def test_exact_ties_are_undecided_and_pass_between_module_and_all_flavours(tied, tmp_path):
    model, ranking, writer, plan, images = tied
    wanted, matches = outputs_and_matches(shrink(model.module, ranking, plan), torch.from_numpy(images))
    reference = None
    for flavour in FLAVOURS:
        own = writer_of(writer.blueprint, tmp_path, flavour)
        path = own.write("x", plan, format=GraphFormat(flavour)).graph
        assert (smallest_margins(path, images) < 1e-6).all()
        require_same_graph(flavour, wanted, matches, path, images)
        assert np.array_equal(run(path, images), run(path, images))
        if reference is None:
            reference = run_and_read(path, images)
        require_same_graph("flavours", *reference, path, images)


def test_ties_that_were_decided_otherwise_pass_by_the_same_merges(tied):
    """Every second patch is the same as the one before: all pairs match as well, and it matters which of them merge."""
    _, _, writer, plan, images = tied
    path = writer.write("x", plan).graph
    left = np.random.default_rng(0).standard_normal((3, 3, 64, 2, 1, 16)).astype(np.float32)
    images = np.repeat(left, 2, axis=4).reshape(images.shape)
    matches = read_matches(path, images)
    order = matches[0].order.copy()
    order[:, [2, 3]] = order[:, [3, 2]]  # the last of the three that go, and the first that stays
    turned = {**matches, 0: matches[0]._replace(order=order)}
    turned[1] = follow(path, images, turned)[1][1]  # block 1 decides for what it then sees
    wanted, _ = follow(path, images, turned)
    assert agreement(wanted, run(path, images)).max_abs > 10 * TOLERANCE
    require_same_graph("other ties", wanted, turned, path, images)


# What must not pass


def test_decisions_that_are_not_the_best_do_not_pass(deit):
    _, _, writer, plan, images = deit
    path = writer.write("x", plan).graph
    _, matches = run_and_read(path, images)
    worst = {i: match._replace(order=match.order[:, ::-1].copy()) for i, match in matches.items()}
    wanted, _ = follow(path, images, worst)
    with pytest.raises(GateFailed, match="x: block 0 merges other tokens, and their cosines differ by"):
        require_same_graph("x", wanted, worst, path, images)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("takes the smallest", "does not take the best matches"),
        ("forgets the sizes", "outputs differ by"),
        ("adds nothing up", "block 1 merges other tokens, and their cosines differ by"),
    ],
)
def test_a_graph_that_merges_wrongly_does_not_pass(deit, damage, says):
    model, ranking, writer, plan, images = deit
    wanted, matches = outputs_and_matches(shrink(model.module, ranking, plan), torch.from_numpy(images))
    path = writer.write("x", plan).graph
    require_same_graph("x", wanted, matches, path, images)
    damaged(path, damage)
    with pytest.raises(GateFailed, match=says):
        require_same_graph("x", wanted, matches, path, images)


def damaged(path: Path, how: str) -> None:
    graph = onnx.load(path, load_external_data=False)
    for node in graph.graph.node:
        if how == "takes the smallest" and "blocks.0.merge.order" in node.output:
            node.attribute.append(onnx.helper.make_attribute("largest", 0))
        if how == "forgets the sizes" and node.op_type == "Log":
            node.op_type = "Sqrt"
        if how == "adds nothing up" and node.name == "blocks.0.merge.of_stream.sub":
            node.input[1] = node.input[0]
    path.write_bytes(graph.SerializeToString())


def test_flips_of_a_reduced_precision_are_compared_with_the_same_merges_and_wrong_ones_do_not_pass(deit, tmp_path):
    model, ranking, _, plan, _ = deit
    images = noise_arrays(model.anatomy, 40)
    exact, written, _ = exact_and("fp16", blueprint(model, ranking), plan, tmp_path, images[:4], "portable")
    apart = smallest_margins(exact.graph, images)
    near = images[np.argsort(apart)[:8]]  # the likeliest to flip
    assert require_close_graph("fp16", exact.graph, written.graph, near, "fp16").cosine >= LEAST_COSINE["fp16"]
    damaged(written.graph, "takes the smallest")
    with pytest.raises(GateFailed, match="block 0 does not take the best matches"):
        require_close_graph("fp16", exact.graph, written.graph, near, "fp16")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8-dynamic"])
def test_a_variant_that_merges_is_built_through_all_gates(precision, tmp_path):
    model = model_of("deit_tiny_patch16_224")
    ranking, images = random_ranking(model.anatomy, seed=1), noise(model, 16)
    target = Target(runtime="onnxruntime", precision=precision, batch=1, threads=1)
    folders = [tmp_path / "family", tmp_path / "exact"]
    for folder in folders:
        folder.mkdir()
    corrector = Corrector(model, ranking, None, images, Silent())
    cutter = ModuleCutter(model, corrector)
    builder = VariantBuilder(cutter, target, GraphFormat("ort"), images, *folders, provenance={}, progress=Silent())
    plan = merging_plan(model.anatomy)
    built = builder.build("merged", Point(plan, precision), keep=True)
    assert built.plan == plan
    assert built.parity is not None
    assert built.parity <= TOLERANCE
    assert inspect(built.path).tokens == model.anatomy.tokens_after(plan)


@pytest.mark.parametrize("flavour", ["portable", "ort"])
def test_a_device_cuts_a_variant_that_merges_without_torch_through_its_gates(family_and_elastic, tmp_path, flavour):
    manifest = read_family(family_and_elastic / "family")
    packed, target = Elastic.load(family_and_elastic / "elastic"), manifest.target.target
    inputs = partial(device_noise, manifest, 4)
    builder = ElasticBuilder(packed, manifest, target, GraphFormat(flavour), inputs, tmp_path, Silent())
    plan = manifest.plan(manifest.variant("s30"))
    merged = plan.with_tokens([2 if heads else 0 for heads in plan.heads])
    built = builder.build("merged", Point(merged, "fp32"), keep=True)
    assert inspect(built.path).tokens == manifest.anatomy.tokens_after(merged)
    assert inspect(built.path).opset == (17 if flavour == "portable" else 23)


def test_a_runtime_that_merges_is_compared_with_onnx_runtime(deit, monkeypatch):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'snapvit-export[openvino]'")
    _, _, writer, plan, images = deit
    path = writer.write("x", plan).graph
    target = Target(runtime="openvino", precision="fp32", batch=1, threads=1)
    require_same_in_runtime("x", path, target, images)
    with open_session(path, target) as session:
        wrong = session.run(images)[:, ::-1]  # of every image

    class Wrong:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def run(self, _):
            return wrong

    monkeypatch.setattr(gates, "open_session", lambda *_: Wrong())
    with pytest.raises(GateFailed, match="x: openvino and ONNX Runtime"):
        require_same_in_runtime("x", path, target, images)
