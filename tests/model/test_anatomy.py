"""Parameters and FLOPs as the paper counts them."""

import pytest

from snapvit_export.errors import FileFormatError
from snapvit_export.model.anatomy import Anatomy, Block
from snapvit_export.model.plan import Plan
from snapvit_export.storage.json import from_json, to_json


def vit(embed: int, depth: int, heads: int) -> Anatomy:
    block = Block(heads=heads, head_dim=embed // heads, hidden=4 * embed)
    return Anatomy(
        family="vit",
        embed_dim=embed,
        blocks=(block,) * depth,
        image=(224, 224),
        patch=(16, 16),
        positions=197,
        classes=1000,
    )


@pytest.mark.parametrize(
    ("embed", "depth", "heads", "gflops"), [(384, 12, 6, 9.2), (768, 12, 12, 35.1), (1024, 24, 16, 123.2)]
)
def test_flops_of_small_base_and_large_are_those_of_the_paper(embed, depth, heads, gflops):
    assert round(vit(embed, depth, heads).flops() / 1e9, 1) == gflops


def test_flops_of_a_plan_follow_table_7():
    anatomy = vit(384, 2, 6)
    plan = Plan(heads=(6, 2), neurons=(1536, 100))
    e, h, t = 384, 64, 197
    blocks = sum(
        4 * e * n * t + 8 * e * h * k * t + 4 * k * h * t * t + 3 * k * t * t for k, n in ((6, 1536), (2, 100))
    )
    assert anatomy.block_flops(plan) == blocks
    assert anatomy.flops(plan) == 2 * 196 * 16 * 16 * 3 * e + blocks + 2 * e * 1000
    assert plan.flops_ratio(anatomy) == blocks / anatomy.block_flops()


def test_every_token_is_counted():
    plain = vit(384, 12, 6)
    extra = Anatomy(**{**_fields(plain), "registers": 4, "distillation_token": True})
    assert extra.tokens == plain.tokens + 5
    assert extra.block_flops() > plain.block_flops()


def test_a_gated_mlp_costs_three_matrices():
    plain = vit(384, 1, 6)
    gated = Anatomy(**{**_fields(plain), "blocks": (Block(heads=6, head_dim=64, hidden=1536, mlp="glu"),)})
    assert gated.block_flops() - plain.block_flops() == 2 * 384 * 1536 * 197
    assert gated.params() - plain.params() == 384 * 1536 + 1536


def test_json_round_trip_and_strictness():
    anatomy = vit(384, 2, 6)
    data = to_json(anatomy)
    assert from_json(data, Anatomy, "here") == anatomy
    for damaged in (
        data.replace(b'"heads": 6', b'"heads": -1'),
        data.replace(b'"heads": 6', b'"heads": "6"'),
        data.replace(b'"embed_dim"', b'"embed_dims"'),
        data.replace(b'"patch": [\n  16,\n  16\n ]', b'"patch": [225, 16]'),
        data[:-20],
        b"\xff\xfe",
    ):
        assert damaged != data
        with pytest.raises(FileFormatError, match="here"):
            from_json(damaged, Anatomy, "here")


def _fields(anatomy: Anatomy) -> dict:
    return {name: getattr(anatomy, name) for name in anatomy.__struct_fields__}
