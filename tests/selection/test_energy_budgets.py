"""Budgets in millijoules: decided by intervals as milliseconds are, and refused where nobody measured."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from helpers.shared import ROOT
from snapvit_export.errors import UsageError
from snapvit_export.selection.known_profiles import parse_budgets

ARCHIVE = ROOT / "tests" / "fixtures" / "before_the_move" / "files.tar.xz"
GPU = {"name": "GPU", "software": {}, "power_mode": "15W", "clocks_mhz": {}, "temperatures_c": {}, "memory_bytes": 1}


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


class Known:
    """A family and Profiles of a board in which every variant has the energy that a test gives it."""

    def __init__(self, archive: Path, folder: Path) -> None:
        shutil.copytree(archive / "family", folder / "family")
        self.family, self.path = folder / "family", folder / "orin.json"
        self.written = json.loads((archive / "profile.json").read_text())
        self.written["target"]["device"]["accelerator"] = GPU
        sizes = {v["name"]: v["flops"] for v in json.loads((self.family / "manifest.json").read_text())["variants"]}
        for profile in self.written["profiles"].values():
            profile["conditions"].update(waited=0.0, others=0.0)
        self.names = sorted(self.written["profiles"], key=sizes.__getitem__, reverse=True)  # dense first

    def energies(self, *rounds: list[float] | None) -> Path:
        """Write the rounds of every variant, dense first; the last of them for all others."""
        for n, name in enumerate(self.names):
            given = rounds[min(n, len(rounds) - 1)]
            told = {"energy_mj": None, "energy_rounds_mj": [], "energy_source": None}
            if given is not None:
                mean = sum(given) / len(given)
                told = {"energy_mj": mean, "energy_rounds_mj": given, "energy_source": "VDD_IN by INA3221"}
            self.written["profiles"][name].update(told)
        self.path.write_text(json.dumps(self.written))
        return self.path

    def latency(self, name: str) -> float:
        return self.written["profiles"][name]["p50_ms"]

    @property
    def choice(self) -> dict:
        return json.loads((self.family / "manifest.json").read_text())["choice"]


@pytest.fixture
def known(archive, tmp_path) -> Known:
    return Known(archive, tmp_path)


def steady(mj: float) -> list[float]:
    return [mj * factor for factor in (0.99, 1.0, 1.01)]


def test_the_densest_within_an_energy_is_chosen_with_its_proof(snapvit, known):
    path = known.energies(steady(30.0), steady(14.0), steady(9.0))
    outcome = snapvit("choose", known.family, "--budget", "15mJ", "--profile", path)
    assert outcome.code == 0, outcome.err
    choice = known.choice
    assert (choice["variant"], choice["next_denser"], choice["decided"]) == (known.names[1], "dense", True)
    assert (choice["budget_ms"], choice["budget_mj"]) == (None, 15.0)
    rows = {row["variant"]: row for row in choice["measurements"]}
    assert rows["dense"]["verdict"] == "no"
    assert rows[known.names[1]]["energy_mj"] == pytest.approx(14.0)
    low, high = rows[known.names[1]]["energy_between_mj"]
    assert low < 14 < high <= 15
    assert "15 mJ" in outcome.out
    assert "14.00 mJ (" in " ".join(outcome.out.split())
    readme = (known.family / "README.txt").read_text()
    assert "Energy    14.00 mJ (" in readme
    assert "of one run: VDD_IN by INA3221" in readme
    assert "the budget is 15 mJ" in readme
    report = snapvit("report", known.family)
    assert report.code == 0, report.err
    page = (known.family / "report.html").read_text()
    assert "energy of a run" in page
    again = snapvit("report", known.family, "--budget", "10ms")
    assert "the family was chosen for 15mJ, which the report draws" in again.error_line


def test_both_budgets_must_be_met(snapvit, known):
    path = known.energies(steady(14.0), steady(20.0), steady(9.0))
    slow = known.latency("dense") * 2
    outcome = snapvit("choose", known.family, "--budget", f"{slow}ms, 15mJ", "--profile", path)
    assert outcome.code == 0, outcome.err
    assert known.choice["variant"] == "dense"
    assert known.choice["budget_ms"] == pytest.approx(slow)
    outcome = snapvit("choose", known.family, "--budget", f"{slow}ms,10mJ", "--profile", path)
    assert outcome.code == 0, outcome.err
    assert known.choice["variant"] == known.names[2]
    fast = min(map(known.latency, known.names)) / 2
    outcome = snapvit("choose", known.family, "--budget", f"{fast}ms,15mJ", "--profile", path)
    assert outcome.code == 1
    assert " ms: the smallest reaches" in outcome.error_line


def test_an_energy_whose_interval_holds_the_budget_may_fit_and_is_refused_by_strict(snapvit, known):
    path = known.energies(steady(30.0), [13.0, 15.0, 16.0], steady(40.0))
    words = ("choose", known.family, "--budget", "15mJ", "--profile", path)
    outcome = snapvit(*words)
    assert outcome.code == 0, outcome.err
    choice = known.choice
    assert (choice["variant"], choice["decided"]) == (known.names[1], False)
    assert "mJ and may fit or not. Measure for longer, or allow" in choice["doubt"]
    outcome = snapvit(*words, "--strict")
    assert outcome.code == 1
    assert f"no variant surely fits 15 mJ: {known.names[1]} takes" in outcome.error_line


def test_a_budget_that_none_meets_says_what_would_be(snapvit, known):
    path = known.energies(steady(30.0), steady(14.0), steady(9.0))
    before = (known.family / "manifest.json").read_bytes()
    outcome = snapvit("choose", known.family, "--budget", "5mJ", "--profile", path)
    assert outcome.code == 1
    assert "no variant fits 5 mJ: " in outcome.error_line
    assert "takes 9 mJ, dense 30 mJ. Allow at least 9.1" in outcome.error_line
    assert (known.family / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("rounds", [None, [9.0, 9.1]])
def test_what_was_not_measured_is_refused_in_one_line(snapvit, known, rounds):
    path = known.energies(steady(30.0), rounds)
    for words in (
        ("choose", known.family, "--budget", "15mJ", "--profile", path),
        ("fleet", known.family, "--budget", f"{path}=15mJ"),
    ):
        outcome = snapvit(*words)
        assert outcome.code == 2
        assert "was not measured, or in too few rounds. Give milliseconds" in outcome.error_line
    assert snapvit("fleet", known.family, "--budget", f"{path}=1000ms").code == 0


def test_a_fleet_takes_energies_beside_latencies(snapvit, known):
    path = known.energies(steady(30.0), steady(14.0), steady(9.0))
    picks = json.loads(snapvit("fleet", known.family, "--budget", f"{path}=15mJ", "--json").out)
    assert [(p["variant"], p["budget_ms"], p["budget_mj"]) for p in picks] == [(known.names[1], None, 15.0)]
    assert (picks[0]["energy_mj"], picks[0]["next_denser_mj"]) == (pytest.approx(14.0), pytest.approx(30.0))
    outcome = snapvit("fleet", known.family, "--budget", f"{path}=1000ms,10mJ")
    assert outcome.code == 0, outcome.err
    assert "budget mJ" in outcome.out
    assert known.names[2] in outcome.out


def test_energies_of_a_fleet_belong_to_the_device_before():
    found = parse_budgets("cpu=40ms,orin.json=10ms,15mJ,thor.json=0.02J")
    assert {name: str(budget) for name, budget in found.items()} == {
        "cpu": "40ms",
        "orin.json": "10ms,15mJ",
        "thor.json": "20mJ",
    }
    for text in ("15mJ", "cpu=40ms,5ms", "cpu=5mJ,5mJ", "cpu=5mJ,6ms,7mJ"):
        with pytest.raises(UsageError):
            parse_budgets(text)


def test_where_nothing_measures_here_an_energy_is_refused_before_anything_is_timed(snapvit, known, monkeypatch):
    from snapvit_export.selection import on_device

    monkeypatch.setattr(on_device, "meter_for", lambda runtime: None)
    monkeypatch.setattr(on_device, "_time", None)  # would fail
    outcome = snapvit("choose", known.family, "--budget", "15mJ")
    assert outcome.code == 2
    assert "nothing that can be read here measures the energy of onnxruntime. Give milliseconds" in outcome.error_line
    outcome = snapvit("export", "--budget", "15mJ")
    assert outcome.code == 2
    assert "export cuts to a latency, and energy is compared among variants that exist" in outcome.error_line
    assert "snapvit choose FAMILY --budget 15mJ" in outcome.error_line


def test_here_every_variant_is_measured_in_as_many_processes_as_a_decision_needs(snapvit, known, monkeypatch):
    from snapvit_export.profiling.energy import ProcessorMeter
    from snapvit_export.profiling.profile import Profile
    from snapvit_export.selection import on_device
    from snapvit_export.storage.json import from_json

    known.energies(steady(30.0), steady(14.0), steady(9.0))
    profiles = {
        name: from_json(json.dumps(profile), Profile, name) for name, profile in known.written["profiles"].items()
    }
    calls = []

    class FakeTimer(on_device.Timer):
        """A fake timer: invented Profiles, in which a variant has the energy that the test gave it."""

        def time(self, files, seconds, report, at, *, energy, fresh, least_runs):
            calls.append((sorted(files), energy, fresh))
            return {name: profiles[name] for name in files}

    monkeypatch.setattr(on_device, "Timer", FakeTimer)
    monkeypatch.setattr(on_device, "meter_for", lambda runtime: ProcessorMeter(None))
    outcome = snapvit("choose", known.family, "--budget", "15mJ")
    assert outcome.code == 0, outcome.err
    assert calls == [(sorted(known.names), True, True)] * 3
    assert known.choice["variant"] == known.names[1]
    assert known.choice["measurements"][0]["energy_between_mj"] == [30.0, 30.0]  # three processes that agree
    manifest = json.loads((known.family / "manifest.json").read_text())
    for row in manifest["choice"]["measurements"]:  # as if the last process had measured less than all of them
        if row["variant"] == "dense":
            row.update(energy_mj=31.0, energy_between_mj=[29.0, 33.0])
    (known.family / "manifest.json").write_text(json.dumps(manifest))
    picks = json.loads(snapvit("fleet", known.family, "--budget", "cpu=15mJ", "--json").out)
    assert (picks[0]["variant"], picks[0]["next_denser_mj"]) == (known.names[1], 31.0)
    picks = json.loads(snapvit("fleet", known.family, "--budget", "cpu=32mJ", "--json").out)
    assert (picks[0]["variant"], picks[0]["energy_mj"]) != ("dense", 30.0)  # the last Profile alone would surely fit
    picks = json.loads(snapvit("fleet", known.family, "--budget", "cpu=34mJ", "--json").out)
    assert (picks[0]["variant"], picks[0]["energy_mj"]) == ("dense", 31.0)
    calls.clear()
    assert snapvit("choose", known.family, "--budget", "1000ms").code == 0
    assert not calls[0][1]  # energy takes time, and nobody asked for it
