"""Variants that differ in tokens alone share their weights, and each of them outlives the others."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from helpers.graphs import close, run
from helpers.images import noise
from helpers.models import make_model
from helpers.plans import half_plan
from helpers.rankings import random_ranking
from helpers.timing import short_timings
from snapvit_export.elastic.folder import Elastic
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.precision import GraphPrecision
from snapvit_export.graph.writer import Blueprint, GraphWriter, WrittenGraph
from snapvit_export.model.plan import Plan
from snapvit_export.profiling.sample_plans import sample_plans
from snapvit_export.profiling.timer import Timer
from snapvit_export.progress import Silent
from snapvit_export.prune.correct.elastic import make_factors
from snapvit_export.prune.pack import pack
from snapvit_export.prune.stats.observe import observe
from snapvit_export.runtimes.session import device_for
from snapvit_export.selection.candidates import BuiltVariant, Candidates, write_samples
from snapvit_export.selection.elastic_builder import adopt
from snapvit_export.storage.atomic import sha256
from snapvit_export.target import Target

TARGET = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
DEIT_TINY = dict(img_size=224, patch_size=16, embed_dim=192, depth=12, num_heads=3, num_classes=1000)


def packed(folder: Path, kwargs: dict, images: int) -> Elastic:
    """An Elastic folder that corrects."""
    model = make_model(kwargs)
    ranking = random_ranking(model.anatomy)
    pack(model, ranking, folder, make_factors(model, ranking, observe(model, noise(model, images))))
    return Elastic.load(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Elastic:
    return packed(tmp_path_factory.mktemp("tiny") / "elastic", DEIT_TINY, 4)


@pytest.fixture
def elastic(tmp_path) -> Elastic:
    kwargs = dict(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=4, num_classes=5)
    return packed(tmp_path / "elastic", kwargs, 20)


def weights_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.bin"))


def token_plans(plan: Plan, kind: str) -> list[Plan]:
    """Ten Plans of one width with other tokens each."""
    if kind == "merged":
        return [plan.with_tokens(merged=[count] * 11 + [0]) for count in range(4, 14)]
    return [plan.with_tokens(grid=(side, side)) for side in range(4, 14)]


@pytest.mark.parametrize("kind", ["merged", "grid"])
def test_ten_token_variants_of_one_width_add_less_than_a_megabyte(tiny, kind, tmp_path):
    writer = GraphWriter(Blueprint.of(tiny), tmp_path)
    width = half_plan_of_deit_tiny(tiny)
    corrected = tiny.corrected_layers(width)
    first = writer.write("width", width, corrected)
    before = weights_in(tmp_path)
    written = [writer.write(f"t{n}", plan, corrected) for n, plan in enumerate(token_plans(width, kind))]
    assert all(set(first.weights) <= set(each.weights) for each in written)
    assert len({each.graph.read_bytes() for each in written}) == 10
    added = weights_in(tmp_path) - before
    assert added < 1_000_000
    assert (added == 0) == (kind == "merged")  # merging needs no weights at all


def half_plan_of_deit_tiny(elastic: Elastic) -> Plan:
    """Two of three heads and half of the neurons everywhere."""
    return Plan(heads=(2,) * 12, neurons=tuple(n // 2 for n in elastic.anatomy.neurons))


def as_built(name: str, plan: Plan, written: WrittenGraph, kept: bool = True) -> BuiltVariant:
    return BuiltVariant(
        name=name,
        path=written.graph,
        weights=written.weights,
        plan=plan,
        precision="fp32",
        sha256=sha256(written.graph),
        size_bytes=written.size_bytes,
        correction="elastic",
        precision_cosine=None,
        kept=kept,
    )


def candidates_of(elastic: Elastic, built: list[BuiltVariant], builder=None) -> Candidates:
    return Candidates(elastic.anatomy, TARGET, Silent(), builder, built=built)


def three(elastic: Elastic, folder: Path) -> tuple[list[BuiltVariant], dict[str, np.ndarray]]:
    """The dense variant, and two of one corrected width at two resolutions; and what each says of some images."""
    writer = GraphWriter(Blueprint.of(elastic), folder)
    width = half_plan(elastic.anatomy)
    plans = {"dense": Plan.dense(elastic.anatomy), "large": width, "small": width.with_tokens(grid=(3, 3))}
    built, said = [], {}
    for name, plan in plans.items():
        written = writer.write(name, plan, None if name == "dense" else elastic.corrected_layers(plan))
        built.append(as_built(name, plan, written))
        said[name] = run(written.graph, images_of(elastic, plan))
    return built, said


def images_of(elastic: Elastic, plan: Plan) -> np.ndarray:
    shape = (2, 3, *elastic.anatomy.image_of(plan))
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_variant_works_after_the_one_that_wrote_its_weights_is_gone(elastic, tmp_path):
    family = tmp_path / "family"
    family.mkdir()
    built, said = three(elastic, family)
    assert len(list(family.glob("corrected-*.bin"))) == len(list(family.glob("positions-*.bin"))) == 1
    candidates = candidates_of(elastic, built)
    candidates.keep_only(["dense", "small"])
    assert not (family / "large.onnx").exists()
    small = candidates.built["small"]
    assert close(run(small.path, images_of(elastic, small.plan)), said["small"])
    assert {weights.file for weights in candidates.weight_files(["dense", "small"])} == {
        path.name for path in family.glob("*.bin")
    }
    candidates.keep_only(["dense"])
    assert {path.name for path in family.iterdir()} == {"dense.onnx", "weights.bin"}


def test_variants_that_share_weights_are_adopted_one_by_one(elastic, tmp_path):
    scratch, family = tmp_path / "scratch", tmp_path / "family"
    scratch.mkdir()
    family.mkdir()
    built, said = three(elastic, scratch)
    shutil.copy(scratch / "weights.bin", family)
    for variant in (each for each in built if each.name != "dense"):
        there = adopt(family, variant)
        assert there.path.parent == family
        assert close(run(there.path, images_of(elastic, there.plan)), said[there.name])
    assert {path.name for path in family.glob("*.onnx")} == {"large.onnx", "small.onnx"}


def test_a_variant_that_is_made_again_leaves_nothing_of_the_first_time(elastic, tmp_path):
    plan = half_plan(elastic.anatomy)
    writer = GraphWriter(Blueprint.of(elastic), tmp_path / "family")
    (tmp_path / "family").mkdir()

    class Corrects:
        """First as a probe, then by a correction that gives other matrices."""

        def build(self, name, point, keep, before):
            plan, corrected = point.plan, elastic.corrected_layers(point.plan)
            if keep:
                corrected = {key: array * np.float32(1.5) for key, array in corrected.items()}
            return as_built(name, plan, writer.write(name, plan, corrected), kept=keep)

    candidates = candidates_of(elastic, [], Corrects())
    candidates.add("x", plan)
    (probe,) = (tmp_path / "family").glob("corrected-*.bin")
    candidates.add("x", plan, keep=True)
    (final,) = (tmp_path / "family").glob("corrected-*.bin")
    assert probe != final
    assert final in candidates.built["x"].weights


def test_weights_of_both_flavours_are_one_file_and_damage_is_repaired(elastic, tmp_path):
    plan = half_plan(elastic.anatomy)
    writer = GraphWriter(Blueprint.of(elastic), tmp_path)
    corrected = elastic.corrected_layers(plan)
    first = writer.write("a", plan, corrected, format=GraphFormat("portable"))
    (own,) = (path for path in first.weights if path.name != "weights.bin")
    data = own.read_bytes()
    own.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    second = writer.write("b", plan, corrected, format=GraphFormat("ort"))
    assert second.weights == first.weights
    assert own.read_bytes() == data
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_sample_configurations_leave_neither_files_nor_gaps(elastic, tmp_path):
    family = tmp_path / "family"
    family.mkdir()
    writer = GraphWriter(Blueprint.of(elastic), family)

    class Builder:
        """Writes graphs of uncorrected weights."""

        def build(self, name, point, keep, before):
            return as_built(name, point.plan, writer.write(name, point.plan))

        def write_samples(self, plans, precision):
            return write_samples(writer, plans, GraphFormat(), GraphPrecision())

    samples = sample_plans(elastic.anatomy, removable=True)
    lacks_the_first = next(plan for plan in samples if not plan.heads[0] and not plan.neurons[0])
    timer = Timer(TARGET, device_for(TARGET.runtime), images_of(elastic, lacks_the_first)[:1])
    candidates = Candidates(elastic.anatomy, TARGET, Silent(), Builder(), timer)
    candidates.add("dense", Plan.dense(elastic.anatomy))
    candidates.add("shares", lacks_the_first)  # its positions are those of a sample
    before, said = listed(family), run(family / "shares.onnx", images_of(elastic, lacks_the_first))
    assert any(name.startswith("positions-") for name in before)
    with short_timings():
        assert candidates.latency_model("fp32", removable=True) is not None
    assert listed(family) == before
    assert np.array_equal(run(family / "shares.onnx", images_of(elastic, lacks_the_first)), said)


def listed(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
