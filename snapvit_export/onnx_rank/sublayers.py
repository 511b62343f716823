"""Measures each attention and each MLP in ONNX Runtime: its effect on the stream, and the output without it. Light.

The words and formulas are those of `prune.stats.sublayer_stats`. Without a sub-layer f the model adds the mean of f
instead: its proj or fc2 has weights of zero and that mean as its bias, and is written with one head or neuron, so that
no Plan is refused and little is computed. `onward` is the same for an attention and all later ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..correction.moments import Statistics
from ..correction.token_weights import as_read, batch_size
from ..family.fidelity import Comparison
from ..graph.format import GraphFormat
from ..graph.read import read_graph
from ..graph.writer import Blueprint, GraphWriter
from ..model.anatomy import Anatomy
from ..model.plan import Part, Plan
from ..model.sublayer import IMAGES, SubLayer
from ..progress import Progress
from ..runtimes.in_threads import run_in_threads
from ..storage.temporary import scratch_folder
from .observe import mean_outputs, some_values, write_observable

BATCH = 8
LAYER: dict[Part, str] = {"attention": "proj", "mlp": "fc2"}
Floats = npt.NDArray[np.float64]


def measure_sublayers(
    blueprint: Blueprint, images: Images, statistics: Statistics, progress: Progress
) -> tuple[SubLayer, ...]:
    """Return the measurements of all sub-layers in the order of the computation."""
    anatomy, few = blueprint.anatomy, images.first(IMAGES)
    progress.phase("measuring sub-layers", 2 * len(anatomy.blocks))
    effects = _effects(blueprint, few)
    found = []
    with scratch_folder() as folder:
        damage = Damage(blueprint, few, mean_outputs(blueprint, statistics), folder)
        for i in range(len(anatomy.blocks)):
            for part in LAYER:
                name = f"blocks.{i}.{LAYER[part]}"
                lacks = name not in damage.means  # nothing more can be lost of it
                divergence, turned = (0.0, 0.0) if lacks else effects[name]
                lost = 0.0 if lacks else damage.without([name])
                found.append(SubLayer(block=i, part=part, divergence=divergence, turned=turned, damage=lost))
                progress.advance()
        if anatomy.reads_token:
            for i in range(len(anatomy.blocks)):
                later = [f"blocks.{j}.proj" for j in range(i, len(anatomy.blocks)) if anatomy.blocks[j].heads]
                found[2 * i] = msgspec.structs.replace(found[2 * i], onward=damage.without(later))
    return tuple(found)


@dataclass
class Damage:
    """The output divergence of a model in which some layers only add what they give on average."""

    blueprint: Blueprint
    images: Images
    means: Mapping[str, Floats]  # by the name of the layer, (E,)
    folder: Path

    def __post_init__(self) -> None:
        self.writer = GraphWriter(self.blueprint, self.folder)
        self.dense = self._outputs([])

    def without(self, layers: Iterable[str]) -> float:
        """Return the mean divergence over the images."""
        return diverged(self.blueprint.anatomy, self._outputs(layers), self.dense).mean().item()

    def _outputs(self, layers: Iterable[str]) -> npt.NDArray[np.float32]:
        plan, corrected = _silenced(self.blueprint.anatomy, {name: self.means[name] for name in layers})
        return outputs_of(self.writer, plan, self.images, corrected)


def _silenced(anatomy: Anatomy, means: Mapping[str, Floats]) -> tuple[Plan, dict[str, npt.NDArray[np.float32]]]:
    """Return the Plan and the layers of a model in which these layers give the same for every token."""
    heads, neurons, corrected = list(anatomy.heads), list(anatomy.neurons), {}
    for name, mean in means.items():
        _, number, layer = name.split(".")
        block = anatomy.blocks[int(number)]
        (heads if layer == "proj" else neurons)[int(number)] = 1
        rows = block.head_dim if layer == "proj" else 1
        corrected[f"{name}.weight"] = np.zeros((rows, anatomy.embed_dim), np.float32)
        corrected[f"{name}.bias"] = mean.astype(np.float32)
    return Plan(heads=tuple(heads), neurons=tuple(neurons)), corrected


def outputs_of(
    writer: GraphWriter,
    plan: Plan,
    images: Images,
    corrected: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> npt.NDArray[np.float32]:
    """Return the outputs of a Plan for all images, from a graph that is removed afterwards."""
    written = writer.write("measured", plan, corrected, format=GraphFormat("ort"))
    try:
        return run_in_threads(written.graph, images.batches(BATCH))
    finally:
        written.remove()


def diverged(anatomy: Anatomy, outputs: npt.NDArray[np.float32], dense: npt.NDArray[np.float32]) -> Floats:
    """Return the divergence of outputs from the dense model's, image by image, (N,)."""
    return Comparison.of(outputs, dense, classifies=anatomy.classes > 1).divergence


def _effects(blueprint: Blueprint, images: Images) -> dict[str, tuple[float, float]]:
    """Return for every layer the share of the stream that its sub-layer adds, and how far it turns the stream."""
    anatomy, weights = blueprint.anatomy, as_read(blueprint.anatomy)
    with scratch_folder() as folder:
        path = write_observable(blueprint, folder).graph
        around = _around(path)
        names = [name for pair in around.values() for name in pair]
        batches = some_values(path, list(dict.fromkeys(names)), images, batch_size(anatomy, len(images)))
    found = {}
    for layer, (before, after) in around.items():
        own = weights[int(layer.split(".")[1])]
        w = np.ones(anatomy.tokens) if own is None else own.astype(np.float64)
        pairs = [(_tokens(batch[before], anatomy), _tokens(batch[after], anatomy)) for batch in batches]
        found[layer] = _effect(pairs, w / w.sum())
    return found


def _around(path: Path) -> dict[str, tuple[str, str]]:
    """Return the values of the stream before and after every sub-layer of a graph, by the name of its layer."""
    nodes = read_graph(path).graph.node
    read = {name for node in nodes for name in node.input}
    found = {}
    for node in nodes:
        block, _, kind = node.output[0].rpartition(".")
        if node.op_type == "Add" and kind in ("attended", "stream"):
            is_mlp = kind == "stream" and f"{block}.fc2.weight" in read
            found[f"{block}.{'fc2' if is_mlp else 'proj'}"] = node.input[0], node.output[0]
    return found


def _tokens(x: npt.NDArray[np.float32], anatomy: Anatomy) -> npt.NDArray[np.float32]:
    return x.reshape(-1, anatomy.tokens, anatomy.embed_dim)


def _effect(pairs: Iterable[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]], w: Floats) -> tuple[float, float]:
    """Return E |f| / E |x + f| and E [1 - cos(x, x + f)] over images and tokens; `w` (T,) sums to one."""
    own = whole = turned = 0.0
    images = 0
    for x, y in pairs:
        before, after = _length(x), _length(y)  # (B, T)
        own += float((_length(y - x) @ w).sum())
        whole += float((after @ w).sum())
        cosine = (x.astype(np.float64) * y).sum(-1) / np.maximum(before * after, 1e-30)
        turned += float(((1 - cosine) @ w).sum())
        images += len(x)
    return (own / whole if whole else 0.0), turned / images


def _length(x: npt.NDArray[np.float32]) -> Floats:
    return np.asarray(np.linalg.norm(x.astype(np.float64), axis=-1))
