"""Fewer bits: fp16 and int8 graphs of every family against float32, what they share, and what they refuse."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest

from helpers.graphs import FLAVOURS, exact_and, run, step_by_step
from helpers.images import noise_arrays
from helpers.models import FAMILIES, as_model, make_model, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.allocation.planner import Planner
from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.checks.activations import largest_values
from snapvit_export.checks.gates import agreement, require_close
from snapvit_export.checks.quantisation import MARGIN, _sample, best_range, calibrate, too_large
from snapvit_export.errors import GateFailed, SnapvitError, UsageError
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.precision import GraphPrecision, Range, stored
from snapvit_export.graph.writer import GraphWriter, WrittenGraph
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.pack import blueprint
from snapvit_export.target import check_precision, parse_precision

FEWER = ["fp16", "int8-dynamic", "int8-static"]
# Least cosine of three blocks in int8, on any CPU. A product is off by the steps of its inputs, 1/255 of a span of 8
# deviations, and of its weights, at worst 1/64 of about 3; rounding is even within a step, so by 8 / 255 / sqrt(12) =
# 0.009 and 3 / 64 / sqrt(12) = 0.0135, 0.016 together. Twelve products after each other (qkv, proj, fc1, fc2) make
# sqrt(12) * 0.016 = 0.056, even if nothing went past them: 1 - 0.056^2 / 2.
INT8_COSINE = 0.998
HALF_MAX = float(np.finfo(np.float16).max)


def types_of(written: WrittenGraph) -> dict[str, int]:
    graph = onnx.load(written.graph, load_external_data=False).graph
    return {tensor.name: tensor.data_type for tensor in graph.initializer}


@pytest.mark.parametrize("precision", FEWER)
@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_every_family_computes_nearly_the_same_in_fewer_bits(name, precision, tmp_path):
    module, _ = small(name)
    model = as_model(module, name, {})
    drawn = blueprint(model, random_ranking(model.anatomy, seed=1))
    images, plan = noise_arrays(model.anatomy, 6), uneven_plan(model.anatomy)
    for flavour in FLAVOURS:
        exact, written, _ = exact_and(precision, drawn, plan, tmp_path, images, flavour)
        onnx.checker.check_model(str(written.graph), full_check=True)
        found = agreement(run(exact.graph, images), run(written.graph, images))
        assert found.cosine > (0.9999 if precision == "fp16" else INT8_COSINE), (flavour, found)


@pytest.mark.parametrize("precision", FEWER)
def test_weights_are_stored_in_the_precision_and_shared_by_all_variants(precision, tmp_path):
    model = make_model(dict(img_size=64, patch_size=16, embed_dim=192, depth=4, num_heads=3, num_classes=10))
    ranking = random_ranking(model.anatomy)
    planner, drawn = Planner(ranking, model.anatomy), blueprint(model, ranking)
    images = noise_arrays(model.anatomy, 4)
    exact, dense, numerics = exact_and(precision, drawn, Plan.dense(model.anatomy), tmp_path, images, "ort")
    emitter = GraphWriter(drawn, tmp_path / precision, precision=precision)
    for percent in (20, 40, 60):
        plan = planner.sparsity(percent / 100)
        narrow = calibrate(precision, GraphWriter(drawn, tmp_path / "fp32").write("cut", plan), [images])
        emitter.write(f"s{percent}", plan, format=GraphFormat("ort"), precision=narrow)
    total = sum(path.stat().st_size for path in (tmp_path / precision).iterdir() if path.suffix != ".onnx")
    assert total == (tmp_path / precision / "weights.bin").stat().st_size  # nothing of their own
    share = dense.size_bytes / exact.size_bytes
    assert share < (0.52 if precision == "fp16" else 0.45)
    layer = types_of(dense)["blocks.1.fc1.weight"]
    assert layer == (onnx.TensorProto.FLOAT16 if precision == "fp16" else onnx.TensorProto.INT8)
    assert numerics.precision == precision


@pytest.mark.parametrize("precision", FEWER)
def test_bytes_corrections_and_single_files_work_in_fewer_bits(precision, tmp_path):
    module, _ = small("deit_tiny_patch16_224")
    model = as_model(module, "deit_tiny_patch16_224", {})
    drawn = blueprint(model, random_ranking(model.anatomy, seed=1))
    drawn = replace(drawn, preprocessing=replace_mean(drawn.preprocessing))
    plan = uneven_plan(model.anatomy)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), np.uint8)
    random = np.random.default_rng(2)
    made = {
        f"blocks.1.{layer}": random.standard_normal((rows, 48)[:dims]).astype(np.float32) / 8
        for layer, rows, dims in (
            ("proj.weight", 4 * 12, 2),
            ("fc2.weight", 7, 2),
            ("fc2.bias", 48, 1),
            ("proj.bias", 48, 1),
        )
    }
    options = {"takes_bytes": True, "single_file": True, "corrected": made}
    exact, written, _ = exact_and(precision, drawn, plan, tmp_path, pixels, "ort", **options)
    assert not written.weights
    normalised = drawn.preprocessing.normalise(pixels)
    (tmp_path / "plain").mkdir()
    plain = run(GraphWriter(drawn, tmp_path / "plain").write("x", plan, made).graph, normalised)
    assert (
        agreement(run(GraphWriter(drawn, tmp_path / "plain").write("y", plan).graph, normalised), plain).cosine < 0.99
    )
    assert agreement(plain, run(exact.graph, pixels)).max_abs < 1e-4
    assert agreement(plain, run(written.graph, pixels)).cosine > (0.9999 if precision == "fp16" else INT8_COSINE)


def replace_mean(preprocessing):
    import msgspec

    return msgspec.structs.replace(preprocessing, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_only_the_part_that_would_overflow_stays_in_float32(name, tmp_path):
    module, _ = small(name)
    model = as_model(module, name, {})
    drawn = blueprint(model, Ranking.flat(model.anatomy))
    dense = dict(drawn.dense)  # the hidden units of one block become huge, and what reads them as much smaller
    up = "blocks.1.fc1" if "blocks.1.fc1.weight" in dense else "blocks.1.up"
    for part in ("weight", "bias"):
        dense[f"{up}.{part}"] = dense[f"{up}.{part}"] * np.float32(2**15)
    dense["blocks.1.fc2.weight"] = dense["blocks.1.fc2.weight"] * np.float32(2**-13)
    drawn = replace(drawn, dense=dense)
    images, plan = noise_arrays(model.anatomy, 2), Plan.dense(model.anatomy)
    for flavour in ("ort", "portable"):
        exact, written, numerics = exact_and("fp16", drawn, plan, tmp_path, images, flavour)
        assert numerics.wide == {"blocks.1.mlp"}
        wanted = run(exact.graph, images)
        assert agreement(wanted, run(written.graph, images)).cosine > 0.9999
    emitter = GraphWriter(drawn, tmp_path / "fp16", precision="fp16")
    blind = emitter.write("blind", plan, format=GraphFormat("portable"), precision=GraphPrecision("fp16"))
    assert agreement(wanted, step_by_step(written, images)).cosine > 0.999
    with pytest.raises(GateFailed):
        require_close("blind", wanted, step_by_step(blind, images), "fp16")
    said = {p.key: p.value for p in onnx.load(written.graph, load_external_data=False).metadata_props}
    assert json.loads(said["snapvit.float32_parts"]) == ["blocks.1.mlp"]


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_base_patch16_siglip_224", "vit_giant_patch14_dinov2"])
def test_a_stream_beyond_the_largest_half_stays_in_float32_to_the_end(name, tmp_path):
    module, _ = small(name)
    model = as_model(module, name, {})
    drawn = blueprint(model, Ranking.flat(model.anatomy))
    bias = np.zeros(model.anatomy.embed_dim, np.float32)
    bias[5] = 60000  # one feature of the stream is huge from the first block on, as in large models
    scaled = {
        f"blocks.{i}.fc2.bias": (bias / drawn.dense.get(f"blocks.{i}.scale2", 1)).astype(np.float32) for i in (0, 1)
    }
    drawn = replace(drawn, dense={**drawn.dense, **scaled})
    images, plan = noise_arrays(model.anatomy, 2), Plan.dense(model.anatomy)
    for flavour in ("ort", "portable"):
        exact, written, numerics = exact_and("fp16", drawn, plan, tmp_path, images, flavour)
        assert numerics.wide == {"stream", "output", "blocks.0.mlp", "blocks.1.mlp"}
        onnx.checker.check_model(str(written.graph), full_check=True)
        wanted = run(exact.graph, images)
        assert agreement(wanted, run(written.graph, images)).cosine > 0.9999
    assert agreement(wanted, step_by_step(written, images)).cosine > 0.999
    emitter = GraphWriter(drawn, tmp_path / "fp16", precision="fp16")
    for wide in (set(), numerics.wide - {"output"}, numerics.wide - {"stream"}):  # none is enough
        blind = GraphPrecision("fp16", wide=frozenset(wide))
        assert not np.isfinite(step_by_step(emitter.write("blind", plan, precision=blind), images)).all()


def test_a_margin_is_kept_below_the_largest_half():
    assert too_large({"blocks.2.mlp.gemm": HALF_MAX / MARGIN * 1.01}) == {"blocks.2.mlp"}
    assert too_large({"blocks.2.mlp.gemm": HALF_MAX / MARGIN * 0.99}) == frozenset()
    assert too_large({"blocks.2.attn.wide.mul": 1e9}) == frozenset()  # inside a norm that is in float32 anyway
    assert too_large({"logits": float("inf")}) == {"output"}
    assert too_large({"blocks.0.stream": float("nan")}) == {"output", "stream"}  # what is read from it as well
    assert too_large({"blocks.2.attn.of_stream.slice": 1e6}) == {"output", "stream"}


def test_ranges_have_zero_and_clip_what_is_rare():
    values = np.random.default_rng(0).standard_normal(1 << 15).astype(np.float32)
    values[0] = 60
    span = best_range(values)
    assert 3 < span.high < 60
    scale, zero = span.step(symmetric=False)
    assert (0 - int(zero)) * scale <= -3
    assert Range(0.5, 2.0).step(symmetric=False)[1] == 0  # zero has a value of its own, as paddings need
    assert Range(-1.0, 4.0).step(symmetric=True) == (np.float32(4 / 127), 0)


def test_ranges_about_zero_are_sought_with_the_steps_that_will_be_written():
    values = np.abs(np.random.default_rng(0).standard_normal(1 << 14)).astype(np.float32) - 0.17
    values[:4] = 9
    about_zero, beside = best_range(values, symmetric=True), best_range(values)
    assert about_zero.high < beside.high  # half of the steps are wasted on numbers that never come

    def error(span):
        scale, _ = span.step(symmetric=True)
        return float(np.square(np.rint(values / scale).clip(-128, 127) * scale - values).mean())

    assert error(about_zero) <= error(beside)


@pytest.mark.parametrize("width", [1280, 768, 192])
def test_ranges_are_sought_among_all_features(width):
    values = np.arange(257 * width, dtype=np.float32) % width  # every value is the number of its feature
    taken = np.concatenate(_sample(values.reshape(257, width), 1 << 14, np.random.default_rng(0)))
    assert len(np.unique(taken)) > 0.99 * width


def test_a_bias_too_large_for_int32_stays_a_float_and_is_not_lost(tmp_path):
    module, _ = small("deit_tiny_patch16_224")
    model = as_model(module, "deit_tiny_patch16_224", {})
    drawn = blueprint(model, Ranking.flat(model.anatomy))
    dead = {
        "blocks.1.fc2.weight": 0 * drawn.dense["blocks.1.fc2.weight"],
        "blocks.1.fc2.bias": 3 + 0 * drawn.dense["blocks.1.fc2.bias"],
    }
    drawn = replace(drawn, dense={**drawn.dense, **dead})
    images, plan = noise_arrays(model.anatomy, 3), Plan.dense(model.anatomy)
    exact, written, _ = exact_and("int8-static", drawn, plan, tmp_path, images, "ort")
    assert agreement(run(exact.graph, images), run(written.graph, images)).cosine > 0.999
    names = types_of(written)
    assert "blocks.1.fc2.bias" in names
    assert "blocks.0.fc2.bias.int32" in names


def test_calibration_reads_no_more_memory_than_one_image_at_a_time(tmp_path):
    model = make_model()
    written = GraphWriter(blueprint(model, random_ranking(model.anatomy)), tmp_path).write(
        "x", Plan.dense(model.anatomy)
    )
    together = noise_arrays(model.anatomy, 4)
    one_by_one = [image[None] for image in together]
    assert calibrate("fp16", written, one_by_one) == calibrate("fp16", written, [together])
    largest = largest_values(written.graph, one_by_one)
    assert largest == pytest.approx(largest_values(written.graph, [together]), rel=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"x.onnx", "weights.bin"}


def test_weights_that_fp16_cannot_hold_are_refused_by_name():
    with pytest.raises(SnapvitError, match=r"patch\.weight has values beyond 65504"):
        stored({"patch.weight": np.array([[1e5]], np.float32)}, "fp16")


def test_dead_features_and_tiny_weights_keep_finite_scales():
    weight = np.array([[0, 0], [1, -1], [1e-9, 0]], np.float32)  # (out, in)
    found = stored({"blocks.0.fc1.weight": weight}, "int8-static")
    assert (found["blocks.0.fc1.scale"] > 0).all()
    assert found["blocks.0.fc1.weight"].tolist() == [[0, 0], [127, -127], [0, 0]]


def test_an_emitter_writes_only_its_own_precision(tmp_path):
    model = make_model()
    emitter = GraphWriter(blueprint(model, random_ranking(model.anatomy)), tmp_path, precision="fp16")
    with pytest.raises(ValueError, match="a writer of fp16 cannot write fp32"):
        emitter.write("x", Plan.dense(model.anatomy))


def test_names_of_precisions():
    assert parse_precision("int8") == "int8-dynamic"
    assert parse_precision("fp16") == "fp16"
    with pytest.raises(UsageError, match="no precision is called 'int4'. Known: fp32, fp16"):
        check_precision("int4")


@pytest.mark.parametrize(("precision", "least"), [("fp16", 0.9999), ("int8-dynamic", 0.98), ("int8-static", 0.96)])
def test_a_real_model_on_real_images(precision, least, shared, tmp_path):
    model = load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    parts = calibration_and_held_out(str(shared / "data" / "imagenet-sample"), 16, 0, 8)
    seen, new = (next(prepare(part, model.preprocessing).batches(16)) for part in parts)
    ranking = random_ranking(model.anatomy)
    for plan in (Plan.dense(model.anatomy), Planner(ranking, model.anatomy).flops(0.9)):
        exact, written, _ = exact_and(precision, blueprint(model, ranking), plan, tmp_path, seen, "ort")
        found = agreement(run(exact.graph, new), run(written.graph, new))
        assert found.cosine > least, (plan, found)
