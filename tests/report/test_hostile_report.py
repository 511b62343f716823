"""Every string that comes from a file is text in the report: none becomes markup, an attribute, a script or a link."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from helpers.report_factory import DEVICE, make_manifest, make_merging_validation, make_validation
from snapvit_export.errors import SnapvitError
from snapvit_export.family.manifest import DroppedPrecision, Manifest
from snapvit_export.report.data import LoadedFamily, collect
from snapvit_export.report.markdown import markdown
from snapvit_export.report.page import page
from snapvit_export.runtimes.device import DeviceCard

PARTS = [
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
EVIL = " ".join(PARTS)
replace = msgspec.structs.replace
EVERYWHERE: dict[str, Callable[[Manifest, str], Manifest]] = {
    "model": lambda m, s: replace(m, model=s),
    "recipe": lambda m, s: replace(m, recipe={s: s, "data": {s: s, "source": s}, "weights_sha256": s, "name": [s]}),
    "command": lambda m, s: replace(m, command=f"snapvit export {s}"),
    "stages": lambda m, s: replace(m, seconds={s: 1.0}),
    "device": lambda m, s: replace(m, target=replace(m.target, device=device_called(s))),
    "evaluation": lambda m, s: with_variants(m, lambda v: replace(v, evaluation=replace(v.evaluation, source=s))),
    "hash": lambda m, s: with_variants(m, lambda v: replace(v, sha256=s)),
    "doubt": lambda m, s: with_choice(m, decided=False, doubt=s),
    "correction": lambda m, s: with_choice(m, measurements=[replace(x, correction=s) for x in m.choice.measurements]),
    "dropped": lambda m, s: with_choice(m, dropped=[DroppedPrecision(precision="fp16", ratio=1.1, reason=s)]),
}


def device_called(name: str) -> DeviceCard:
    return replace(DEVICE, cpu=name, governor=name, system=name, runtime_version=name)


def with_choice(manifest: Manifest, **changes) -> Manifest:
    changes = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    return replace(manifest, choice=replace(manifest.choice, **changes))


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


def changed(manifest: Manifest, text: str) -> Manifest:
    for change in EVERYWHERE.values():
        manifest = change(manifest, text)
    return manifest


def test_no_string_of_a_manifest_changes_an_element_of_the_page():
    usual, evil = (page_of(changed(make_manifest(4), text)) for text in ("plain words", EVIL))
    assert shape(evil) == shape(usual)
    assert links(evil) == set()
    assert len(re.findall(r"</script", evil)) == 2
    shown = Page(evil).text
    for text in PARTS[:-1]:
        assert text in shown, text


def test_no_title_label_or_source_of_a_validation_changes_an_element_of_the_page():
    def pages(text: str) -> list[str]:
        manifest = make_manifest(3)
        title = text.replace("{", "{{").replace("}", "}}")
        told = replace(make_validation(manifest, label=text, title=title), source=text)
        return [page_of(manifest, told), page_of(manifest, make_merging_validation(manifest, title=text))]

    for usual, evil in zip(pages("plain words"), pages(EVIL), strict=True):
        assert shape(evil) == shape(usual)
        assert links(evil) == set()


@pytest.mark.parametrize("kind", ["name", "file"])
def test_names_of_variants_and_files_are_refused_or_shown_as_text(kind):
    manifest = make_manifest(4, choice=False)
    try:
        last = replace(manifest.variants[3], **{kind: EVIL})
        hostile = page_of(replace(manifest, variants=(*manifest.variants[:3], last)))
    except (ValueError, SnapvitError):  # the better way: nothing is made of such a name
        return
    assert [tag for tag, _ in shape(hostile)] == [tag for tag, _ in shape(page_of(manifest))]
    assert links(hostile) == set()


def test_a_hostile_model_is_text_in_markdown_too():
    text = markdown(collect(LoadedFamily(Path("here"), replace(make_manifest(3), model=EVIL))), None)
    assert not re.findall(r"<(script|img|svg)", text)
