"""Tokens in Plans and Anatomies: lengths, FLOPs, parameters, bounds, nesting, and files of before."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from helpers.plans import anatomy_of
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.model.anatomy import Anatomy, AttentionPool, Block
from snapvit_export.model.plan import Plan
from snapvit_export.storage.json import from_json, to_json


def deit_tiny() -> Anatomy:
    block = Block(heads=3, head_dim=64, hidden=768)
    return Anatomy(
        family="vit",
        embed_dim=192,
        blocks=(block,) * 12,
        image=(224, 224),
        patch=(16, 16),
        positions=197,
        classes=1000,
    )


TWO = anatomy_of([4, 2], [10, 6])  # embedding 32, heads of 8, 4 x 4 patches of 8 x 8 pixels, a class token, 3 classes


def test_lengths_by_hand():
    plan = Plan.dense(TWO).with_tokens((5, 3))
    assert TWO.lengths(plan) == ((17, 12), (12, 9))
    assert TWO.tokens_after(plan) == (12, 9)
    assert TWO.lengths() == ((17, 17), (17, 17))
    small = Plan.dense(TWO).with_tokens((2, 0), grid=(3, 2))
    assert TWO.lengths(small) == ((7, 5), (5, 5))
    assert (TWO.patches_of(small), TWO.image_of(small)) == (6, (24, 16))


def test_flops_by_hand():
    plan = Plan(heads=(4, 1), neurons=(10, 6), merged=(2, 1), grid=(3, 2))
    # Attentions of 7 and 5 tokens; MLPs of 5 and 4. Each head: 8 E h T + 4 h T^2 + 3 T^2, each neuron: 4 E T.
    heads = 4 * (8 * 32 * 8 * 7 + 35 * 49) + 1 * (8 * 32 * 8 * 5 + 35 * 25)
    neurons = 10 * 4 * 32 * 5 + 6 * 4 * 32 * 4
    assert TWO.block_flops(plan) == heads + neurons
    patches, logits = 2 * 6 * (8 * 8 * 3) * 32, 2 * 32 * 3
    assert TWO.flops(plan) == patches + heads + neurons + logits
    assert plan.flops_ratio(TWO) == (heads + neurons) / TWO.block_flops()


def test_attention_pooling_reads_the_tokens_that_are_left():
    pooled = msgspec.structs.replace(TWO, pooling="map", attention_pool=AttentionPool(heads=4, hidden=64))
    plan = Plan.dense(pooled).with_tokens((5, 3))
    e, t = 32, 9
    pool = 4 * e * e + 4 * e * e * t + 4 * e * t + 3 * 4 * t + 4 * e * 64
    assert pooled.flops(plan) - TWO.flops(Plan.dense(TWO).with_tokens((5, 3))) == pool


def test_merging_thirteen_everywhere_leaves_the_known_share_of_the_flops():
    anatomy = deit_tiny()
    plan = Plan.dense(anatomy).with_tokens((13,) * 12)
    assert plan.flops_ratio(anatomy) == pytest.approx(0.573, abs=0.002)


def test_only_positions_are_fewer_parameters():
    anatomy = deit_tiny()
    dense = Plan.dense(anatomy)
    assert anatomy.params(dense.with_tokens((13,) * 12)) == anatomy.params()
    smaller = dense.with_tokens(grid=(10, 12))
    assert anatomy.params() - anatomy.params(smaller) == 192 * (196 - 120)
    assert smaller.sparsity(anatomy) == 0
    without = msgspec.structs.replace(anatomy, positions=0)
    assert without.params(smaller) == without.params()


def test_an_anatomy_after_the_cut_is_that_of_the_plan():
    plan = Plan(heads=(3, 2), neurons=(4, 6), merged=(2, 1), grid=(3, 2))
    cut = TWO.with_counts(plan)
    assert (cut.image, cut.grid, cut.positions, cut.merges) == ((24, 16), (3, 2), 7, (2, 1))
    assert (cut.params(), cut.flops()) == (TWO.params(plan), TWO.flops(plan))
    assert cut.lengths() == TWO.lengths(plan)
    assert Plan.dense(cut) == plan.with_tokens(plan.merged)


def test_a_grid_that_is_the_models_own_changes_nothing():
    odd = msgspec.structs.replace(TWO, image=(35, 32))  # not a multiple of the patch: the rest is never seen
    named = Plan.dense(odd).with_tokens(grid=(4, 4))
    assert odd.with_counts(named) == odd


def test_plans_and_anatomies_with_tokens_are_files(tmp_path):
    plan = Plan(heads=(3, 2), neurons=(4, 6), merged=(2, 1), grid=(3, 2))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    cut = TWO.with_counts(plan)
    cut.save(tmp_path / "anatomy.json")
    assert Anatomy.load(tmp_path / "anatomy.json") == cut


def test_files_without_tokens_load_as_before():
    old = b'{"format_version": 1, "heads": [4, 2], "neurons": [10, 6]}'
    assert from_json(old, Plan, "here") == Plan.dense(TWO)
    assert from_json(old, Plan, "here").merged == (0, 0)
    written = to_json(TWO)
    assert b"merged" not in written  # sealed files of models that merge nothing keep their bytes
    assert TWO.merged is UNSET
    assert TWO.with_counts(Plan.dense(TWO)) == TWO


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"heads": [4, 2], "neurons": [10, 6], "merged": [1]}',
        b'{"heads": [4, 2], "neurons": [10, 6], "merged": [1, -1]}',
        b'{"heads": [4, 2], "neurons": [10, 6], "merged": [1, "2"]}',
        b'{"heads": [4, 2], "neurons": [10, 6], "grid": [3]}',
        b'{"heads": [4, 2], "neurons": [10, 6], "grid": [0, 3]}',
        b'{"heads": [4, 2], "neurons": [10, 6], "tokens": 3}',
    ],
)
def test_plans_that_make_no_sense_are_refused(damaged):
    with pytest.raises(FileFormatError, match="here"):
        from_json(damaged, Plan, "here")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dict(merged=(9, 0)), "block 0: the plan merges 9 of 16 patch tokens. Merge at most half: 8"),
        (dict(merged=(8, 5)), "block 1: the plan merges 5 of 8 patch tokens. Merge at most half: 4"),
        (dict(merged=(4, 0), grid=(2, 3)), "block 0: the plan merges 4 of 6 patch tokens. Merge at most half: 3"),
        (dict(heads=(4, 0), merged=(0, 1)), "block 1: tokens are matched by the keys of an attention"),
        (dict(grid=(5, 4)), "a grid of 5 x 4 patches, the model 4 x 4. Take at most that"),
        (dict(grid=(1, 40)), "a grid of 1 x 40 patches, the model 4 x 4"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused_in_one_line(plan, message):
    with pytest.raises(SnapvitError, match=message) as refused:
        Plan(**{"heads": (4, 2), "neurons": (10, 6), **plan}).check_fits(TWO)
    assert "\n" not in str(refused.value)


def test_a_wrong_number_of_counts_is_refused():
    with pytest.raises(ValueError, match="2 blocks needs as many counts of merged tokens"):
        Plan(heads=(4, 2), neurons=(10, 6), merged=(1, 2, 3))
    with pytest.raises(SnapvitError, match="3 blocks, the model has 2"):
        Plan(heads=(4, 2, 1), neurons=(10, 6, 1), merged=(1, 2, 3)).check_fits(TWO)


def test_nesting_with_tokens():
    dense = Plan.dense(TWO)
    early, late = dense.with_tokens((3, 0)), dense.with_tokens((0, 3))
    assert dense.keeps_all_of(early)
    assert late.keeps_all_of(early)  # it has more tokens after the first block, and as many after the second
    assert not early.keeps_all_of(late)
    assert not early.keeps_all_of(dense)
    smaller = dense.with_tokens(grid=(3, 3))
    assert not dense.keeps_all_of(smaller)
    assert not smaller.keeps_all_of(dense)
    assert smaller.keeps_all_of(smaller.with_tokens((1, 1), grid=(3, 3)))
    assert not early.keeps_all_of(Plan(heads=(4, 2), neurons=(10, 6)))
    narrow = Plan(heads=(3, 2), neurons=(10, 6), merged=(3, 1))
    assert early.keeps_all_of(narrow)
    assert not narrow.keeps_all_of(early)


@given(st.integers(0, 8), st.integers(0, 4))
def test_fewer_tokens_are_fewer_flops(first, second):
    plan = Plan.dense(TWO).with_tokens((first, second))
    plan.check_fits(TWO)
    more = Plan.dense(TWO).with_tokens((max(0, first - 1), second))
    assert TWO.flops(plan) < TWO.flops(more) or first == 0
    assert plan.changes_tokens == (first + second > 0)
