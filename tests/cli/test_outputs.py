"""A typo in --out costs nobody a file: places are checked before the work begins; only --force overrides."""

import hashlib
from pathlib import Path

import pytest
import torch

from helpers.rankings import apart_from_time
from snapvit_export.model.ranking import Ranking


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def diary(tmp_path) -> Path:
    path = tmp_path / "diary.json"
    path.write_text("dear diary")
    return path


@pytest.fixture
def never_timed(monkeypatch) -> None:
    """Timing and ssh are the work that must not have begun."""

    def begin(*_, **__):
        pytest.fail("the work began before the place was checked")

    for work in ("on_device.profile_family", "remote.profile_there"):
        monkeypatch.setattr(f"snapvit_export.selection.{work}", begin)


@pytest.mark.parametrize("target", ["local", "ssh://nowhere"])
@pytest.mark.parametrize(
    "name",
    [
        *("manifest.json", "weights.bin", "dense.onnx", "ranking.safetensors"),
        *(
            "validation.json",
            "model.onnx",
            "run.py",
            "run_engine.py",
            "report.html",
        ),  # not there yet, and names of the family
    ],
)
@pytest.mark.usefixtures("never_timed")
def test_profile_leaves_the_family_alone(snapvit, device_folder, name, target):
    before = contents(device_folder)
    outcome = snapvit("profile", device_folder / "family", "--out", device_folder / "family" / name, "--target", target)
    assert outcome.code == 1
    assert "Choose another --out, or give --force" in outcome.error_line
    assert contents(device_folder) == before


@pytest.mark.usefixtures("never_timed")
def test_profile_refuses_files_of_others_folders_and_devices(snapvit, device_folder, diary, tmp_path):
    family = device_folder / "family"
    assert "not a profile that snapvit made" in snapvit("profile", family, "--out", diary).error_line
    assert "is a folder" in snapvit("profile", family, "--out", tmp_path).error_line
    assert "not an ordinary file" in snapvit("profile", family, "--out", "/dev/null", "--force").error_line
    assert diary.read_text() == "dear diary"


@pytest.mark.usefixtures("short_timings")
def test_profile_writes_over_anything_with_force_and_over_a_profile_without(snapvit, device_folder, diary):
    for force in (("--force",), ()):
        command = ("profile", device_folder / "family", "--seconds", "0.1", "--out", diary, "--quiet")
        assert snapvit(*command, *force).code == 0
        assert '"profiles"' in diary.read_text()


def test_rank_replaces_only_the_same_ranking(snapvit, tiny_folder, diary, tmp_path):
    out = tmp_path / "ranking.safetensors"
    command = ("rank", tiny_folder, "--recipe", "local", "--criterion", "magnitude", "--quiet")
    assert snapvit(*command, "--out", out).code == 0
    first = apart_from_time(out)
    assert snapvit(*command, "--out", out).code == 0
    assert apart_from_time(out) == first
    before = out.read_bytes()
    for change in (("--seed", "1"), ("--criterion", "lamp")):
        outcome = snapvit(*command, "--out", out, *change)
        assert outcome.code == 1
        assert "is a ranking of another model, images or settings" in outcome.error_line
    assert out.read_bytes() == before
    assert "not a ranking that snapvit made" in snapvit(*command, "--out", diary).error_line
    assert diary.read_text() == "dear diary"
    assert snapvit(*command, "--out", out, "--seed", "1", "--force").code == 0
    assert Ranking.load(out).provenance["seed"] == 1


@pytest.mark.parametrize("folder", ["family", "elastic"])
def test_rank_and_import_leave_the_ranking_of_a_folder_alone(snapvit, device_folder, folder):
    before, out = contents(device_folder), device_folder / folder / "ranking.safetensors"
    for command in (("rank", device_folder / "model", "--data", device_folder / "images"), ("import-scores", "x.pt")):
        assert "a part of its folder" in snapvit(*command, "--out", out).error_line
    assert contents(device_folder) == before


def test_import_scores_replaces_only_the_same_ranking(snapvit, tmp_path, diary):
    def save(path: Path, seed: int) -> Path:
        torch.manual_seed(seed)
        scores = {"mlp_scores": torch.rand(2, 8), "head_scores": torch.rand(2, 2)}
        torch.save({**scores, "num_blocks": 2, "hidden_dim": 8, "num_heads": 2, "model_type": "m"}, path)
        return path

    one, two = save(tmp_path / "one.pt", 0), save(tmp_path / "two.pt", 1)
    out, read = tmp_path / "r.safetensors", one.read_bytes()
    for _ in range(2):
        assert snapvit("import-scores", one, "--out", out).code == 0
    first = out.read_bytes()
    assert "is another ranking, of m" in snapvit("import-scores", two, "--out", out).error_line
    assert "not a ranking" in snapvit("import-scores", two, "--out", diary).error_line
    assert "is read by this command" in snapvit("import-scores", one, "--out", one).error_line
    assert (out.read_bytes(), one.read_bytes(), diary.read_text()) == (first, read, "dear diary")
    assert snapvit("import-scores", two, "--out", out, "--force").code == 0
    assert out.read_bytes() != first


@pytest.mark.parametrize("kind", ["html", "md", "json", "svg", "png"])
def test_report_replaces_its_own_files_only(snapvit, device_folder, tmp_path, kind):
    family, place = device_folder / "family", tmp_path / "reports"
    command = ("report", family, "--out", place, "--format", kind, "--quiet")
    assert snapvit(*command).code == 0
    path = sorted(place.iterdir())[0]
    path.write_text("dear diary")
    outcome = snapvit(*command)
    assert outcome.code == 1
    assert f"{path.name}: is there already, and not a report that snapvit made" in outcome.error_line
    assert path.read_text() == "dear diary"
    path.unlink()  # what is left was written by the first call
    assert snapvit(*command, *(("--force",) if kind == "json" else ())).code == 0
    assert path.read_bytes() != b"dear diary"


def test_report_leaves_the_family_alone(snapvit, device_folder):
    before = contents(device_folder)
    for name in ("manifest.json", "validation.json"):
        assert (
            "a part of its folder"
            in snapvit("report", device_folder / "family", "--out", device_folder / "family" / name).error_line
        )
    assert contents(device_folder) == before


@pytest.mark.parametrize("name", ["compare.json", "compare.md", "compare.svg", "compare.png"])
def test_compare_refuses_a_folder_with_files_of_others(snapvit, tmp_path, name):
    (tmp_path / name).write_text("dear diary")
    outcome = snapvit("compare", "--out", tmp_path, "--model", "no-such-model", "--data", tmp_path)
    assert f"{name}: is there already" in outcome.error_line
    assert contents(tmp_path).keys() == {name}


def test_features_never_take_the_place_of_another_file(snapvit, device_folder, diary):
    command = ("evaluate", device_folder / "family" / "dense.onnx", "--data", device_folder / "images", "--quiet")
    before = contents(device_folder)
    assert "not a file of features" in snapvit(*command, "--features", diary).error_line
    for name in ("dense.onnx", "weights.bin", "manifest.json"):
        path = device_folder / "family" / name
        assert "Choose another --features, or give --force" in snapvit(*command, "--features", path).error_line
    assert "Leave it out" in snapvit(*command, "--force").error_line
    assert contents(device_folder) == before
    assert snapvit(*command, "--features", diary, "--force", "--by", "knn").code == 0
    assert b"snapvit-features" in diary.read_bytes()[:1000]


def test_a_model_folder_does_not_replace_weights_of_others(tiny_model, tmp_path):
    from snapvit_export.errors import SnapvitError
    from snapvit_export.prune.models.load import save_model

    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").write_text("a download of hours")
    with pytest.raises(SnapvitError, match="not ours"):
        save_model(tiny_model, tiny_model.description, tmp_path / "hub")
    assert contents(tmp_path / "hub").keys() == {"model.safetensors"}
    for _ in range(2):
        save_model(tiny_model, tiny_model.description, tmp_path / "mine")
