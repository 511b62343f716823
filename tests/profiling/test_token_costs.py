"""The latency model with tokens: exact where it is true, close where the truth is richer, a cost for allocations."""

import msgspec
import numpy as np
import pytest

from helpers.plans import anatomy_of
from snapvit_export.allocation.costs import CostsByLast
from snapvit_export.allocation.tokens import merging_blocks
from snapvit_export.model.anatomy import Anatomy, Block
from snapvit_export.model.plan import Plan
from snapvit_export.profiling.latency_model import LatencyModel, fit
from snapvit_export.profiling.sample_plans import held_out_plans, sample_plans
from snapvit_export.storage.json import as_builtins, from_json, to_json


def vit(embed: int, heads: int, pooling: str = "token") -> Anatomy:
    """A ViT of twelve blocks for images of 224 pixels in patches of 16."""
    blocks = (Block(heads=heads, head_dim=64, hidden=4 * embed),) * 12
    return Anatomy(
        family="vit", embed_dim=embed, blocks=blocks, image=(224, 224), patch=(16, 16), positions=197, pooling=pooling
    )


TINY, BASE = vit(192, 3), vit(768, 12)


def random_plans(anatomy: Anatomy, count: int, seed: int = 0) -> list[Plan]:
    """Plans of other heads, neurons, merges and grids in every block."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        heads, neurons = (
            tuple(int(n * share) or 1 for n, share in zip(counts, random.uniform(0.3, 1, len(counts))))
            for counts in (anatomy.heads, anatomy.neurons)
        )
        side = int(random.integers(7, 15))
        plan = Plan(heads=heads, neurons=neurons).with_tokens(grid=(side, side) if side < 14 else None)
        left, merged = anatomy.patches_of(plan), [0] * len(heads)
        for i in merging_blocks(anatomy, plan):
            if random.random() < 0.6:
                merged[i] = int(random.integers(0, left // 5 + 1))
                left -= merged[i]
        found.append(plan.with_tokens(merged, plan.grid))
    return found


def linear(anatomy: Anatomy, plan: Plan) -> float:
    """A latency of the model's own form, for a model that is read in all tokens and has blocks of one shape."""
    e, block = anatomy.embed_dim, anatomy.blocks[0]
    h = block.head_dim
    patches, ms = anatomy.patches_of(plan), 0.3 + 0.002 * anatomy.patches_of(plan)
    for (before, after), merged, heads, neurons in zip(anatomy.lengths(plan), plan.merged, plan.heads, plan.neurons):
        flops = 8 * e * h * before * heads + 2 * (patches / 2) ** 2 * h * heads * (merged > 0) + e * patches * merged
        ms += flops / 1e8 + 2e-6 * heads * before**2 + 1.3e-8 * 4 * e * after * neurons
        ms += 2e-8 * (heads * block.params_per_head(e, "layer") + neurons * block.params_per_neuron(e, "layer"))
        ms += 0.0002 * ((heads > 0) * before + (neurons > 0) * after)
        ms += (merged > 0) * (0.1 + 5e-7 * before * (e + h * heads))
        patches -= merged
    return ms


@pytest.mark.parametrize("anatomy", [vit(192, 3, "avg"), vit(768, 12, "avg")], ids=["Ti", "B"])
def test_a_latency_of_the_models_own_form_is_found_exactly(anatomy):
    model = fit(anatomy, [(plan, linear(anatomy, plan)) for plan in sample_plans(anatomy, tokens=True)])
    assert model.tokens is not None
    assert model.tokens.patch_ms == pytest.approx(0.002)
    assert model.tokens.token_ms == pytest.approx(0.0002)
    assert model.tokens.merge_ms == pytest.approx(0.1)
    for plan in random_plans(anatomy, 20):
        plan.check_fits(anatomy)
        assert model.predict_ms(plan) == pytest.approx(linear(anatomy, plan), rel=1e-6)
    assert from_json(to_json(model), LatencyModel, "x") == model


def richer(anatomy: Anatomy, plan: Plan, random: np.random.Generator | None = None) -> float:
    """A latency with what the model leaves out: rows in tiles, narrow layers that are slower, softmax apart from
    products, calls of operators, a TopK, one token from the last attention on; and noise of one per cent."""
    e, h, last = anatomy.embed_dim, anatomy.blocks[0].head_dim, plan.last_attention

    def product(rows: float, inner: float, columns: float) -> float:
        if not rows * inner * columns:
            return 0.0
        tiles = 6 * np.ceil(rows / 6) * 16 * np.ceil(columns / 16)
        return 0.003 + 2 * tiles * inner / 1.1e8 * (1 + 6 / inner) + inner * columns * 4 / 8e6

    ms, patches = 0.25 + product(anatomy.patches_of(plan), 768, e), anatomy.patches_of(plan)
    for i, ((before, after), merged, heads, neurons) in enumerate(
        zip(anatomy.lengths(plan), plan.merged, plan.heads, plan.neurons)
    ):
        if heads and i < last:
            ms += 0.02 + before * e * 6e-7 + 3 * product(before, e, h * heads) + product(before, h * heads, e)
            ms += heads * (2 * product(before, h, before) + before**2 * 1.2e-6)
            if merged:
                a = (patches + 1) // 2
                ms += 0.09 + 4e-7 * before * (h * heads + e) + product(a, h * heads, patches // 2)
                ms += a * np.log2(a) * 2e-6 + a * patches / 2 * 4e-7 + product(patches // 2, merged, e)
        elif i == last:
            ms += 0.03 + before * e * 6e-7 + 2 * product(heads, e, before)
        rows = after if i < last else 1
        if neurons:
            ms += 0.02 + rows * e * 6e-7 + product(rows, e, neurons) + product(rows, neurons, e) + rows * neurons * 5e-7
        patches -= merged
    return float(ms * (1 if random is None else random.normal(1, 0.01)))


@pytest.mark.parametrize("anatomy", [TINY, BASE], ids=["Ti", "B"])
@pytest.mark.parametrize("removable", [False, True])
def test_richer_latencies_are_predicted_to_three_per_cent(anatomy, removable):
    random = np.random.default_rng(1)
    samples = sample_plans(anatomy, removable, tokens=True)
    unseen = [(plan, richer(anatomy, plan, random)) for plan in held_out_plans(anatomy)]
    model = fit(anatomy, [(plan, richer(anatomy, plan, random)) for plan in samples], held_out=unseen)
    held_out = random_plans(anatomy, 60)
    errors = [abs(model.predict_ms(plan) / richer(anatomy, plan) - 1) for plan in held_out]
    assert np.mean(errors) < 0.03
    assert np.max(errors) < 0.1
    by_flops = richer(anatomy, Plan.dense(anatomy)) / anatomy.flops()
    plain = [abs(by_flops * anatomy.flops(plan) / richer(anatomy, plan) - 1) for plan in held_out]
    assert np.mean(errors) < np.mean(plain) / 3  # there is something to find
    assert model.mean_error < 0.03


def test_the_error_is_that_of_held_out_plans_which_the_fit_does_not_see():
    samples = [(plan, richer(TINY, plan)) for plan in sample_plans(TINY, tokens=True)]
    unseen = [(plan, richer(TINY, plan)) for plan in held_out_plans(TINY)]
    for plan, _ in unseen:
        plan.check_fits(TINY)
    assert not {plan for plan, _ in unseen} & {plan for plan, _ in samples}
    model = fit(TINY, samples, held_out=unseen)
    slower = fit(TINY, samples, held_out=[(plan, 2 * ms) for plan, ms in unseen])
    assert msgspec.structs.replace(slower, mean_error=0, most_error=0) == msgspec.structs.replace(
        model, mean_error=0, most_error=0
    )
    off = [abs(model.predict_ms(plan) / ms - 1) for plan, ms in unseen]
    assert (model.mean_error, model.most_error) == (pytest.approx(np.mean(off)), pytest.approx(max(off)))
    assert slower.mean_error == pytest.approx(0.5, abs=0.03)


def test_without_samples_of_tokens_nothing_is_said_of_them_and_the_file_is_as_before():
    anatomy = anatomy_of([6] * 4, [200] * 4)
    model = fit(anatomy, [(plan, 1.0 + sum(plan.heads) + sum(plan.neurons)) for plan in sample_plans(anatomy)])
    assert model.tokens is None
    with pytest.raises(ValueError, match="all tokens"):
        model.predict_ms(Plan.dense(anatomy).with_tokens((2, 0, 0, 0)))
    with pytest.raises(ValueError, match="all tokens"):
        model.costs(anatomy, Plan.dense(anatomy).with_tokens(grid=(2, 2)))
    old = as_builtins(model)
    del old["tokens"]
    assert from_json(msgspec.json.encode(old), LatencyModel, "x") == model


@pytest.mark.parametrize("pooling", ["token", "avg"])
def test_costs_for_some_tokens_are_what_is_predicted_of_every_plan_that_has_them(pooling):
    anatomy = vit(192, 3, pooling)
    model = fit(anatomy, [(plan, richer(anatomy, plan)) for plan in sample_plans(anatomy, tokens=True)])
    for plan in random_plans(anatomy, 12, seed=3):
        costs = model.costs(anatomy, Plan.dense(anatomy).with_tokens(plan.merged, plan.grid))
        assert isinstance(costs, CostsByLast) == (pooling == "token")
        assert costs.of(plan) == pytest.approx(model.predict_ms(plan), rel=1e-9)
    own = model.costs(anatomy)
    assert own.of(Plan.dense(anatomy)) == pytest.approx(model.predict_ms(Plan.dense(anatomy)), rel=1e-9)


def test_fewer_tokens_never_cost_more_unless_they_are_merged():
    model = fit(TINY, [(plan, richer(TINY, plan)) for plan in sample_plans(TINY, tokens=True)])
    dense = Plan.dense(TINY)
    sides = [model.predict_ms(dense.with_tokens(grid=(side, side))) for side in range(4, 14)]
    assert sides == sorted(sides)
    one = (1,) * 11 + (0,)
    assert model.predict_ms(dense.with_tokens(one)) > model.predict_ms(dense)  # all cost and no gain
    assert model.predict_ms(dense.with_tokens([16 * n for n in one])) < model.predict_ms(dense)


def test_samples_of_tokens_come_last_fit_every_model_and_tell_all_numbers():
    for anatomy in (TINY, BASE, anatomy_of([6] * 4, [200] * 4), anatomy_of([1], [3]), vit(192, 3, "avg")):
        plain, more = sample_plans(anatomy), sample_plans(anatomy, tokens=True)
        assert more[: len(plain)] == plain
        assert not any(plan.changes_tokens for plan in plain)
        assert len(more) <= len(plain) + 8
        for plan in more:
            plan.check_fits(anatomy)
    assert any(plan.grid and any(plan.merged) for plan in sample_plans(TINY, tokens=True))


def test_a_model_that_merges_already_is_sampled_with_its_merges():
    merged = TINY.with_counts(Plan.dense(TINY).with_tokens((16,) * 11 + (0,)))
    for plan in sample_plans(merged):
        assert plan.merged == merged.merges
    for plan in sample_plans(merged, removable=True):
        plan.check_fits(merged)
