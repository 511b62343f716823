"""A report of 500 variants: every one is in its tables, and charts, page and work grow no faster than their number.

How soon a browser shows it is measured in `benchmarks/load.py`; what makes it so is held here.
"""

import json
import re
import sys
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.report_factory import make_manifest, make_search, make_sublayers, make_validation
from snapvit_export.family.manifest import Manifest
from snapvit_export.report.charts import all_charts
from snapvit_export.report.charts.latencies import latencies
from snapvit_export.report.charts.pareto import MOST_LABELS
from snapvit_export.report.charts.rows import MOST_ROWS, drawn
from snapvit_export.report.charts.widths import widths
from snapvit_export.report.data import LoadedFamily, ReportData, collect
from snapvit_export.report.page import page
from snapvit_export.report.shell import script

COUNT = 500
MOST_PAGE = 8e6  # bytes, with the libraries that draw
MOST_MARKS = 12_000  # of all charts without a script: two for a cell or run of each row, eight for a point
MOST_ELEMENTS = 80_000  # of tables, most of them folded


@cache
def large(count: int = COUNT) -> Manifest:
    return make_manifest(count, recipe={"search": make_search(), "sublayers": make_sublayers()})


def data_of(manifest: Manifest) -> ReportData:
    return collect(LoadedFamily(Path("here"), manifest))


@cache
def text_of(count: int = COUNT) -> str:
    manifest = large(count)
    return page(LoadedFamily(Path("here"), manifest, make_validation(manifest)), data_of(manifest))


def test_every_variant_is_in_every_table():
    report = data_of(large())
    names = {variant.name for variant in large().variants}
    assert len(names) == COUNT
    for chart in all_charts(report):
        if chart.name in ("pareto", "heads", "neurons", "latencies"):
            assert {row[0] for row in chart.rows} == names, chart.name
    table = re.search(r'<table class="sortable".*?</table>', text_of(), flags=re.DOTALL)[0]
    assert set(re.findall(r'<th scope="row"[^>]*>([^<]*)</th>', table)) == names


def test_charts_with_a_row_for_each_draw_those_that_matter_and_say_how_many():
    report = data_of(large())
    for chart in (widths(report, "heads"), widths(report, "neurons"), latencies(report)):
        values = chart.spec["data"]["values"] if "data" in chart.spec else chart.spec["layer"][1]["data"]["values"]
        shown = list(dict.fromkeys(row["name"] for row in values))
        assert len(shown) == MOST_ROWS
        assert {"dense", report.chosen, report.next_denser} <= set(shown)
        order = [variant.name for variant in large().variants]
        assert shown == sorted(shown, key=order.index)
        assert max(order.index(b) - order.index(a) for a, b in pairwise(shown)) <= 2 * COUNT / MOST_ROWS
        assert f"{MOST_ROWS} of the {COUNT} variants" in chart.caption
    assert "variants, at equal steps" not in widths(data_of(large(MOST_ROWS)), "heads").caption
    assert drawn(report, ["a", "b"]) == ["a", "b"]


def test_the_page_and_its_plots_stay_small():
    text = text_of()
    assert len(text.encode()) - len(script().encode()) < MOST_PAGE
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)
    marks = Counter(re.findall(r"<(path|rect|line|text)\b", markup))
    assert sum(marks.values()) < MOST_MARKS
    assert len(re.findall(r"<[a-z]", markup)) - sum(marks.values()) < MOST_ELEMENTS
    specs = json.loads(re.search(r'<script type="application/json" id="plots">(.*?)</script>', text)[1])
    rows = {name: sum(len(part["data"]["values"]) for part in layers(spec)) for name, spec in specs.items()}
    assert rows["pareto"] <= 2 * COUNT + 4 * (MOST_LABELS + 2) + 10
    assert rows["heads"] == rows["neurons"] == MOST_ROWS * 12
    assert rows["latencies"] <= MOST_ROWS * (40 + 2) + 2


def layers(spec: dict) -> list[dict]:
    parts = [spec, *spec.get("layer", [])]
    return [part for part in parts if "data" in part]


@pytest.mark.parametrize("work", [data_of, lambda manifest: all_charts(data_of(manifest))], ids=["data", "charts"])
def test_twice_the_variants_are_about_twice_the_work(work):
    few, many = (calls_of(work, large(count)) for count in (COUNT // 2, COUNT))
    assert many < 2.5 * few


def calls_of(work, manifest) -> int:
    """Calls of Python functions, by which work that grows faster than the number of variants is seen."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    work(manifest)  # what is done once is done
    sys.setprofile(count)
    try:
        work(manifest)
    finally:
        sys.setprofile(None)
    return calls
