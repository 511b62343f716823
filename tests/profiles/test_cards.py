"""Device cards: data with a schema, complete, and honest about what was measured."""

import json
from importlib import resources

import pytest

from snapvit_export import profiles
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.storage.json import from_json

KNOWN = {
    "cpu",
    "raspberry-pi-5",
    "jetson-orin-nano",
    "jetson-orin-nx",
    "jetson-agx-orin",
    "jetson-thor",
    "rtx-4090",
    "l4",
}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_card_says_what_where_from_and_how_to_hold_its_clock(name):
    card = profiles.load(name)
    assert card.name == name
    assert card.sources
    assert card.clock
    assert card.measured == (name == "cpu")  # all that this project has timed so far
    for precision, multiple in (("fp32", 4), ("fp16", 8), ("int8-static", 16)):
        assert card.width_multiple(precision) == (multiple if card.target.runtime == "tensorrt" else 1)


def test_there_are_these_cards_and_others_are_refused():
    assert set(profiles.names()) == KNOWN
    with pytest.raises(UsageError, match="no device card is called 'toaster'. There are: cpu, jetson-agx-orin"):
        profiles.load("toaster")
    with pytest.raises(UsageError):
        profiles.load("../cpu")


def test_a_card_with_other_or_missing_keys_is_refused():
    data = json.loads((resources.files("snapvit_export.profiles") / "cpu.json").read_text())
    for changed in ({**data, "colour": "red"}, {k: v for k, v in data.items() if k != "sources"}):
        with pytest.raises(SnapvitError, match="not a valid Card"):
            from_json(json.dumps(changed), profiles.Card, "x")


def test_a_card_for_tensorrt_is_refused_before_any_work(snapvit, tmp_path):
    outcome = snapvit("export", "--budget", "10ms", "--card", "jetson-orin-nano", "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "needs an NVIDIA GPU" in outcome.error_line
    assert not (tmp_path / "out").exists()
