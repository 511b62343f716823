"""int8 layers compute the same on every CPU: proved by bounds and by a CPU without VNNI in numpy, whatever runs this.

`one_int8_layer.saturating` is that CPU. Where qemu is installed it is held against ONNX Runtime's own kernels for one.
"""

import json
import platform
import shutil
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec import UNSET
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from helpers import one_int8_layer
from helpers.graphs import exact_and, step_by_step
from helpers.images import noise_arrays
from helpers.models import FAMILIES, as_model, make_model, small
from helpers.one_int8_layer import LEAST, MOST, extremes, saturating
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.checks.inspect import inspect
from snapvit_export.elastic.folder import Elastic
from snapvit_export.family.folder import read_family
from snapvit_export.graph import writer as emitter_module
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.precision import IN_FIRST, IN_INT8, GraphPrecision, stored
from snapvit_export.graph.writer import GraphWriter, WrittenGraph
from snapvit_export.model.plan import Plan
from snapvit_export.progress import Silent
from snapvit_export.prune.pack import blueprint
from snapvit_export.selection.candidates import BuiltVariant
from snapvit_export.selection.elastic_builder import ElasticBuilder
from snapvit_export.selection.on_device import noise
from snapvit_export.selection.point import Point
from snapvit_export.storage.atomic import sha256

INT8 = ["int8-dynamic", "int8-static"]
QEMU = shutil.which("qemu-x86_64") if platform.machine() == "x86_64" else None


def corrected(anatomy, plan: Plan) -> dict[str, np.ndarray]:
    """A proj and an fc2 of a variant's own, as a correction makes them."""
    random, size = np.random.default_rng(2), anatomy.embed_dim
    rows = {"proj": plan.heads[1] * anatomy.blocks[1].head_dim, "fc2": plan.neurons[1]}
    made = {f"blocks.1.{layer}.weight": random.standard_normal((count, size)) for layer, count in rows.items()}
    made |= {f"blocks.1.{layer}.bias": random.standard_normal(size) for layer in rows}
    return {name: tensor.astype(np.float32) for name, tensor in made.items()}


def initialisers(written: WrittenGraph) -> dict[str, np.ndarray]:
    """The weights that a graph reads, from whichever file."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(written.graph).graph.initializer}


def int8_layers(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """int8 weights by layer, as (in, out)."""
    found = {name.removesuffix(".weight"): w for name, w in tensors.items() if name.endswith(".weight")}
    found = {layer: w for layer, w in found.items() if w.dtype == np.int8}
    return {layer: w if layer.rpartition(".")[2] in IN_FIRST else w.T for layer, w in found.items()}


def largest_sums(weight: np.ndarray) -> tuple[int, int]:
    """The largest and the smallest that 255 x neighbours can add up to, of int8 (in, out)."""
    whole = np.pad(weight.astype(np.int64), ((0, len(weight) % 2), (0, 0)))
    first, second = whole[0::2], whole[1::2]
    upper = 255 * (np.maximum(first, 0) + np.maximum(second, 0))
    lower = 255 * (np.minimum(first, 0) + np.minimum(second, 0))
    return int(upper.max(initial=0)), int(lower.min(initial=0))


def fits(weight: np.ndarray) -> bool:
    upper, lower = largest_sums(weight)
    return lower >= LEAST and upper <= MOST


def is_exact(weight: np.ndarray) -> bool:
    """Whether a CPU without VNNI gives the exact sums for the inputs that make them largest."""
    inputs = extremes(weight)
    return np.array_equal(saturating(inputs, weight), inputs.astype(np.int64) @ weight.astype(np.int64))


def test_the_cpu_in_numpy_saturates_as_the_instruction_does():
    full = np.array([[255, 255, 255]], np.uint8)
    assert saturating(full, np.array([[127], [127], [127]], np.int8)).item() == 32767 + 255 * 127
    assert saturating(full, np.array([[-127], [-127], [1]], np.int8)).item() == -32768 + 255
    assert saturating(full, np.array([[1], [127], [127]], np.int8)).item() == 255 * 255  # only neighbours meet
    assert saturating(full, np.array([[127], [-127], [0]], np.int8)).item() == 0
    assert is_exact(np.full((6, 2), 64, np.int8))
    assert not is_exact(np.full((6, 2), 65, np.int8))


@pytest.mark.parametrize("precision", INT8)
@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_every_layer_of_every_family_is_exact_without_vnni(name, precision, tmp_path):
    model = as_model(small(name)[0], name, {})
    drawn, plan = blueprint(model, random_ranking(model.anatomy, seed=1)), uneven_plan(model.anatomy)
    images, made = noise_arrays(model.anatomy, 2), corrected(model.anatomy, plan)
    for flavour in ("tensorrt", "portable", "ort") if precision == "int8-static" else ("portable", "ort"):
        _, written, numerics = exact_and(precision, drawn, plan, tmp_path, images, flavour, corrected=made)
        layers = int8_layers(initialisers(written))
        assert {layer.rpartition(".")[2] for layer in layers} <= set(IN_INT8)
        assert {"blocks.1.proj", "blocks.1.fc2"} <= set(layers)
        assert len(layers["blocks.1.fc2"]) == 7  # an odd number of inputs: the last has no neighbour
        assert all(is_exact(weight) and fits(weight) for weight in layers.values())
    before = GraphWriter(drawn, tmp_path, precision=precision, sum_bits=32)  # the test can fail: these do overflow
    layers = int8_layers(initialisers(before.write("x", plan, made, format=GraphFormat("ort"), precision=numerics)))
    beyond = [layer for layer, weight in layers.items() if not fits(weight)]
    assert beyond
    assert beyond == [layer for layer, weight in layers.items() if not is_exact(weight)]  # both judges agree
    shared = int8_layers(GraphWriter(drawn, tmp_path, precision=precision).shared)  # at full width
    assert all(fits(weight) for weight in shared.values())


def test_rounding_never_brings_a_pair_beyond_the_bound():
    random = np.random.default_rng(0)
    shapes = [(size, 400) for size in (0, 1, 2, 3, 8, 49)]
    kinds = [
        lambda shape: random.standard_normal(shape),
        lambda shape: random.choice([-1.0, 0.0, 0.25, 1.0], shape),
        lambda shape: np.full(shape, 1.0) * random.uniform(1e-30, 1e30, shape[1]),  # every pair lies on the bound
        lambda shape: random.standard_cauchy(shape),
        lambda shape: (np.arange(shape[0])[:, None] % 2 * 2 + 127.0) * np.ones(shape),  # 127 + 129: halves after it
    ]
    for shape, kind in product(shapes, kinds):
        weight = kind(shape).astype(np.float32)
        for layer, given in (("fc2", weight), ("fc1", weight.T)):
            found = stored({f"blocks.0.{layer}.weight": given}, "int8-static")
            whole = found[f"blocks.0.{layer}.weight"]
            assert fits(whole if layer == "fc2" else whole.T)
            scale = found[f"blocks.0.{layer}.scale"]
            error = np.abs(whole * (scale if layer == "fc2" else scale[:, None]) - given)
            assert (error <= (0.5 + 1e-4) * (scale if layer == "fc2" else scale[:, None])).all()  # nothing is clipped


def test_a_step_is_never_wider_than_that_of_seven_bits():
    weight = np.random.default_rng(0).standard_normal((192, 50)).astype(np.float32)
    steps = {
        bits: stored({"blocks.0.fc2.weight": weight}, "int8-static", bits)["blocks.0.fc2.scale"] for bits in (16, 32)
    }
    assert (steps[32] <= steps[16]).all()
    assert (steps[16] <= np.abs(weight).max(0) / 63.9).all()
    assert np.mean(steps[16] / steps[32]) < 1.5


def test_sums_of_a_whole_layer_with_its_bias_fit_32_bits(tmp_path):
    model = as_model(small("deit_tiny_patch16_224")[0], "deit_tiny_patch16_224", {})
    drawn, plan = blueprint(model, random_ranking(model.anatomy, seed=1)), uneven_plan(model.anatomy)
    made = corrected(model.anatomy, plan)
    _, written, numerics = exact_and(
        "int8-static", drawn, plan, tmp_path, noise_arrays(model.anatomy, 2), "ort", corrected=made
    )
    found = initialisers(written)
    layers = int8_layers(found)
    assert {"blocks.1.fc2.bias.int32", "blocks.1.proj.bias.int32"} <= set(found)
    for layer, weight in layers.items():
        bias = found.get(f"{layer}.bias.int32", np.zeros(weight.shape[1], np.int32)).astype(np.int64)
        assert (np.abs(bias) + 255 * np.abs(weight.astype(np.int64)).sum(0) < 2**31).all()
        if layer in numerics.ranges and f"{layer}.bias" in made:  # in steps of the products, of the scales as written
            step = numerics.ranges[layer].step(symmetric=False)[0] * found[f"{layer}.scale"]
            assert np.array_equal(found[f"{layer}.bias.step"], step)


class MatMulInteger(OpRun):
    """The operator on a CPU without VNNI."""

    def _run(self, a, b, zero=None):
        moved = int(zero) * b.astype(np.int64).sum(0)  # ONNX Runtime takes the zero point off afterwards
        return ((saturating(a.reshape(-1, a.shape[-1]), b) - moved).reshape(*a.shape[:-1], -1).astype(np.int32),)


def test_a_whole_graph_says_the_same_without_vnni_and_what_it_needs(snapvit, tmp_path):
    model = make_model()
    drawn, plan = blueprint(model, random_ranking(model.anatomy)), Plan.dense(model.anatomy)
    images, same = noise_arrays(model.anatomy, 2), {}
    for bits in (16, 32):
        emitter = GraphWriter(drawn, tmp_path, precision="int8-dynamic", sum_bits=bits)
        written = emitter.write("x", plan, format=GraphFormat("portable"), precision=GraphPrecision("int8-dynamic"))
        without = ReferenceEvaluator(str(written.graph), new_ops=[MatMulInteger]).run(None, {"images": images})[0]
        same[bits] = np.array_equal(step_by_step(written, images), without)
        assert inspect(written.graph).int8_sum_bits == bits
        assert f"sums of int8 products within {bits} bits" in snapvit("inspect", written.graph).out
    assert same == {16: True, 32: False}


def test_this_cpu_computes_layers_exactly():
    assert one_int8_layer.found_here(16)["exact"]


@pytest.mark.slow  # every instruction of ONNX Runtime is emulated
@pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64")
def test_an_emulated_cpu_without_vnni_computes_what_the_one_in_numpy_says():
    call = [str(QEMU), "-cpu", "Haswell", sys.executable, one_int8_layer.__file__]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["16"] == {"exact": True, "saturating": True}
    assert found["32"] == {"exact": False, "saturating": True}  # the very numbers: the reference is that CPU


def test_families_from_before_are_read_and_added_to_as_they_are(snapvit, tiny_folder, tmp_path, monkeypatch):
    family, images = tmp_path / "out", ["--data", "digits", "--images", 16]
    with monkeypatch.context() as before:
        before.setattr(emitter_module, "stored", lambda tensors, precision, *_: stored(tensors, precision, 32))
        words = ["export", "--model", tiny_folder, *images, "--sparsity", "0.2", "--precision", "int8-dynamic"]
        assert snapvit(*words, "--recipe", "local", "--out", family).code == 0
    _without_the_key(family / "manifest.json")
    packing = ["pack", "--model", tiny_folder, *images, "--ranking", family / "ranking.safetensors"]
    assert snapvit(*packing, "--out", tmp_path / "elastic").code == 0
    manifest, packed = read_family(family), Elastic.load(tmp_path / "elastic")
    assert manifest.variant("s20").int8_sum_bits is UNSET
    target, format, scratch = manifest.target.target, GraphFormat("ort"), tmp_path / "scratch"
    scratch.mkdir()
    builder = ElasticBuilder(packed, manifest, target, format, partial(noise, manifest, 4), scratch, Silent())
    builder.require_same_model(
        family, BuiltVariant.of(family, manifest.variant("dense"), manifest.anatomy)
    )  # no refusal
    point = Point(manifest.plan(manifest.variant("s20")), "int8-dynamic")
    assert builder.build("new", point, keep=True).int8_sum_bits == 32
    assert sha256(tmp_path / "scratch" / "weights.bin") == sha256(family / "weights.bin")  # one file for all


def _without_the_key(path: Path) -> None:
    manifest = json.loads(path.read_text())
    for variant in manifest["variants"]:
        del variant["int8_sum_bits"]
    path.write_text(json.dumps(manifest))
