"""Ablations of the published recipe: what the factors belong to, one to six pairs, and the covariance in a file."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from helpers.images import make_image_folder, pictures
from helpers.models import make_model_folder
from snapvit_export.allocation.planner import PUBLISHED_PAIRS
from snapvit_export.allocation.recipe import Settings, make_settings
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.rank import rank as module
from snapvit_export.prune.rank.checkpoint import Checkpoint
from snapvit_export.prune.rank.rank import rank
from snapvit_export.prune.rank.search import cka, covariance
from snapvit_export.prune.rank.search.cka import cka_covariance
from snapvit_export.prune.rank.search.covariance import CkaInputs, describe, load_cka, save_cka

SEARCH = Settings(evaluations=5, population=5, pca=16, criterion="magnitude")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablations")
    return make_model_folder(folder / "model"), make_image_folder(folder / "images")


@pytest.fixture
def command(snapvit, places, tmp_path):
    """Rank with a small search; the image folder has 60 images."""
    model, images = places
    given = ["rank", model, "--data", images, "--recipe", "paper", "--criterion", "magnitude", "--pca", 16]
    given += ["--out", tmp_path / "r", "--images", 24, "--population", 5]
    return lambda *options, evaluations=("--evaluations", 5): snapvit(*given, *evaluations, *options)


# --- what is searched over


def test_a_search_over_mlps_leaves_the_heads_as_their_scores_are(tiny_model):
    local = rank(tiny_model, pictures(20), replace(SEARCH, evaluations=0))
    found = rank(tiny_model, pictures(20), replace(SEARCH, search_over="mlp"))
    factors = found.provenance["search"]["factors"]
    assert len(factors) == 3  # one for each block
    for i, factor in enumerate(factors):
        np.testing.assert_array_equal(found.head_scores[i], local.head_scores[i])
        np.testing.assert_allclose(found.neuron_scores[i], local.neuron_scores[i] * abs(factor), rtol=1e-6)
    assert found.provenance["search_settings"]["search_over"] == "mlp"
    assert len(rank(tiny_model, pictures(20), SEARCH).provenance["search"]["factors"]) == 3 + 12


def test_a_search_over_nothing_is_the_scores_alone():
    none = make_settings("paper", search_over="none")
    assert (none.evaluations, none.images, none.seed) == (0, 1000, 42)
    assert replace(none, search_over="all") == make_settings("paper", evaluations=0)


def test_settings_as_before_are_described_as_before(tiny_model):
    """Rankings and checkpoints of an earlier version are still those of the same settings."""
    made = rank(tiny_model, pictures(20), SEARCH).provenance["search_settings"]
    assert {"search_over", "cka_images"}.isdisjoint(made)


@pytest.mark.parametrize("count", [1, 6])
def test_one_to_six_pairs(tiny_model, count):
    settings = replace(SEARCH, pairs=PUBLISHED_PAIRS[:count])
    found = rank(tiny_model, pictures(20), settings)
    assert len(found.provenance["search_settings"]["pairs"]) == count
    assert found.provenance["search"]["best_fitness"] <= found.provenance["search"]["start_fitness"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"search_over": "heads"}, "a search over 'heads' is not known. Known: none, mlp, all"),
        ({"search_over": "none", "evaluations": 9}, "--evaluations 9 contradicts that"),
        (
            {"search_over": "none", "pca": 8},
            "--pca has no part in recipe snapvit as it is asked for. Give --search",
        ),
        ({"cka": True, "cka_images": 1}, "1 images give no covariance"),
        ({"cka_images": 50}, "--cka-images has no part in recipe snapvit as it is asked for. Give --cka"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, says):
    with pytest.raises(UsageError) as error:
        make_settings("paper", **options)
    assert says in str(error.value)


def test_a_recipe_without_a_search_has_none_to_leave_out():
    with pytest.raises(UsageError, match="recipe local does not search"):
        make_settings("local", search_over="none")
    with pytest.raises(UsageError, match="--search-over has no part"):
        make_settings("default", search_over="mlp", evaluations=5)


# --- the covariance


def test_the_covariance_in_pieces_is_that_of_the_whole(tiny_model, monkeypatch):
    images = pictures(40)
    whole = cka_covariance(tiny_model, images)
    monkeypatch.setattr(cka, "AT_ONCE", 7 * 15 * 40)  # seven rows of the Gram matrices at a time: 40 is no multiple
    # Sums of 1600 products of numbers up to one, in another order: some 1600 roundings, and as many of the eigenvalues.
    np.testing.assert_allclose(cka_covariance(tiny_model, images), whole, atol=4000 * np.finfo(float).eps)


def test_more_images_give_another_covariance(tiny_model):
    few, many = (cka_covariance(tiny_model, pictures(40), most) for most in (8, 40))
    assert np.abs(few - many).max() > 1e-3


def test_cka_is_of_the_class_token_where_there_is_one_and_of_equal_width(tiny_model):
    """By the definition, from the widths' side: |X_s^T X_t|^2 / (|X_s^T X_s| |X_t^T X_t|)."""
    images = pictures(40)
    found = cka._activations(tiny_model, images, device=module.torch.device("cpu"))
    centred = [x.astype(np.float64) - x.mean(0, dtype=np.float64) for x in found]
    products = np.array([[np.linalg.norm(a.T @ b) ** 2 for b in centred] for a in centred])
    wanted = products / np.sqrt(np.outer(np.diag(products), np.diag(products)))
    made = cka._products(found)
    np.testing.assert_allclose(made / np.sqrt(np.outer(np.diag(made), np.diag(made))), wanted, rtol=1e-9)


@pytest.fixture
def counted(monkeypatch):
    """Count how often a covariance is computed, and on how many images."""
    computed: list[int] = []

    def counting(model, images, *given):
        computed.append(len(images))
        return cka_covariance(model, images, *given)

    monkeypatch.setattr(covariance, "cka_covariance", counting)
    return computed


def test_a_file_is_written_when_computed_and_used_again(command, tmp_path, counted):
    file = tmp_path / "cka.safetensors"
    options = ["--cka", "--cka-images", 40, "--cka-file", file]
    assert command(*options).code == 0
    first = Ranking.load(tmp_path / "r")
    assert first.provenance["search_settings"]["cka_images"]["images"] == 40
    assert (first.timings[0].seconds["cka"] > 0, counted) == (True, [40])  # more than the 24 that calibrate
    before = file.read_bytes()
    (tmp_path / "r").unlink()
    outcome = command(*options)
    assert outcome.code == 0, outcome.err
    assert "the first covariance is that of" in outcome.err
    assert counted == [40]
    again = Ranking.load(tmp_path / "r")
    assert again.provenance["search"] == first.provenance["search"]
    assert file.read_bytes() == before
    assert command(*options, "--search-over", "mlp", "--force").code == 0  # of a part of its structures
    assert counted == [40]


def test_a_file_of_other_images_is_refused_before_any_work_or_replaced(command, tmp_path, counted):
    file = tmp_path / "cka.safetensors"
    assert command("--cka", "--cka-images", 30, "--cka-file", file).code == 0
    (tmp_path / "r").unlink()
    before, other = file.read_bytes(), ["--cka", "--cka-images", 32, "--cka-file", file]
    outcome = command(*other)
    assert outcome.code == 1
    assert "a covariance of another model or other images (images differs)" in outcome.error_line
    assert not (tmp_path / "r.checkpoint").exists()
    assert (file.read_bytes(), counted) == (before, [30])
    assert command(*other, "--force").code == 0
    assert (file.read_bytes() != before, counted) == (True, [30, 32])


@pytest.mark.parametrize(
    ("options", "says", "code"),
    [
        (["--cka-file", "FILE"], "--cka-file keeps the covariance of --cka. Give --cka too", 2),
        (["--cka", "--cka-file", "MINE"], "not a CKA covariance that snapvit made", 1),
        (
            ["--cka", "--cka-file", "OUT"],
            "is read by this command, or a part of its folder. Choose another --cka",
            1,
        ),
    ],
)
def test_a_file_that_is_something_else_is_refused(command, tmp_path, options, says, code):
    (tmp_path / "mine").write_text("precious")
    names = {"FILE": tmp_path / "x", "MINE": tmp_path / "mine", "OUT": tmp_path / "r"}
    outcome = command(*(names.get(option, option) for option in options))
    assert outcome.code == code
    assert says in outcome.error_line
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (tmp_path / "r").exists()


def test_a_file_without_a_usable_covariance_is_refused(tiny_model, tmp_path):
    images = pictures(8)
    described, path = describe(tiny_model, images), tmp_path / "c"
    good = np.eye(15)
    for bad, says in (
        (good[:5, :5], "not a covariance of 15 structures"),
        (good.astype(np.float32), "in float64"),
        (good + np.triu(np.full((15, 15), 0.1), 1), "not symmetric"),
        (np.where(good == 1, 1.0, np.nan), "not symmetric"),
        (np.ones((15, 15)) - 2 * good, "not positive definite"),
    ):
        save_cka(path, bad, described)
        with pytest.raises(SnapvitError, match=says):
            load_cka(path, described)
        assert load_cka(path, described, replaces=True) is None
    save_cka(path, good, described)
    np.testing.assert_array_equal(load_cka(path, described), good)
    with pytest.raises(SnapvitError, match="weights_sha256 differs"):
        load_cka(path, msgspec.structs.replace(described, weights_sha256="0" * 64))


def test_a_search_that_resumes_needs_no_covariance(tiny_model, tmp_path, monkeypatch, counted):
    """What became of it is in the checkpoint."""
    settings, saves, save = replace(SEARCH, cka=True, evaluations=15), [], Checkpoint.save
    whole = rank(tiny_model, pictures(20), settings)

    def stopping(self, *given):
        save(self, *given)
        saves.append(given[0])
        if len(saves) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", stopping)
        with pytest.raises(KeyboardInterrupt):
            rank(tiny_model, pictures(20), settings, checkpoint=tmp_path / "c")
    assert saves == ["scored", "search", "search"]
    counted.clear()
    again = rank(tiny_model, pictures(20), settings, checkpoint=tmp_path / "c")
    assert counted == []
    assert again.provenance["search"] == whole.provenance["search"]


def test_images_of_its_own_for_the_covariance_are_described(tiny_model):
    settings = replace(SEARCH, cka=True, cka_images=30)
    few, more = (rank(tiny_model, pictures(20), settings, cka=CkaInputs(pictures(n))) for n in (25, 40))
    counts = [found.provenance["search_settings"]["cka_images"]["images"] for found in (few, more)]
    assert counts == [25, 30]


# --- time


def test_every_phase_has_its_time_and_the_command_says_so(command, tmp_path):
    outcome = command("--cka", "--json")
    assert outcome.code == 0, outcome.err
    (timing,) = json.loads(outcome.out)["timing"]
    assert timing["processes"] == 1
    assert set(timing["seconds"]) == {"scores", "preparation", "cka", "search", "sampling", "sorting"}
    assert timing == msgspec.to_builtins(Ranking.load(tmp_path / "r").timings[0])
    plain = command("--force")
    assert "Took " in plain.out
    assert "; 1 process of " in plain.out


def test_a_joint_ranking_and_rounds_have_their_phases_too(tiny_model):
    from snapvit_export.allocation.recipe import Rounds
    from snapvit_export.prune.rank.iterative import rank_in_rounds

    joint = make_settings("default", images=20)
    found = rank(tiny_model, pictures(20), replace(joint, evaluations=4, population=4, search_images=4))
    phases = {"statistics", "ordering", "sub-layers", "preparation", "search", "sampling", "allocation"}
    assert set(found.timings[0].seconds) == phases
    rounds = rank_in_rounds(tiny_model, pictures(20), Rounds((0.8,), most_moved=9.0), joint)
    assert set(rounds.timings[0].seconds) == {"statistics", "ordering", "sub-layers", "cutting", "divergence"}


def test_time_goes_on_from_the_checkpoint(tiny_model, tmp_path, monkeypatch):
    settings, save = replace(SEARCH, evaluations=10), Checkpoint.save

    def stopping(self, *given):
        self.clock._stages.seconds["scores"] = 100.0  # as if it had taken so long
        save(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", stopping)
        with pytest.raises(KeyboardInterrupt):
            rank(tiny_model, pictures(20), settings, checkpoint=tmp_path / "c")
    (timing,) = rank(tiny_model, pictures(20), settings, checkpoint=tmp_path / "c").timings
    assert 100 <= timing.seconds["scores"] < 200
