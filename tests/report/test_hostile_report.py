"""Every string that comes from a file is text in the report: none becomes markup, an attribute, a script or a link."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from helpers.report_factory import make_manifest, make_merging_validation, make_mixed, make_validation
from snapvit_export.family.manifest import Manifest
from snapvit_export.report.data import LoadedFamily, collect
from snapvit_export.report.markdown import markdown
from snapvit_export.report.page import page

EVIL = [
    "</script><img src=x onerror=alert(1)>",
    '" onload="alert(1)',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "</title><svg onload=alert(1)>",
    "<!--<script>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% for x in y %}",
    "${alert(1)}",
    "&lt;b&gt;",
    "\u202egnp.exe\u2028\x00\x1b[31m",
]
replace = msgspec.structs.replace
EVERYWHERE: dict[str, Callable[[Manifest, str], Manifest]] = {
    "model": lambda m, s: replace(m, model=s),
    "recipe": lambda m, s: replace(m, recipe={s: s, "data": {s: s, "source": s}, "weights_sha256": s, "name": [s, {s: s}]}),
    "command": lambda m, s: replace(m, command=f"snapvit export {s}"),
    "stages": lambda m, s: replace(m, seconds={s: 1.0}),
    "device": lambda m, s: replace(m, target=replace(m.target, device=replace(m.target.device, **dict.fromkeys(("cpu", "governor", "system", "runtime_version"), s)))),
    "evaluation": lambda m, s: with_variants(m, lambda v: replace(v, evaluation=replace(v.evaluation, source=s))),
    "hash": lambda m, s: with_variants(m, lambda v: replace(v, sha256=s)),
    "doubt": lambda m, s: replace(m, choice=replace(m.choice, decided=False, doubt=s)),
    "correction": lambda m, s: replace(m, choice=replace(m.choice, measurements=tuple(replace(x, correction=s) for x in m.choice.measurements))),
    "dropped": lambda m, s: replace(m, choice=replace(make_mixed().choice, variant=m.choice.variant, dropped=tuple(replace(x, reason=s) for x in make_mixed().choice.dropped))),
}  # fmt: skip


def with_variants(manifest: Manifest, change) -> Manifest:
    return replace(manifest, variants=tuple(change(variant) for variant in manifest.variants))


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def page_of(manifest: Manifest, validation=None) -> str:
    own = LoadedFamily(Path("here"), manifest, validation)
    return page(own, collect(own))


def shape(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """The elements and the names of their attributes: what a string could have changed."""
    return [(tag, tuple(attributes)) for tag, attributes in Page(text).elements if tag not in ("tspan", "text")]


def links(text: str) -> set[str | None]:
    found = {attributes.get(name) for _, attributes in Page(text).elements for name in ("src", "href", "action")}
    return {link for link in found if link is not None and not link.startswith(("data:", "#"))}


@pytest.mark.parametrize("where", EVERYWHERE)
def test_a_string_of_a_manifest_changes_no_element_of_the_page(where):
    manifest = make_manifest(4)
    usual = shape(page_of(EVERYWHERE[where](manifest, "plain words")))
    for evil in EVIL:
        text = page_of(EVERYWHERE[where](manifest, evil))
        assert shape(text) == usual, evil
        assert links(text) == set()
        assert len(re.findall(r"</script", text)) == 2


def test_titles_labels_and_sources_of_a_validation_change_no_element_of_the_page():
    manifest = make_manifest(3)
    usual = shape(page_of(manifest, make_validation(manifest, label="a", title="b")))
    merged = shape(page_of(manifest, make_merging_validation(manifest, title="b")))
    for evil in EVIL:
        title = evil.replace("{", "{{").replace("}", "}}")
        told = replace(make_validation(manifest, label=evil, title=title), source=evil)
        text = page_of(manifest, told)
        assert shape(text) == usual, evil
        assert links(text) == set()
        assert shape(page_of(manifest, make_merging_validation(manifest, title=evil))) == merged, evil


@pytest.mark.parametrize("kind", ["name", "file"])
def test_names_of_variants_and_files_are_refused_or_shown_as_text(kind):
    manifest, refused = make_manifest(4, choice=False), 0
    usual = shape(page_of(manifest))
    for evil in EVIL:
        try:
            hostile = replace(manifest, variants=(*manifest.variants[:3], replace(manifest.variants[3], **{kind: evil})))
        except (ValueError, msgspec.ValidationError):
            refused += 1
            continue
        text = page_of(hostile)
        assert [tag for tag, _ in shape(text)] == [tag for tag, _ in usual], evil
        assert links(text) == set()
    assert refused in (0, len(EVIL))


def test_a_hostile_model_is_text_in_markdown_too():
    for evil in EVIL:
        text = markdown(collect(LoadedFamily(Path("here"), replace(make_manifest(3), model=evil))), None)
        assert "<script" not in text
        assert "<img" not in text
        assert "<svg" not in text
