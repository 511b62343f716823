"""Fewer bits: fp16 and int8 graphs of every family against float32, what they share, and what they refuse."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import make_model, random_ranking
from onnx.reference import ReferenceEvaluator
from test_families import FAMILIES, small, uneven_plan
from test_graph import run
from test_reference_forward import as_model

from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.errors import GateFailed, SnapvitError, UsageError
from snapvit_export.graph.calibrate import MARGIN, best_range, calibrate, too_large
from snapvit_export.graph.emit import Options
from snapvit_export.graph.emitter import Blueprint, Emitter, Written
from snapvit_export.graph.gates import agreement, require_close
from snapvit_export.graph.numerics import Numerics, Range, stored
from snapvit_export.plan import Plan, Planner
from snapvit_export.prune.load import load_model
from snapvit_export.prune.pack import blueprint
from snapvit_export.ranking import Ranking
from snapvit_export.target import check_precision

FEWER = ["fp16", "int8-dynamic", "int8-static"]
HALF_MAX = float(np.finfo(np.float16).max)


def noise(anatomy, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, *anatomy.image)).astype(np.float32)


def exact_and(precision: str, drawn: Blueprint, plan: Plan, folder: Path, images, flavour: str, **options):
    """The float32 graph of a Plan and the one in that precision, calibrated on `images`."""
    for name in ("fp32", precision):
        (folder / name).mkdir(exist_ok=True)
    takes_bytes = options.pop("takes_bytes", False)
    exact = Emitter(drawn, folder / "fp32", takes_bytes).write("x", plan)
    numerics = calibrate(precision, exact, [images])
    emitter = Emitter(drawn, folder / precision, takes_bytes, precision)
    return exact, emitter.write(flavour, plan, options=Options(flavour, numerics=numerics), **options), numerics


def types_of(written: Written) -> dict[str, int]:
    graph = onnx.load(written.graph, load_external_data=False).graph
    return {tensor.name: tensor.data_type for tensor in graph.initializer}


@pytest.mark.parametrize("precision", FEWER)
@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_every_family_computes_nearly_the_same_in_fewer_bits(name, precision, tmp_path):
    module, _ = small(name)
    model = as_model(module, name, {})
    drawn = blueprint(model, random_ranking(model.anatomy, seed=1))
    images, plan = noise(model.anatomy, 6), uneven_plan(model.anatomy)
    for flavour in ("portable", "ort"):
        exact, written, _ = exact_and(precision, drawn, plan, tmp_path, images, flavour)
        onnx.checker.check_model(str(written.graph), full_check=True)
        found = agreement(run(exact.graph, images), run(written.graph, images))
        assert found.cosine > (0.9999 if precision == "fp16" else 0.98), (flavour, found)


@pytest.mark.parametrize("precision", FEWER)
def test_weights_are_stored_in_the_precision_and_shared_by_all_variants(precision, tmp_path):
    model = make_model(dict(img_size=64, patch_size=16, embed_dim=192, depth=4, num_heads=3, num_classes=10))
    ranking = random_ranking(model.anatomy)
    planner, drawn = Planner(ranking, model.anatomy), blueprint(model, ranking)
    images = noise(model.anatomy, 4)
    exact, dense, numerics = exact_and(precision, drawn, Plan.dense(model.anatomy), tmp_path, images, "ort")
    emitter = Emitter(drawn, tmp_path / precision, precision=precision)
    for percent in (20, 40, 60):
        plan = planner.sparsity(percent / 100)
        narrow = calibrate(precision, Emitter(drawn, tmp_path / "fp32").write("cut", plan), [images])
        emitter.write(f"s{percent}", plan, options=Options("ort", numerics=narrow))
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
    exact, written, _ = exact_and(precision, drawn, plan, tmp_path, pixels, "ort", takes_bytes=True, single_file=True)
    assert not written.weights
    normalised = drawn.preprocessing.normalise(pixels)
    (tmp_path / "plain").mkdir()
    plain = run(Emitter(drawn, tmp_path / "plain").write("x", plan).graph, normalised)
    assert agreement(plain, run(exact.graph, pixels)).max_abs < 1e-4
    assert agreement(plain, run(written.graph, pixels)).cosine > (0.9999 if precision == "fp16" else 0.98)


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
    images, plan = noise(model.anatomy, 2), Plan.dense(model.anatomy)
    for flavour in ("ort", "portable"):
        exact, written, numerics = exact_and("fp16", drawn, plan, tmp_path, images, flavour)
        assert numerics.wide == {"blocks.1.mlp"}
        wanted = run(exact.graph, images)
        assert agreement(wanted, run(written.graph, images)).cosine > 0.9999
    emitter = Emitter(drawn, tmp_path / "fp16", precision="fp16")
    blind = emitter.write("blind", plan, options=Options("portable", numerics=Numerics("fp16")))
    assert agreement(wanted, step_by_step(written, images)).cosine > 0.999
    with pytest.raises(GateFailed):
        require_close("blind", wanted, step_by_step(blind, images), "fp16")
    said = {p.key: p.value for p in onnx.load(written.graph, load_external_data=False).metadata_props}
    assert json.loads(said["snapvit.float32_parts"]) == ["blocks.1.mlp"]


def step_by_step(written: Written, images: np.ndarray) -> np.ndarray:
    """Every operator in the type it is written in: ONNX Runtime leaves halves out on a CPU that has none."""
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(str(written.graph)).run(None, {"images": images})[0]


def test_a_large_stream_stays_in_float32_and_leaves_the_parts_in_half(tmp_path):
    module, _ = small("deit_tiny_patch16_224")
    model = as_model(module, "deit_tiny_patch16_224", {})
    drawn = blueprint(model, Ranking.flat(model.anatomy))
    largest = {"embed.add": HALF_MAX, "blocks.0.attn.gemm": 1.0, "blocks.0.attended": 2.0}
    assert too_large(largest) == {"embed", "stream"}
    numerics = Numerics("fp16", wide=too_large(largest))
    images, plan = noise(model.anatomy, 2), Plan.dense(model.anatomy)
    wanted = run(Emitter(drawn, tmp_path).write("exact", plan).graph, images)
    (tmp_path / "half").mkdir()
    half = Emitter(drawn, tmp_path / "half", precision="fp16")
    for flavour in ("portable", "ort"):
        written = half.write(flavour, plan, options=Options(flavour, numerics=numerics))
        onnx.checker.check_model(str(written.graph), full_check=True)
        assert agreement(wanted, run(written.graph, images)).cosine > 0.9999


def test_a_margin_is_kept_below_the_largest_half():
    assert too_large({"blocks.2.mlp.gemm": HALF_MAX / MARGIN * 1.01}) == {"blocks.2.mlp"}
    assert too_large({"blocks.2.mlp.gemm": HALF_MAX / MARGIN * 0.99}) == frozenset()
    assert too_large({"blocks.2.attn.wide.mul": 1e9}) == frozenset()  # inside a norm that is in float32 anyway
    assert too_large({"logits": float("inf"), "blocks.0.stream": float("nan")}) == {"output", "stream"}


def test_ranges_have_zero_and_clip_what_is_rare():
    values = np.random.default_rng(0).standard_normal(1 << 15).astype(np.float32)
    values[0] = 60
    span = best_range(values)
    assert 3 < span.high < 60
    scale, zero = span.step(symmetric=False)
    assert (0 - int(zero)) * scale <= -3
    assert Range(0.5, 2.0).step(symmetric=False)[1] == 0  # zero has a value of its own, as paddings need
    assert Range(-1.0, 4.0).step(symmetric=True) == (np.float32(4 / 127), 0)


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
    emitter = Emitter(blueprint(model, random_ranking(model.anatomy)), tmp_path, precision="fp16")
    with pytest.raises(ValueError, match="an emitter of fp16 cannot write fp32"):
        emitter.write("x", Plan.dense(model.anatomy))


def test_names_of_precisions():
    assert check_precision("int8") == "int8-dynamic"
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
