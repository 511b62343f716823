"""Criteria: the released code's numbers where it has them, direct definitions elsewhere, and every family."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from helpers.models import FAMILIES, randomise, small
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.rank.criteria import CRITERIA, Batch, make_criterion
from snapvit_export.prune.rank.criteria.gradients import SNIP, SQUARED, SummedGradient
from snapvit_export.prune.rank.criteria.losses import SelfSupervised, batch_generator, self_supervised_losses
from snapvit_export.prune.rank.criteria.views import DISTINCT_WEIGHTS, PAIRED_WEIGHTS, Views
from snapvit_export.prune.rank.criteria.weights import lamp

PER_SAMPLE = ("self-supervised", "cross-entropy")
BY_LOSS = ("fptp", "llm-surgeon", "nvit")  # where the loss is all that a name with labels changes
ALL = [(name, {}) for name in CRITERIA if name.removesuffix("-cross-entropy") not in BY_LOSS or name in BY_LOSS]
ALL += [(name, {"reduction": "per_sample"}) for name in PER_SAMPLE]
IDS = [" ".join([name, *options.values()]) for name, options in ALL]
every_criterion = pytest.mark.parametrize(("name", "options"), ALL, ids=IDS)


def batches(count: int = 4, size: int = 3, side: int = 32, classes: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, size, 3, side, side, generator=generator)
    labels = torch.randint(classes, (count, size), generator=generator)
    return [Batch(images[i], labels[i], i) for i in range(count)]


def summed(contributions) -> list[torch.Tensor]:
    return [sum(same) for same in zip(*contributions)]


def scores_of(criterion, module, given):
    sums = summed(criterion.contribution(module, batch) for batch in given)
    return criterion.finish(module, sums, sum(len(batch.images) for batch in given))


def close(got, wanted, relative: float) -> bool:
    """Each block on its own, neurons and heads: by norm."""
    pairs = [*zip(got.neurons, wanted.neurons), *zip(got.heads, wanted.heads)]
    return all(np.linalg.norm(a - b) <= relative * np.linalg.norm(b) for a, b in pairs)


# The released code's numbers


@dataclass
class GivenCrops:
    """The self-supervised loss on crops that were drawn elsewhere, four images to a batch."""

    crops: torch.Tensor  # (images, V, 3, H, W)
    weights: torch.Tensor
    needs = "images"
    settings = {}  # noqa: RUF012

    def __call__(self, module, batch):
        own = self.crops[4 * batch.number : 4 * batch.number + 4]
        return self_supervised_losses(module, Views(own.transpose(0, 1), self.weights))


@pytest.fixture
def golden(shared):
    folder = shared / "golden"
    return dict(np.load(folder / "scores.npz")), dict(np.load(folder / "inputs.npz"))


@pytest.fixture
def golden_model(shared) -> VisionTransformer:
    config = dict(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=4, num_classes=10)
    module = VisionTransformer(**config).eval()
    module.load_state_dict(load_file(shared / "golden" / "tiny_vit.safetensors"))
    return module


def assert_as_released(scores, golden, key: str, by_norm: float = 1e-5, each: float = 1e-4) -> None:
    for got, wanted in ((scores.neurons, golden[f"{key}_mlp"]), (scores.heads, golden[f"{key}_head"])):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted):
            assert np.linalg.norm(a - b) <= by_norm * np.linalg.norm(b)
            matters = b > 1e-4 * b.max()
            assert (np.abs(a - b)[matters] <= each * b[matters]).all()


def given_crops(inputs, views: str) -> GivenCrops:
    weights = PAIRED_WEIGHTS if views == "ref" else DISTINCT_WEIGHTS
    return GivenCrops(torch.from_numpy(inputs[f"crops_{views}"]), weights)


NUMBERS = [Batch(torch.empty(0), None, number) for number in range(4)]  # GivenCrops looks only at the number


@pytest.mark.parametrize("views", ["ref", "distinct"])
def test_gradients_are_those_of_the_released_code(golden, golden_model, views):
    scores, inputs = golden
    criterion = SummedGradient("x", given_crops(inputs, views), SQUARED)
    sums = summed(criterion.contribution(golden_model, batch) for batch in NUMBERS)
    wanted = [scores[f"dino_{views}_grad_{layer}_{i}"] for layer in ("fc1", "qkv") for i in range(4)]
    for a, b in zip(sums, wanted, strict=True):
        assert np.linalg.norm(a.numpy() - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("views", ["ref", "distinct"])
@pytest.mark.parametrize(("key", "rule"), [("dino", SQUARED), ("snip_dino", SNIP)])
def test_label_free_scores_are_those_of_the_released_code(golden, golden_model, views, key, rule):
    scores, inputs = golden
    criterion = SummedGradient("x", given_crops(inputs, views), rule)
    sums = summed(criterion.contribution(golden_model, batch) for batch in NUMBERS)
    assert_as_released(criterion.finish(golden_model, sums, 16), scores, f"{key}_{views}")


@pytest.mark.parametrize(("name", "key"), [("cross-entropy", "ce"), ("snip-cross-entropy", "snip_ce")])
def test_cross_entropy_scores_are_those_of_the_released_code(golden, golden_model, name, key):
    scores, inputs = golden
    images, labels = torch.from_numpy(inputs["eval_images"]), torch.from_numpy(inputs["labels"])
    given = [Batch(a, b, i) for i, (a, b) in enumerate(zip(images.split(16), labels.split(16)))]
    assert_as_released(scores_of(make_criterion(name), golden_model, given), scores, key)


def test_lamp_is_that_of_the_released_code_up_to_its_rounding(golden, golden_model):
    """The released form, in float32, is ||w||^2 minus a running sum: where little is left, at the largest entries, its
    own rounding is 2.6e-5 of a block and 1.5e-4 of a row. WrittenGraph that way, ours agrees to 5e-8."""
    scores, _ = golden
    assert_as_released(make_criterion("lamp").finish(golden_model, [], 0), scores, "lamp", by_norm=4e-5, each=2e-4)


def test_paired_views_stand_for_twelve(golden, golden_model):
    """Two distinct images with weights 2 and 20 give the gradients of 2 and 10 copies with all 22 terms."""
    crops = torch.from_numpy(golden[1]["crops_ref"])[:4].transpose(0, 1)
    few = self_supervised_losses(golden_model, Views(crops, PAIRED_WEIGHTS)).mean()
    many = self_supervised_losses(golden_model, Views(crops[[0, 0] + [1] * 10], DISTINCT_WEIGHTS)).mean()
    assert torch.allclose(few, many, rtol=1e-6)
    weight = golden_model.blocks[0].mlp.fc1.weight
    a, b = (torch.autograd.grad(loss, weight)[0] for loss in (few, many))
    assert (a - b).norm() <= 1e-5 * b.norm()


# Direct definitions

FUSED_WITH_OWN_BIASES = "eva_giant_patch14_224"  # its attention calls F.linear past the qkv module
HARD = ["deit_tiny_patch16_224", "eva02_tiny_patch14_224", FUSED_WITH_OWN_BIASES, "vit_giant_patch14_dinov2"]


def image_by_image(name: str, module, batch: Batch):
    """Squared gradients of one image at a time by plain autograd; a crop's box depends on the batch's number alone."""
    blocks, criterion, total = blocks_of(module), make_criterion(name), None
    for image, label in zip(batch.images, batch.labels):
        alone = Batch(image[None], label[None], batch.number)
        gradients = criterion.contribution(module, alone)  # of one image, the mean is that image
        squares = [mean_square(g, i, blocks) for i, g in enumerate(gradients)]
        total = squares if total is None else [a + b for a, b in zip(total, squares)]
    return total


def mean_square(gradient, i: int, blocks):
    if i < len(blocks):
        return gradient[: blocks[i].mlp.fc2.in_features].square().mean(1)  # the gate is the first half
    attn = blocks[i - len(blocks)].attn
    values = gradient[-attn.num_heads * attn.head_dim :]
    return values.reshape(attn.num_heads, -1).square().mean(1)


@pytest.mark.parametrize("family", HARD)
@pytest.mark.parametrize("name", PER_SAMPLE)
def test_per_sample_is_the_mean_over_single_images(name, family):
    module, _ = small(family)
    batch = batches(1, 3, side=64)[0]
    criterion = make_criterion(name, reduction="per_sample")
    got = criterion.contribution(module, batch)
    for a, b in zip(got, image_by_image(name, module, batch), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()
    scores = criterion.finish(module, got, 3)
    assert np.allclose(scores.neurons[0], got[0].numpy() / 3, rtol=1e-6, atol=0)
    assert np.allclose(scores.heads[0], got[3].numpy() / 3, rtol=1e-6, atol=0)


def losses_under_masks(module, batch, heads, neurons):
    """The loss with explicit factors on what block 1's heads give proj and its neurons give fc2."""
    block = blocks_of(module)[1]
    spread = heads.repeat_interleave(block.attn.head_dim)
    hooks = [
        block.attn.proj.register_forward_pre_hook(lambda _, x: (x[0] * spread,)),
        block.mlp.fc2.register_forward_pre_hook(lambda _, x: (x[0] * neurons,)),
    ]
    losses = SelfSupervised()(module, batch)
    for hook in hooks:
        hook.remove()
    return losses


@pytest.mark.parametrize("family", HARD)
def test_mask_fisher_is_the_squared_gradient_of_explicit_masks(family):
    module, _ = small(family)
    batch = batches(1, 3, side=64)[0]
    got = make_criterion("fisher-masks").contribution(module, batch)
    block = blocks_of(module)[1]
    heads = torch.ones(block.attn.num_heads, requires_grad=True)
    neurons = torch.ones(block.mlp.fc2.in_features, requires_grad=True)
    wanted_heads, wanted_neurons = torch.zeros_like(heads), torch.zeros_like(neurons)
    for loss in losses_under_masks(module, batch, heads, neurons):
        by_heads, by_neurons = torch.autograd.grad(loss, (heads, neurons), retain_graph=True)
        wanted_heads, wanted_neurons = wanted_heads + by_heads**2, wanted_neurons + by_neurons**2
    assert (got[1] - wanted_neurons).norm() <= 1e-4 * wanted_neurons.norm()
    assert (got[4] - wanted_heads).norm() <= 1e-4 * wanted_heads.norm()


def inputs_of_layer(module: torch.nn.Module, linear: torch.nn.Linear, given: list[Batch]) -> np.ndarray:
    """What a layer reads over all images and tokens, in float64: (n, in)."""
    seen = []
    hook = linear.register_forward_pre_hook(lambda _, x: seen.append(x[0].detach().numpy()))
    with torch.no_grad():
        module(torch.cat([batch.images for batch in given]))
    hook.remove()
    return seen[0].reshape(-1, linear.in_features).astype(np.float64)


@pytest.mark.parametrize("family", HARD)
def test_variance_is_numpys_on_recorded_activations(family):
    module, _ = small(family)
    given = batches(2, 3, side=64)
    scores = scores_of(make_criterion("variance"), module, given)
    block = blocks_of(module)[1]
    for linear, got, unit in (
        (block.mlp.fc2, scores.neurons[1], 1),
        (block.attn.proj, scores.heads[1], block.attn.head_dim),
    ):
        x = inputs_of_layer(module, linear, given)
        column = x.var(0) * (linear.weight.detach().numpy().astype(np.float64) ** 2).sum(0)
        assert np.allclose(got, column.reshape(-1, unit).sum(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("family", HARD)
def test_flow_divergence_is_the_share_of_a_structure_in_what_its_layer_gives(family):
    module, _ = small(family)
    given = batches(2, 3, side=64)
    scores = scores_of(make_criterion("divergence"), module, given)
    block = blocks_of(module)[1]
    for linear, got, unit in (
        (block.mlp.fc2, scores.neurons[1], 1),
        (block.attn.proj, scores.heads[1], block.attn.head_dim),
    ):
        x = inputs_of_layer(module, linear, given)
        weight = linear.weight.detach().numpy().astype(np.float64)
        whole = np.linalg.norm(x @ weight.T, axis=1).mean()
        columns = np.arange(linear.in_features).reshape(-1, unit)
        wanted = [np.linalg.norm(x[:, own] @ weight[:, own].T, axis=1).mean() / whole for own in columns]
        assert np.allclose(got, wanted, rtol=1e-4, atol=0)


def test_lamp_is_its_definition_also_where_entries_are_equal_or_zero():
    w = torch.tensor([[3.0, -1.0, 0.0], [1.0, 2.0, 0.5]])
    values = w.flatten().tolist()
    wanted = [abs(v) / sum(u * u for u in values if abs(u) >= abs(v)) ** 0.5 for v in values]
    assert np.allclose(lamp(w).flatten(), wanted, rtol=1e-12, atol=0)
    assert lamp(torch.zeros(2, 2)).tolist() == [[0, 0], [0, 0]]


def test_lamp_of_a_large_matrix_stays_a_number():
    """In float32 the sum of what is left would fall below zero at the largest entries."""
    w = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    w[0, 0] = 1e-6
    entries = lamp(w)
    assert torch.isfinite(entries).all()
    assert float(entries.max()) == 1.0  # the largest entry against itself
    assert int(entries.argmax()) == int(w.abs().argmax())


@pytest.mark.parametrize("family", HARD)
def test_weight_criteria_read_the_first_projection_and_the_values(family):
    module, _ = small(family)
    block = blocks_of(module)[2]
    fc1 = block.mlp.fc1_g if hasattr(block.mlp, "fc1_g") else block.mlp.fc1
    rows = fc1.weight.detach()[: block.mlp.fc2.in_features].double()
    qkv = block.attn.v_proj if block.attn.qkv is None else block.attn.qkv
    values = qkv.weight.detach()[-block.attn.proj.in_features :].double()
    magnitude = make_criterion("magnitude").finish(module, [], 0)
    assert np.allclose(magnitude.neurons[2], rows.square().sum(1).sqrt(), rtol=1e-6, atol=0)
    heads = values.reshape(block.attn.num_heads, -1)
    assert np.allclose(magnitude.heads[2], heads.square().sum(1).sqrt(), rtol=1e-6, atol=0)
    scores = make_criterion("lamp").finish(module, [], 0)
    assert np.allclose(scores.neurons[2], lamp(rows).mean(1), rtol=1e-6, atol=0)
    by_row = lamp(values).mean(1).reshape(block.attn.num_heads, -1)
    assert np.allclose(scores.heads[2], by_row.mean(1), rtol=1e-6, atol=0)


def test_taylor_is_the_squared_product_summed(tiny_model):
    given = batches()
    criterion = make_criterion("taylor")
    sums = summed(criterion.contribution(tiny_model.module, batch) for batch in given)
    scores = criterion.finish(tiny_model.module, sums, 12)
    block = tiny_model.module.blocks[0]
    products = (sums[0] * block.mlp.fc1.weight.detach()) ** 2  # (hidden, E)
    assert np.allclose(scores.neurons[0], products.sum(1), rtol=1e-5, atol=0)
    values = ((sums[3] * block.attn.qkv.weight.detach()) ** 2)[-48:]  # (heads*head_dim, E)
    assert np.allclose(scores.heads[0], values.reshape(4, -1).sum(1), rtol=1e-5, atol=0)


def test_random_scores_depend_on_the_seed_alone(tiny_model):
    first, again, other = (make_criterion("random", seed=s).finish(tiny_model.module, [], 0) for s in (3, 3, 4))
    assert close(again, first, 0)
    assert not np.array_equal(first.neurons[0], other.neurons[0])
    assert not np.array_equal(first.heads[0], other.heads[0])
    assert not np.array_equal(first.neurons[0], first.neurons[1])


# What every criterion promises


@every_criterion
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_family_gets_one_finite_score_per_structure(family, name, options):
    module, _ = small(family)
    anatomy = read_anatomy(module, family)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    scores = scores_of(make_criterion(name, **options), module, batches(2, 2, side=64))
    assert tuple(map(len, scores.heads)) == anatomy.heads
    assert tuple(map(len, scores.neurons)) == anatomy.neurons
    for block in (*scores.heads, *scores.neurons):
        assert block.dtype == np.float32
        assert np.isfinite(block).all()
        assert (block >= 0).all()
        assert len(set(block.tolist())) > 1
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


@every_criterion
@pytest.mark.parametrize("family", ["deit_tiny_patch16_224", "vit_small_plus_patch16_dinov3"])
def test_a_pruned_model_is_scored_like_any_other(family, name, options):
    module, _ = small(family)
    anatomy = read_anatomy(module, family)
    ranking = Ranking(
        *[[np.arange(n, dtype=np.float32) for n in counts] for counts in (anatomy.heads, anatomy.neurons)]
    )
    pruned = shrink(module, ranking, Plan(heads=(1, 4, 3), neurons=(9, 20, 7)))
    scores = scores_of(make_criterion(name, **options), pruned, batches(1, 2, side=64))
    assert tuple(map(len, scores.heads)) == (1, 4, 3)
    assert tuple(map(len, scores.neurons)) == (9, 20, 7)


@every_criterion
def test_two_processes_that_share_the_batches_give_the_same_scores(tiny_model, name, options):
    given = batches()
    alone = scores_of(make_criterion(name, **options), tiny_model.module, given)
    criterion = make_criterion(name, **options)
    halves = [[criterion.contribution(tiny_model.module, given[i]) for i in own] for own in ((3, 1), (2, 0))]
    together = criterion.finish(tiny_model.module, summed(summed(half) for half in halves), 12)
    assert close(together, alone, 1e-5)


@every_criterion
def test_a_contribution_depends_on_its_batch_alone(tiny_model, name, options):
    given = batches(2)
    criterion = make_criterion(name, **options)
    criterion.contribution(tiny_model.module, given[0])
    torch.rand(7)  # nor on torch's global generator
    later = criterion.contribution(tiny_model.module, given[1])
    fresh = make_criterion(name, **options).contribution(tiny_model.module, given[1])
    assert bool(later) == (criterion.needs != "nothing")
    assert all(torch.equal(a, b) for a, b in zip(later, fresh, strict=True))


@pytest.mark.parametrize(("name", "options"), [("variance", {}), ("cross-entropy", {"reduction": "per_sample"})])
def test_where_nothing_is_drawn_the_batch_size_does_not_matter(tiny_model, name, options):
    given = batches(2, 6)
    halved = [
        Batch(images, labels, 0)
        for batch in given
        for images, labels in zip(batch.images.split(2), batch.labels.split(2))
    ]
    assert len(halved) == 6
    criterion = make_criterion(name, **options)
    large, little = (scores_of(criterion, tiny_model.module, way) for way in (given, halved))
    assert close(little, large, 1e-5)


@pytest.mark.parametrize("name", ["self-supervised", "variance", "fisher-masks"])
def test_a_neuron_that_reaches_nothing_scores_zero(tiny_model, name):
    with torch.no_grad():
        tiny_model.module.blocks[1].mlp.fc2.weight[:, 7] = 0
        tiny_model.module.blocks[1].attn.proj.weight[:, 12:24] = 0  # head 1
    scores = scores_of(make_criterion(name), tiny_model.module, batches())
    assert np.flatnonzero(scores.neurons[1] == 0).tolist() == [7]
    assert np.flatnonzero(scores.heads[1] == 0).tolist() == [1]


def test_crops_depend_on_the_seed_and_on_the_number_of_the_batch():
    draws = {
        (seed, number): float(torch.rand(1, generator=batch_generator(seed, number)))
        for seed in range(5)
        for number in range(50)
    }
    assert len(set(draws.values())) == 250
    assert float(torch.rand(1, generator=batch_generator(3, 7))) == draws[3, 7]


@pytest.mark.parametrize("name", ["self-supervised", "snip", "taylor", "fisher-masks"])
def test_seed_and_views_change_label_free_scores(tiny_model, name):
    given = batches(2)
    first, seeded, distinct = (
        scores_of(make_criterion(name, **options), tiny_model.module, given)
        for options in ({}, {"seed": 1}, {"views": "distinct"})
    )
    assert not close(seeded, first, 1e-3)
    assert not close(distinct, first, 1e-3)


# Settings and refusals


def test_settings_are_json_and_tell_criteria_apart():
    asked = [*ALL, *[(name, {"views": "distinct"}) for name in ("self-supervised", "snip")], ("random", {"seed": 1})]
    described = [json.dumps(make_criterion(name, **options).settings, sort_keys=True) for name, options in asked]
    assert len(set(described)) == len(asked)
    assert make_criterion("self-supervised", seed=4).settings == {
        "criterion": "self-supervised",
        "views": "paired",
        "seed": 4,
        "reduction": "summed",
    }
    assert make_criterion("snip-cross-entropy").settings["alpha"] == 1e-3


def test_needs_are_told_before_any_work():
    needs = {name: make_criterion(name).needs for name in CRITERIA}
    assert {name for name in needs if needs[name] == "labels"} == {n for n in CRITERIA if n.endswith("cross-entropy")}
    assert [name for name in needs if needs[name] == "nothing"] == ["lamp", "magnitude", "random"]


def test_an_unknown_criterion_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="'entropy'") as refused:
        make_criterion("entropy")
    assert all(name in str(refused.value) for name in CRITERIA)


@pytest.mark.parametrize("name", CRITERIA)
def test_options_a_criterion_does_not_have_are_refused_unless_default(name):
    make_criterion(name, views="paired", reduction="summed", seed=5)
    for option, value in (("views", "distinct"), ("reduction", "per_sample")):
        if option in CRITERIA[name].options:
            assert make_criterion(name, **{option: value}).settings[option] == value
        else:
            with pytest.raises(UsageError, match=f"{name} has no {option}"):
                make_criterion(name, **{option: value})


@pytest.mark.parametrize("options", [{"views": "many"}, {"reduction": "mean"}])
def test_unknown_options_are_refused_with_the_known_ones(options):
    with pytest.raises(UsageError, match="Known: (paired, distinct|summed, per_sample)"):
        make_criterion("self-supervised", **options)


@pytest.mark.parametrize("name", ["cross-entropy", "snip-cross-entropy"])
def test_cross_entropy_refuses_what_it_cannot_use_in_one_line(tiny_model, name):
    criterion, batch = make_criterion(name), batches(1)[0]
    with pytest.raises(SnapvitError, match="needs labels"):
        criterion.contribution(tiny_model.module, Batch(batch.images, None, 0))
    with pytest.raises(SnapvitError, match="from 0 to 5, but this model has 5 classes"):
        criterion.contribution(tiny_model.module, Batch(batch.images, torch.tensor([0, 5, 1]), 0))
    headless = randomise(
        VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=0)
    )
    with pytest.raises(SnapvitError, match="no classifier"):
        criterion.contribution(headless, batch)


@pytest.mark.parametrize("name", [name for name in CRITERIA if name != "random"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_broken_model_stops_with_one_line(tiny_model, name, value):
    tiny_model.module.blocks[0].mlp.fc1.weight.data[3] = value
    with pytest.raises(SnapvitError, match="not (a )?finite number") as refused:
        scores_of(make_criterion(name), tiny_model.module, batches(1))
    assert "\n" not in str(refused.value)


def test_cross_entropy_is_torchs_own(tiny_model):
    batch = batches(1)[0]
    wanted = F.cross_entropy(tiny_model.module(batch.images), batch.labels)
    weight = tiny_model.module.blocks[0].mlp.fc1.weight
    got = make_criterion("cross-entropy").contribution(tiny_model.module, batch)[0]
    assert torch.allclose(got, torch.autograd.grad(wanted, weight)[0], rtol=1e-4, atol=1e-7)
