"""The contents of `evaluation.json`, and the table of it: one model at several sizes on several data sets. Light.

A result is that of one size, one seed and one data set. The table has a row for each size, dense first, and a column
for each data set; with several seeds a cell is their mean with its standard deviation, with one seed the error is the
standard error over the images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ..allocation.planner import Planner
from ..family.evaluation import TITLES, Measure
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..storage.json import Count, Finite, NotNegative, Ratio, Some, Value, read_json, write_json
from .comparison import CutResult
from .published import DENSE_PAIR, Pair, published_results

EVALUATION = "evaluation.json"
Errors = Literal["standard error", "standard deviation over seeds"]


class CutSize(Value, frozen=True, omit_defaults=True):
    """How much is asked to be cut: a pair of ratios, a sparsity, or FLOPs; nothing of the dense model."""

    pair: Pair | None = None
    sparsity: Ratio | None = None
    flops: Ratio | None = None  # of the dense blocks', that are kept

    @property
    def title(self) -> str:
        """The size as a row of a table names it."""
        if self.pair is not None:
            return "{:g}:{:g}".format(*self.pair)
        if self.sparsity is not None:
            return f"sparsity {self.sparsity:g}"
        return "dense" if self.flops is None else f"FLOPs {self.flops:g}"

    def plan(self, planner: Planner) -> Plan:
        """Return the Plan of a ranking for this size."""
        if self.pair is not None:
            return planner.pair(*self.pair)
        if self.sparsity is not None:
            return planner.sparsity(self.sparsity)
        return planner.dense if self.flops is None else planner.flops(self.flops)


DENSE = CutSize()


class CellResult(CutResult, frozen=True, kw_only=True):
    """The quality of the model at one size on one data set, of one seed."""

    size: CutSize
    seed: Count
    data: str
    flops: Some  # of the whole model, for one image


class SeedInputs(Value, frozen=True, kw_only=True):
    """What the results of one seed come from; images by a hash of their names, classes and some pixels."""

    ranking: str | None  # hash of its scores; None: nothing was cut, or the settings say how it was made
    calibration: dict[str, Any] | None  # images that correct, or rank; None: nothing needed any
    data: dict[str, dict[str, Any]]  # images of each data set

    def difference(self, other: SeedInputs) -> str | None:
        """Return which input differs from another's, of those that both have."""
        if None not in (self.ranking, other.ranking) and self.ranking != other.ranking:
            return "another ranking"
        if None not in (self.calibration, other.calibration) and self.calibration != other.calibration:
            return "other images to calibrate on"
        common = sorted(self.data.keys() & other.data.keys())
        return next((f"other images of {name}" for name in common if self.data[name] != other.data[name]), None)

    def joined(self, other: SeedInputs) -> SeedInputs:
        """Return these inputs with those of another that it has besides."""
        return SeedInputs(
            ranking=self.ranking or other.ranking,
            calibration=self.calibration or other.calibration,
            data={**other.data, **self.data},
        )


class EvaluationTable(Value, frozen=True, kw_only=True):
    """All results and the inputs they come from; a run with the same inputs can resume."""

    format_version: Literal[1] = 1
    model: str
    weights_sha256: str
    anatomy: Anatomy
    settings: dict[str, Any]
    inputs: dict[str, SeedInputs]  # by seed
    results: tuple[CellResult, ...] = ()

    def __post_init__(self) -> None:
        for result in self.results:
            inputs = self.inputs.get(str(result.seed))
            if inputs is None or result.data not in inputs.data:
                raise ValueError(f"{result.size.title} on {result.data} with seed {result.seed} has results, no inputs")

    def difference(self, other: EvaluationTable) -> str | None:
        """Return what keeps the results of another table out of this one; None if they belong in it."""
        for name in ("model", "weights_sha256", "anatomy"):
            if getattr(self, name) != getattr(other, name):
                return "another model"
        for name in sorted(self.settings.keys() | other.settings.keys()):
            if self.settings.get(name) != other.settings.get(name):
                return f"other settings ({name})"
        common = sorted(self.inputs.keys() & other.inputs.keys())
        found = [self.inputs[seed].difference(other.inputs[seed]) for seed in common]
        return next((difference for difference in found if difference is not None), None)

    def joined(self, other: EvaluationTable, measures: Sequence[Measure]) -> EvaluationTable:
        """Return this table with the inputs of one that belongs in it, and its results that have these measures."""
        inputs = {**other.inputs, **self.inputs}
        for seed in self.inputs.keys() & other.inputs.keys():
            inputs[seed] = self.inputs[seed].joined(other.inputs[seed])
        whole = [result for result in other.results if set(measures) <= set(result.evaluation.measures)]
        return msgspec.structs.replace(self, inputs=inputs, results=(*whole, *self.results))

    def found(self, size: CutSize, seed: int, data: str) -> CellResult | None:
        """Return the result of a size on a data set, if there is one."""
        return next((r for r in self.results if (r.size, r.seed, r.data) == (size, seed, data)), None)

    def adding(self, result: CellResult) -> EvaluationTable:
        """Return the table with one more result."""
        return msgspec.structs.replace(self, results=(*self.results, result))

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        write_json(folder / EVALUATION, self)

    @staticmethod
    def load(folder: Path) -> EvaluationTable | None:
        """Read it from a folder; None if there is none."""
        path = folder / EVALUATION
        return read_json(path, EvaluationTable) if path.is_file() else None


class Quantity(Value, frozen=True):
    """A number of the table with its error, and the value of each seed."""

    value: Finite
    error: NotNegative | None
    by_seed: tuple[Finite, ...]


class TableRow(Value, frozen=True, kw_only=True):
    """One size on all data sets; what differs between seeds is their mean."""

    size: CutSize
    correction: str | None
    sparsity: Ratio
    flops_ratio: Ratio  # of the blocks, to the dense ones
    flops: NotNegative  # of the whole model
    params: NotNegative
    speed_up: NotNegative  # dense FLOPs by those of this row, of the whole model
    values: dict[str, Quantity]  # by data set
    average: Quantity
    delta: Quantity | None  # of the average, to the dense model's; None for that itself
    published: dict[str, Ratio]  # by data set, where the published model, size and images are the same


class ResultsTable(Value, frozen=True, kw_only=True):
    """All sizes on all data sets by one measure."""

    measure: Measure
    data: tuple[str, ...]
    seeds: tuple[Count, ...]
    errors: Errors
    rows: tuple[TableRow, ...]
    published_as: str | None  # the title of the published model, where the table has values of it
    published_source: str | None


class TableReport(Value, frozen=True, kw_only=True):
    """What `snapvit evaluate` says of several sizes or data sets: all results, and a table for each measure."""

    evaluation: EvaluationTable
    tables: tuple[ResultsTable, ...]


def results_table(
    found: EvaluationTable, measure: Measure, sizes: Sequence[CutSize], data: Sequence[str], seeds: Sequence[int]
) -> ResultsTable:
    """Return the table of these sizes, data sets and seeds, all of which were found."""
    cells = {(size, name): [_cell(found, size, seed, name) for seed in seeds] for size in sizes for name in data}
    rows: list[TableRow] = []
    for size in sizes:
        by_data = {name: cells[size, name] for name in data}
        rows.append(_row(found, measure, by_data, rows[0].average if rows else None))
    page = published_results()
    model = page.of(found.model, found.anatomy) if any(row.published for row in rows) else None
    return ResultsTable(
        measure=measure,
        data=tuple(data),
        seeds=tuple(seeds),
        errors="standard error" if len(seeds) == 1 else "standard deviation over seeds",
        rows=tuple(rows),
        published_as=None if model is None else model.title,
        published_source=None if model is None else page.source,
    )


def _cell(found: EvaluationTable, size: CutSize, seed: int, data: str) -> CellResult:
    cell = found.found(size, seed, data)
    if cell is None:
        raise ValueError(f"{size.title} on {data} with seed {seed} was not evaluated")
    return cell


def _row(
    found: EvaluationTable, measure: Measure, cells: dict[str, list[CellResult]], dense: Quantity | None
) -> TableRow:
    first = next(iter(cells.values()))  # a cell for each seed: the cut is the same on all data sets
    values = {name: _quantity(measure, of_seeds) for name, of_seeds in cells.items()}
    average = _average(list(values.values()))
    flops = _mean([cell.flops for cell in first])
    return TableRow(
        size=first[0].size,
        correction=first[0].correction,
        sparsity=_mean([cell.sparsity for cell in first]),
        flops_ratio=_mean([cell.flops_ratio for cell in first]),
        flops=flops,
        params=_mean([cell.params for cell in first]),
        speed_up=found.anatomy.flops() / flops,
        values=values,
        average=average,
        delta=None if dense is None else _difference(average, dense),
        published=_published(found, measure, cells),
    )


def _quantity(measure: Measure, of_seeds: Sequence[CellResult]) -> Quantity:
    values = []
    for cell in of_seeds:
        value = cell.evaluation.value(measure)
        if value is None:
            raise ValueError(f"{cell.size.title} on {cell.data} has no {TITLES[measure]}")
        values.append(value)
    if len(values) == 1:
        return Quantity(values[0], of_seeds[0].evaluation.error(measure), tuple(values))
    return _over_seeds(values)


def _average(values: Sequence[Quantity]) -> Quantity:
    """Return the mean of all data sets; their errors are independent of each other."""
    by_seed = [_mean(of_seed) for of_seed in zip(*(each.by_seed for each in values))]
    if len(by_seed) > 1:
        return _over_seeds(by_seed)
    error = math.sqrt(sum((each.error or 0.0) ** 2 for each in values)) / len(values)
    return Quantity(by_seed[0], error, tuple(by_seed))


def _difference(one: Quantity, other: Quantity) -> Quantity:
    """Return the difference, seed by seed; that of one seed has no error, since both saw the same images."""
    by_seed = [a - b for a, b in zip(one.by_seed, other.by_seed)]
    return _over_seeds(by_seed) if len(by_seed) > 1 else Quantity(by_seed[0], None, tuple(by_seed))


def _over_seeds(values: Sequence[float]) -> Quantity:
    return Quantity(_mean(values), float(np.std(values, ddof=1)), tuple(values))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _published(found: EvaluationTable, measure: Measure, cells: dict[str, list[CellResult]]) -> dict[str, float]:
    """Return the published values that belong beside a row: of the same cut, uncorrected, on as many images."""
    page = published_results()
    size = next(iter(cells.values()))[0].size
    pair = DENSE_PAIR if size == DENSE else size.pair
    model = page.of(found.model, found.anatomy)
    if model is None or pair is None or measure != page.measure:
        return {}
    shown = {}
    for name, of_seeds in cells.items():
        same = all(cell.correction is None for cell in of_seeds)
        value = page.value(model, pair, name, of_seeds[0].evaluation.images) if same else None
        if value is not None:
            shown[name] = value
    return shown
