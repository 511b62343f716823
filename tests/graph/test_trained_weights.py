"""Graphs of trained variants: whatever was trained, the file computes what the module does, and shares the rest."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.images import some_images
from helpers.models import model_of
from helpers.rankings import random_ranking
from snapvit_export.checks.gates import require_same_graph
from snapvit_export.graph.format import Flavour, GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.prune.blocks.merging import outputs_and_matches
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import blueprint, own_weights
from snapvit_export.prune.recover.parameters import trained
from snapvit_export.runtimes.ort import OrtSession

MODELS = [
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_base_patch16_siglip_224",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_dinov3",
    "vit_giant_patch14_dinov2",
]
NARROW = Plan(heads=(2, 4, 1), neurons=(50, 192, 20))
REMOVED = Plan(heads=(4, 0, 2), neurons=(0, 40, 192))


def nudged(module: torch.nn.Module, names: set[str]) -> torch.nn.Module:
    """A copy with other values in these parameters, as training leaves them."""
    other, generator = copy.deepcopy(module), torch.Generator().manual_seed(5)
    for name, tensor in other.named_parameters():
        if name in names:
            tensor.data += 0.05 * torch.randn(tensor.shape, generator=generator)
    return other


def written(name: str, plan: Plan, kind: str, folder: Path, takes_bytes: bool = False, flavour: Flavour = "ort"):
    """The file of a trained variant, its writer, and the module that it must equal."""
    folder.mkdir(exist_ok=True)
    model = model_of(name)
    ranking = random_ranking(model.anatomy)
    neurons = model.anatomy.neurons
    plan = Plan(
        heads=plan.heads,
        neurons=tuple(min(n, have) for n, have in zip(plan.neurons, neurons)),
        merged=plan.merged,
        grid=plan.grid,
    )
    start = shrink(model.module, ranking, plan)
    module = nudged(start, set(trained(start, kind, model.module)))
    made = blueprint(model, ranking)
    own = own_weights(module, start, ranking, plan, made.dense)
    writer = GraphWriter(made, folder, takes_bytes, flavour=flavour)
    return writer.write("trained", plan, own, format=GraphFormat(flavour)), module, model, own


@pytest.mark.parametrize("flavour", ["ort", "tensorrt"])
@pytest.mark.parametrize("kind", ["norms", "linear", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_trained_weights_equals_its_module(name, kind, flavour, tmp_path):
    file, module, _, _ = written(name, NARROW, kind, tmp_path, flavour=flavour)
    inputs = next(some_images().batches(6))
    require_same_graph(name, *outputs_and_matches(module, torch.from_numpy(inputs)), file.graph, inputs)


@pytest.mark.parametrize("kind", ["norms", "all"])
@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit3_small_patch16_224", "eva02_tiny_patch14_224"])
def test_removed_sub_layers_merged_tokens_and_smaller_images_too(name, kind, tmp_path):
    for n, plan in enumerate([REMOVED, NARROW.with_tokens((2, 0, 1)), NARROW.with_tokens(grid=(3, 3))]):
        file, module, model, _ = written(name, plan, kind, tmp_path / str(n))
        inputs = np.random.default_rng(0).standard_normal((4, 3, *model.anatomy.image_of(plan))).astype(np.float32)
        require_same_graph(name, *outputs_and_matches(module, torch.from_numpy(inputs)), file.graph, inputs)


@pytest.mark.parametrize("kind", ["norms", "all"])
def test_bytes_go_in_as_well(kind, tmp_path):
    file, module, model, _ = written("deit_tiny_patch16_224", NARROW, kind, tmp_path, takes_bytes=True)
    pixels = some_images().pixels
    with OrtSession(file.graph, 1) as session, torch.no_grad():
        found = session.run(pixels)
        wanted = module(torch.from_numpy(model.preprocessing.normalise(pixels))).numpy()
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_trained_norms_are_in_the_graph_and_matrices_stay_shared(tmp_path):
    file, _, _, own = written("deit_tiny_patch16_224", NARROW, "norms", tmp_path)
    assert [path.name for path in file.weights] == ["weights.bin"]
    assert all(array.ndim == 1 for name, array in own.items() if not name.endswith(("proj.weight", "fc2.weight")))
    assert {"blocks.0.norm1.weight", "blocks.0.fc1.bias", "final_norm.bias", "head.bias"} <= set(own)


def test_what_was_not_trained_is_not_its_own(tmp_path):
    model = model_of("deit_tiny_patch16_224")
    ranking = random_ranking(model.anatomy)
    start = shrink(model.module, ranking, NARROW)
    assert not own_weights(start, start, ranking, NARROW, blueprint(model, ranking).dense)
