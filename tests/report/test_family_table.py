"""What an export says at its end: levers in words, a table that fits its terminal, and the decision in a sentence."""

import html
import io
import json
import re
from pathlib import Path

import msgspec
import pytest

from helpers.report_factory import DEPTH, HOSTILE, make_fidelity, make_manifest, make_mixed
from snapvit_export.family.class_names import class_name
from snapvit_export.family.manifest import Manifest, Shipped, Variant, verdict_on
from snapvit_export.report.charts.pareto import pareto
from snapvit_export.report.charts.proof import proof
from snapvit_export.report.data import LoadedFamily, collect
from snapvit_export.report.markdown import markdown
from snapvit_export.report.page import page
from snapvit_export.report.summary import Column, fitted, packed, table
from snapvit_export.report.terminal import print_family
from snapvit_export.report.text import alone, decision, divergence, dropped, headline, same, seconds
from snapvit_export.report.variant_words import levers, measured_verdict
from snapvit_export.report.variants import alternative_rows, measurement_rows, variant_table
from snapvit_export.storage.json import to_json

change = msgspec.structs.replace


def report_of(manifest: Manifest):
    return collect(LoadedFamily(Path("here"), manifest))


def printed(manifest: Manifest, width: int | None = None, folder: Path | None = None) -> str:
    file = io.StringIO()
    print_family(manifest, file, folder, width)
    return file.getvalue()


def rows_of(text: str) -> list[str]:
    """The lines of the table below its rule, until the first empty one."""
    lines = text.splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line.strip()) == {"─"})
    below = lines[rule + 1 :]
    return below[: below.index("")]


def with_choice(manifest: Manifest, **changes: object) -> Manifest:
    return change(manifest, choice=change(manifest.choice, **changes))


def measured(manifest: Manifest, name: str, **changes: object) -> Manifest:
    """The family with one of its measurements changed."""
    rows = tuple(change(m, **changes) if m.variant == name else m for m in manifest.choice.measurements)
    return with_choice(manifest, measurements=rows)


# Words


WORDS = {
    "dense": "dense",
    "int8": "int8",
    "int8-r112-w88": "int8, 112 of 197 tokens, 88 % width",
    "int8-r112-w85": "int8, 112 of 197 tokens, 85 % width",
    "int8-192": "int8, 192 px, 129 of 197 tokens, 2 sub-layers fewer",
    "r48": "48 of 197 tokens",
    "w52": "52 % width",
}


@pytest.mark.parametrize("kept", [1, 4, 7])
def test_levers_in_words_are_the_same_for_a_file_and_for_a_candidate_that_was_not_kept(kept):
    manifest = make_mixed(kept=max(kept, 4)) if kept > 1 else with_choice(make_mixed(), variant="dense")
    manifest = change(manifest, variants=manifest.variants[:kept])
    assert {m.variant: levers(m, manifest) for m in manifest.choice.measurements} == WORDS
    assert {v.name: levers(v, manifest) for v in manifest.variants} == dict(list(WORDS.items())[:kept])


def variant_with(**changes: object) -> tuple[Variant, Manifest]:
    manifest = make_mixed()
    return change(manifest.variants[0], **changes), manifest


def test_levers_name_resolution_alone_and_oblong_images():
    small = (145,) * DEPTH
    assert levers(*variant_with(image_size=(192, 192), tokens=small)) == "192 px"
    assert levers(*variant_with(image_size=(192, 192), tokens=msgspec.UNSET)) == "192 px"
    assert levers(*variant_with(image_size=(160, 192), tokens=msgspec.UNSET)) == "160x192 px"


def test_levers_name_precisions_as_people_call_them():
    assert levers(*variant_with(precision="int8-static")) == "int8 static"
    assert levers(*variant_with(precision="fp16")) == "fp16"


def test_levers_count_one_sub_layer_and_do_not_call_depth_width():
    one = (0, *(6,) * (DEPTH - 1))
    assert levers(*variant_with(heads=one, sparsity=0.03)) == "1 sub-layer fewer"


def test_a_width_that_is_nearly_all_is_not_rounded_to_all():
    narrower = (5, *(6,) * (DEPTH - 1))
    assert levers(*variant_with(heads=narrower, sparsity=0.004)) == "99.6 % width"


def test_levers_of_older_files_come_from_sparsity_and_the_familys_precision():
    manifest = make_manifest(3, precision="int8-dynamic")
    assert [levers(m, manifest) for m in manifest.choice.measurements] == [
        "int8",
        "int8, 65 % width",
        "int8, 30 % width",
    ]
    gone = change(manifest, variants=manifest.variants[:1], choice=None)
    assert levers(manifest.choice.measurements[2], gone) == "int8, 30 % width"


def test_a_verdict_is_sure_only_beyond_the_interval():
    assert verdict_on((9.6, 10.0), 10.0) == "fits"
    assert verdict_on((9.9, 10.1), 10.0) == "unsure"
    assert verdict_on((10.0, 10.2), 10.0) == "unsure"
    assert verdict_on((10.1, 10.4), 10.0) == "no"
    assert verdict_on((9.6, 9.9), 10.0, within_limits=False) == "no"


def test_a_candidate_that_is_fast_enough_but_too_large_does_not_fit():
    choice = make_mixed().choice
    fast = next(m for m in choice.measurements if m.variant == "w52")
    assert measured_verdict(fast, choice) == "fits"
    assert measured_verdict(change(fast, fits=False), choice) == "no"
    unsure = change(fast, fits=False, between_ms=(9.9, 10.1))
    assert measured_verdict(unsure, choice) == "unsure"
    limited = change(choice, limits=change(choice.limits, max_size_bytes=10))
    assert measured_verdict(unsure, limited) == "no"


def test_fidelity_has_the_digits_that_its_error_allows():
    assert same(make_fidelity(0.012, 0.984)) == "98.4 ± 0.6"
    assert same(make_fidelity(0.012, 0.984, estimated=True)) == "~98.4 ± 0.6"
    assert divergence(make_fidelity(0.012, 1.0, standard_error=0.001)) == "0.012 ± 0.001"
    assert divergence(make_fidelity(0.00042, 1.0, standard_error=0.00005)) == "0.00042 ± 0.00005"
    assert divergence(make_fidelity(1.234, 0.5, standard_error=0.2)) == "1.23 ± 0.20"
    assert (same(None), divergence(None)) == ("–", "–")


def test_where_the_time_went_is_one_line_whose_stages_add_up():
    assert seconds({"ranking": 14.2, "timing": 46.4, "other": 0.2}) == "Took 61 s: ranking 14, timing 46"
    assert seconds({"ranking": 0.4, "timing": 1.24}) == "Took 1.6 s: ranking 0.4, timing 1.2"
    assert seconds({"timing": 180.0}) == "Took 180 s (3.0 min): timing 180"


# The table


NUMBERS = [  # every cell that must stand whole, in a line of its own column
    "9.79 (9.60 – 9.93)",
    "10.21 (10.02 – 10.35)",
    "98.4 ± 0.6",
    "79.1 ± 0.6",
]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("labelled", [False, True])
def test_the_table_keeps_to_its_width_and_breaks_no_number(width, labelled):
    text = printed(make_mixed(labelled=labelled), width, Path("snapvit-family"))
    assert max(map(len, text.splitlines())) <= width
    whole = NUMBERS if not labelled or width > 80 else ["(9.60 – 9.93)", "(10.02 – 10.35)", *NUMBERS[2:], "77.0 ± 1.0"]
    for number in whole:
        assert number in text
    for phrase in ("112 of 197 tokens", "85 % width", "2 sub-layers fewer"):
        assert sum(phrase in line for line in rows_of(text)) >= 1


def test_wide_tables_have_size_and_divergence_and_narrow_ones_leave_them_out():
    wide, narrow = printed(make_mixed(), 120), printed(make_mixed(), 80)
    assert "0.012 ± 0.002" in wide
    assert " 18.7 " in wide
    assert "0.012 ± 0.002" not in narrow
    assert " 18.7 " not in narrow
    middle = [column.title for column in table(report_of(make_mixed()), 105)[1]]
    assert "MB" not in middle
    assert "divergence\n(KL)" in middle


def test_a_name_that_is_long_leaves_room_for_the_numbers():
    manifest = make_manifest(4, names={1: "x" * 60, 2: "[bold]y"})
    text = printed(manifest, 80)
    assert max(map(len, text.splitlines()[: text.splitlines().index("")])) <= 80
    assert "[bold]y" in text
    assert "x" * 20 in text


def test_phrases_are_packed_whole():
    phrases = ["int8", "112 of 197 tokens", "85 % width"]
    assert packed(phrases, 100) == "int8, 112 of 197 tokens, 85 % width"
    assert packed(phrases, 24) == "int8, 112 of 197 tokens,\n85 % width"
    assert packed(phrases, 23) == "int8,\n112 of 197 tokens,\n85 % width"
    assert packed(["dense"], 3) == "dense"


def test_columns_are_left_out_in_their_order():
    levers_ = Column("levers", ("a" * 30,), is_words=True)
    columns = [
        levers_,
        Column("p", ("1" * 10,)),
        Column("q", ("2" * 10,), left_out=2),
        Column("r", ("3" * 10,), left_out=1),
    ]
    assert [c.title for c in fitted(columns, 66)] == ["levers", "p", "q", "r"]
    assert [c.title for c in fitted(columns, 54)] == ["levers", "p", "q"]
    assert [c.title for c in fitted(columns, 40)] == ["levers", "p"]


def test_the_best_comes_first_and_the_first_that_fits_is_chosen():
    rows, _ = table(report_of(make_mixed()), 120)
    assert [row.name for row in rows] == list(WORDS)
    assert next(row for row in rows if row.verdict == "fits").is_chosen
    mixed_up = with_choice(make_mixed(), measurements=tuple(reversed(make_mixed().choice.measurements)))
    assert table(report_of(mixed_up), 120)[0] == rows


def test_where_accuracy_is_preferred_the_most_accurate_comes_first():
    manifest = make_mixed(labelled=True, prefer="accuracy")
    best = next(m for m in manifest.choice.measurements if m.variant == "w52")
    manifest = measured(manifest, "w52", evaluation=change(best.evaluation, top1=0.795))
    assert [row.name for row in table(report_of(manifest), 120)[0]][:3] == ["dense", "w52", "int8"]


def test_latencies_shown_are_those_that_decided():
    manifest = make_mixed()
    text = printed(manifest, 120)
    for m in manifest.choice.measurements:
        assert f"{m.latency_ms:.2f} ({m.between_ms[0]:.2f} – {m.between_ms[1]:.2f})" in text
        assert f"{m.profile.p50_ms:.2f}" not in text


def test_every_row_has_a_verdict_and_one_is_chosen():
    manifest = measured(make_mixed(), "r48", between_ms=(9.7, 10.1), fits=False)
    verdicts = [
        line.rstrip().split("  ")[-1].strip() for line in rows_of(printed(manifest, 120)) if re.search(r"\(\d", line)
    ]
    assert verdicts == ["no", "no", "no", "fits, chosen", "fits", "unsure", "fits"]


def test_a_family_without_a_choice_has_the_same_columns_and_no_verdict():
    manifest = change(make_mixed(), choice=None)
    text = printed(manifest, 120)
    assert "fits" not in text
    assert "98.4 ± 0.6" in text
    ms, (low, high) = manifest.latency("int8-r112-w85")
    assert f"{ms:.2f} ({low:.2f} – {high:.2f})" in text
    assert "verdict" not in text
    assert "-" not in [cell for line in rows_of(text) for cell in line.split()]


def test_unlabelled_images_leave_no_dash_and_older_files_have_one():
    manifest = make_mixed()
    assert not any(re.search(r" - |-$", line) for line in rows_of(printed(manifest, 120)))
    assert "100.0" in rows_of(printed(manifest, 120))[0]
    unknown = measured(manifest, "w52", fidelity=None)
    assert re.search(r" - ", rows_of(printed(unknown, 120))[-1])
    assert "same top" not in printed(make_manifest(3), 120)


def test_the_dense_model_agrees_with_itself_without_an_error():
    manifest = make_mixed()
    dense = change(manifest.variants[0], fidelity=make_fidelity(0.0, 1.0))
    own = change(measured(manifest, "dense", fidelity=dense.fidelity), variants=(dense, *manifest.variants[1:]))
    assert printed(own, 120) == printed(manifest, 120)


def test_a_model_without_a_head_is_compared_by_the_nearest_image():
    text = printed(make_mixed(by="neighbours"), 120)
    assert "same nearest" in text
    assert "with the same nearest image as the dense model in 98.4 ± 0.6 of 100" in " ".join(text.split())
    assert "top answer" not in text


def test_many_candidates_are_cut_down_to_those_around_the_choice():
    manifest = make_manifest(40)
    rows, _ = table(report_of(manifest), 120)
    assert [row.name for row in rows] == [m.variant for m in manifest.choice.measurements[:10]]
    assert "30 more candidates were timed; the report shows all." in printed(manifest)
    assert len(table(report_of(make_manifest(40, choice=False)), 120)[0]) == 40


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_the_table_is_written_in_any_encoding(encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_family(make_mixed(), file)
    file.flush()
    assert "9.79 (9.60 - 9.93)" in file.buffer.getvalue().decode(encoding)


# Below the table


def test_the_decision_names_what_was_taken_and_what_was_next():
    assert decision(report_of(make_mixed())) == (
        "int8-r112-w85 (int8, 112 of 197 tokens, 85 % width) is the most faithful that fits 10 ms: "
        "9.79 ms (9.60 to 9.93), with the same top answer as the dense model in 98.4 ± 0.6 of 100 held-out images; "
        "the next better, int8-r112-w88 (int8, 112 of 197 tokens, 88 % width), takes 10.21 ms (10.02 to 10.35)."
    )


def test_the_decision_where_the_dense_model_fits():
    manifest = make_mixed(variant="dense", budget_ms=30.0, next_denser=None)
    assert decision(report_of(manifest)) == (
        "dense takes 24.10 ms (23.64 to 24.44) and fits 30 ms: it is the dense model, nothing had to be cut."
    )


def test_the_decision_where_the_machine_was_too_noisy():
    manifest = make_mixed(decided=False, doubt="timing runs disagree")
    manifest = measured(manifest, "int8-r112-w85", between_ms=(9.6, 10.1), fits=False)
    text = decision(report_of(manifest))
    assert "is the most faithful that may fit 10 ms: 9.79 ms (9.60 to 10.10)" in text
    assert text.endswith("; too noisy to decide between int8-r112-w88 and int8-r112-w85: timing runs disagree.")


def test_the_decision_where_accuracy_is_preferred():
    text = decision(report_of(make_mixed(labelled=True, prefer="accuracy")))
    assert "is the most accurate that fits 10 ms" in text
    assert "and top-1 77.0 ± 1.0 % (dense 80.0 ± 1.0 %); the next better," in text


def test_the_decision_without_fidelity_is_about_density():
    manifest = make_manifest(3)
    text = decision(report_of(manifest))
    assert text.startswith("s70 (30 % width) is the densest that fits ")
    assert "top answer" not in text
    assert "; the next denser, s35 (65 % width), takes " in text


def test_width_and_depth_alone_are_about_density_too():
    manifest = make_mixed(levers=("width", "depth"))
    assert "is the densest that fits" in decision(report_of(manifest))


def test_a_better_one_that_is_only_too_large_is_said_to_be():
    manifest = measured(make_mixed(), "int8-r112-w88", latency_ms=9.9, between_ms=(9.85, 9.95), fits=False)
    assert decision(report_of(manifest)).endswith("takes 9.90 ms (9.85 to 9.95), but is too large.")


def test_single_levers_and_dropped_precisions_have_a_line_each():
    report = report_of(make_mixed())
    assert alone(report) == (
        "With one lever alone, same top answer: tokens 94.5 ± 0.6 % (r48, 9.83 ms), width 79.1 ± 0.6 % (w52, 9.69 ms)."
    )
    assert [dropped(found) for found in report.dropped] == ["fp16 is not faster here: 1.07 of the dense latency"]
    assert alone(report_of(make_manifest(3))) is None


def test_the_last_lines_are_where_the_time_went_and_the_commands():
    lines = printed(make_mixed(), folder=Path("my family")).splitlines()
    assert lines[-5] == "fp16 is not faster here: 1.07 of the dense latency."
    assert lines[-3] == "Took 61 s: ranking 14, latency model 11, candidates 12, building 8, timing 15."
    assert lines[-2] == "Check it:   snapvit validate 'my family'"
    assert lines[-1] == "Look at it: snapvit report 'my family'"
    assert "snapvit" not in printed(make_mixed())


def test_sentences_are_broken_for_a_terminal_and_one_line_elsewhere():
    manifest = make_mixed(labelled=True)
    assert decision(report_of(manifest)) in printed(manifest).splitlines()
    below = printed(manifest, 80)
    for number in ("9.79 ms (9.60 to", "98.4 ± 0.6 of 100", "88 % width", "80.0 ± 1.0 %"):
        assert any(number in line for line in below.splitlines()), number


# The report


def test_a_report_without_labels_shows_fidelity():
    report = report_of(make_mixed())
    assert (report.measure, report.by_fidelity, report.judged) == ("agreement", True, "128 held-out images")
    assert [point.quality for point in report.own] == [1.0, 0.992, 0.986, 0.984]
    assert headline(report).endswith("with the same top answer as the dense model in 98.4 ± 0.6 % of the images.")


def test_a_report_with_labels_shows_them_and_fidelity_beside():
    report = report_of(make_mixed(labelled=True))
    assert (report.measure, report.by_fidelity) == ("top1", False)
    titles = [column["title"] for column in variant_table(report)["columns"]]
    assert {"top-1", "same top answer, %", "divergence", "levers", "precision"} <= set(titles)


def test_tables_of_the_report_say_the_same_as_the_terminal():
    report = report_of(make_mixed())
    found = measurement_rows(report)
    for row in found["rows"]:
        cells = dict(zip(found["columns"], row))
        assert cells["levers"] == WORDS[cells["variant"]]
        assert cells["verdict"] == (
            "fits, chosen"
            if cells["variant"] == "int8-r112-w85"
            else "no"
            if cells["variant"] in ("dense", "int8", "int8-r112-w88")
            else "fits"
        )
    assert [row[:3] for row in alternative_rows(report)["rows"]] == [
        ("tokens", "r48", "48 of 197 tokens"),
        ("width", "w52", "52 % width"),
    ]
    verdicts = {point.name: point.verdict for point in report.own}
    assert verdicts == {row.name: row.verdict for row in report.looks if row.name in verdicts}


def test_the_proof_shows_what_single_levers_reach_and_what_was_left_out():
    manifest = make_mixed()
    report = report_of(manifest)
    chart = proof(report)
    assert [row[0] for row in chart.rows] == ["int8-r112-w88", "int8-r112-w85", "r48", "w52"]
    assert [row["verdict"] for row in chart.spec["data"]["values"]] == [
        "10.21 ms",
        "9.79 ms, chosen",
        "9.83 ms, tokens alone",
        "9.69 ms, width alone",
    ]
    text = page(LoadedFamily(Path("here"), manifest), report).replace("\u00a0", " ")
    shown = re.search(r'<table class="alternatives">.*?</table>', text, flags=re.DOTALL)[0]
    assert re.findall(r'<th scope="row" class="name">(\w+)<', shown) == ["tokens", "width"]
    assert "94.5 ± 0.6" in shown
    assert "<p>fp16 is not faster here: 1.07 of the dense latency.</p>" in text
    assert decision(report) in text
    assert "Took 61 s: ranking 14" in text
    assert 'class="alternatives"' not in page(LoadedFamily(Path("here"), make_manifest(3)), report_of(make_manifest(3)))


def test_without_labels_the_chart_shows_fidelity():
    chart = pareto(report_of(make_mixed()))
    assert chart.title == "Fidelity against latency"
    assert [row["y"] for row in chart.spec["data"]["values"]] == pytest.approx([100, 99.2, 98.6, 98.4])
    assert "on 128 held-out images" in chart.caption
    assert chart.spec["encoding"]["y"]["axis"]["title"] == "same top answer as dense, %"


def test_markdown_and_json_have_the_proof_too():
    report = report_of(make_mixed())
    text = markdown(report, None)
    assert decision(report) in text
    assert "fp16 is not faster here" in text
    assert "With one lever alone" in text
    found = json.loads(to_json(report))
    assert found["points"][3]["levers"] == "int8, 112 of 197 tokens, 85 % width"
    assert found["looks"][5]["verdict"] == "fits"
    assert found["looks"][5]["fidelity"]["divergence"] == 0.061
    assert [row["lever"] for row in found["alternatives"]] == ["tokens", "width"]
    assert found["dropped"][0]["ratio"] == 1.07
    assert found["seconds"]["timing"] == 15.3


def test_families_of_several_precisions_are_called_by_all_of_them():
    assert report_of(make_mixed()).families == ("fp32 + int8-dynamic, onnxruntime",)


def test_hostile_names_and_reasons_lose_their_control_characters():
    manifest = make_mixed()
    reason = change(manifest.choice.dropped[0], reason=f"\x1b[31m{HOSTILE}")
    text = printed(change(with_choice(manifest, dropped=(reason,)), seconds={"\x1b[2J": 12.0}))
    assert "\x1b" not in text
    assert HOSTILE in text


def test_candidates_that_were_timed_and_not_kept_are_in_the_chart_of_quality():
    manifest = make_mixed()
    report = report_of(manifest)
    chart = pareto(report)
    drawn = {row.get("name") for layer in chart.spec["layer"] for row in layer.get("data", {}).get("values", ())}
    drawn |= {row["name"] for row in chart.spec["data"]["values"]}
    assert {row.name for row in report.looks} <= drawn
    assert "timed on the way and not kept" in chart.caption


def test_the_page_says_how_the_chosen_file_is_used_and_made_again():
    shipped = Shipped(file="model.onnx", sha256="0" * 64, size_bytes=4_000_000)
    manifest = change(make_mixed(), shipped=shipped, command="snapvit export --budget 10ms --out 'a b'")
    text = html.unescape(page(LoadedFamily(Path("here"), manifest), report_of(manifest)))
    assert "Use this file" in text
    assert 'onnxruntime.InferenceSession("model.onnx")' in text
    assert "4.0 MB" in text
    assert "snapvit export --budget 10ms --out 'a b'" in text
    without = page(LoadedFamily(Path("here"), make_mixed()), report_of(make_mixed()))
    assert "Use this file" not in without
    assert "Make it again" not in without


def test_classes_are_named_without_ids():
    assert class_name("n02123045 tabby, tabby cat") == "tabby"
    assert class_name("7") == "7"
    assert class_name("dog, small") == "dog, small"


def test_what_must_be_shipped_is_said_below_the_table():
    manifest = change(make_mixed(), shipped=Shipped(file="model.onnx", sha256="0" * 64, size_bytes=4_000_000))
    file = io.StringIO()
    print_family(manifest, file, Path("fam"), 100)
    assert "To ship: fam/model.onnx, 4.0 MB, and nothing else." in file.getvalue()
    assert "python fam/run.py image.jpg" in file.getvalue()
