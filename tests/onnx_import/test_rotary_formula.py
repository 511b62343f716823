"""The formula of rotary tables is found from the tables alone."""

import itertools

import numpy as np
import pytest
from msgspec import UNSET

from snapvit_export.model.positions import Rotary
from snapvit_export.onnx_import.rotary import Tables, fit

CAT = [
    Rotary(kind="cat", temperature=10000.0, offset=offset, column_first=column_first, reference=reference)
    for offset, column_first, reference in itertools.product((0.0, 0.5, 1.0), (False, True), ((16, 16), (14, 7)))
]
DINOV3 = [
    Rotary(kind="dinov3", temperature=temperature, column_first=column_first, divisor=divisor)
    for temperature, column_first, divisor in itertools.product((100.0, 10000.0), (False, True), ("separate", "max"))
]


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("rotary", [*CAT, *DINOV3], ids=str)
def test_the_formula_is_found_again(rotary, half):
    for grid, features in (((15, 14), 64), ((16, 9), 32)):
        tables = Tables(*rotary.tables(grid, features, half), half)
        assert fit(tables, grid, is_half=False) == (rotary.kind, rotary)


def test_coordinates_as_they_are_count_as_those_of_a_reference():
    """On its own grid a model without a reference is one whose reference is that grid."""
    plain = Rotary(kind="cat", temperature=10000.0)
    kind, found = fit(Tables(*plain.tables((14, 14), 64, True), True), (14, 14), is_half=False)
    assert (kind, found.reference) == ("cat", (14, 14))


def test_tables_in_fp16_are_recognised_with_more_patience():
    rotary = Rotary(kind="dinov3", temperature=100.0)
    sin, cos = (table.astype(np.float16).astype(np.float32) for table in rotary.tables((8, 8), 64, True))
    assert fit(Tables(sin, cos, True), (8, 8), is_half=True) == ("dinov3", rotary)
    assert fit(Tables(sin, cos, True), (8, 8), is_half=False) == ("cat", UNSET)


def test_other_tables_have_no_formula():
    angles = np.random.default_rng(0).uniform(-3, 3, (16, 8)).astype(np.float32)
    angles = np.concatenate([angles, angles], axis=1)
    assert fit(Tables(np.sin(angles), np.cos(angles), True), (4, 4), is_half=False) == ("cat", UNSET)
