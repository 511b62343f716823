"""Ranking files: what goes in comes out, and what is damaged never comes out."""

import numpy as np
import pytest

from helpers.models import TINY
from helpers.plans import anatomy_of
from helpers.rankings import random_ranking
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.model.plan import Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.storage.json import as_builtins


@pytest.fixture
def ranking(tiny_model) -> Ranking:
    made = random_ranking(tiny_model.anatomy)
    return Ranking(made.head_scores, made.neuron_scores, "tiny", tiny_model.anatomy, {"seed": 3, "data": {"images": 8}})


def same(a: Ranking, b: Ranking) -> bool:
    arrays = zip(a.head_scores + a.neuron_scores, b.head_scores + b.neuron_scores)
    return all(np.array_equal(x, y) for x, y in arrays) and (a.model, a.anatomy, dict(a.provenance)) == (
        b.model,
        b.anatomy,
        dict(b.provenance),
    )


def test_round_trip(ranking, tmp_path):
    ranking.save(tmp_path / "r.safetensors")
    assert same(Ranking.load(tmp_path / "r.safetensors"), ranking)
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]
    ranking.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "r.safetensors").read_bytes()


def test_blocks_may_differ_in_size_and_scores_may_be_denormal_or_zero(tmp_path):
    heads = (np.array([0, 1e-44], np.float32), np.array([1], np.float32))
    neurons = (np.array([1e-40, 0, 3e-45], np.float32), np.zeros(5, np.float32))
    Ranking(heads, neurons).save(tmp_path / "r.safetensors")
    read = Ranking.load(tmp_path / "r.safetensors")
    assert read.neuron_order(0).tolist() == [0, 2, 1]
    assert read.head_order(0).tolist() == [1, 0]
    assert read.neuron_scores[0][2] > 0


def test_a_hundred_mutations_never_a_traceback_never_a_wrong_result(ranking, tmp_path):
    path = tmp_path / "r.safetensors"
    ranking.save(path)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(100):
        path.write_bytes(_mutated(good, rng))
        try:
            read = Ranking.load(path)
        except SnapvitError as error:
            assert str(path) in str(error)
            assert "\n" not in str(error)
            refused += 1
        else:
            assert same(read, ranking)
    assert refused > 90


def _mutated(data: bytes, rng: np.random.Generator) -> bytes:
    kind, at = rng.integers(4), int(rng.integers(len(data)))
    if kind == 0:  # a changed byte
        return data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :]
    if kind == 1:  # cut short
        return data[:at]
    if kind == 2:  # something inserted
        return data[:at] + rng.bytes(3) + data[at:]
    end = min(len(data), at + int(rng.integers(1, 200)))  # a piece overwritten
    return data[:at] + rng.bytes(end - at) + data[end:]


def test_foreign_and_absent_files_are_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "foreign.safetensors")
    with pytest.raises(FileFormatError, match="not a snapvit-ranking file"):
        Ranking.load(tmp_path / "foreign.safetensors")
    with pytest.raises(SnapvitError, match="cannot be read"):
        Ranking.load(tmp_path / "absent.safetensors")


def test_another_model_is_refused(ranking, tiny_model):
    assert TINY["depth"] == 3
    with pytest.raises(SnapvitError, match="made for another model"):
        ranking.check_fits(anatomy_of([4, 4, 4], [192, 192, 192]))
    unnamed = Ranking(ranking.head_scores, ranking.neuron_scores)
    with pytest.raises(SnapvitError, match="2 blocks with 8 heads and 20 neurons"):
        unnamed.check_fits(anatomy_of([4, 4], [10, 10]))


def test_scores_that_are_not_numbers_are_refused():
    with pytest.raises(FileFormatError, match=r"blocks\.0\.neuron_scores: 1 scores are not finite"):
        Ranking((np.ones(2, np.float32),), (np.array([1, np.nan], np.float32),))
    with pytest.raises(FileFormatError, match="same number of blocks"):
        Ranking((np.ones(2, np.float32),), ())


def test_a_ranking_cannot_be_changed(ranking):
    with pytest.raises(ValueError, match="read-only"):
        ranking.head_scores[0][0] = 5


@pytest.mark.parametrize(
    "protection",
    [{"bogus": 1}, [1], None, {"sublayers": "no"}, {"neurons": 5.0}, {"heads": -0.1}, {"heads": "0.2"}],
)
def test_a_damaged_protection_is_refused_in_one_line(ranking, snapvit, tiny_folder, image_folder, tmp_path, protection):
    damaged = Ranking(ranking.head_scores, ranking.neuron_scores, provenance={"protection": protection})
    with pytest.raises(FileFormatError, match="the ranking's protection is damaged"):
        damaged.protection  # noqa: B018
    damaged.save(tmp_path / "r.safetensors")
    given = ("export", "--model", tiny_folder, "--data", image_folder, "--out", tmp_path / "out", "--sparsity", "0.3")
    outcome = snapvit(*given, "--ranking", tmp_path / "r.safetensors")
    assert outcome.code == 1
    assert "r.safetensors: the ranking's protection is damaged" in outcome.error_line


def test_a_protection_is_read_as_it_was_written(ranking, tmp_path):
    for wanted in (Protection(sublayers=False), Protection(neurons=0.0, heads=1.0)):
        made = Ranking(ranking.head_scores, ranking.neuron_scores, provenance={"protection": as_builtins(wanted)})
        made.save(tmp_path / "r.safetensors")
        assert Ranking.load(tmp_path / "r.safetensors").protection == wanted
    assert ranking.protection == Protection()
