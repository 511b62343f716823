"""Positions of another resolution in numpy: resampled and rotary ones as timm makes them."""

import itertools

import numpy as np
import pytest
import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3

from snapvit_export.model.positions import Rotary, resample, resampling
from snapvit_export.storage.json import from_json, to_json

GRIDS = [
    ((14, 14), (12, 12)),
    ((14, 14), (7, 7)),
    ((14, 14), (13, 5)),
    ((37, 37), (16, 16)),
    ((16, 12), (5, 12)),  # one side stays
    ((4, 6), (3, 2)),
    ((4, 4), (1, 1)),
]
# Angles are at most 2 pi * 2 or some 20 patches; timm rounds coordinate, frequency and product in float32.
ROUNDING = 20 * 4 * np.finfo(np.float32).eps


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_positions_are_resampled_as_timm_does(old, new):
    positions = np.random.default_rng(0).standard_normal((old[0] * old[1], 24)).astype(np.float32)
    wanted = resample_abs_pos_embed(torch.from_numpy(positions)[None], list(new), list(old), num_prefix_tokens=0)
    wanted = wanted[0].numpy()
    got = resample(positions, old, new)
    assert got.dtype == np.float32
    assert got.shape == (new[0] * new[1], 24)
    assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted)


def test_resampling_keeps_what_is_the_same_everywhere():
    for size, wanted in itertools.product(range(1, 20), repeat=2):
        assert np.allclose(resampling(size, wanted).sum(1), 1, atol=1e-12)
    assert np.array_equal(resampling(9, 9), np.eye(9))


@pytest.mark.parametrize("grid", [(16, 16), (10, 12), (3, 7)])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_rotary_tables_are_those_of_timm(grid, half, indexing):
    same = dict(feat_shape=grid, grid_indexing=indexing, rotate_half=half)
    for reference, offset in itertools.product((None, (16, 16), (14, 20)), (0.0, 1.0)):
        of = RotaryEmbeddingCat(
            24, temperature=50, in_pixels=False, ref_feat_shape=reference, grid_offset=offset, **same
        )
        ours = Rotary(kind="cat", temperature=50, offset=offset, column_first=indexing == "xy", reference=reference)
        check_tables(of, ours, grid, half)
    for divisor, offset in itertools.product(("separate", "min", "max"), (0.0, 0.25)):
        of = RotaryEmbeddingDinoV3(24, temperature=100, normalize_coords=divisor, grid_offset=offset, **same)
        ours = Rotary(kind="dinov3", temperature=100, offset=offset, column_first=indexing == "xy", divisor=divisor)
        check_tables(of, ours, grid, half)


def check_tables(of, ours: Rotary, grid: tuple[int, int], half: bool) -> None:
    sin, cos = ours.tables(grid, 24, half)
    wanted = of.get_embed().numpy()
    assert np.abs(np.concatenate([sin, cos], axis=1) - wanted).max() <= ROUNDING


def test_rotary_parameters_are_json():
    rotary = Rotary(kind="cat", temperature=10000, reference=(16, 16), column_first=True)
    assert from_json(to_json(rotary), Rotary, "here") == rotary
