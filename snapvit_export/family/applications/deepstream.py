"""`deepstream/`: settings for Gst-nvinfer, and a graph that takes the pixels as it gives them. Light.

Gst-nvinfer computes net-scale-factor (pixel - offset), one factor for all channels, and takes outputs for
probabilities; so the graph has mean and deviation in its weights (`graph/scaled_pixels`) and ends in a softmax. No
`onnx-file` is named: Gst-nvinfer would build an engine of another precision where the given one does not load.
"""

from __future__ import annotations

from pathlib import Path

from ...graph.read import read_graph
from ...graph.scaled_pixels import PROBABILITIES, SCALE, give_probabilities, take_scaled_pixels
from ...storage.atomic import write_atomically, writing
from ..layout import LABELS
from .interface import Interface
from .places import DEEPSTREAM_CONFIG, DEEPSTREAM_MODEL

FOLDER = "deepstream"
CONFIG = f"{FOLDER}/{DEEPSTREAM_CONFIG}"
CLASSIFIER, OTHER = 1, 100  # values of network-type
# Values of scaling-filter by interpolation: the nearest kind on the GPU. None is known to average as Pillow does.
FILTERS = {"nearest": 0, "bilinear": 1, "hamming": 1, "bicubic": 2, "box": 3, "lanczos": 4}


def files(about: Interface) -> dict[str, str]:
    """Return the settings and labels by their paths in the family's folder."""
    found = {CONFIG: config(about)}
    if about.classes:  # without a name of its class, no answer would be attached to a frame
        names = about.labels or tuple(f"class {number}" for number in range(about.classes))
        found[f"{FOLDER}/{LABELS}"] = ";".join(name.replace(";", ",") for name in names) + "\n"
    return found


def write_graph(folder: Path, about: Interface, model: Path, largest: int) -> None:
    """Write the graph for DeepStream; with its weights beside it if they are more than `largest` bytes."""
    import onnx

    graph = read_graph(model)
    onnx.load_external_data_for_model(graph, str(model.parent))
    take_scaled_pixels(graph, about.steps)
    if about.classes:
        give_probabilities(graph)
    for entry in graph.metadata_props:
        if entry.key == "snapvit.input":
            entry.value = "float32 NCHW, RGB pixels / 256"
    path = folder / FOLDER / f"{DEEPSTREAM_MODEL}.onnx"
    if sum(len(tensor.raw_data) for tensor in graph.graph.initializer) <= largest:
        write_atomically(path, graph.SerializeToString())
        return
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        onnx.save_model(graph, str(path), save_as_external_data=True, location=f"{DEEPSTREAM_MODEL}.bin")


def config(about: Interface) -> str:
    """Return the text of `config_infer_primary.txt`."""
    channels, height, width = about.steps.input_size
    if about.classes:
        answers = f"""\
network-type={CLASSIFIER}
output-blob-names={PROBABILITIES}
labelfile-path={LABELS}
classifier-threshold=0.0"""
    else:
        answers = f"""\
# An embedding: your program reads it from the tensors that are attached to each frame.
network-type={OTHER}
output-blob-names={about.result}
output-tensor-meta=1"""
    return f"""\
# {about.title}
# Gst-nvinfer; paths are relative to this file. Build the engine first: see README.txt beside the model.
# Pixels are scaled by 1/256 exactly; mean and deviation are in the weights of {DEEPSTREAM_MODEL}.onnx.
[property]
gpu-id=0
gie-unique-id=1
process-mode=1
model-engine-file={DEEPSTREAM_MODEL}.engine
batch-size={about.batch}
infer-dims={channels};{height};{width}
network-input-order=0
model-color-format=0
net-scale-factor={SCALE!r}
# The whole frame is squeezed into the input.
# {_seen(about)}
maintain-aspect-ratio=0
scaling-filter={FILTERS[about.steps.interpolation]}
{answers}
"""


def _seen(about: Interface) -> str:
    """Say how that differs from what the model was checked with."""
    if about.steps.crop_mode == "squash" and about.steps.crop_pct == 1:
        return f"So was every image that the model was checked with, by Pillow's {about.steps.interpolation} filter."
    return (
        "The model was checked with the middle of the image in its own proportions: crop the frames to that before\n"
        "# the muxer (nvvideoconvert src-crop), or expect other answers."
    )


def build_command(about: Interface) -> str:
    """Return how `trtexec` builds the engine: for one image to as many as there are streams."""
    graph = f"{FOLDER}/{DEEPSTREAM_MODEL}"
    return about.build_command(f"{graph}.onnx", f"{graph}.engine", about.steps.input_size, least=1)
