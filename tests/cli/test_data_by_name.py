"""Sets by name in every command that takes images, from the options to the result."""

import json
import re
import sys

import pytest

from helpers.hub import make_hub_set
from helpers.shared import ROOT
from snapvit_export.calibration.known_sets import ALIASES, BY_HAND, KNOWN_SETS, MERGED
from snapvit_export.cli import options
from snapvit_export.errors import MissingDependency
from snapvit_export.family.folder import read_family
from snapvit_export.progress import Silent
from snapvit_export.selection.image_meter import meter_of_images

COMMANDS = {
    "rank": "rank MODEL --data SET",
    "export": "export --model MODEL --data SET --budget 90%",
    "pack": "pack --model MODEL --data SET",
    "compare": "compare --model MODEL --data SET --recipes local",
    "compare --on": "compare --model MODEL --data IMAGES --on SET --recipes local --images 20",
    "recover": "recover FAMILY --variant VARIANT --model MODEL --data SET --minutes 1",
    "evaluate": "evaluate MODEL --data SET",
    "validate": "validate FAMILY --data SET",
    "run": "run FAMILY SET",
}


@pytest.fixture
def words(plain_family, image_folder, tmp_path, monkeypatch):
    """The words of a command, for a family and a model that are there; outputs go to the test's folder."""
    monkeypatch.chdir(tmp_path)
    pruned = next(each.name for each in read_family(plain_family).variants if each.sparsity)
    places = {
        "MODEL": plain_family.parent / "model",
        "IMAGES": image_folder,
        "FAMILY": plain_family,
        "VARIANT": pruned,
    }

    def of(command: str, name: str) -> list[object]:
        return [{**places, "SET": name}.get(word, word) for word in COMMANDS[command].split()]

    return of


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_looks_on_the_hub_for_a_set_by_name(command, words, snapvit, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it now fails
    outcome = snapvit(*words(command, "cifar10"))
    assert outcome.code == 1
    assert re.search(
        r"hf:uoft-cs/cifar10:(train|test) needs datasets, which is not installed. "
        r"Try: pip install 'snapvit-export\[data\]'",
        outcome.error_line,
    )


def test_choosing_looks_on_the_hub_for_what_a_set_reports_on(plain_family, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    manifest = read_family(plain_family)
    with pytest.raises(MissingDependency, match="hf:ILSVRC/imagenet-1k:validation needs datasets"):
        meter_of_images("imagenet-1k", manifest, manifest.target, lambda: plain_family, "fidelity", Silent())


def test_a_set_by_name_ranks_and_evaluates(datasets, tiny_folder, snapvit):
    make_hub_set(datasets, "uoft-cs/cifar10", {"train": 40, "test": 12})
    make_hub_set(datasets, "timm/oxford-iiit-pet", {"train": 40, "test": 12})
    common = ("--recipe", "local", "--images", 8, "--json", "--quiet")
    ranked = snapvit("rank", tiny_folder, "--data", "merged:cifar10,pets", *common)
    assert ranked.code == 0, ranked.err
    made = json.loads(ranked.out)
    assert "hf:uoft-cs/cifar10:train + hf:timm/oxford-iiit-pet:train" in json.dumps(made)
    evaluated = snapvit("evaluate", tiny_folder, "--data", "cifar10", "--by", "knn", "--json", "--quiet")
    assert evaluated.code == 0, evaluated.err
    found = json.loads(evaluated.out)
    assert (found["source"], found["images"]) == ("hf:uoft-cs/cifar10:test", 12)


def test_the_help_and_the_docs_say_the_same_everywhere(snapvit):
    """What images may be is written once: in the help a constant, in the docs a table that the commands link to."""
    with_data = {"choose", *(name.split()[0] for name in COMMANDS)}
    for command in with_data - {"compare"}:  # that one says: as in export
        told = re.sub(r"\s+", " ", snapvit(command, "--help").out)
        assert options.SOURCES in told, command
    assert "as in export" in snapvit("compare", "--help").out
    table = (ROOT / "docs" / "commands.md").read_text().split("### Sources of images")[1].split("\n## ")[0]
    assert {name for name in KNOWN_SETS if f"`{name}`" not in table} == set()
    assert f"`{MERGED}`" in table


def test_the_docs_name_every_set_its_repository_and_its_other_names():
    text = (ROOT / "docs" / "evaluation.md").read_text()
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `") and "/" in row}
    for name, known in KNOWN_SETS.items():
        assert f"`{known.repository}`" in rows[name]
        splits = rows[name].split("|")[3]
        assert all(split in splits for split in known.splits.values())
    assert all(f"`{alias}`" in rows[name] for alias, name in ALIASES.items())
    assert all(place.split()[-1].removeprefix("https://huggingface.co/datasets/") in text for place in BY_HAND.values())
