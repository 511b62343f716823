"""What the examples in docstrings speak of: small real objects and files, under the names that they use."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from helpers.images import make_image_folder, noise
from helpers.models import make_model, make_model_folder
from helpers.onnx_files import traced
from snapvit_export import profiles
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.elastic.folder import Elastic
from snapvit_export.evaluate.evaluator import EvalOptions
from snapvit_export.evaluate.exported_model import read_info
from snapvit_export.evaluate.features import Features
from snapvit_export.graph.nodes import Nodes
from snapvit_export.graph.writer import Blueprint, GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.scores import Scores
from snapvit_export.profiling.drift import Latency
from snapvit_export.profiling.timer import File, Timer
from snapvit_export.progress import Silent
from snapvit_export.prune.correct.elastic import make_factors
from snapvit_export.prune.pack import blueprint, pack
from snapvit_export.prune.rank.search.candidate_runner import CandidateRunner
from snapvit_export.prune.released_features import write_released_features
from snapvit_export.prune.stats.observe import observe
from snapvit_export.prune.stats.output_divergence import OutputDivergence
from snapvit_export.runtimes.session import device_for
from snapvit_export.storage.atomic import sha256
from snapvit_export.workflows.evaluate import EvaluateRequest, evaluate_model
from snapvit_export.workflows.export import Request, export

SHAPE = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=4, num_classes=5)


def make_checkpoint(path: Path) -> None:
    """Weights of a DeiT-Tiny that nobody trained."""
    torch.manual_seed(0)
    save_file(timm.create_model("deit_tiny_patch16_224").state_dict(), path)


def make_files(folder: Path) -> None:
    """All files that examples name, in `folder`."""
    make_model_folder(folder / "my-vit", SHAPE)
    make_image_folder(folder / "path/to/images", 20)
    for split, count in (("train", 20), ("test", 10)):
        for i in range(count):
            path = folder / "path/to/pets" / split / f"class{i % 5}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.random.default_rng(i).integers(0, 255, (32, 32, 3), np.uint8)).save(path)
    request = Request(str(folder / "my-vit"), data=str(folder / "path/to/images"), out=folder / "snapvit-family")
    export(replace(request, sparsity=[0.3], settings=make_settings("default", images=16)))
    (folder / "ranking.safetensors").write_bytes((folder / "snapvit-family/ranking.safetensors").read_bytes())
    names = Names(folder)
    pack(names.model, names.ranking, folder / "elastic", names.factors)
    keeps = EvalOptions(by=["knn"], features=folder / "pets.safetensors")
    evaluate_model(EvaluateRequest(str(folder / "my-vit"), data=str(folder / "path/to/pets"), options=keeps))
    write_released_features(Features.load(folder / "pets.safetensors"), folder / "pets.pt")
    scores = {"num_blocks": 4, "hidden_dim": 192, "num_heads": 4}
    torch.save(scores | {"mlp_scores": torch.rand(4, 192), "head_scores": torch.rand(4, 4)}, folder / "dino_vitb16.pt")
    make_checkpoint(folder / "deit_tiny.safetensors")
    traced(names.model.module, folder / "vit.onnx")
    (folder / "family").mkdir()
    (folder / "int8").mkdir()


class Names:
    """Each attribute is what examples mean by its name. What they change, or is of the folder they run in, is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    progress = Silent()
    target = profiles.load("cpu").target
    path = Path("snapvit-family/s30.onnx")
    labels = (0, 0, 0, 1, 1, 1)
    measured = (Latency(19.0, 18.9, 19.1), Latency(13.0, 12.9, 13.1), Latency(8.5, 8.4, 8.6))
    x = "features"
    small_logits, dense_logits = ((2.0, 1.0), (0.0, 3.0)), ((4.0, 1.0), (2.0, 1.0))

    @cached_property
    def model(self):
        return make_model(SHAPE)

    @cached_property
    def blueprint(self):
        return blueprint(self.model, Ranking.flat(self.anatomy))

    @cached_property
    def anatomy(self):
        return self.model.anatomy

    @cached_property
    def images(self):
        return noise(self.model, 24)

    @cached_property
    def batch(self):
        return next(self.images.batches(4))

    @cached_property
    def inputs(self):
        return torch.from_numpy(self.batch)

    @cached_property
    def ranking(self):
        return Ranking.load(self._folder / "ranking.safetensors")

    @cached_property
    def scores(self):
        return Scores(self.ranking.head_scores, self.ranking.neuron_scores)

    @cached_property
    def planner(self):
        return Planner(self.ranking, self.anatomy, self.ranking.protection)

    @cached_property
    def plan(self):
        return self.planner.sparsity(0.3)

    @cached_property
    def least(self):
        return self.ranking.protection.least(self.anatomy)

    @cached_property
    def factors(self):
        return make_factors(self.model, self.ranking, observe(self.model, self.images))

    @cached_property
    def factor(self):
        return self.factors.fc2[0]

    @cached_property
    def runner(self):
        return CandidateRunner(self.model, self.images)

    @cached_property
    def embedding(self):
        return self.runner.embedding(*self.runner.weights(self.ranking, self.plan))

    @cached_property
    def divergence(self):
        return OutputDivergence("predictions", self.model, self.runner.dense)

    @staticmethod
    def loss(x):
        return float((x**2).sum())

    @cached_property
    def dense(self):
        return self._file("dense")

    @cached_property
    def s30(self):
        return self._file("s30")

    def _file(self, name: str) -> File:
        path = self._folder / "snapvit-family" / f"{name}.onnx"
        return File(path, sha256(path))

    @cached_property
    def timer(self):
        return Timer(self.target, device_for(self.target.runtime), self.batch[:1])

    @cached_property
    def timed(self):
        shares = [Plan.dense(self.anatomy), *map(self.planner.sparsity, (0.2, 0.4, 0.6))]
        return [(plan, self.timer.time({"s30": self.s30}, 0.05)["s30"]) for plan in shares]

    @property
    def info(self):
        return read_info(self.path)[0]

    @property
    def block(self):
        return copy.deepcopy(self.model.module.blocks[3])

    @property
    def nodes(self):
        return Nodes(17)

    @property
    def writer(self):
        return GraphWriter(Blueprint.of(Elastic.load("elastic")), Path("family"))

    @property
    def written(self):
        return self.writer.write("written", self.plan)
