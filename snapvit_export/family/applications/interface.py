"""The interface of a TensorRT engine: its tensors, its batch, and the images that it wants. Light."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...calibration.preprocessing import Preprocessing
from ...errors import FileFormatError
from ...graph.read import read_graph
from ...target import Precision
from ..class_names import class_name
from ..manifest import Input, Manifest, Variant
from ..templates import line, plain


@dataclass(frozen=True)
class Interface:
    """What an engine of the chosen variant takes and gives, as its graph says."""

    variant: str  # whose name its engine has
    title: str  # of model and variant, for people
    source: str  # the name of the input
    result: str  # the name of the output
    given: Input
    steps: Preprocessing  # from an image to the input
    batch: int  # images that the engine is built for
    outputs: int  # numbers for each image
    labels: tuple[str, ...]  # names of the classes, one line each; empty: not known
    classes: int  # 0: the output is an embedding
    precision: Precision

    @staticmethod
    def of(manifest: Manifest, variant: Variant, model: Path) -> Interface:
        """Return the interface of a variant whose graph is `model`."""
        graph = read_graph(model).graph
        source, result = str(graph.input[0].name), str(graph.output[0].name)
        if not all(re.fullmatch(r"[A-Za-z0-9_.]+", name) for name in (source, result)):  # they become code
            raise FileFormatError(f"{model}: its input or output has a name that is not ours. Export the family again")
        return Interface(
            variant=variant.name,
            title=f"{plain(manifest.model)}, variant {plain(variant.name)}",
            source=source,
            result=result,
            given=manifest.input,
            steps=manifest.preprocessing_of(variant),
            batch=manifest.input.batch or manifest.target.batch,
            outputs=manifest.anatomy.classes or manifest.anatomy.embed_dim,
            labels=tuple(line(class_name(name)) for name in manifest.labels),
            classes=manifest.anatomy.classes,
            precision=variant.precision,
        )

    @property
    def has_any_batch(self) -> bool:
        """True if the graph takes any number of images, so that the engine is built for some of them."""
        return self.given.batch is None

    @property
    def image(self) -> tuple[int, int, int]:
        """The shape of one image in the order of the input."""
        channels, height, width = self.steps.input_size
        return (height, width, channels) if self.given.layout == "NHWC" else (channels, height, width)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the input."""
        return (self.batch, *self.image)

    @property
    def engine(self) -> str:
        """The file name of the engine, as the Jetson agent and `snapvit profile` write it."""
        return f"{self.variant}.engine"

    @property
    def plain_name(self) -> str:
        """The name of the variant in letters that stand in an address as they are."""
        return re.sub(r"[^A-Za-z0-9_.-]", "_", self.variant)

    def build_command(self, onnx: str, engine: str, image: tuple[int, ...], least: int) -> str:
        """Return how `trtexec` builds an engine of `least` to `batch` images of a shape."""
        shapes = ""
        if self.has_any_batch:
            few, many = (f"{self.source}:{'x'.join(map(str, (batch, *image)))}" for batch in (least, self.batch))
            shapes = f" --minShapes={few} --optShapes={many} --maxShapes={many}"
        return f"trtexec --onnx={onnx} --saveEngine={engine} --stronglyTyped --noTF32{shapes}"

    @property
    def own_build(self) -> str:
        """The command that builds the engine of the model itself."""
        return self.build_command("model.onnx", self.engine, self.image, self.batch)
