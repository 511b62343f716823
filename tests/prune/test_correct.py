"""Correction: equal to a direct least-squares solve, to the released code's arrays, and useful in every family."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch_export import to_onnx

from helpers.corrections import corrected
from helpers.images import noise
from helpers.models import FAMILIES, features, model_of, randomise
from helpers.plans import half_plan, uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.calibration.images import Images
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.correction.cholesky import columns_of, make_factor
from snapvit_export.correction.moments import Damping, Moments, Statistics
from snapvit_export.correction.sparsegpt import left_to_right
from snapvit_export.errors import SnapvitError
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.correct.elastic import correct_module, make_factors
from snapvit_export.prune.correct.sequential import correct_in_sequence
from snapvit_export.prune.import_scores import import_scores
from snapvit_export.prune.models.load import Model, ModelDescription, load_model, save_model
from snapvit_export.prune.models.masking import masked
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.stats.observe import observe
from snapvit_export.runtimes.ort import OrtSession

NO_DAMPING = Damping(fraction=0.0)
every_family = pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())


def relative(got, wanted) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


# One layer, against a direct solve on the raw activations


@dataclass
class Problem:
    x: np.ndarray  # (n, d) activations
    weight: np.ndarray  # (E, d)
    order: np.ndarray  # structures, best first
    unit: int

    @property
    def moments(self) -> Moments:
        centred = self.x - self.x.mean(0)
        return Moments(len(self.x), self.x.mean(0), centred.T @ centred / len(self.x))

    def kept(self, keep: int) -> np.ndarray:
        return columns_of(self.order[:keep], self.unit)


def problem(seed: int, structures: int, unit: int, outputs: int = 5) -> Problem:
    """Correlated columns of uneven size with means that matter."""
    rng = np.random.default_rng(seed)
    d = structures * unit
    mixing = np.eye(d) + 0.3 * rng.standard_normal((d, d))
    x = rng.standard_normal((6 * d + 20, d)) @ mixing * np.exp(rng.normal(0, 0.5, d)) + rng.normal(0, 2, d)
    return Problem(x, rng.standard_normal((outputs, d)), rng.permutation(structures), unit)


any_problem = st.builds(problem, st.integers(0, 10**6), st.integers(1, 14), st.sampled_from([1, 1, 3, 8]))


@settings(max_examples=60, deadline=None)
@given(any_problem, st.data())
def test_any_width_is_the_least_squares_fit_with_a_bias(layer, data):
    keep = data.draw(st.integers(0, len(layer.order)))
    weight, shift = make_factor(layer.weight, layer.moments, layer.order, layer.unit, NO_DAMPING).corrected(keep)
    columns = np.hstack([layer.x[:, layer.kept(keep)], np.ones((len(layer.x), 1))])
    wanted = np.linalg.lstsq(columns, layer.x @ layer.weight.T, rcond=None)[0].T  # (E, keep*unit + 1)
    assert relative(np.hstack([weight, shift[:, None]]), wanted) < 1e-6


@settings(max_examples=60, deadline=None)
@given(any_problem, st.sampled_from(["mean", "max", "percentile"]), st.data())
def test_damping_is_what_rows_of_a_scaled_identity_would_do(layer, kind, data):
    keep, damping = data.draw(st.integers(1, len(layer.order))), Damping(kind=kind, fraction=0.05)
    weight, shift = make_factor(layer.weight, layer.moments, layer.order, layer.unit, damping).corrected(keep)
    variance = layer.x.var(0)
    added = 0.05 * {"mean": variance.mean(), "max": variance.max(), "percentile": np.quantile(variance, 0.95)}[kind]
    rows = np.vstack([layer.x - layer.x.mean(0), np.sqrt(added * len(layer.x)) * np.eye(layer.x.shape[1])])
    wanted = np.linalg.lstsq(rows[:, layer.kept(keep)], rows @ layer.weight.T, rcond=None)[0].T
    assert relative(weight, wanted) < 1e-6
    output, fitted = layer.x @ layer.weight.T, layer.x[:, layer.kept(keep)] @ weight.T + shift
    assert np.allclose(output.mean(0), fitted.mean(0))  # the bias makes up for the mean whatever the damping


@settings(max_examples=40, deadline=None)
@given(any_problem)
def test_the_error_curve_is_the_error_that_is_measured(layer):
    gain = np.random.default_rng(0).normal(1, 0.5, len(layer.weight))
    factor = make_factor(layer.weight, layer.moments, layer.order, layer.unit, NO_DAMPING, gain)
    errors = factor.errors()
    assert len(errors) == len(layer.order) + 1
    for keep, told in enumerate(errors):
        weight, shift = factor.corrected(keep)
        off = layer.x @ layer.weight.T - layer.x[:, layer.kept(keep)] @ weight.T - shift
        assert np.isclose(np.square(off * gain).sum(1).mean(), told, rtol=1e-6, atol=1e-9 * errors[0])


def test_a_factor_that_spans_several_blocks_of_the_solver_is_exact():
    layer = problem(3, structures=700, unit=1)
    weight, _ = make_factor(layer.weight, layer.moments, layer.order, 1, NO_DAMPING).corrected(600)
    kept = layer.kept(600)
    s = layer.moments.covariance
    assert relative(weight, np.linalg.solve(s[np.ix_(kept, kept)], s[kept] @ layer.weight.T).T) < 1e-6


def test_columns_that_never_vary_go_into_the_bias():
    layer = problem(1, structures=8, unit=1)
    layer.x[:, [2, 5]] = 3.0, 0.0
    for damping in (NO_DAMPING, Damping()):
        factor = make_factor(layer.weight, layer.moments, layer.order, 1, damping)
        weight, shift = factor.corrected(8)
        output = layer.x[:, layer.kept(8)] @ weight.T + shift
        assert relative(output, layer.x @ layer.weight.T) < 1e-9
        assert all(np.isfinite(part).all() for keep in range(9) for part in factor.corrected(keep))


def test_a_layer_whose_input_never_varies_at_all_stays_finite():
    layer = problem(1, structures=4, unit=2)
    layer.x[:] = layer.x[0]
    factor = make_factor(layer.weight, layer.moments, layer.order, 2)
    for keep in range(5):
        weight, shift = factor.corrected(keep)
        assert np.allclose(layer.x[:1, layer.kept(keep)] @ weight.T + shift, layer.x[:1] @ layer.weight.T)


def test_sizes_that_do_not_belong_together_are_refused():
    layer = problem(1, structures=4, unit=2)
    with pytest.raises(SnapvitError, match="different models"):
        make_factor(layer.weight, layer.moments, [0, 1, 2], 2)
    with pytest.raises(ValueError, match="cannot keep 5"):
        make_factor(layer.weight, layer.moments, layer.order, 2).corrected(5)


# The left-to-right variant


def test_left_to_right_is_exact_when_the_cut_columns_come_first():
    layer = problem(2, structures=10, unit=1)
    mask = np.arange(10) >= 4
    second = layer.moments.uncentred().covariance
    wanted = np.linalg.solve(second[np.ix_(mask, mask)], second[mask] @ layer.weight.T).T
    got = left_to_right(layer.weight, layer.moments, mask, NO_DAMPING)
    assert relative(got[:, mask], wanted) < 1e-9
    assert not got[:, ~mask].any()


def test_left_to_right_leaves_the_columns_before_a_cut_alone():
    layer = problem(2, structures=10, unit=1)
    got = left_to_right(layer.weight, layer.moments, np.arange(10) != 9)
    assert np.array_equal(got[:, :9], layer.weight[:, :9])


# The released code's arrays


@dataclass(frozen=True)
class Ready(Images):
    """Images that are preprocessed already."""

    arrays: np.ndarray | None = None

    def batches(self, size):
        assert self.arrays is not None
        for start in range(0, len(self.arrays), size):
            yield self.arrays[start : start + size]


@dataclass(frozen=True)
class Golden:
    model: Model
    images: Images
    ranking: Ranking
    arrays: dict

    def plan(self, j: int) -> Plan:
        heads, neurons = (self.arrays[f"{kind}_{j}"].sum(1).tolist() for kind in ("keep_head", "keep_mlp"))
        return Plan(heads=tuple(heads), neurons=tuple(neurons))

    def logits(self, module) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(self.arrays["eval_images"])).numpy()


@pytest.fixture
def golden(shared) -> Golden:
    folder = shared / "golden"
    arrays = {**np.load(folder / "inputs.npz"), **np.load(folder / "tiny_keep.npz")}
    arrays |= np.load(folder / "tiny_correction.npz")
    config = dict(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=4, num_classes=10)
    module = VisionTransformer(**config).eval()
    module.load_state_dict(load_file(folder / "tiny_vit.safetensors"))
    pre = Preprocessing(input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    described = ModelDescription(name="golden", architecture="none", kwargs={}, preprocessing=pre)
    images = arrays["eval_images"]
    ready = Ready(np.zeros((len(images), 1, 1, 3), np.uint8), None, pre, "golden", arrays=images)
    ranking = import_scores(folder / "tiny_scores_reference_format.pt")
    return Golden(Model(module, read_anatomy(module, "golden"), described), ready, ranking, arrays)


def uncentred(statistics: Statistics) -> Statistics:
    proj, fc2 = (tuple(m.uncentred() for m in kind) for kind in (statistics.proj, statistics.fc2))
    return replace(statistics, proj=proj, fc2=fc2)


@pytest.mark.parametrize(("kind", "fraction"), [("mean", 0.01), ("max", 0.1), ("percentile", 0.01)])
@pytest.mark.parametrize("j", [2, 5])
def test_the_closed_form_is_that_of_the_released_code(golden, kind, fraction, j):
    plan, damping = golden.plan(j), Damping(kind=kind, fraction=fraction)
    statistics = uncentred(observe(golden.model, golden.images, token_weights=[None] * 4))  # it has all tokens alike
    factors = make_factors(golden.model, golden.ranking, statistics, damping)
    compared = 0
    for name, layers, counts in (("proj", factors.proj, plan.heads), ("fc2", factors.fc2, plan.neurons)):
        for i, (factor, keep) in enumerate(zip(layers, counts)):
            weight, shift = factor.corrected(keep)
            assert relative(weight, golden.arrays[f"elastic_{j}_{kind}_{name}_{i}"]) < 1e-4
            assert not shift.any()
            compared += 1
    assert compared == 8
    small = shrink(golden.model.module, golden.ranking, plan)
    correct_module(small, golden.ranking, plan, factors)
    assert np.abs(golden.logits(small) - golden.arrays[f"elastic_{j}_{kind}_logits"]).max() < 1e-4


@pytest.mark.parametrize("j", [2, 5])
def test_the_left_to_right_path_is_that_of_the_released_code(golden, j):
    plan = golden.plan(j)
    small = correct_in_sequence(golden.model, golden.ranking, plan, golden.images, correction="sparsegpt")
    for i, block in enumerate(blocks_of(small)):
        heads, neurons = np.repeat(golden.arrays[f"keep_head_{j}"][i], 16), golden.arrays[f"keep_mlp_{j}"][i]
        for name, linear, kept in (("proj", block.attn.proj, heads), ("fc2", block.mlp.fc2, neurons)):
            wanted = golden.arrays[f"seq_{j}_{name}_{i}"]
            assert relative(linear.weight.detach().numpy(), wanted[:, kept]) < 1e-4
            assert not wanted[:, ~kept].any()
    assert np.abs(golden.logits(small) - golden.arrays[f"seq_{j}_logits"]).max() < 1e-4


@pytest.mark.parametrize("j", [2, 5])
def test_centred_statistics_and_all_kept_columns_at_once_are_better(golden, j):
    model, ranking, plan = golden.model, golden.ranking, golden.plan(j)
    statistics, dense = observe(model, golden.images), golden.logits(model.module)

    def error(module) -> float:
        return float(np.square(golden.logits(module) - dense).mean())

    ours = error(corrected(model, ranking, plan, statistics))
    closed = error(corrected(model, ranking, plan, uncentred(statistics)))
    left = error(corrected(model, ranking, plan, statistics, correction="sparsegpt"))
    assert ours <= 1.02 * closed  # with these small means a bias gives little
    assert ours < 0.7 * left < 0.7 * error(shrink(model.module, ranking, plan))


# Whole models


@every_family
def test_correction_brings_every_family_nearer_to_its_dense_self(name):
    model = model_of(name)
    images, ranking, plan = noise(model), random_ranking(model.anatomy, seed=1), half_plan(model.anatomy)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    factors = make_factors(model, ranking, observe(model, images))
    plain, mended = (shrink(model.module, ranking, plan) for _ in range(2))
    correct_module(mended, ranking, plan, factors)
    dense = features(model.module, images)
    assert relative(features(mended, images), dense) < 0.5 * relative(features(plain, images), dense)
    assert relative(features(correct_in_sequence(model, ranking, plan, images), images), dense) < 0.5 * relative(
        features(plain, images), dense
    )
    assert read_anatomy(mended, name) == model.anatomy.with_output_biases().with_counts(plan)
    assert all(torch.equal(value, before[key]) for key, value in model.module.state_dict().items())


@every_family
def test_the_corrected_module_is_the_masked_dense_model_with_the_corrected_weights(name):
    """Slicing and correction commute: columns went back to the right places, whatever each block keeps."""
    model = model_of(name)
    images, ranking, plan = noise(model), random_ranking(model.anatomy, seed=1), uneven_plan(model.anatomy)
    factors = make_factors(model, ranking, observe(model, images))
    mended = shrink(model.module, ranking, plan)
    correct_module(mended, ranking, plan, factors)
    for i, block in enumerate(blocks_of(model.module)):
        for linear, factor, order, keep in (
            (block.attn.proj, factors.proj[i], ranking.head_order(i), plan.heads[i]),
            (block.mlp.fc2, factors.fc2[i], ranking.neuron_order(i), plan.neurons[i]),
        ):
            weight, shift = factor.corrected(keep)
            columns = torch.from_numpy(columns_of(order[:keep], factor.unit))
            linear.weight.data[:, columns] = torch.from_numpy(weight).float()
            linear.bias.data += torch.from_numpy(shift).float()
    with masked(model.module, ranking, plan):
        reference = features(model.module, images)
    assert np.abs(features(mended, images) - reference).max() <= 1e-4 * max(1, np.abs(reference).max())


def test_a_layer_that_keeps_everything_keeps_its_very_weights(tiny_model):
    ranking, plan = random_ranking(tiny_model.anatomy), Plan.dense(tiny_model.anatomy)
    mended = corrected(tiny_model, ranking, plan, observe(tiny_model, noise(tiny_model)))
    for key, value in tiny_model.module.state_dict().items():
        assert torch.equal(mended.state_dict()[key], value)


def test_a_layer_without_a_bias_gets_one_that_files_and_graphs_carry(tmp_path):
    kwargs = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=5)
    architecture = "vit_tiny_patch16_224"
    module = randomise(timm.create_model(architecture, **kwargs))
    for block in module.blocks:
        block.attn.proj.bias = block.mlp.fc2.bias = None
    pre = Preprocessing(input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    described = ModelDescription(name="bare", architecture=architecture, kwargs=kwargs, preprocessing=pre)
    model = Model(module, read_anatomy(module, "bare"), described)
    images, ranking, plan = noise(model), random_ranking(model.anatomy), half_plan(model.anatomy)
    mended = corrected(model, ranking, plan, observe(model, images))
    anatomy = model.anatomy.with_output_biases()
    assert "proj" not in model.anatomy.blocks[0].biases
    assert read_anatomy(mended, "bare") == anatomy.with_counts(plan)
    assert sum(p.numel() for p in mended.parameters()) == anatomy.params(plan)
    inputs = next(images.batches(3))
    with OrtSession(to_onnx(mended, anatomy.with_counts(plan), {}), threads=1) as session, torch.no_grad():
        wanted = mended(torch.from_numpy(inputs)).numpy()
        assert np.abs(session.run(inputs) - wanted).max() <= 1e-4 * np.abs(wanted).max()
    save_model(mended, described, tmp_path / "bare")
    again = load_model(str(tmp_path / "bare"))
    assert np.array_equal(features(again.module, images), features(mended, images))


def test_a_file_that_lacks_a_bias_is_refused_as_before(tmp_path):
    model = model_of("deit_tiny_patch16_224")
    for block in blocks_of(model.module):
        block.attn.proj.bias = None
    save_model(model.module, model.description, tmp_path / "m")
    with pytest.raises(SnapvitError, match="lacks blocks.0.attn.proj.bias"):
        load_model(str(tmp_path / "m"))


def test_factors_of_another_ranking_are_refused(tiny_model):
    anatomy, images = tiny_model.anatomy, noise(tiny_model)
    first, second = random_ranking(anatomy, seed=1), random_ranking(anatomy, seed=2)
    factors, plan = make_factors(tiny_model, first, observe(tiny_model, images)), half_plan(anatomy)
    with pytest.raises(SnapvitError, match="another order of heads and neurons"):
        correct_module(shrink(tiny_model.module, second, plan), second, plan, factors)
    louder = Ranking(tuple(2 * s for s in first.head_scores), first.neuron_scores)  # the same order
    correct_module(shrink(tiny_model.module, louder, plan), louder, plan, factors)
    with pytest.raises(SnapvitError, match="columns where the plan keeps"):
        correct_module(shrink(tiny_model.module, first, plan), first, Plan.dense(anatomy), factors)


def test_statistics_of_other_weights_are_refused(tiny_model):
    statistics = observe(tiny_model, noise(tiny_model))
    blocks_of(tiny_model.module)[0].mlp.fc1.weight.data += 1
    changed = replace(tiny_model)  # a Model's hash is that of the weights with which it was first asked for
    with pytest.raises(SnapvitError, match="other weights of tiny"):
        make_factors(changed, random_ranking(tiny_model.anatomy), statistics)


def test_correcting_in_sequence_helps_when_much_is_cut():
    model = model_of("deit_tiny_patch16_224")
    images, ranking = noise(model, 96), random_ranking(model.anatomy, seed=1)
    plan = Plan(heads=(1, 1, 1), neurons=(24, 24, 24))
    dense = features(model.module, images)
    plain = relative(features(corrected(model, ranking, plan, observe(model, images)), images), dense)
    assert relative(features(correct_in_sequence(model, ranking, plan, images), images), dense) < 0.99 * plain


def test_the_first_layer_of_a_sequence_is_corrected_as_without_one(tiny_model):
    images, ranking = noise(tiny_model), random_ranking(tiny_model.anatomy)
    plan = half_plan(tiny_model.anatomy)
    single = corrected(tiny_model, ranking, plan, observe(tiny_model, images))
    walked = correct_in_sequence(tiny_model, ranking, plan, images)
    first, second = (blocks_of(module)[0].attn.proj.weight.detach().numpy() for module in (single, walked))
    assert relative(second, first) < 1e-5
