"""The examples in docstrings and in the README: each of them runs, and what it shows is true."""

import ast
import doctest
import importlib
import os
import pkgutil
import re
import shutil
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

import snapvit_export
from helpers.examples import Names, make_checkpoint, make_files
from helpers.families import make_family
from helpers.images import make_image_folder, noise
from helpers.models import make_model, make_model_folder
from helpers.shared import ROOT
from helpers.transformers_models import CASES, make, save
from snapvit_export.family.folder import read_family, write_manifest
from snapvit_export.family.shipped import write_shipped
from snapvit_export.runtimes import cuda

BESIDE = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "snapvit_export")
NEEDS = {"tensorrt_rtx": "tensorrt_rtx", "OpenVinoSession": "openvino", "quantise": "nncf"}  # package by word


def modules() -> list[ModuleType]:
    """All of the library, wherever its files lie."""
    packages = [snapvit_export, *(importlib.import_module(f"snapvit_export.{name}") for name in BESIDE)]
    names = {package.__name__ for package in packages}
    for package in packages:
        names |= {found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")}
    return [importlib.import_module(name) for name in sorted(names) if not name.endswith(".__main__")]


LIBRARY = modules()
FOUND = [test for module in LIBRARY for test in doctest.DocTestFinder().find(module) if test.examples]


class Shown(doctest.OutputChecker):
    """What an example does not show may be anything."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def names(files) -> Names:
    return Names(files)


def test_every_example_is_found():
    written = sum(
        len(re.findall(r"^\s*>>> ", path.read_text(), re.MULTILINE))
        for folder in ("snapvit_export", *BESIDE)
        for path in (ROOT / folder).rglob("*.py")
    )
    assert sum(len(test.examples) for test in FOUND) == written > 80


def meant(test: doctest.DocTest, names: Names) -> dict[str, object]:
    """All that the example may use: every class and function of the library, its own module's first, and `Names`."""
    library = {name: value for module in LIBRARY for name, value in vars(module).items() if not name.startswith("_")}
    library = {name: value for name, value in library.items() if not isinstance(value, ModuleType)}
    parsed = [ast.parse(example.source) for example in test.examples]
    used = {node.id for part in parsed for node in ast.walk(part) if isinstance(node, ast.Name)}
    return {**library, **test.globs, **{name: getattr(names, name) for name in used & set(dir(Names))}}


@pytest.mark.parametrize("test", FOUND, ids=lambda test: test.name.removeprefix("snapvit_export."))
def test_an_example_runs_and_shows_the_truth(test, names, files, tmp_path, monkeypatch):
    for word, package in NEEDS.items():
        if word in test.docstring and not os.environ.get("SNAPVIT_REQUIRE_RUNTIMES"):
            pytest.importorskip(package)
    if "TensorRTSession(" in test.docstring:
        try:
            cuda.require_gpu()
        except cuda.NoGPU as error:
            pytest.skip(f"needs an NVIDIA GPU: {error}")
    # Links are enough: whatever writes a file here writes another one and renames it.
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "here", copy_function=os.link))
    test.globs = meant(test, names)
    said: list[str] = []
    result = doctest.DocTestRunner(Shown(), optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.failed == 0, "".join(said)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def make_chosen_family(folder: Path) -> None:
    """A family with a choice, of a model of 224 pixels whose classes have names, and an image beside it."""
    shape = dict(img_size=224, patch_size=32, embed_dim=48, depth=3, num_heads=4, num_classes=5)
    family = make_family(folder / "made", kwargs=shape, budget="99%", levers=("width",)).rename("snapvit-family")
    named = msgspec.structs.replace(read_family(family), labels=("ant", "bee", "cat", "dog", "eel"))
    write_manifest(family, write_shipped(family, named))
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)).save("cat.jpg")


def test_the_readme_runs(tmp_path, monkeypatch, capsys):
    [block] = python_blocks("README.md")
    monkeypatch.chdir(tmp_path)
    make_chosen_family(tmp_path)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() in "01234"


@pytest.mark.slow  # a ranking and a refit of a real DeiT-Tiny at 224 pixels
def test_the_page_about_python_runs(tmp_path, monkeypatch):
    predicting, cutting, as_released, exporting = python_blocks("docs/python.md")
    monkeypatch.chdir(tmp_path)
    make_chosen_family(tmp_path)
    make_checkpoint(Path("deit_tiny.safetensors"))
    make_model_folder(Path("my-vit"))
    make_image_folder(Path("path/to/images"), 12)  # 256 are asked for: it takes what there is
    made: dict[str, object] = {}
    for block in (predicting, cutting, as_released, exporting):
        exec(compile(block, "python.md", "exec"), made)
    assert made["elastic"].corrected
    assert made["elastic"].plan.sparsity(made["model"].anatomy) >= 0.5
    assert Path("ranking.safetensors").is_file()
    anatomy, plan = made["model"].anatomy, made["plan"]
    assert plan.flops_ratio(anatomy) <= 0.72
    assert sum(p.numel() for p in made["small"].parameters()) < anatomy.params()
    assert {variant.name for variant in made["manifest"].variants} == {"dense", "s30"}


def test_the_page_about_elastic_inference_runs(tmp_path, monkeypatch, capsys):
    [block] = python_blocks("docs/elastic_inference.md")
    monkeypatch.chdir(tmp_path)
    make_chosen_family(tmp_path)
    exec(compile(block, "elastic_inference.md", "exec"), {})
    assert "(1, 5)" in capsys.readouterr().out


def test_the_page_about_models_runs(tmp_path, monkeypatch, capsys):
    [block] = python_blocks("docs/models.md")
    monkeypatch.chdir(tmp_path)
    save(make(CASES["vit"]), Path("path/to/transformers-vit"))
    names = {"MyDetector": Detector, "images": noise(make_model(), 24)}
    exec(compile(block, "models.md", "exec"), names)
    assert sum(p.numel() for p in names["detector"].parameters()) < sum(p.numel() for p in Detector().parameters())
    assert names["model"].anatomy.classes == 7


class Detector(torch.nn.Module):
    """A larger model around a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.neck = make_model().module, torch.nn.Linear(4, 4)
