"""The report: its numbers are the manifest's, its plots are data and not code, and no string becomes markup."""

import io
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from PIL import Image

from helpers.families import make_family
from helpers.report_factory import (
    HOSTILE,
    make_manifest,
    make_merging_validation,
    make_rounds,
    make_search,
    make_sublayers,
    make_validation,
)
from snapvit_export.budget import Budget
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.family.folder import own_files, read_family, write_manifest
from snapvit_export.family.layout import PLOTS, parse_formats, place, report_files
from snapvit_export.family.manifest import Manifest
from snapvit_export.family.trace import Load, Trace, Traced
from snapvit_export.family.validation import Validation
from snapvit_export.report.charts import all_charts
from snapvit_export.report.charts.deadlines import deadlines
from snapvit_export.report.charts.pareto import pareto
from snapvit_export.report.charts.pareto import place as place_labels
from snapvit_export.report.charts.style import DARK, LIGHT, axis
from snapvit_export.report.data import LoadedFamily, collect
from snapvit_export.report.draw import as_data, inline_svg, png, svg
from snapvit_export.report.markdown import markdown
from snapvit_export.report.page import page
from snapvit_export.report.terminal import bar, bars, print_validation, spread_bars
from snapvit_export.report.text import headline, missing
from snapvit_export.report.variants import variant_table
from snapvit_export.visible import visible

HERE = Path("here")


def report_of(manifest, *beside, budget=None):
    others = [LoadedFamily(Path(f"other{i}"), other) for i, other in enumerate(beside)]
    return collect(LoadedFamily(HERE, manifest), others, budget and Budget.parse(budget))


def charts_of(manifest, *beside, **more):
    return {chart.name: chart for chart in all_charts(report_of(manifest, *beside, **more))}


def page_of(manifest, validation=None, **more):
    return page(LoadedFamily(HERE, manifest, validation), report_of(manifest, **more))


def full() -> Manifest:
    return make_manifest(7, recipe={"search": make_search(), "sublayers": make_sublayers(), "ranking": make_rounds()})


# Numbers


def test_numbers_are_those_of_the_manifest():
    manifest = make_manifest()
    report = report_of(manifest)
    assert [p.name for p in report.own] == [v.name for v in manifest.variants]
    for point, variant, measured in zip(report.own, manifest.variants, manifest.choice.measurements):
        assert (point.latency_ms, point.between_ms) == (measured.latency_ms, measured.between_ms)
        assert point.p90_ms == variant.profile.p90_ms
        assert (point.quality, point.error) == (variant.evaluation.top1, 0.01)
        assert (point.params, point.flops, point.size_bytes) == (variant.params, variant.flops, variant.size_bytes)
    assert report.chosen == manifest.choice.variant
    assert report.budget_ms == manifest.choice.budget_ms


def test_a_latency_is_the_profiles_where_the_choice_timed_another_file():
    manifest = make_manifest()
    measurements = manifest.choice.measurements
    other = msgspec.structs.replace(
        measurements[3], latency_ms=99.0, profile=msgspec.structs.replace(measurements[3].profile, sha256="0")
    )
    choice = msgspec.structs.replace(manifest.choice, measurements=(*measurements[:3], other, *measurements[4:]))
    point = report_of(msgspec.structs.replace(manifest, choice=choice)).own[3]
    assert point.latency_ms == manifest.variants[3].profile.p50_ms


def test_a_budget_at_p90_is_drawn_against_p90():
    manifest = make_manifest()
    limits = msgspec.structs.replace(manifest.choice.limits, at="p90")
    choice = msgspec.structs.replace(manifest.choice, limits=limits)
    timed = [msgspec.structs.replace(m, latency_ms=m.profile.p90_ms) for m in choice.measurements]
    choice = msgspec.structs.replace(choice, measurements=tuple(timed))
    report = report_of(msgspec.structs.replace(manifest, choice=choice))
    assert report.at == "p90"
    assert [p.latency_ms for p in report.own] == [v.profile.p90_ms for v in manifest.variants]


def test_who_is_dominated_is_worked_out_from_what_is_shown():
    manifest = make_manifest(5, seed=4)
    report = report_of(manifest)
    by_name = {p.name: p for p in report.own}
    for point in report.own:
        better = [
            p for p in report.own if p.latency_ms <= point.latency_ms and p.quality >= point.quality and p != point
        ]
        assert (point.dominated_by is not None) == bool(better)
        assert point.dominated_by is None or by_name[point.dominated_by] in better


def test_the_measure_is_the_best_that_all_have():
    manifest = make_manifest(3)
    without = [
        msgspec.structs.replace(v, evaluation=msgspec.structs.replace(v.evaluation, top1=None))
        for v in manifest.variants
    ]
    assert report_of(manifest).measure == "top1"
    mixed = msgspec.structs.replace(manifest, variants=(*manifest.variants[:2], without[2]))
    assert report_of(mixed).measure == "agreement"


def test_samples_are_thinned_in_the_same_way_every_time():
    few, many = report_of(make_manifest(2)), report_of(make_manifest(40))
    assert {len(spread.shown_ms) for spread in few.spreads.values()} == {160}
    assert {len(spread.shown_ms) for spread in many.spreads.values()} == {50}
    assert many == report_of(make_manifest(40))
    samples = make_manifest(40).variants[0].profile.samples_ms
    shown = many.spreads["dense"].shown_ms
    assert (shown[0], shown[-1]) == (min(samples), max(samples))
    assert set(shown) <= set(samples)


def test_families_of_one_kind_are_told_apart_by_their_folder():
    report = report_of(make_manifest(3), make_manifest(3, seed=1), make_manifest(3, precision="fp16"))
    assert report.families == ("fp32, onnxruntime (here)", "fp32, onnxruntime (other0)", "fp16, onnxruntime")
    assert [p.is_chosen for p in report.points] == [False, False, True] + [False] * 6


def test_another_model_does_not_stand_beside():
    other = msgspec.structs.replace(make_manifest(3), model="deit")
    with pytest.raises(SnapvitError, match="other0: a family of deit, not of imaginary-vit. Give families of the same"):
        report_of(make_manifest(3), other)


def test_a_budget_is_drawn_only_where_none_was_chosen_for():
    assert report_of(make_manifest(3, choice=False), budget="15ms").budget_ms == 15
    half = report_of(make_manifest(3, choice=False), budget="50%")
    assert half.budget_ms == pytest.approx(half.own[0].latency_ms / 2)
    with pytest.raises(UsageError, match="was chosen for .*ms, which the report draws. Leave --budget out"):
        report_of(make_manifest(3), budget="15ms")
    with pytest.raises(UsageError, match="a share of the dense latency, which was not measured"):
        report_of(make_manifest(3, timed=False), budget="50%")


@pytest.mark.parametrize("search", [None, [], {"history": []}, {"history": [{"best": "?"}]}, {"history": 3}, "text"])
@pytest.mark.parametrize("sublayers", [None, {}, [3], [{"block": "x", "part": 1}], [{"block": 1, "part": "mlp"}]])
def test_a_recipe_of_another_form_leaves_its_plots_out(search, sublayers):
    found = charts_of(make_manifest(3, recipe={"search": search, "sublayers": sublayers, "ranking": search}))
    assert not {"search", "sublayers"} & set(found)


def test_the_search_of_a_ranking_that_was_given_is_found():
    assert "search" in charts_of(make_manifest(3, recipe={"ranking": {"search": make_search()}}))


def test_rounds_of_cutting_and_recovering_are_drawn_by_flops_and_parameters_with_a_table():
    charts = charts_of(make_manifest(3, recipe={"ranking": make_rounds()}))
    by_flops, by_params = charts["rounds-gflops"], charts["rounds-params"]
    rows = by_flops.spec["data"]["values"]
    assert {row["which"] for row in rows} == {"same answers, recovered", "same answers, cut", "top-1, recovered"}
    assert len(rows) == 4 + 3 + 4  # the dense model was not cut
    assert [row["x"] for row in rows if row["which"].startswith("top-1")][1:] == [2.25, 2.0, 1.75]
    assert [row["x"] for row in by_params.spec["data"]["values"] if row["which"].startswith("top-1")][1] == 5.2
    assert by_flops.rows[2] == ("2", "80%", "2", "4.70 M", "80.0 %", "90.0 %", "0.200", "82.0 %", "")
    assert by_flops.rows[3][-1] == "too much lost"


@pytest.mark.parametrize("part", ["before_rounds", "rounds"])
@pytest.mark.parametrize("damaged", [None, [], "text", [{"flops": 2.0}], {"agreement": float("inf")}])
def test_rounds_of_another_form_are_not_drawn(part, damaged):
    found = charts_of(make_manifest(3, recipe={"ranking": {**make_rounds(), part: damaged}}))
    assert not [name for name in found if name.startswith("rounds")]


# Words


def test_the_headline_has_the_result():
    manifest = make_manifest()
    text = headline(report_of(manifest))
    measured = manifest.choice.measurements[2]
    assert text.startswith(f"{measured.variant} takes {measured.latency_ms:.2f} ms ({measured.between_ms[0]:.2f} to ")
    assert f"fits {manifest.choice.budget_ms:.4g} ms" in text
    assert f"top-1 {100 * measured.evaluation.top1:.1f} ± 1.0 %" in text
    assert f"dense model has {100 * manifest.variants[0].evaluation.top1:.1f} ± 1.0 %" in text


def test_headlines_of_families_without_a_choice():
    assert headline(report_of(make_manifest(3, timed=False))) == "3 variants of imaginary-vit, none of them timed yet."
    assert headline(report_of(make_manifest(3, choice=False))).startswith(
        "3 variants of imaginary-vit: from dense, 24."
    )
    assert headline(report_of(make_manifest(1))).startswith("One variant, dense, 24.")
    assert "No choice was proved" in headline(report_of(make_manifest(5, choice=False), budget="18ms"))
    assert headline(report_of(make_manifest(5, choice=False), budget="1ms")) == "No variant surely meets 1 ms."


def test_what_is_missing_is_said_with_its_command():
    assert missing(report_of(make_manifest())) == []
    notes = missing(report_of(make_manifest(3, timed=False, evaluated=False)))
    assert "snapvit choose FAMILY --budget 10ms" in notes[0]
    assert "Accuracy is missing" in notes[1]
    assert "snapvit validate FAMILY --data DIR" in notes[1]


# Plots


def make_trace() -> Trace:
    """Requests, some of them late, refused or beside a load."""
    requests = [
        Traced(at_s=0.1 * n, variant="dense" if n % 3 else "s30", latency_ms=8.0 if n % 7 else 30.0, met=n % 7 != 0)
        for n in range(50)
    ]
    requests += [Traced(at_s=6.0, variant=None, latency_ms=None, met=False)]
    loads = (Load(from_s=1.0, to_s=2.0, what="a <hog>"),)
    return Trace(title="a test", deadline_ms=10.0, variants=("dense", "s30"), requests=tuple(requests), loads=loads)


def test_requests_over_time_are_drawn_with_their_misses_and_the_load(tmp_path):
    chart = deadlines(make_trace())
    rows = chart.spec["data"]["values"]
    assert sum(row["state"] == "missed" for row in rows) == 9
    assert max(row["ms"] for row in rows) == 16.0  # beyond that it is drawn at the edge
    assert chart.rows[0] == ("dense", "33", "28")
    assert b"a &lt;hog&gt;" in svg(chart)
    make_trace().save(tmp_path)
    assert Trace.load(tmp_path) == make_trace()
    assert Trace.load(tmp_path / "elsewhere") is None


def test_of_very_many_requests_all_misses_are_drawn():
    some = make_trace()
    many = msgspec.structs.replace(some, requests=some.requests * 400)
    rows = deadlines(many).spec["data"]["values"]
    assert len(rows) < 8000
    assert sum(row["state"] == "missed" for row in rows) == 9 * 400


def test_every_plot_is_there_when_there_are_numbers_for_it():
    report = msgspec.structs.replace(report_of(full()), trace=make_trace())
    assert tuple(chart.name for chart in all_charts(report)) == PLOTS
    assert "deadlines" not in charts_of(full())
    assert list(charts_of(make_manifest(3, timed=False, evaluated=False))) == ["heads", "neurons"]
    assert list(charts_of(make_manifest(1))) == ["pareto", "heads", "neurons", "latencies"]


def strings(part):
    if isinstance(part, dict):
        for key, value in part.items():
            yield key
            yield from [] if key == "values" else strings(value)
    elif isinstance(part, list):
        for item in part:
            yield from strings(item)
    elif isinstance(part, str):
        yield part


@pytest.mark.parametrize("name", [HOSTILE, 'a.b[0]["c"]', "datum.x + alert(1)", "var(--ink)", "\x1b[31m\u202e"])
def test_names_are_values_of_rows_and_nothing_else(name):
    """Outside `values`, names appear only as members of a scale's domain, which Vega reads as plain values."""
    expected = {text for chart in charts_of(full()).values() for text in strings(chart.spec)}
    manifest = make_manifest(7, names={1: name}, recipe=full().recipe)
    for chart in charts_of(manifest).values():
        scales = set(report_of(manifest).spreads) if chart.name == "latencies" else set()
        assert set(strings(chart.spec)) - expected <= scales
        drawn = "".join(ElementTree.fromstring(svg(chart)).itertext())
        assert visible(name)[:8] in drawn or chart.name.partition("-")[0] in ("pareto", "search", "rounds", "sublayers")
        assert "onerror=" not in re.sub(r">[^<]*<", "><", inline_svg(chart))


def test_a_removed_sub_layer_looks_like_nothing_else():
    manifest = make_manifest(4)
    last = manifest.variants[-1]
    heads = tuple(0 if i == 4 else count for i, count in enumerate(last.heads))
    cut = msgspec.structs.replace(last, heads=heads)
    chart = charts_of(msgspec.structs.replace(manifest, variants=(*manifest.variants[:-1], cut)))["heads"]
    gone = [row for row in chart.spec["data"]["values"] if row["kept"] == 0]
    assert [(row["name"], row["block"], row["text"]) for row in gone] == [
        (last.name, 4, "nothing: the sub-layer is removed")
    ]
    assert "×" in svg(chart).decode()
    assert "A cross" in chart.caption
    assert "×" not in svg(charts_of(manifest)["heads"]).decode()


def test_without_a_quality_there_is_no_chart_but_the_command_that_measures_it():
    manifest = make_manifest(4, evaluated=False)
    assert "pareto" not in charts_of(manifest)
    text = re.sub(r"<script.*?</script>", "", page_of(manifest), flags=re.DOTALL)
    assert "plot-pareto" not in text
    assert "neither accuracy nor fidelity is known" in text
    assert "snapvit validate" in text


def test_a_standard_error_is_a_small_part_of_the_upward_axis():
    chart = charts_of(make_manifest(4))["pareto"]
    low, high = chart.spec["encoding"]["y"]["scale"]["domain"]
    widest = max(row["up"] - row["down"] for row in chart.spec["data"]["values"]) / 2
    assert high - low >= 8 * widest


@pytest.mark.parametrize("count", [1, 2, 40])
def test_plots_of_one_and_of_many_variants_are_drawn(count):
    for chart in charts_of(make_manifest(count)).values():
        image = Image.open(io.BytesIO(png(chart)))
        assert image.width >= 1300
        assert len(image.convert("L").getcolors(1 << 20)) > 10
        assert len(chart.rows) >= 1
        assert all(len(row) == len(chart.columns) for row in chart.rows)


def test_charts_of_their_own_have_colours_and_no_variables():
    for chart in charts_of(full()).values():
        text = svg(chart).decode()
        assert "var(" not in text
        assert "#ffffff" in text


def test_plots_of_a_page_share_no_ids_and_follow_its_colours():
    texts = [inline_svg(chart) for chart in charts_of(full()).values()]
    ids = [found for text in texts for found in re.findall(r'\bid="([^"]+)"', text)]
    assert len(set(ids)) == len(ids)
    assert all(f'id="{found}"' in "".join(texts) for found in re.findall(r"url\(#([^)]+)\)", "".join(texts)))
    assert all("var(--" in text and "<script" not in text and "href" not in text for text in texts)


def test_axes_show_the_data_and_not_the_zero():
    tight = axis([97.6, 97.9], least=2.0, most=100.0)
    assert 96 < tight.low < 97.6 < 97.9 < tight.high < 99.5
    assert 3 <= len(tight.ticks) <= 8
    assert axis([0.2, 10.0], floor=0.0).low == 0
    assert max(axis([90.0, 100.0], pad=0.2, most=100.0).ticks) == 100
    for length in (1e-4, 0.3, 7, 1234.5):
        assert 3 <= len(axis([5.0, 5.0 + length]).ticks) <= 8


def test_labels_never_overlap_and_the_first_is_always_there():
    crowd = [(0.5 + 0.001 * i, 0.5, f"name{i}") for i in range(30)]
    placed = place_labels(crowd, range(30), sure=1)
    assert placed[0].index == 0
    assert len(placed) < 10
    apart = [(0.1 + 0.2 * i, 0.1 + 0.2 * i, f"n{i}") for i in range(5)]
    assert sorted(label.index for label in place_labels(apart, range(5))) == list(range(5))


# The page


def test_json_in_a_page_cannot_end_its_element():
    text = as_data({"name": "</script><!--&\u2028\u2029"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": "</script><!--&\u2028\u2029"}
    with pytest.raises(ValueError, match="JSON"):
        as_data({"x": float("nan")})


def test_hostile_strings_never_become_markup():
    manifest = make_manifest(5, names={2: HOSTILE}, recipe={"name": HOSTILE, "data": {"source": HOSTILE}})
    text = page_of(manifest, make_validation(manifest, label=HOSTILE, title=HOSTILE + '" onload="x'))
    assert "<img src=x" not in text
    assert len(re.findall(r"</script", text)) == 2
    assert '" onload="x' not in text
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in text


def test_the_page_is_whole_in_itself():
    text = page_of(full(), make_validation(full()))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', markup)


def test_the_page_can_be_read_by_those_who_hear_it():
    text = page_of(full(), make_validation(full()))
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)
    levels = [int(level) for level in re.findall(r"<h(\d)", markup)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert markup.count("<figure") == markup.count("<figcaption") == markup.count('role="img" aria-label=') == 9
    assert all(alt for alt in re.findall(r'<img[^>]* alt="([^"]*)"', markup))
    assert markup.count("<img") == markup.count(" alt=") == 6
    assert markup.count("<table") == markup.count("<caption>")
    ids = re.findall(r'\bid="([^"]+)"', markup)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'aria-labelledby="([^"]+)"', markup)) <= set(ids)


def test_tokens_are_shown_for_each_block_where_variants_differ_in_them():
    manifest = make_manifest(3)
    assert 'class="tokens"' not in page_of(manifest)
    last = manifest.variants[-1]
    counts = list(manifest.anatomy.tokens_after())
    counts[-1] -= 4
    merging = msgspec.structs.replace(last, tokens=tuple(counts), image_size=manifest.anatomy.image)
    text = page_of(msgspec.structs.replace(manifest, variants=(*manifest.variants[:-1], merging)))
    table = re.search(r'<table class="tokens">.*?</table>', text, flags=re.DOTALL)[0]
    row = re.search(rf'<th scope="row" class="name">{last.name}</th>(.*?)</tr>', table)[1]
    assert re.findall(r"<td>(\d+)</td>", row) == [str(n) for n in (manifest.anatomy.tokens, *counts)]


def test_merged_patches_are_shown_block_by_block():
    manifest = make_manifest(3)
    text = page_of(manifest, make_merging_validation(manifest))
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)
    table = re.search(r'<table class="merges">.*?</table>', markup, flags=re.DOTALL)[0]
    columns = ["input", "block 3: 143 tokens", "block 7: 99 tokens"]
    assert re.findall(r'<th scope="col">([^<]*)<', table) == columns
    assert table.count('<tr><th scope="row">') == 2
    assert table.count("<img") == table.count(" alt=") == table.count('width="96" height="96"') == 2 * 3
    assert 'alt="pictures/0.png as 99 tokens, after block 7"' in table
    assert markup.count("<table") == markup.count("<caption>")
    assert "may differ where two matches are nearly equal" not in text
    other = msgspec.structs.replace(make_merging_validation(manifest), runtime="openvino")
    assert "As ONNX Runtime merges them; openvino may differ where two matches are nearly equal." in page_of(
        manifest, other
    )


def test_merged_patches_that_could_not_be_drawn_say_why_and_without_any_nothing_is_said():
    manifest = make_manifest(3)
    text = page_of(manifest, make_merging_validation(manifest, images=(), missing="v1.xml does not tell"))
    assert "No picture: v1.xml does not tell." in text
    assert '<table class="merges">' not in text
    assert "Patches that are merged" not in page_of(manifest, make_validation(manifest))
    assert "Patches that are merged" not in page_of(manifest)


def test_merged_patches_of_hostile_names_and_pictures_are_text():
    manifest = make_manifest(3)
    told = make_merging_validation(manifest, title=HOSTILE + '" onload="x', variant=HOSTILE)
    text = page_of(manifest, told)
    assert "<img src=x" not in text
    assert '" onload="x' not in text
    (merged,) = told.merged
    broken = msgspec.structs.replace(merged.images[0].steps[0], picture="aGVsbG8=")
    image = msgspec.structs.replace(merged.images[0], picture="?", steps=(broken,))
    broken_too = msgspec.structs.replace(told, samples=(), merged=(msgspec.structs.replace(merged, images=(image,)),))
    text = page_of(manifest, broken_too)
    assert text.count("(no image)") == 2
    assert "data:image" not in text


def test_a_validation_that_was_written_before_merges_were_drawn_is_read(tmp_path):
    manifest = make_manifest(3)
    make_validation(manifest).save(tmp_path)
    path = tmp_path / "validation.json"
    written = json.loads(path.read_text())
    assert written.pop("merged") == []
    path.write_text(json.dumps(written))
    assert Validation.load(tmp_path) == make_validation(manifest)


def test_predictions_are_marked_in_words():
    manifest = make_manifest(5)
    text = page_of(manifest, make_validation(manifest))
    assert "✓ right" in text
    assert "✗ wrong" in text
    assert "≠ dense" in text


def test_what_is_no_image_is_left_out():
    manifest = make_manifest(3)
    found = make_validation(manifest, count=1)
    for picture in ("?", "aGVsbG8=", ""):
        sample = msgspec.structs.replace(found.samples[0], picture=picture)
        text = page_of(manifest, msgspec.structs.replace(found, samples=(sample,)))
        assert "(no image)" in text
        assert "data:image" not in text


def test_doubts_and_missing_pieces_are_said():
    manifest = make_manifest(4)
    choice = msgspec.structs.replace(manifest.choice, decided=False, doubt="s12 may fit or not")
    assert "s12 may fit or not." in page_of(msgspec.structs.replace(manifest, choice=choice))
    text = page_of(make_manifest(4, evaluated=False, timed=False))
    assert "Accuracy is missing" in text
    assert "plot-pareto" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_words_stand_out_from_their_background():
    """Contrast of every colour that carries text or a mark: 4.5 for words, 3 for lines and points (WCAG 2.2)."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    for colours in (LIGHT, DARK):
        for name in ("--ink", "--muted", "--budget", "--fits", *(f"--c{i}" for i in range(1, 7))):
            low, high = sorted([light(colours[name]), light(colours["--paper"])])
            assert (high + 0.05) / (low + 0.05) >= (4.5 if not name.startswith("--c") else 3), name


# Markdown, and the terminal


def test_markdown_is_a_table_that_names_cannot_break():
    manifest = make_manifest(4, names={1: "a|b", 3: HOSTILE})
    text = markdown(report_of(manifest), "report_pareto.svg")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 6
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "](<report_pareto.svg>)" in text
    assert "<img" not in text
    assert "**s46.7**" in lines[4]


def test_bars_in_eighths_and_in_ascii():
    assert bar(0.5, 4) == "██  "
    assert bar(0.53125, 4) == "██▏ "
    assert bar(7.0, 3) == "███"
    assert bar(0.5, 4, ascii_only=True) == "##  "
    assert bars([10.0, None, 4.0], limit=6.0, width=10) == ["██████████", "", "████  ┊   "]
    assert spread_bars([0.98, 0.99, None], width=4)[2] == ""
    assert spread_bars([None]) == [""]


def stream(encoding):
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_table_of_a_validation_keeps_to_its_columns_and_encoding(encoding, count):
    file = stream(encoding)
    print_validation(make_manifest(count, names={1: "x" * 60, 3: "[bold]y"} if count > 3 else None), file)
    file.flush()
    text = file.buffer.getvalue().decode(encoding)
    assert max(map(len, text.splitlines())) <= 120
    assert ("█" in text) == (encoding == "utf-8")
    assert ("chosen" in text) == (count >= 3)
    assert "[bold]y" in text or count < 4


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_of_a_validation_breaks_no_number_at_any_width(width):
    manifest, file = make_manifest(7), stream("utf-8")
    print_validation(manifest, file, width)
    file.flush()
    text = file.buffer.getvalue().decode()
    assert max(map(len, text.splitlines())) <= width
    report = report_of(manifest)
    for point in report.own:
        assert f"{point.latency_ms:.2f}" in text
        assert f"{100 * point.quality:.1f} ± {100 * point.error:.1f} %" in text


def test_the_table_of_a_validation_leaves_out_what_nobody_knows(capsys):
    print_validation(make_manifest(3, timed=False))
    text = capsys.readouterr().out
    assert "p50" not in text
    assert "agrees" in text


# Files and the command line


def test_names_and_places(tmp_path):
    assert parse_formats("png, HTML,png") == ("html", "png")
    with pytest.raises(UsageError, match="no format is called 'pdf'. Known: html, png, svg, md, json"):
        parse_formats("html,pdf")
    assert place(HERE, None, None) == (HERE, "report", ("html",))
    assert place(HERE, tmp_path, ("svg",)) == (tmp_path, "report", ("svg",))
    assert place(HERE, tmp_path / "new", None) == (tmp_path / "new", "report", ("html",))
    assert place(HERE, tmp_path / "a.md", None) == (tmp_path, "a", ("md",))
    assert place(HERE, tmp_path / "a.html", ("html", "png")) == (tmp_path, "a", ("html", "png"))
    with pytest.raises(UsageError, match="a.md is not what --format html gives"):
        place(HERE, tmp_path / "a.md", ("html",))
    with pytest.raises(UsageError, match="a.doc is neither a folder nor one of .html"):
        place(HERE, tmp_path / "a.doc", None)


@pytest.mark.parametrize(("choice", "covers"), [(True, "90 % interval"), (False, "95 % interval")])
def test_intervals_are_called_by_the_share_that_they_cover(choice, covers):
    manifest = make_manifest(choice=choice)
    found = report_of(manifest)
    assert covers in variant_table(found)["caption"]
    assert f"Bars across are {covers}s" in pareto(found).caption
    assert "95 % interval" not in page(LoadedFamily(HERE, manifest), found) or not choice


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """One small family, exported once for all tests here."""
    folder = tmp_path_factory.mktemp("exported")
    return make_family(folder, correct=False, sparsity=[0.5])


@pytest.fixture
def family(exported, tmp_path) -> Path:
    """A copy of it that a test may change."""
    return shutil.copytree(exported, tmp_path / "family")


def test_a_real_family_gets_a_page_that_an_export_may_replace(snapvit, family):
    outcome = snapvit("report", family, "--budget", "60%", "-q")
    assert outcome.code == 0, outcome.err
    assert f"Written to {family}: report.html" in outcome.out
    text = (family / "report.html").read_text()
    assert "tiny" in text
    assert "s50" in text
    assert not {path.name for path in family.iterdir()} - set(own_files(family))
    read_family(family)


def test_all_formats_lie_beside_each_other(snapvit, family, tmp_path):
    other = shutil.copytree(family, tmp_path / "other")
    make_validation(read_family(family)).save(family)
    out = tmp_path / "out" / "mine.html"
    outcome = snapvit(
        "report", family, "--out", out, "--format", "html,png,svg,md,json", "--beside", other, "--json", "-q"
    )
    assert outcome.code == 0, outcome.err
    names = {path.name for path in out.parent.iterdir()}
    plots = ("pareto", "heads", "neurons", "latencies", "sublayers")
    assert names == {"mine.html", "mine.md", "mine.json"} | {
        f"mine_{p}.{kind}" for p in plots for kind in ("svg", "png")
    }
    assert json.loads(outcome.out) == json.loads((out.parent / "mine.json").read_text())
    assert len(json.loads(outcome.out)["points"]) == 4
    assert "mine_pareto.svg" in (out.parent / "mine.md").read_text()
    assert "pictures/0.png" in out.read_text()
    for path in out.parent.glob("*.svg"):
        ElementTree.parse(path)
    for path in out.parent.glob("*.png"):
        Image.open(path).verify()


def test_a_report_never_replaces_what_a_family_is_made_of(snapvit, family):
    before = (family / "manifest.json").read_bytes()
    outcome = snapvit("report", family, "--out", family / "manifest.json")
    assert outcome.code == 1
    assert "a part of its folder" in outcome.error_line
    assert (family / "manifest.json").read_bytes() == before


def test_bad_requests_are_refused_in_one_line(snapvit, family, tmp_path):
    assert "manifest.json: cannot be read" in snapvit("report", tmp_path / "nothing").error_line
    assert "no format is called 'gif'" in snapvit("report", family, "--format", "gif").error_line
    assert "budget '3' is not a latency" in snapvit("report", family, "--budget", "3").error_line
    (tmp_path / "shut").write_text("")
    assert "cannot be written" in snapvit("report", family, "--out", tmp_path / "shut" / "a.md", "-q").error_line
    (family / "validation.json").write_text("{}")
    assert "validation.json: not a valid Validation" in snapvit("report", family).error_line


def test_a_family_of_another_model_is_refused_by_its_folder(snapvit, family, tmp_path):
    other = shutil.copytree(family, tmp_path / "other")
    write_manifest(other, msgspec.structs.replace(read_family(other), model="deit"))
    assert f"{other}: a family of deit, not of tiny" in snapvit("report", family, "--beside", other).error_line


@pytest.mark.parametrize("package", ["vl_convert", "jinja2"])
def test_what_draws_may_be_missing(snapvit, family, monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    line = snapvit("report", family).error_line
    assert line == f"error: reports needs {package}, which is not installed. Try: pip install 'snapvit-export[report]'"


def test_every_file_of_a_report_is_known():
    assert {f"report.{kind}" for kind in ("html", "md", "json")} <= set(report_files())
    assert "report_pareto.png" in report_files()
    assert len(set(report_files())) == 3 + 2 * len(PLOTS)
