"""Ranking: reproducible, resumable at any moment, and the same for any number of processes."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from helpers.images import make_image_folder, pictures
from helpers.models import make_model_folder
from helpers.programs import KILLED_RANK, python, torchrun
from helpers.rankings import apart_from_time
from snapvit_export.allocation.recipe import RECIPES, Settings, make_settings
from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.errors import SnapvitError
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.models.class_names import as_outputs
from snapvit_export.prune.models.load import Model, load_model, save_model
from snapvit_export.prune.rank.checkpoint import Checkpoint
from snapvit_export.prune.rank.criteria.base import Batch
from snapvit_export.prune.rank.criteria.losses import CrossEntropy
from snapvit_export.prune.rank.rank import rank, starting_factors
from snapvit_export.prune.rank.reproducible import ExactSum, choose_exponents
from snapvit_export.prune.rank.search.cka import cka_covariance, nearest_correlation

SEARCH = Settings(evaluations=10, population=5, pca=16)


def same(a: Ranking, b: Ranking) -> bool:
    arrays = zip(a.head_scores + a.neuron_scores, b.head_scores + b.neuron_scores)
    return all(np.array_equal(x, y) for x, y in arrays)


def test_the_ranking_is_reproducible_and_says_how_it_was_made(tiny_model):
    first, again = (rank(tiny_model, pictures(20), Settings(seed=5)) for _ in range(2))
    other = rank(tiny_model, pictures(20), Settings(seed=6))
    assert same(first, again)
    assert not same(first, other)
    assert first.provenance["seed"] == 5
    assert first.provenance["data"]["images"] == 20
    assert len(first.provenance["weights_sha256"]) == 64
    assert first.anatomy == tiny_model.anatomy
    assert all(parameter.grad is None for parameter in tiny_model.module.parameters())


def test_a_search_weights_the_local_scores_and_records_itself(tiny_model):
    local = rank(tiny_model, pictures(20), Settings())
    found = rank(tiny_model, pictures(20), SEARCH)
    record = found.provenance["search"]
    factors = np.array(record["factors"])
    assert np.allclose(found.neuron_scores[1], local.neuron_scores[1] * abs(factors[1]), rtol=1e-6)
    assert np.allclose(found.head_scores[0], local.head_scores[0] * np.abs(factors[3:7]), rtol=1e-6)
    assert record["best_fitness"] <= record["start_fitness"]
    assert record["history"][-1]["evaluations"] == 10
    assert len(record["covariance_eigenvalues"]) == 3


@pytest.mark.parametrize(
    "change", [dict(optimiser="snes-log"), dict(cka=True), dict(racing=True), dict(criterion="lamp")]
)
def test_every_kind_of_search_runs(tiny_model, change):
    found = rank(tiny_model, pictures(20), Settings(**{**SEARCH.__dict__, **change}))
    assert found.provenance["search"]["best_fitness"] <= found.provenance["search"]["start_fitness"]


def test_the_released_recipe_is_there_by_name():
    released = RECIPES["snapvit"]
    assert (released.images, released.evaluations, released.seed, released.optimiser) == (1000, 50, 42, "xnes")
    assert (released.views, released.reduction, released.criterion) == ("paired", "summed", "self-supervised")
    assert released.pairs == ((0.15, 0.0), (0.35, 0.2), (0.55, 0.4), (0.65, 0.5))
    assert make_settings("snapvit", images=10, seed=None).images == 10
    assert make_settings("snapvit", images=10, seed=None).seed == 42


def test_the_start_falls_with_depth(tiny_model):
    scores = rank(tiny_model, pictures(4), Settings(criterion="magnitude"))
    from snapvit_export.model.scores import Scores

    start = starting_factors(Scores(scores.head_scores, scores.neuron_scores))
    assert np.allclose(start[:3], [1.2, 1.0, 0.8])
    assert np.allclose(start[3:], np.repeat([1.2, 1.0, 0.8], 4))


# --- sums


def test_exact_sums_do_not_depend_on_the_order():
    generator = torch.Generator().manual_seed(0)
    terms = [[torch.randn(40, 30, generator=generator) * 1e-6, torch.randn(5, generator=generator)] for _ in range(50)]
    exponents = choose_exponents(terms[0])
    forwards, backwards = (ExactSum.like(terms[0], exponents) for _ in range(2))
    for term in terms:
        forwards.add(term)
    for term in reversed(terms):
        backwards.add(term)
    for a, b, i in zip(forwards.values(), backwards.values(), range(2)):
        assert torch.equal(a, b)
        wanted = sum(term[i].double() for term in terms)
        assert (a - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_small_entries_are_not_lost_beside_large_ones():
    terms = [[torch.tensor([1.0, 1e-12, 1e-18], dtype=torch.float64)] for _ in range(10)]
    total = ExactSum.like(terms[0], choose_exponents(terms[0]))
    for term in terms:
        total.add(term)
    assert torch.allclose(total.values()[0], torch.tensor([10.0, 1e-11, 1e-17], dtype=torch.float64), rtol=1e-4, atol=0)


def test_variance_of_a_nearly_constant_neuron_survives_the_sums(tiny_model):
    block = tiny_model.module.blocks[0].mlp
    with torch.no_grad():
        block.fc1.weight[0] *= 1e-3
        block.fc1.bias[0] = 1000.0
    seen: list[torch.Tensor] = []
    hook = block.fc2.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0][..., 0].double()))
    ranking = rank(tiny_model, pictures(16), Settings(criterion="variance"))
    hook.remove()
    wanted = float((seen[0].var(unbiased=False) * block.fc2.weight[:, 0].square().sum()).detach())
    assert ranking.neuron_scores[0][0] == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e30])
def test_sums_refuse_what_they_cannot_hold(bad):
    total = ExactSum.like([torch.ones(3)], choose_exponents([torch.ones(3)]))
    with pytest.raises(SnapvitError, match="not finite"):
        total.add([torch.tensor([1.0, bad, 1.0])])


# --- CKA


def test_cka_is_a_correlation_matrix_of_the_structures(tiny_model):
    covariance = cka_covariance(tiny_model, pictures(40))
    assert covariance.shape == (3 + 12, 3 + 12)
    assert np.allclose(np.diag(covariance), 1)
    assert np.linalg.eigvalsh(covariance)[0] > 0
    assert (covariance >= -1e-9).all()


def test_cka_of_equal_heads_is_one(tiny_model):
    attn = tiny_model.module.blocks[1].attn
    with torch.no_grad():
        for part in attn.qkv.weight.view(3, 4, 12, 48), attn.qkv.bias.view(3, 4, 12):
            part[:, 2] = part[:, 0]  # head 2 becomes a copy of head 0
    covariance = cka_covariance(tiny_model, pictures(40))
    assert covariance[3 + 4 + 0, 3 + 4 + 2] > 0.99
    assert covariance[3 + 4 + 0, 3 + 4 + 1] < 0.9


def test_the_nearest_correlation_matrix_is_positive_definite():
    broken = np.array([[1.0, 0.9, -0.9], [0.9, 1.0, 0.9], [-0.9, 0.9, 1.0]])
    mended = nearest_correlation(broken)
    assert np.linalg.eigvalsh(mended)[0] > 0
    assert np.allclose(np.diag(mended), 1)


# --- resuming


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    """One for all tests here, none of which changes it."""
    return make_model_folder(tmp_path_factory.mktemp("rank") / "tiny-model")


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory) -> Path:
    """One for all tests here, none of which changes it."""
    return make_image_folder(tmp_path_factory.mktemp("rank") / "pictures")


def ranking_with_search(model: Path, images: Path, out: Path, *extra: object) -> list[str]:
    """Arguments of a small but whole ranking with a search."""
    base = ["rank", model, "--data", images, "--out", out, "--images", 56, "--pca", 16, "--recipe", "local"]
    return [str(part) for part in (*base, "--evaluations", 12, "--population", 5, *extra)]


@pytest.fixture
def command(tiny_folder, image_folder, tmp_path):
    """Those arguments, to write into tmp_path."""
    return lambda out, *extra: ranking_with_search(tiny_folder, image_folder, tmp_path / out, *extra)


@pytest.fixture(scope="module")
def whole(tiny_folder, image_folder, tmp_path_factory) -> tuple:
    """The ranking of that command, if nothing goes wrong."""
    out = tmp_path_factory.mktemp("whole") / "whole.safetensors"
    done = python(KILLED_RANK, 0, *ranking_with_search(tiny_folder, image_folder, out))
    assert done.returncode == 0, done.stderr
    return apart_from_time(out)


@pytest.mark.slow  # every process imports torch anew
@pytest.mark.parametrize("kill_after", [2, 4, 6])  # saves: two while scoring, one when scored, then each generation
def test_killed_at_any_moment_the_same_command_ends_in_the_same_ranking(command, whole, tmp_path, kill_after):
    killed = python(KILLED_RANK, kill_after, *command("killed.safetensors"))
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed.safetensors").exists()
    assert (tmp_path / "killed.safetensors.checkpoint").exists()
    again = python(KILLED_RANK, 0, *command("killed.safetensors"))
    assert again.returncode == 0, again.stderr
    assert apart_from_time(tmp_path / "killed.safetensors") == whole
    assert not (tmp_path / "killed.safetensors.checkpoint").exists()


def test_a_checkpoint_of_other_settings_is_refused_by_naming_the_difference(tmp_path):
    path = tmp_path / "c"
    Checkpoint(path, {"seed": 1, "data": {"images": 5}}).save("score", {"x": np.ones(2)}, {"n": 1})
    assert Checkpoint(path, {"seed": 1, "data": {"images": 5}}).load().rest == {"n": 1}
    with pytest.raises(SnapvitError, match="seed was 1, now it is 2"):
        Checkpoint(path, {"seed": 2, "data": {"images": 5}}).load()
    with pytest.raises(SnapvitError, match="data.images was 5, now it is 6"):
        Checkpoint(path, {"seed": 1, "data": {"images": 6}}).load()
    with pytest.raises(SnapvitError, match="racing was null, now it is true"):
        Checkpoint(path, {"seed": 1, "data": {"images": 5}, "racing": True}).load()


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = tmp_path / "c"
    Checkpoint(path, {}).save("score", {"x": np.arange(9)}, {})
    good, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(50):
        at = int(rng.integers(len(good)))
        path.write_bytes(good[:at] + bytes([good[at] ^ int(rng.integers(1, 256))]) + good[at + 1 :])
        try:
            assert np.array_equal(Checkpoint(path, {}).load().arrays["x"], np.arange(9))
        except SnapvitError as error:
            assert str(path) in str(error)


# --- several processes


@pytest.mark.slow  # every process imports torch anew
def test_one_two_and_three_processes_give_the_same_ranking(command, tmp_path):
    results = []
    plain = ["-m", "snapvit_export.cli", *command("1.safetensors", "--json")]
    for count in (1, 2, 3):  # the first without torchrun, on all cores; torchrun gives each process one
        if count == 1:
            done = python(*plain, OMP_NUM_THREADS="")
        else:
            done = torchrun(count, "-m", "snapvit_export.cli", *command(f"{count}.safetensors", "--json"))
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout)["search"]["history"][-1]["evaluations"] == 12  # only one of them speaks
        results.append(apart_from_time(tmp_path / f"{count}.safetensors"))
        (timing,) = Ranking.load(tmp_path / f"{count}.safetensors").timings
        assert timing.processes == count
    assert results[0] == results[1] == results[2]


@pytest.mark.slow  # every process imports torch anew
def test_the_default_recipe_is_the_same_in_two_processes_and_after_a_kill(tiny_folder, image_folder, tmp_path):
    def arguments(out: str) -> list[str]:
        base = ["rank", tiny_folder, "--data", image_folder, "--images", 24, "--flops", "0.7", "--evaluations", 20]
        return [str(part) for part in (*base, "--population", 5, "--out", tmp_path / out)]

    whole = python(KILLED_RANK, 0, *arguments("whole.safetensors"))
    assert whole.returncode == 0, whole.stderr
    two = torchrun(2, "-m", "snapvit_export.cli", *arguments("two.safetensors"))
    assert two.returncode == 0, two.stderr[-3000:]
    killed = python(KILLED_RANK, 3, *arguments("killed.safetensors"))
    assert killed.returncode == -signal.SIGKILL
    again = python(KILLED_RANK, 0, *arguments("killed.safetensors"))
    assert again.returncode == 0, again.stderr
    results = [apart_from_time(tmp_path / f"{name}.safetensors") for name in ("whole", "two", "killed")]
    assert results[0] == results[1] == results[2]


@pytest.mark.slow  # every process imports torch anew
def test_a_lost_process_ends_the_run_and_leaves_a_usable_checkpoint(command, whole, tmp_path):
    lost = torchrun(2, str(KILLED_RANK), "lost", *command("lost.safetensors"))
    assert lost.returncode != 0
    assert not (tmp_path / "lost.safetensors").exists()
    assert "error: another process of this run was lost" in lost.stderr or "error: stopped from outside" in lost.stderr
    again = python(KILLED_RANK, 0, *command("lost.safetensors"))
    assert again.returncode == 0, again.stderr
    assert apart_from_time(tmp_path / "lost.safetensors") == whole


# --- the command


def test_the_command_writes_a_ranking_that_export_uses(snapvit, command, tiny_folder, image_folder, tmp_path):
    outcome = snapvit(*command("r.safetensors", "--evaluations", 5))
    assert outcome.code == 0, outcome.err
    assert "after 5" in outcome.out
    assert Ranking.load(tmp_path / "r.safetensors").provenance["search_settings"]["evaluations"] == 5
    arguments = ["--model", tiny_folder, "--data", image_folder, "--images", 16, "--sparsity", "0.3"]
    arguments += ["--ranking", tmp_path / "r.safetensors", "--out", tmp_path / "family"]
    assert snapvit("export", *arguments).code == 0


def test_json_is_for_machines(snapvit, command):
    outcome = snapvit(*command("r.safetensors", "--json"))
    lines = [json.loads(line) for line in outcome.err.splitlines()]
    assert {"scoring heads and neurons", "searching"} <= {line.get("phase") for line in lines}
    assert any("best fitness" in line.get("status", "") for line in lines)
    assert json.loads(outcome.out)["criterion"] == "self-supervised"


@pytest.mark.parametrize(
    ("option", "says", "code"),
    [
        ("--criterion=nonsense", "no criterion is called 'nonsense'", 2),
        ("--recipe=nonsense", "no recipe is called", 2),
        ("--optimiser=nonsense", "no optimiser is called", 2),
        ("--engine=nonsense", "no engine is called", 2),
        ("--autocast=nonsense", "no autocast is called", 2),
        ("--device=tpu", "not cpu or cuda", 2),
        ("--pairs=0.3", "is not a pair", 2),
        ("--pairs=0.99:0", "largest ratio possible", 1),
        ("--pca=40", "Give more --images", 1),
        ("--population=1", "population of 1", 2),
        ("--views=nonsense", "views 'nonsense' is not known", 2),
    ],
)
def test_bad_options_are_one_line(snapvit, command, tmp_path, option, says, code):
    extra = [option] if option != "--pca=40" else [option, "--images", "20"]
    outcome = snapvit(*command("r.safetensors", *extra))
    assert outcome.code == code
    assert says in outcome.error_line
    assert not list(tmp_path.glob("r.safetensors*"))  # nor a checkpoint that would stand in the way


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: nothing to refuse")
def test_a_gpu_that_is_not_there_is_refused(snapvit, command):
    outcome = snapvit(*command("r.safetensors", "--device", "cuda"))
    assert outcome.code == 1
    assert "Use --device cpu" in outcome.error_line


def test_a_criterion_that_needs_no_images_gets_along_without(snapvit, tiny_folder, tmp_path):
    local = ("rank", tiny_folder, "--recipe", "local")
    outcome = snapvit(*local, "--criterion", "magnitude", "--out", tmp_path / "r.safetensors")
    assert outcome.code == 0, outcome.err
    outcome = snapvit(*local, "--criterion", "variance", "--out", tmp_path / "r2.safetensors")
    assert outcome.code == 2
    assert "needs images" in outcome.error_line


def test_a_checkpoint_is_not_resumed_by_another_engine(tiny_model, tmp_path):
    settings = Settings(evaluations=5, population=5, pca=8)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    class Stopping:
        phase = advance = note = staticmethod(lambda *_: None)
        describe = staticmethod(stop)

    with pytest.raises(KeyboardInterrupt):
        rank(tiny_model, pictures(12), settings, checkpoint=tmp_path / "c", progress=Stopping())
    with pytest.raises(SnapvitError, match="search_settings.engine was"):
        rank(tiny_model, pictures(12), settings, checkpoint=tmp_path / "c", engine="torch")
    assert rank(tiny_model, pictures(12), settings, checkpoint=tmp_path / "c").provenance["search"]


def test_labels_are_asked_for(snapvit, command, image_folder, tmp_path):
    labelled = ["rank", command("x")[1], "--data", image_folder, "--out", tmp_path / "r", "--images", 8]
    assert snapvit(*labelled, "--recipe", "local", "--criterion", "cross-entropy").code == 0
    flat = ["rank", command("x")[1], "--data", image_folder / "class0", "--out", tmp_path / "r2", "--images", 8]
    outcome = snapvit(*flat, "--recipe", "local", "--criterion", "cross-entropy")
    assert outcome.code == 1
    assert "needs labels" in outcome.error_line


def test_a_ranking_of_other_weights_is_refused(snapvit, tiny_model, tiny_folder, image_folder, tmp_path):
    from snapvit_export.prune.models.load import save_model

    mine = shutil.copytree(tiny_folder, tmp_path / "mine")
    plain = ["rank", mine, "--data", image_folder, "--out", tmp_path / "r.safetensors", "--images", 8]
    assert snapvit(*plain, "--recipe", "local").code == 0
    tiny_model.module.blocks[0].mlp.fc1.weight.data += 1
    save_model(tiny_model.module, tiny_model.description, mine)
    arguments = ["--model", mine, "--data", image_folder, "--images", 16, "--sparsity", "0.3"]
    outcome = snapvit("export", *arguments, "--ranking", tmp_path / "r.safetensors", "--out", tmp_path / "family")
    assert outcome.code == 1
    assert "made from other weights" in outcome.error_line


@pytest.mark.parametrize(
    "options",
    [
        ("--recipe", "local", "--damping", "max:0.5"),
        ("--evaluations", "0", "--flops", "0.5"),
        ("--evaluations", "0", "--divergence", "cosine"),
        ("--evaluations", "0", "--optimiser", "xnes"),
        ("--recipe", "local", "--racing"),
    ],
)
def test_options_that_would_change_nothing_are_refused(snapvit, tiny_folder, image_folder, tmp_path, options):
    outcome = snapvit("rank", tiny_folder, "--data", image_folder, "--out", tmp_path / "r.safetensors", *options)
    assert outcome.code == 2
    assert "has no part in" in outcome.error_line
    assert not (tmp_path / "r.safetensors").exists()


LABELLED = ("cross-entropy", "snip-cross-entropy")


def with_names(model: Model, *names: str) -> Model:
    return replace(model, description=msgspec.structs.replace(model.description, labels=names))


@pytest.mark.parametrize("criterion", LABELLED)
def test_labels_of_the_data_become_outputs_of_the_head(tiny_model, criterion):
    named = with_names(tiny_model, "cat", "dog", "emu", "fox", "ape")
    numbers = np.arange(20) % 2
    by_folder = replace(pictures(20), labels=numbers, classes=("ape", "cat"))  # alphabetical, as folders are
    by_output = replace(pictures(20), labels=np.array([4, 0])[numbers], classes=())
    settings = Settings(criterion=criterion)
    assert same(rank(named, by_folder, settings), rank(named, by_output, settings))
    other = replace(by_output, labels=numbers)
    assert not same(rank(named, other, settings), rank(named, by_output, settings))


@pytest.mark.parametrize("criterion", LABELLED)
def test_classes_that_the_head_does_not_have_are_refused_in_one_line(
    snapvit, tiny_model, image_folder, tmp_path, criterion
):
    named = with_names(tiny_model, "cat", "dog", "emu", "fox", "ape")
    save_model(named, named.description, tmp_path / "named")
    few = ["--images", 8, "--recipe", "local", "--criterion", criterion]
    outcome = snapvit("rank", tmp_path / "named", "--data", image_folder, "--out", tmp_path / "r", *few)
    assert outcome.code == 1
    assert "class 'class0' of the data is not among its labels of the head" in outcome.error_line
    assert criterion in outcome.error_line
    assert "--classes" not in outcome.error_line  # which rank does not have


def test_a_checkpoint_is_bound_to_the_labels_too(tiny_model):
    labels = [np.arange(20) % 2, np.arange(20) % 3]
    settings = Settings(criterion="cross-entropy")
    first, second = (rank(tiny_model, replace(pictures(20), labels=own), settings) for own in labels)
    assert first.provenance["labels_sha256"] != second.provenance["labels_sha256"]


def test_on_real_folders_the_loss_is_that_of_the_mapped_labels(shared):
    model = load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    source, _ = calibration_and_held_out(str(shared / "data" / "tiny-imagenet" / "val"), 32, 0, 0)
    images = prepare(source, model.preprocessing)
    pixels = torch.from_numpy(next(images.batches(32)))
    with torch.no_grad():
        known, alphabetical = (
            float(CrossEntropy()(model.module, Batch(pixels, torch.from_numpy(labels), 0)).mean())
            for labels in (as_outputs(images, model, "cross-entropy").labels, images.labels)
        )
    assert known < 5 < 7 < alphabetical
