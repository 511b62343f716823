"""What tests share: tiny models of every family, the command line in this process, and the folder of references."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run two at a time, most of them on tiny models

import timm
import torch
from PIL import Image

from snapvit_export.anatomy import Anatomy
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.prune.load import Model, ModelDescription, save_model
from snapvit_export.prune.understand import read_anatomy
from snapvit_export.ranking import Ranking

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
TINY = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=5)


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a job that a shell put in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that tests interrupt would never end


@pytest.fixture
def shared() -> Path:
    """The folder of reference arrays and real data beside the project, which a newcomer's clone does not have."""
    if not SHARED.is_dir():
        if os.environ.get("SNAPVIT_REQUIRE_SHARED"):
            pytest.fail(f"{SHARED} is required here and missing")
        pytest.skip("needs the reference folder ../shared, which is not part of the repository")
    return SHARED


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> torch.nn.Module:
    """Weights large enough that every part of the network matters; timm's own init leaves some at zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(0, scale, generator=generator)
    return module.eval()


def random_ranking(anatomy: Anatomy, seed: int = 0) -> Ranking:
    rng = np.random.default_rng(seed)
    heads = tuple(rng.random(n, dtype=np.float32) for n in anatomy.heads)
    return Ranking(heads, tuple(rng.random(n, dtype=np.float32) for n in anatomy.neurons), anatomy=anatomy)


def description(**changes: object) -> ModelDescription:
    settings = dict(
        name="tiny",
        architecture="vit_tiny_patch16_224",
        kwargs=TINY,
        preprocessing=Preprocessing(input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0),
    )
    return ModelDescription(**{**settings, **changes})  # type: ignore[arg-type]


def make_model(kwargs: dict[str, int] = TINY) -> Model:
    module = randomise(timm.create_model("vit_tiny_patch16_224", **kwargs))
    preprocessing = Preprocessing(
        input_size=(3, kwargs["img_size"], kwargs["img_size"]), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0
    )
    described = description(kwargs=kwargs, preprocessing=preprocessing)
    return Model(module, read_anatomy(module, "tiny"), described)


def make_model_folder(folder: Path, kwargs: dict[str, int] = TINY) -> Path:
    model = make_model(kwargs)
    save_model(model.module, model.description, folder)
    return folder


def make_image_folder(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(60):
        path = folder / f"class{i % 5}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)).save(path)
    return folder


@pytest.fixture
def tiny_model() -> Model:
    """A plain ViT of three blocks with random weights."""
    return make_model()


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """The same, saved as a model folder."""
    return make_model_folder(tmp_path / "tiny-model")


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Sixty noisy pictures in five classes."""
    return make_image_folder(tmp_path / "pictures")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The one line that a refusal prints."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


@pytest.fixture
def snapvit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line in this process."""
    from snapvit_export.cli.app import main

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["snapvit", *map(str, arguments)])
        monkeypatch.setattr("signal.signal", lambda *_: None)
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
