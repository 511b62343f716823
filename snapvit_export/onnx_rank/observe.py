"""Observes a model in ONNX Runtime: mean and covariance of every proj and fc2 input, in one pass over images. Light.

The graph that is written for a token-pooled model computes the last block for the tokens that are read alone. Here all
tokens count, so a graph of the same blocks with mean pooling is run, with the inputs of proj and fc2 as more outputs.
Such a graph adds the bias of v after attention, so it is added to the means of proj's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..checks.activations import all_values
from ..correction.moments import Moments, Statistics, check_memory
from ..correction.token_weights import as_read, batch_size, counted, few_images, subsample_step
from ..errors import SnapvitError
from ..graph.format import GraphFormat
from ..graph.weights import moves_value_bias
from ..graph.writer import Blueprint, GraphWriter
from ..model.plan import Plan
from ..progress import Progress
from ..runtimes.device import usable_cores
from ..storage.temporary import scratch_folder
from .moments import RunningMoments

Floats = npt.NDArray[np.float32]
LAYERS = ("proj", "fc2")
EMPTY = Moments(0.0, np.zeros(0), np.zeros((0, 0)))  # of a layer that the model lacks


def observe(
    blueprint: Blueprint, images: Images, progress: Progress, provenance: Mapping[str, Any] | None = None
) -> Statistics:
    """Take the statistics of a model over all images; tokens count as the output reads them.

    >>> statistics = observe(blueprint, images, Silent())
    """
    if not len(images):
        raise SnapvitError("statistics need images. Give --data")
    anatomy, weights = blueprint.anatomy, as_read(blueprint.anatomy)
    check_memory(anatomy, blueprint.model)
    if (note := few_images(anatomy, len(images), weights)) is not None:
        progress.note(note)
    progress.phase("observing the dense model", len(images))
    sums = _sums(blueprint)
    with scratch_folder() as folder:
        written = write_observable(blueprint, folder)
        names = {layer: written.layer_inputs[layer] for layer in sums}
        size = batch_size(anatomy, len(images))
        values = all_values(written.graph, set(names.values()), images.batches(size), threads=usable_cores())
        for number, found in enumerate(values):
            for layer, moments in sums.items():
                x = found[names[layer]]
                own = weights[int(layer.split(".")[1])]
                moments.add(x.reshape(-1, anatomy.tokens, x.shape[-1]), counted(anatomy, len(images), number, own))
            progress.advance(min(size, len(images) - number * size))
    made = {layer: _with_value_bias(blueprint, layer, moments.result()) for layer, moments in sums.items()}
    proj, fc2 = (tuple(made.get(f"blocks.{i}.{layer}", EMPTY) for i in range(len(anatomy.blocks))) for layer in LAYERS)
    described = {"data": images.fingerprint, "passed_over": subsample_step(anatomy, len(images)), **(provenance or {})}
    return Statistics(proj, fc2, len(images), described)


def write_observable(blueprint: Blueprint, folder: Path) -> Any:
    """Write the graph of a model that computes all of its tokens in every block; its output is of no use."""
    own = blueprint.anatomy
    anatomy = msgspec.structs.replace(
        own,
        pooling="avg",
        attention_pool=None,
        classes=0,
        fc_norm=False,
        distillation_token=False,
        registers=own.registers + own.distillation_token,
    )
    writer = GraphWriter(replace(blueprint, anatomy=anatomy, labels=()), folder)
    return writer.write("observed", Plan.dense(anatomy), format=GraphFormat())


def _sums(blueprint: Blueprint) -> dict[str, RunningMoments]:
    """Return empty sums of every proj and fc2 that the model has."""
    found = {}
    for i, block in enumerate(blueprint.anatomy.blocks):
        for layer, width in zip(LAYERS, (block.heads * block.head_dim, block.hidden)):
            if width:
                name = f"blocks.{i}.{layer}"
                found[name] = RunningMoments(name, width)
    return found


def _with_value_bias(blueprint: Blueprint, layer: str, moments: Moments) -> Moments:
    """Return the moments of the inputs as the model itself has them."""
    block = int(layer.split(".")[1])
    bias = blueprint.dense.get(f"blocks.{block}.v.bias")
    if not layer.endswith("proj") or bias is None or not moves_value_bias(blueprint.anatomy, block):
        return moments
    return replace(moments, mean=moments.mean + bias)


def mean_outputs(blueprint: Blueprint, statistics: Statistics) -> dict[str, npt.NDArray[np.float64]]:
    """Return what every proj and fc2 gives on average, before LayerScale: (E,) by the name of the layer."""
    found = {}
    for layer, moments in (("proj", statistics.proj), ("fc2", statistics.fc2)):
        for i, own in enumerate(moments):
            name = f"blocks.{i}.{layer}"
            if own.width:
                weight = blueprint.dense[f"{name}.weight"].astype(np.float64)  # (in, E)
                found[name] = own.mean @ weight + blueprint.dense.get(f"{name}.bias", np.float32(0))
    return found


def some_values(path: Path, names: Sequence[str], images: Images, size: int) -> list[dict[str, Floats]]:
    """Return values inside a graph for all batches of a few images."""
    return list(all_values(path, names, images.batches(size), threads=usable_cores()))
