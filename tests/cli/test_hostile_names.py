"""Names from a stranger's files: whatever they say, nothing outside the stranger's folder is touched."""

import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest

from snapvit_export.elastic.format import ELASTIC, read_description
from snapvit_export.family.folder import read_family
from snapvit_export.family.layout import MANIFEST
from snapvit_export.storage.json import to_json

NAMES = (
    "x/../../victim/model",
    "../victim/model",
    "/tmp/snapvit-victim",
    "victim/model",
    "..",
    ".",
    "",
    ".hidden",
    "a\nb",
    "a\0b",
    "..\\victim",
    "s30\n",
    "$(touch x)",
    "~",
    "ü",
    "s" * 300,
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


def outside(place: Path) -> dict[str, str]:
    """Everything but the stranger's own folders, by contents."""
    files = [path for path in place.rglob("*") if path.is_file() and not path.is_relative_to(place / "family")]
    own = [path for path in files if not path.is_relative_to(place / "elastic") and path.suffix != ".log"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in own}


def commands(place: Path) -> list[tuple[str, ...]]:
    """Every command that takes a family, an Elastic folder or a profile."""
    family, images, known = str(place / "family"), str(place / "images"), str(place / "profile.json")
    elastic, quick = str(place / "elastic"), ("--quiet",)
    return [
        ("validate", family, "--data", images, "--images", "4", *quick),
        ("validate", family, "--data", images, "--images", "4", "--profile", known, *quick),
        ("report", family, *quick),
        ("report", family, "--beside", family, "--format", "json", *quick),
        ("choose", family, "--budget", "50ms", *quick),
        ("choose", family, "--budget", "50ms", "--profile", known, *quick),
        ("choose", family, "--budget", "50ms", "--elastic", elastic, *quick),
        ("profile", family, "--seconds", "0.1", "--out", str(place / "family" / "new.json"), *quick),
        ("fleet", family, "--budget", "cpu=50ms"),
        ("fleet", family, "--budget", f"{known}=50ms"),
        ("export", "--sparsity", "0.1", "--out", family, *quick),
        ("pack", "--out", elastic, *quick),
    ]


def run_all(snapvit, place: Path, reads: str) -> None:
    """Run the commands that read `reads`; all refuse in one line, and what lies outside stays as it was."""
    before = outside(place)
    for command in commands(place):
        if not any(reads in word for word in command):
            continue
        outcome = snapvit(*command)
        assert outcome.code in (1, 2), command
        assert outcome.error_line
        assert outside(place) == before, command


def renamed(value, old: str, new: str):
    """Return a value from JSON with a name changed wherever it stands, as a key too."""
    if isinstance(value, dict):
        return {new if key == old else key: renamed(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, old, new) for each in value]
    return new if value == old else value


@pytest.mark.parametrize("name", NAMES)
def test_names_of_variants_and_files_in_a_manifest(snapvit, place, family_and_elastic, name):
    manifest = msgspec.json.decode((family_and_elastic / "family" / MANIFEST).read_bytes())
    profiles = {v["name"]: v["profile"] for v in manifest["variants"]}
    known = {"model": manifest["model"], "target": manifest["target"], "profiles": profiles, "format_version": 1}
    (place / "profile.json").write_bytes(msgspec.json.encode(known))
    for old in ("s30", "s30.onnx", "weights.bin"):
        (place / "family" / MANIFEST).write_bytes(msgspec.json.encode(renamed(manifest, old, name)))
        run_all(snapvit, place, str(place / "family"))
    (place / "family" / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    read_family(place / "family")


@pytest.mark.parametrize("name", NAMES)
def test_names_of_variants_in_a_profile(snapvit, place, family_and_elastic, name):
    manifest = msgspec.json.decode((family_and_elastic / "family" / MANIFEST).read_bytes())
    profiles = {v["name"]: v["profile"] for v in manifest["variants"]}
    known = {"model": "m", "target": manifest["target"], "profiles": renamed(profiles, "s30", name)}
    (place / "profile.json").write_bytes(msgspec.json.encode(known))
    (place / "family" / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    run_all(snapvit, place, str(place / "profile.json"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["ranking", "weights"])
def test_names_of_files_in_an_elastic_folder(snapvit, place, family_and_elastic, name, field):
    described = read_description(family_and_elastic / "elastic")
    (place / "family" / MANIFEST).write_bytes((family_and_elastic / "family" / MANIFEST).read_bytes())
    hostile = msgspec.structs.replace(getattr(described, field), file=name)
    sealed = msgspec.structs.replace(described, **{field: hostile}).with_checksum()  # a stranger can do that, too
    (place / "elastic" / ELASTIC).write_bytes(to_json(sealed))
    run_all(snapvit, place, str(place / "elastic"))
    (place / "elastic" / ELASTIC).write_bytes(to_json(described))


def test_a_manifest_of_the_known_attack_did_overwrite_a_file_before_names_were_checked(place):
    """The path that validate made from such a name really leads outside: the canary is where it would be hit."""
    kept = place / "family" / ".validation-x/../../victim/model.safetensors"
    assert kept.resolve() == (place / "victim" / "model.safetensors").resolve()
    assert kept.is_file()
