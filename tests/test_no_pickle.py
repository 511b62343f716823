"""No pickle is ever executed: every way in that a file has is tried with a pickle that would leave a proof behind."""

import ast
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from helpers.hostile import Bomb
from helpers.shared import ROOT
from snapvit_export.calibration.dataset import open_dataset
from snapvit_export.calibration.open_source import open_source
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import SnapvitError
from snapvit_export.evaluate.features import Features
from snapvit_export.family.folder import read_family
from snapvit_export.model.ranking import Ranking
from snapvit_export.profiling import new_process
from snapvit_export.prune.import_scores import import_scores
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.rank.checkpoint import Checkpoint
from snapvit_export.prune.released_features import read_released_features

NAME = "vit_tiny_patch16_224"


def zipped(bomb: Bomb) -> bytes:
    """As torch writes it."""
    file = io.BytesIO()
    torch.save({"state_dict": {"head.weight": torch.zeros(2, 2)}, "hyper_parameters": bomb}, file)
    return file.getvalue()


def legacy(bomb: Bomb) -> bytes:
    """As torch wrote it before version 1.6."""
    file = io.BytesIO()
    torch.save({"model": bomb}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def bare(bomb: Bomb) -> bytes:
    return pickle.dumps(bomb)


def array(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([bomb], object), allow_pickle=True)
    return file.getvalue()


def arrays(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    np.savez(file, images=np.zeros((2, 4, 4, 3), np.uint8), labels=np.array([bomb, bomb], object))
    return file.getvalue()


def splits(bomb: Bomb) -> bytes:
    file = io.BytesIO()
    np.savez(file, train_images=np.array([bomb], object), test_images=np.zeros((2, 4, 4, 3), np.uint8))
    return file.getvalue()


def metadata(bomb: Bomb) -> bytes:
    """A whole safetensors file, with the pickle as text where ours have JSON."""
    kinds = ("snapvit-ranking", "snapvit-features", "snapvit-checkpoint")
    return save({"x": np.zeros(3, np.float32)}, {kind: pickle.dumps(bomb, 0).decode("latin-1") for kind in kinds})


def model_folder(path: Path) -> object:
    folder = path.parent / "model"
    folder.mkdir()
    bundled = ROOT / "snapvit_export" / "bundled"
    (folder / "model.json").write_bytes((bundled / "model.json").read_bytes())
    path.rename(folder / "model.safetensors")
    return load_model(str(folder))


def checkpoint(path: Path) -> object:
    return load_model(NAME, path)


def timing_job(path: Path) -> object:
    """What a process that times files reads as the array of its inputs."""
    job = b'{"target":{"runtime":"onnxruntime","precision":"fp32","batch":1,"threads":1},"device":{"cpu":"","cores":1,'
    job += b'"governor":"","memory_bytes":1,"system":"","runtime_version":""},"files":{},"seconds":1,"at":"p50",'
    job += b'"pause_ms":0,"energy":false}\n'
    data = path.read_bytes()
    return new_process._read_request(io.BytesIO(job + b"%d\n" % len(data) + data))


WAYS: dict[str, tuple[Callable[[Bomb], bytes], str, Callable[[Path], object]]] = {
    "--checkpoint of torch, .pth": (zipped, "w.pth", checkpoint),
    "--checkpoint of torch, .pt": (zipped, "w.pt", checkpoint),
    "--checkpoint of Lightning, .ckpt": (zipped, "w.ckpt", checkpoint),
    "--checkpoint of the hub, .bin": (legacy, "w.bin", checkpoint),
    "--checkpoint that is a bare pickle": (bare, "w.pth", checkpoint),
    "--checkpoint that is called .safetensors": (bare, "w.safetensors", checkpoint),
    "weights of a model folder": (zipped, "w", model_folder),
    "import-scores": (zipped, "scores.pt", import_scores),
    "import-scores of an old file": (legacy, "scores.pt", import_scores),
    "--data .npz with labels of objects": (arrays, "x.npz", lambda path: open_source(str(path))),
    "--data .npz with images of objects": (splits, "x.npz", lambda path: open_dataset(str(path))),
    "--data .npy": (array, "x.npy", lambda path: open_source(str(path))),
    "--ranking": (zipped, "r.safetensors", Ranking.load),
    "--ranking, in its metadata": (metadata, "r.safetensors", Ranking.load),
    "--features": (bare, "f.safetensors", Features.load),
    "features of the released code": (zipped, "f.pt", read_released_features),
    "features of the released code, an old file": (legacy, "f.pt", read_released_features),
    "--features, in their metadata": (metadata, "f.safetensors", Features.load),
    "checkpoint of a run to resume": (zipped, "r.checkpoint", lambda path: Checkpoint(path, {}).load()),
    "checkpoint of a run, in its metadata": (metadata, "r.checkpoint", lambda path: Checkpoint(path, {}).load()),
    "inputs of a timing process": (array, "x.npy", timing_job),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_pickle_is_refused_and_not_executed(way, tmp_path):
    write, name, read = WAYS[way]
    proof, path = tmp_path / "proof", tmp_path / name
    path.write_bytes(write(Bomb(proof)))
    with pytest.raises((SnapvitError, ValueError)) as refused:
        read(path)
    assert not proof.exists()
    if isinstance(refused.value, SnapvitError):
        assert "\n" not in str(refused.value)
    else:
        assert way == "inputs of a timing process"  # which our own process writes, never a user


def test_the_bomb_goes_off_where_a_pickle_is_executed(tmp_path):
    for number, write in enumerate((bare, zipped, legacy)):
        proof = tmp_path / f"proof{number}"
        file = io.BytesIO(write(Bomb(proof)))
        found = pickle.load(file) if write is bare else torch.load(file, weights_only=False)
        for opened in found.values() if isinstance(found, dict) else [found]:
            if hasattr(opened, "close"):
                opened.close()
        assert proof.exists()


@pytest.mark.parametrize("name", ["ranking.safetensors", "weights.bin", "elastic.json"])
def test_a_pickle_in_an_elastic_folder_is_refused_and_not_executed(name, device_folder):
    (device_folder / "elastic" / name).write_bytes(bare(Bomb(device_folder / "proof")))
    with pytest.raises(SnapvitError):
        Elastic.load(device_folder / "elastic")
    assert not (device_folder / "proof").exists()


@pytest.mark.parametrize("name", ["manifest.json", "weights.bin", "dense.onnx"])
def test_a_pickle_in_a_family_is_refused_and_not_executed(name, device_folder):
    (device_folder / "family" / name).write_bytes(bare(Bomb(device_folder / "proof")))
    with pytest.raises(SnapvitError):
        read_family(device_folder / "family")
    assert not (device_folder / "proof").exists()


def test_pickled_weights_of_the_hub_are_not_executed(tmp_path, monkeypatch):
    """timm takes them where a repository has no safetensors."""
    from huggingface_hub.errors import EntryNotFoundError
    from timm.models import _hub

    asked = []

    def download(*, filename: str, **_: object) -> str:
        asked.append(filename)
        if filename.endswith(".safetensors"):
            raise EntryNotFoundError("there is none")
        (tmp_path / filename).write_bytes(legacy(Bomb(tmp_path / "proof")))
        return str(tmp_path / filename)

    monkeypatch.setattr(_hub, "hf_hub_download", lambda repo_id=None, **given: download(**given))
    with pytest.raises(SnapvitError, match="its weights could not be fetched"):
        load_model("vit_tiny_patch16_224.augreg_in21k")
    assert any(name.endswith(".bin") for name in asked)
    assert not (tmp_path / "proof").exists()


LOADERS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}


def test_no_module_of_ours_unpickles():
    """The readers that could are called only in their safe way, and modules that can do nothing else not at all."""
    called, imported = [], set()
    for folder in ("snapvit_export", "calibration", "cli", "profiles"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.split(".")[0])
                elif isinstance(node, ast.Call) and ast.unparse(node.func) in LOADERS:
                    name, value = LOADERS[ast.unparse(node.func)]
                    given = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg == name}
                    called.append((path.name, given.get(name) is value))
    assert not imported & {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
    assert called
    assert [name for name, is_safe in called if not is_safe] == []
