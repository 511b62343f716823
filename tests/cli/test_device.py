"""--device: where torch computes, in every command that computes in torch; nothing needs a GPU."""

from __future__ import annotations

import pytest
import torch
from typer.main import get_command

from helpers.models import make_model
from snapvit_export.calibration.digits import BUNDLED
from snapvit_export.cli.app import app
from snapvit_export.prune.models import extractor
from snapvit_export.prune.models.extractor import TorchExtractor

COMMANDS = {
    "rank": (),
    "rank in rounds": ("--rounds", "0.8"),
    "export": ("--sparsity", "0.3"),
    "pack": (),
    "evaluate": (),
    "compare": (),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_device_that_is_not_there_is_refused_in_one_line_before_any_work(snapvit, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    outcome = snapvit(name.partition(" ")[0], *COMMANDS[name], "--device", "cuda")
    assert outcome.code == 1
    assert "no CUDA device works here" in outcome.error_line
    assert not list(tmp_path.iterdir())


def test_every_command_that_computes_in_torch_has_it():
    commands = get_command(app).commands
    found = {name for name, command in commands.items() if any("--device" in p.opts for p in command.params)}
    assert found == {"rank", "export", "pack", "evaluate", "compare", "recover"}


@pytest.mark.parametrize("command", [("export", "--sparsity", "0.3", "--model"), ("pack", "--model"), ("evaluate",)])
def test_an_onnx_file_has_no_device(snapvit, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    outcome = snapvit(*command, "vit.onnx", "--data", BUNDLED, "--device", "cuda")
    assert outcome.code == 2
    assert "vit.onnx needs no torch" in outcome.error_line


def test_features_are_taken_on_the_device_and_the_module_comes_back(monkeypatch):
    """Without a GPU: the place of every tensor is told by who moves it there."""
    model, moved = make_model(), []

    class Batches:
        def batches(self, size):
            yield torch.zeros(2, 3, *model.anatomy.image).numpy()

    plain = type(model.module).to
    monkeypatch.setattr(type(model.module), "to", lambda module, where: (moved.append(where), plain(module, "cpu"))[1])
    monkeypatch.setattr(extractor.torch, "from_numpy", lambda array: _Told(torch.tensor(array), moved))
    TorchExtractor(model, "cuda:1").features(Batches())
    assert moved == ["cuda:1", "batch to cuda:1", "cpu"]


class _Told:
    def __init__(self, tensor, moved):
        self.tensor, self.moved = tensor, moved

    def to(self, where):
        self.moved.append(f"batch to {where}")
        return self.tensor
