"""The fitness of a search: the released values, one function for every family, and what a race may drop."""

import numpy as np
import pytest
import torch

from helpers.images import pictures
from helpers.models import FAMILIES, description, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.allocation.planner import Planner
from snapvit_export.calibration.images import Images
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.errors import SnapvitError
from snapvit_export.model.plan import Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.scores import Scores
from snapvit_export.prune.blocks.functional import (
    all_weights,
    attend_first,
    block_weights,
    embed_tokens,
    pooled,
    read_body,
)
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.models.load import Model
from snapvit_export.prune.models.masking import masked
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import kept, shrink
from snapvit_export.prune.rank.search.engine import OrtEngine, TorchEngine
from snapvit_export.prune.rank.search.fitness import Fitness, Projection
from snapvit_export.prune.rank.search.loop import search
from snapvit_export.prune.rank.search.xnes import XNES

ENGINES = ["torch", "onnxruntime"]


class Ready(Images):
    """Images that are already normalised, as the golden arrays are."""

    def __init__(self, arrays: np.ndarray) -> None:
        preprocessing = Preprocessing(input_size=(3, *arrays.shape[2:]), mean=(0,) * 3, std=(1,) * 3)
        super().__init__(np.zeros((len(arrays), *arrays.shape[2:], 3), np.uint8), None, preprocessing, "golden")
        object.__setattr__(self, "arrays", arrays)

    def batches(self, size: int):
        for start in range(0, len(self), size):
            yield self.arrays[start : start + size]


@pytest.fixture
def golden(shared):
    """The golden model, images and scores."""
    from safetensors.torch import load_file
    from timm.models.vision_transformer import VisionTransformer

    config = dict(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=4, num_classes=10)
    module = VisionTransformer(**config).eval()
    module.load_state_dict(load_file(shared / "golden" / "tiny_vit.safetensors"))
    scores = np.load(shared / "golden" / "scores.npz")
    images = Ready(np.load(shared / "golden" / "inputs.npz")["eval_images"])
    model = Model(module, read_anatomy(module, "golden"), description(name="golden"))
    return model, Scores(tuple(scores["dino_distinct_head"]), tuple(scores["dino_distinct_mlp"])), images


def golden_fitness(golden, pca: int, engine: str) -> Fitness:
    model, scores, images = golden
    return Fitness(model, scores, images, pca=pca, protection=Protection(heads=0.25), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pca", [32, 64])
def test_fitness_is_that_of_the_released_code(shared, golden, pca, engine):
    reference = np.load(shared / "golden" / "fitness.npz")
    fitness = golden_fitness(golden, pca, engine)
    for solution, wanted in zip(reference["solutions"], reference[f"fitness_fp32_pca{pca}"]):
        assert abs(fitness(solution) - wanted) <= 1e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_the_search_ends_at_the_released_vector(shared, golden, engine):
    reference = np.load(shared / "golden" / "xnes_real.npz")
    fitness = golden_fitness(golden, 32, engine)
    by_depth = np.linspace(1.2, 0.8, 4, dtype=np.float32)
    start = np.concatenate([by_depth, np.repeat(by_depth, 4)])
    found = search(fitness, XNES(start, seed=42), evaluations=40)
    assert np.abs(found.best_factors - reference["best_x"]).max() <= 1e-12
    assert abs(found.best_loss - float(reference["best_y"])) <= 1e-6
    assert found.best_loss < found.start_loss
    final = golden[1].scaled(found.best_factors)
    wanted = np.load(shared / "golden" / "tiny_scores.npz")
    neurons, heads = (next(wanted[k] for k in wanted if part in k) for part in ("mlp", "head"))
    assert np.allclose(np.stack(final.neurons), neurons, rtol=1e-6, atol=0)
    assert np.allclose(np.stack(final.heads), heads, rtol=1e-6, atol=0)
    keep = np.load(shared / "golden" / "tiny_keep.npz")
    planner = Planner(Ranking(final.heads, final.neurons), golden[0].anatomy, Protection(heads=0.25))
    for j, (mlp, head) in enumerate(keep["pairs"]):
        plan = planner.pair(mlp, head)
        assert plan.neurons == tuple(keep[f"mlp_keep_counts_{j}"])
        assert plan.heads == tuple(keep[f"head_keep_counts_{j}"])


@pytest.mark.parametrize("engine", [TorchEngine, OrtEngine])
@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_one_function_computes_every_family_at_any_width(name, engine):
    module, _ = small(name)
    anatomy = read_anatomy(module, name)
    ranking, plan = random_ranking(anatomy), uneven_plan(anatomy)
    images = torch.randn(3, 3, *anatomy.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        sliced = shrink(module, ranking, plan)
        wanted = sliced.forward_head(sliced.forward_features(images), pre_logits=True)
        tokens, rope = embed_tokens(module, images)
        body = read_body(module, anatomy, rope)

        def weights(p):
            return all_weights(module, body, [kept(ranking, p, i) for i in range(3)])

        whole = block_weights(blocks_of(module)[0], torch.arange(4), torch.arange(anatomy.neurons[0]), False)
        first = attend_first(tokens, whole, body)
        dense = weights(type(plan).dense(anatomy))
        runner = (
            OrtEngine(body, dense, tokens, first) if engine is OrtEngine else TorchEngine(body, torch.device("cpu"))
        )
        columns = (kept(ranking, plan, 0)[0][:, None] * 12 + torch.arange(12)).flatten()
        got = pooled(module, runner.run(tokens[:2], first[:2, :, columns], runner.prepare(weights(plan))))
    assert (got - wanted[:2]).abs().max() <= 1e-5 * max(1, float(wanted.abs().max()))


@pytest.mark.parametrize("engine", ENGINES)
def test_fitness_equals_masking_the_dense_model(tiny_model, engine):
    scores = _random_scores(tiny_model)
    images = pictures(20)
    fitness = Fitness(tiny_model, scores, images, pca=16, engine=engine)
    factors = np.random.default_rng(1).normal(1, 0.3, scores.factors)
    scaled = scores.scaled(factors)
    ranking = Ranking(scaled.heads, scaled.neurons)
    planner = Planner(ranking, tiny_model.anatomy)
    module = tiny_model.module
    batch = torch.from_numpy(next(images.batches(20)))
    losses = []
    with torch.no_grad():
        for pair in fitness.pairs:
            with masked(module, ranking, planner.pair(*pair)):
                z = module.forward_head(module.forward_features(batch), pre_logits=True)
            cosine = torch.nn.functional.cosine_similarity(fitness.projection(z), fitness.teacher, dim=1)
            losses.append(1 - cosine.mean().item())
    assert abs(fitness(factors) - np.mean(losses)) <= 1e-6


def _random_scores(model: Model) -> Scores:
    ranking = random_ranking(model.anatomy)
    return Scores(ranking.head_scores, ranking.neuron_scores)


def test_evaluating_leaves_the_model_alone_and_parts_add_up(tiny_model):
    scores = _random_scores(tiny_model)
    before = {name: value.clone() for name, value in tiny_model.module.state_dict().items()}
    fitness = Fitness(tiny_model, scores, pictures(22), pca=16)
    factors = np.ones(scores.factors)
    whole = fitness.per_image(factors)
    parts = [fitness.per_image(factors, range(0, 2)), fitness.per_image(factors, range(2, fitness.runner.chunks))]
    assert whole.shape == (4, 22)
    assert np.allclose(np.concatenate(parts, axis=1), whole, atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in tiny_model.module.state_dict().items())


def test_autocast_is_chosen_by_trying_and_stays_faithful(tiny_model):
    scores = _random_scores(tiny_model)
    exact = Fitness(tiny_model, scores, pictures(12), pca=8, engine="torch")
    tried = Fitness(tiny_model, scores, pictures(12), pca=8, engine="torch", autocast=None)
    lower = Fitness(tiny_model, scores, pictures(12), pca=8, autocast="bf16")
    assert tried.runner.autocast in ("none", "bf16")
    factors = np.ones(scores.factors)
    assert abs(tried(factors) - exact(factors)) < 1e-2
    assert 0 < abs(lower(factors) - exact(factors)) < 3e-2  # it really computes in less than fp32
    with pytest.raises(SnapvitError, match="computes in fp32"):
        Fitness(tiny_model, scores, pictures(12), pca=8, engine="onnxruntime", autocast="bf16")


def test_pca_is_exact_and_needs_enough_images():
    z = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)
    projection = Projection.fit(z, 4)
    centred = z - z.mean(0)
    _, s, _ = torch.linalg.svd(centred)
    assert torch.allclose(projection(z).square().sum(0), s[:4] ** 2, rtol=1e-4)
    assert torch.equal(Projection.fit(z, 12)(z), z)  # nothing to reduce
    with pytest.raises(SnapvitError, match="needs as many images, not 3"):
        Projection.fit(z[:3], 4)


def test_racing_sees_fewer_images_and_finds_the_same_winner(tiny_model):
    scores = _random_scores(tiny_model)
    fitness = Fitness(tiny_model, scores, pictures(240), pca=16)
    start = np.ones(scores.factors)
    plain = search(fitness, XNES(start, seed=0, population=8), 24)
    raced = search(fitness, XNES(start, seed=0, population=8), 24, racing=True)
    assert raced.images_seen < plain.images_seen
    assert raced.evaluations == plain.evaluations == 24
    assert raced.best_loss <= plain.best_loss + 0.01 * plain.best_loss  # the tolerance that the docs state


def test_a_search_is_never_worse_than_no_search_and_tells_its_history(tiny_model):
    scores = _random_scores(tiny_model)
    fitness = Fitness(tiny_model, scores, pictures(16), pca=8)
    found = search(fitness, XNES(np.ones(scores.factors), seed=1, population=6), 15)
    assert found.best_loss <= found.start_loss == pytest.approx(fitness(np.ones(scores.factors)))
    assert [entry["evaluations"] for entry in found.history] == [6, 12, 15]
    assert found.best_loss == pytest.approx(fitness(found.best_factors), abs=1e-9)
    assert all(a["best"] >= b["best"] for a, b in zip(found.history, found.history[1:]))
