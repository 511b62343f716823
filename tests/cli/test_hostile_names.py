"""Names from a stranger's files: whatever they say, nothing outside the stranger's folder is touched."""

import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest

from snapvit_export.elastic.format import ELASTIC, Description, read_description
from snapvit_export.errors import FileFormatError
from snapvit_export.family.layout import MANIFEST
from snapvit_export.family.manifest import Manifest
from snapvit_export.selection.known_profiles import FamilyProfile
from snapvit_export.storage.json import from_json, to_json

ATTACKS = ("x/../../victim/model", "x/../../victim/new", ".hidden")  # tried on every command
NAMES = (
    *ATTACKS,
    *(
        "/tmp/snapvit-victim",
        "../victim/model",
        "victim/model",
        "..",
        ".",
        "",
        "a\nb",
        "a\0b",
        "..\\victim",
        "s30\n",
        "$(touch x)",
        "~",
    ),
    *("s30 ", "ü", "\N{RIGHT-TO-LEFT OVERRIDE}", "s" * 300),
)


@pytest.fixture(scope="module")
def place(family_and_elastic, tmp_path_factory) -> Path:
    """A stranger's `family`, `elastic` and `profile.json` beside a `victim`; tests change the first three."""
    place = tmp_path_factory.mktemp("place")
    for name in ("family", "elastic", "images"):
        shutil.copytree(family_and_elastic / name, place / name)
    victim = place / "victim"
    victim.mkdir()
    for suffix in ("", ".onnx", ".safetensors", ".bin", ".json", ".engine", ".checkpoint"):
        (victim / f"model{suffix}").write_text("dear diary")
    for stem in (".validation-x", "x", ".tap-x", "s30"):  # so that x/.. leads somewhere
        (place / "family" / stem).mkdir()
    return place


@pytest.fixture(scope="module")
def manifest(family_and_elastic) -> dict:
    return msgspec.json.decode((family_and_elastic / "family" / MANIFEST).read_bytes())


@pytest.fixture(scope="module")
def known(manifest) -> dict:
    """The family's latencies as a profile has them."""
    profiles = {variant["name"]: variant["profile"] for variant in manifest["variants"]}
    return {"model": manifest["model"], "target": manifest["target"], "profiles": profiles, "format_version": 1}


def renamed(value, old: str, new: str):
    """Return a value from JSON with a name changed wherever it stands, as a key too."""
    if isinstance(value, dict):
        return {new if key == old else key: renamed(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, old, new) for each in value]
    return new if value == old else value


def outside(place: Path) -> dict[str, str]:
    """All that is not in the stranger's folders: names, and of the victim's files the contents."""
    there = {path.name: "" for path in (*place.iterdir(), *(place / "images").iterdir())}
    return there | {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (place / "victim").iterdir()}


def commands(place: Path) -> list[tuple[str, ...]]:
    """Every command that takes a family, an Elastic folder or a profile."""
    family, images, given = str(place / "family"), str(place / "images"), str(place / "profile.json")
    elastic, quiet = str(place / "elastic"), "--quiet"
    return [
        ("validate", family, "--data", images, "--images", "4", quiet),
        ("validate", family, "--data", images, "--images", "4", "--profile", given, quiet),
        ("report", family, quiet),
        ("report", family, "--beside", family, "--format", "json", quiet),
        ("choose", family, "--budget", "50ms", quiet),
        ("choose", family, "--budget", "50ms", "--profile", given, quiet),
        ("choose", family, "--budget", "50ms", "--elastic", elastic, quiet),
        ("profile", family, "--seconds", "0.1", "--out", str(place / "family" / "new.json"), quiet),
        ("fleet", family, "--budget", "cpu=50ms"),
        ("fleet", family, "--budget", f"{given}=50ms"),
        ("export", "--sparsity", "0.1", "--out", family, quiet),
        ("pack", "--out", elastic, quiet),
    ]


def run_all(snapvit, place: Path, reads: str) -> None:
    """Run the commands that read this part of the place; all refuse in one line, and what lies outside stays."""
    before = outside(place)
    for command in commands(place):
        if any(str(place / reads) in word for word in command):
            outcome = snapvit(*command)
            assert outcome.code in (1, 2), command
            assert outcome.error_line
            assert outside(place) == before, command


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("old", ["s30", "s30.onnx"])
def test_no_command_follows_the_names_of_a_manifest(snapvit, place, manifest, known, name, old):
    (place / "profile.json").write_bytes(msgspec.json.encode(known))
    (place / "family" / MANIFEST).write_bytes(msgspec.json.encode(renamed(manifest, old, name)))
    run_all(snapvit, place, "family")


@pytest.mark.parametrize("name", ATTACKS)
def test_no_command_follows_the_names_of_a_profile(snapvit, place, manifest, known, name):
    (place / "profile.json").write_bytes(msgspec.json.encode(renamed(known, "s30", name)))
    (place / "family" / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    run_all(snapvit, place, "profile.json")


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("field", ["ranking", "weights"])
def test_no_command_follows_the_names_of_an_elastic_folder(snapvit, place, manifest, family_and_elastic, name, field):
    described = read_description(family_and_elastic / "elastic")
    (place / "family" / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    hostile = msgspec.structs.replace(getattr(described, field), file=name)
    sealed = msgspec.structs.replace(described, **{field: hostile}).with_checksum()  # a stranger can do that, too
    (place / "elastic" / ELASTIC).write_bytes(to_json(sealed))
    run_all(snapvit, place, "elastic")


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_no_part_of_a_path_are_refused_where_they_are_read(manifest, known, family_and_elastic, name):
    described = msgspec.json.decode((family_and_elastic / "elastic" / ELASTIC).read_bytes())
    files = (described["ranking"]["file"], described["weights"]["file"], described["correction"]["buffer"]["file"])
    hostile = [(renamed(manifest, old, name), Manifest) for old in ("dense", "s30", "s30.onnx", "weights.bin")]
    hostile += [(renamed(described, old, name), Description) for old in files]
    hostile += [(renamed(known, "s30", name), FamilyProfile)]
    for content, kind in hostile:
        with pytest.raises(FileFormatError, match=f"x.json: not a valid {kind.__name__}") as refused:
            from_json(msgspec.json.encode(content), kind, "x.json")
        assert "\n" not in str(refused.value)


def test_the_canary_lies_where_the_known_attack_would_hit(place):
    """The path that validate made from such a name really leads outside."""
    kept = place / "family" / ".validation-x/../../victim/model.safetensors"
    assert kept.resolve() == (place / "victim" / "model.safetensors").resolve()
    assert kept.is_file()
