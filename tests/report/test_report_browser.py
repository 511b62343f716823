"""The page in a real browser: it is drawn, it answers, it keeps to its borders, and no string in it acts."""

import io
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.report_factory import (
    HOSTILE,
    make_manifest,
    make_merging_validation,
    make_mixed,
    make_search,
    make_sublayers,
    make_validation,
)
from snapvit_export.report.data import LoadedFamily, collect
from snapvit_export.report.page import page

if os.environ.get("SNAPVIT_REQUIRE_BROWSER"):
    from playwright import sync_api
else:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[test]'")
HERE = Path("here")
DRAWN = "html[data-drawn=yes]"
MOST_MARKS = 20_000  # of all live plots of a large family: more take seconds


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where Chromium is. In CI it is installed if need be; elsewhere that is for people to decide."""
    required = os.environ.get("CI") or os.environ.get("SNAPVIT_REQUIRE_BROWSER")
    if shutil.which("chromium") is None and required and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], check=True)
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and required:
        pytest.fail("Chromium is required here and could not be installed")
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    return found


@pytest.fixture(scope="session")
def browser(chromium) -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@dataclass
class Opened:
    """A page that was opened, and all that it said and asked for."""

    page: "sync_api.Page"
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def pixels(self, selector: str) -> np.ndarray:
        """(H, W) brightness of a part of the page."""
        data = self.page.locator(selector).screenshot(caret="initial")
        return np.asarray(Image.open(io.BytesIO(data)).convert("L"), np.float64)


@pytest.fixture
def open_page(browser, tmp_path):
    """Open a report in a window of its own, and hold it to silence at the end."""
    contexts, opened = [], []

    def run(manifest, validation=None, beside=(), width=1000, scheme="light", script=True) -> Opened:
        own = LoadedFamily(HERE, manifest, validation)
        path = tmp_path / f"{len(opened)}.html"
        report = collect(own, [LoadedFamily(Path(f"other{i}"), other) for i, other in enumerate(beside)])
        path.write_text(page(own, report), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script
        )
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.on("console", lambda message: found.said.append(f"{message.type}: {message.text}"))
        found.page.on("pageerror", lambda error: found.said.append(str(error)))
        found.page.on("dialog", lambda dialog: found.said.append(f"dialog {dialog.message}"))
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.goto(path.as_uri())
        if script:
            found.page.wait_for_selector(DRAWN, timeout=30_000)
        opened.append(found)
        return found

    yield run
    for found in opened:
        assert found.said == []
        assert [url for url in found.asked if not url.startswith(("file:", "data:"))] == []
    for context in contexts:
        context.close()


def full_manifest(count=7, **changes):
    return make_manifest(count, recipe={"search": make_search(), "sublayers": make_sublayers()}, **changes)


def overflow(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def tooltip(page, number: int) -> dict[str, str]:
    """What hovering over a variant's point in the first plot shows."""
    points = page.locator("#plot-pareto .live svg path[aria-roledescription=point][opacity='0']")
    points.nth(number).scroll_into_view_if_needed()
    page.wait_for_timeout(200)  # scrolling hides the tooltip, and its event comes a frame later
    points.nth(number).hover(force=True)
    page.wait_for_selector("#tip:not([hidden])")
    terms, words = page.locator("#tip dt").all_inner_texts(), page.locator("#tip dd").all_inner_texts()
    return dict(zip(terms, words, strict=True))


@pytest.mark.parametrize("count", [1, 40])
def test_hovering_shows_what_the_manifest_says(open_page, count):
    manifest = make_manifest(count)
    found = open_page(manifest).page
    assert found.locator("#plot-pareto.ready").count() == 1
    for number in {0, count // 3, count - 1}:
        variant = manifest.variants[number]
        shown = tooltip(found, number)
        assert shown["variant"] == variant.name
        assert shown["latency"] == f"{variant.profile.p50_ms:.2f} ms"
        assert shown["p90, last timing run"] == f"{variant.profile.p90_ms:.2f} ms"
        assert shown["top-1"] == f"{100 * variant.evaluation.top1:.1f} ± 1.0 %"
        assert shown["parameters"] == f"{variant.params / 1e6:.2f} M"
        assert shown["size"] == f"{variant.size_bytes / 1e6:.1f} MB"
        assert shown["precision"] == "fp32"


def test_hovering_over_a_mix_of_levers_says_what_it_is(open_page):
    found = open_page(make_mixed()).page
    shown = tooltip(found, 3)
    assert shown["levers"] == "int8, 112 of 197 tokens, 85 % width"
    assert shown["same top answer as dense"] == "98.4 ± 0.6 %"
    assert shown["divergence"] == "0.012 ± 0.002"
    assert shown["precision"] == "int8-dynamic"


@pytest.mark.parametrize("labelled", [False, True])
def test_levers_and_the_proof_fit_a_phone(open_page, labelled):
    found = open_page(make_mixed(labelled=labelled, kept=7), width=360).page
    for element in found.locator("details").all():
        element.evaluate("(details) => { details.open = true; }")
    assert overflow(found) <= 0
    assert found.locator("table.alternatives tbody tr").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_is_drawn_in_light_and_in_dark(open_page, scheme):
    manifest = full_manifest()
    others = [make_manifest(7, seed=1, speed=0.5, precision="int8-dynamic")]
    found = open_page(manifest, make_validation(manifest), others, scheme=scheme)
    names = [plot.get_attribute("id") for plot in found.page.locator(".plot.ready").all()]
    assert len(names) == 7
    for name in names:
        pixels = found.pixels(f"#{name}")
        assert pixels.std() > 5, name
        paper = np.bincount(pixels.astype(int).ravel()).argmax()
        assert (paper > 200) == (scheme == "light") or name in ("plot-heads", "plot-neurons", "plot-sublayers")
    assert found.pixels("body")[:8, :8].mean() > 200 if scheme == "light" else found.pixels("body")[:8, :8].mean() < 60


@pytest.mark.parametrize("count", [1, 40])
def test_a_phone_has_no_sideways_scrolling(open_page, count):
    manifest = full_manifest(count, names={count - 1: "a-very-long-name-" * 12} if count > 1 else None)
    found = open_page(manifest, make_validation(manifest), width=360).page
    assert overflow(found) <= 0
    for element in found.locator("details").all():
        element.evaluate("(details) => { details.open = true; }")
    assert overflow(found) <= 0
    widths = found.locator(".live svg").evaluate_all("(all) => all.map((svg) => svg.getBoundingClientRect().width)")
    assert all(250 < width <= 360 for width in widths)


def test_plots_follow_the_width_of_the_window(open_page):
    found = open_page(make_manifest()).page
    svg = found.locator("#plot-pareto .live svg")
    before = svg.bounding_box()["width"]
    found.set_viewport_size({"width": 500, "height": 900})
    found.wait_for_timeout(400)
    assert svg.bounding_box()["width"] < before - 300
    assert overflow(found) <= 0


def test_the_table_is_sorted_by_keyboard(open_page):
    manifest = make_manifest()
    found = open_page(manifest).page
    names = found.locator("#variants tbody th")
    head = found.locator("#variants thead th", has_text="sparsity")
    found.locator("#variants thead button", has_text="size").focus()
    found.keyboard.press("Tab")
    assert found.evaluate("document.activeElement.textContent") == "sparsity"
    found.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    found.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    assert names.all_inner_texts() == [variant.name for variant in reversed(manifest.variants)]
    assert found.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    found.locator("#variants thead button", has_text="p50").click()
    fastest = sorted(manifest.variants, key=lambda variant: variant.profile.p50_ms)
    assert names.all_inner_texts() == [variant.name for variant in fastest]


def test_the_first_tab_skips_to_the_plots(open_page):
    found = open_page(make_manifest(3)).page
    found.keyboard.press("Tab")
    assert found.evaluate("document.activeElement.className") == "skip"
    found.keyboard.press("Enter")
    assert found.evaluate("document.activeElement.id") == "content"


def test_hostile_strings_are_shown_as_text(open_page):
    manifest = make_manifest(5, names={2: HOSTILE, 3: 'a.b[0]["c"]'}, recipe={"name": HOSTILE})
    found = open_page(manifest, make_validation(manifest, label=HOSTILE, title=HOSTILE)).page
    assert found.locator("img[src=x]").count() == 0
    assert HOSTILE in found.locator(".answer").inner_text()
    assert tooltip(found, 2)["variant"] == HOSTILE
    assert tooltip(found, 3)["variant"] == 'a.b[0]["c"]'
    assert found.locator("#tip img").count() == 0
    assert HOSTILE in found.locator("#variants tbody th").all_inner_texts()


def test_without_javascript_the_plots_are_still_there(open_page):
    manifest = full_manifest()
    found = open_page(manifest, make_validation(manifest), script=False, width=360)
    assert found.page.locator(".still svg:visible").count() == 7
    assert found.pixels("#plot-pareto").std() > 5
    assert found.page.locator("th button").count() == 0


def test_paper_is_light_and_has_the_plots(open_page):
    manifest = full_manifest()
    found = open_page(manifest, make_validation(manifest), scheme="dark")
    found.page.emulate_media(media="print", color_scheme="dark")
    assert found.page.locator(".still svg:visible").count() == 7
    assert found.page.locator(".live svg:visible").count() == 0
    pixels = found.pixels("#plot-pareto")
    assert pixels.std() > 5
    assert np.median(pixels) > 230
    assert len(found.page.pdf(format="A4")) > 20_000


@pytest.mark.parametrize("width", [360, 1200])
def test_merged_patches_are_shown_pixel_by_pixel(open_page, width):
    """Scaled pictures would lose lines of one pixel, and show patches as merged that are not."""
    manifest = make_manifest(3)
    found = open_page(manifest, make_merging_validation(manifest), width=width).page
    shown = found.locator(".merges td img").evaluate_all("(all) => all.map((img) => [img.width, img.naturalWidth])")
    assert shown == [[96, 96]] * 4
    assert overflow(found) <= 0


@pytest.mark.parametrize("width", [390, 1280])
def test_five_hundred_variants_are_drawn_and_nothing_is_clipped(open_page, width):
    manifest = full_manifest(500)
    found = open_page(manifest, make_validation(manifest), width=width).page
    assert found.locator(".plot.ready").count() == 7
    assert overflow(found) <= 0
    cut = "(all) => all.filter((svg) => svg.getBoundingClientRect().right > window.innerWidth + 1).length"
    assert found.locator(".live svg").evaluate_all(cut) == 0
    assert found.locator("#variants tbody tr").count() == 500
    assert found.locator(".live svg *").count() < MOST_MARKS
    names = found.locator("#variants tbody th").all_inner_texts()
    assert names[0] == "dense"
    found.locator("#variants thead button", has_text="p50").click()
    fastest = min(manifest.variants, key=lambda variant: variant.profile.p50_ms)
    assert found.locator("#variants tbody th").first.inner_text() == fastest.name
    assert tooltip(found, 499)["variant"] == manifest.variants[-1].name
