"""What a candidate loses, read from the table of an Elastic folder."""

import itertools
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from snapvit_export.calibration.images import prepare
from snapvit_export.calibration.open_source import open_source
from snapvit_export.elastic.fidelity_table import FidelityTable, MeasuredFidelity
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import FileFormatError
from snapvit_export.model.anatomy import Anatomy, Block
from snapvit_export.model.plan import Plan
from snapvit_export.selection.measure_table import _Measure, _merging
from snapvit_export.selection.point import Point
from snapvit_export.selection.table_meter import TableMeter
from snapvit_export.storage.json import from_json, to_json

BLOCKS = (Block(heads=4, head_dim=8, hidden=64),) * 4
VIT = Anatomy(family="vit", embed_dim=32, blocks=BLOCKS, image=(64, 64), patch=(8, 8), positions=65, classes=3)
DENSE = Plan.dense(VIT)
NARROW = Plan(heads=(2,) * 4, neurons=(32,) * 4)  # half of everything, and so of the FLOPs


def measured(divergence: float) -> MeasuredFidelity:
    return MeasuredFidelity(
        divergence=divergence, standard_error=divergence / 10, agreement=1 / (1 + divergence), agreement_error=0.01
    )


def table_of(root) -> FidelityTable:
    """A table whose divergence is the square of a function of the numbers of the levels."""
    values = [measured(root(*numbers) ** 2) for numbers in itertools.product(range(2), range(2), range(3))]
    return FidelityTable(
        by="predictions",
        images=50,
        source="noise",
        grids=((8, 8), (4, 4)),
        widths=(1.0, NARROW.flops_ratio(VIT)),
        tokens=(1.0, 0.5, 0.25),
        values=tuple(values),
        int8_dynamic=measured(0.01),
    )


JUDGE = TableMeter(VIT, table_of(lambda grid, width, tokens: 0.5 * grid + 0.4 * width + 0.1 * tokens))


def divergence(plan: Plan, precision="fp32") -> float:
    return JUDGE.estimate(Point(plan, precision)).divergence


def with_left(plan: Plan, left: int) -> Plan:
    """Merge down to so many tokens, in two blocks."""
    gone = VIT.patches_of(plan) - left
    return plan.with_tokens((gone - gone // 2, gone // 2, 0, 0), plan.grid)


def test_measured_plans_get_what_was_measured_of_them():
    assert divergence(DENSE) == 0
    assert divergence(NARROW) == pytest.approx(0.4**2)
    assert divergence(with_left(DENSE, 32)) == pytest.approx(0.1**2)
    assert divergence(with_left(NARROW.with_tokens(grid=(4, 4)), 4)) == pytest.approx((0.5 + 0.4 + 0.2) ** 2)
    found = JUDGE.estimate(Point(NARROW, "fp32"))
    assert (found.estimated, found.images, found.by) == (True, 50, "predictions")
    assert found.standard_error == pytest.approx(0.016)
    assert found.agreement == pytest.approx(1 / 1.16)


def test_between_them_the_root_of_the_divergence_is_straight():
    assert divergence(with_left(DENSE, 48)) == pytest.approx(0.05**2)  # three quarters: between all and half
    assert divergence(with_left(DENSE, 24)) == pytest.approx(0.15**2)
    half = DENSE.with_tokens(grid=(4, 8))  # half of the patches: in logarithms between all and a quarter
    assert divergence(half) == pytest.approx(0.25**2)
    assert divergence(with_left(half, 24)) == pytest.approx((0.25 + 0.05) ** 2)


def test_beyond_the_last_level_less_is_worse_and_never_better():
    fewer = Plan(heads=(1,) * 4, neurons=(16,) * 4)
    width = fewer.flops_ratio(VIT)
    steps = (1 - width) / (1 - NARROW.flops_ratio(VIT))
    assert divergence(fewer) == pytest.approx((0.4 * steps) ** 2)
    falling = TableMeter(VIT, table_of(lambda grid, width, tokens: 0.5 - 0.3 * width))  # as noise may have it
    assert falling.estimate(Point(fewer, "fp32")).divergence == pytest.approx(0.2**2)


def test_int8_adds_what_the_dense_model_loses_in_it():
    assert divergence(DENSE, "int8-dynamic") == pytest.approx(0.01)
    found = JUDGE.estimate(Point(NARROW, "int8-dynamic"))
    assert found.divergence == pytest.approx(0.4**2 + 0.01)
    assert found.standard_error == pytest.approx(math.hypot(0.016, 0.001))
    assert found.agreement == pytest.approx(1 / 1.16 / 1.01)
    assert not JUDGE.needs_probes
    assert JUDGE.losses(None, Point(NARROW, "fp32"), few=True) == pytest.approx([0.16])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"widths": (0.5, 1.0)}, "widths of a fidelity table must fall"),
        ({"grids": ((8, 8), (8, 8))}, "grids of a fidelity table must fall"),
        ({"tokens": (0.9, 0.5, 0.25)}, "begins with the dense model"),
        ({"tokens": (1.0, 0.5)}, r"a fidelity table of \(2, 2, 2\) has 12 values"),
        ({"grids": ()}, "grids of a fidelity table must fall"),
    ],
)
def test_a_table_that_cannot_be_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        msgspec.structs.replace(JUDGE.table, **changes)
    written = {**msgspec.to_builtins(JUDGE.table), **changes}
    with pytest.raises(FileFormatError, match=says):
        from_json(to_json(written), FidelityTable, "elastic.json")


def test_what_was_not_measured_lies_between_what_was(family_and_elastic: Path, tmp_path):
    """An estimate is between the measured Plans around it; so must the truth be, up to the noise of the images."""
    packed = Elastic.load(family_and_elastic / "elastic")
    table, anatomy = packed.fidelity, packed.anatomy
    assert table.shape == (4, 5, 3)
    assert table.values[0].divergence == 0  # the dense model itself
    source = open_source(str(family_and_elastic / "images"))
    measure = _Measure(packed, prepare(source, packed.description.preprocessing), tmp_path)
    meter = TableMeter(anatomy, table)
    for width, grid, left in ((0.77, None, 1.0), (0.62, None, 0.7), (0.77, (11, 11), 0.4), (0.65, (9, 9), 1.0)):
        plan = _merging(packed, packed.planner.flops(width).with_tokens(grid=grid), left)
        around = _around(table, meter._place(plan))
        low, high = min(v.divergence for v in around), max(v.divergence for v in around)
        estimate, found = meter.estimate(Point(plan, "fp32")), measure.of(plan, "fp32")
        assert low <= estimate.divergence <= high
        noise = 3 * math.hypot(found.standard_error, max(v.standard_error for v in around))
        assert low - noise <= found.divergence <= high + noise, (width, grid, left)


def _around(table: FidelityTable, place) -> list[MeasuredFidelity]:
    """The measured Plans at the corners of the cell that a place is in."""
    axes = [-math.log(rows * columns) for rows, columns in table.grids], [-w for w in table.widths]
    numbers = []
    for axis, at in zip((*axes, [-left for left in table.tokens]), place):
        n = min(max(int(np.searchsorted(axis, at)), 1), len(axis) - 1)
        numbers.append((n - 1, n))
    values = np.array(table.values, dtype=object).reshape(table.shape)
    return [values[corner] for corner in itertools.product(*numbers)]
