"""int8 for OpenVINO by NNCF: it finds the ranges on calibration images and writes int8 as OpenVINO recognises it.

OpenVINO 2026.4 computes most int8 layers of our own graphs in float32, so this starts from the float32 graph. As in the
other int8 graphs only the linear layers of the blocks are in int8. What was tried on DeiT-Tiny with 32 images, as least
and mean cosine to float32 of 64 others:

    NNCF's own choice for transformers: SmoothQuant, means of extremes, all products   0.778  0.933
    without SmoothQuant                                                                0.978  0.992
    and ranges with the least squared error, by histograms                             0.989  0.996
    and the embedding and the classifier in float32                                    0.990  0.997
    and attention in float32                                                           0.993  0.997   this

Symmetric ranges (0.986, 0.994) are worse, more images (128: 0.989, 0.997) no better, fewer worse (8: 0.953), and a
correction of biases changes nothing. Other 32 images move the least by 0.01 and the mean by 0.0003; with all of them
the last line is nearer than the one above, by 0.0002 in the mean, and a tenth slower on a ViT-Ti.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, first_line, needs
from ..storage.atomic import sha256, write_atomically
from ..storage.json import to_json
from ..storage.temporary import scratch_folder
from .openvino import read_model, settings

BLOCKS = "blocks."  # begins the names of layers that may be in int8
OURS = (BLOCKS, "embed.", "output.", "images", "logits", "features")  # begin all names of the ONNX graph
METADATA = "framework"  # where OpenVINO keeps the metadata of the ONNX graph


def quantise(
    onnx_path: Path, out_stem: Path, images: Sequence[npt.NDArray[Any]], threads: int = 1
) -> tuple[Path, Path]:
    """Write out_stem.xml and .bin, the int8 form of a float32 portable graph; equal inputs give equal files.

    Images are single ones, as the graph takes them: (1, 3, H, W), or (1, H, W, 3) bytes. Both files are elsewhere than
    the graph, or have another name: its own weights may be in a .bin too.

    >>> graph, weights = quantise(written.graph, Path("int8/s30"), list(images.batches(1)))
    """
    if not images:
        raise SnapvitError(f"{onnx_path}: int8 for OpenVINO needs calibration images. Give some with --data")
    if out_stem == onnx_path.with_suffix(""):
        raise ValueError(f"{out_stem}.bin may be the weights of {onnx_path}: write the int8 form elsewhere")
    model = read_model(onnx_path)
    _fold(model)
    size = model.inputs[0].partial_shape[0]
    batch = 1 if size.is_dynamic else size.get_length()
    fed = [np.resize(image, (batch, *image.shape[1:])) for image in images]
    made = _quantised(model, _kept_in_floats(onnx_path, model), fed, threads, onnx_path)
    _name_in_order(made)
    return _write(made, out_stem)


def _fold(model: Any) -> None:
    """Fold operations on weights alone: NNCF takes the shape that a matrix is stored in for the one it has."""
    from openvino.passes import ConstantFolding, Manager

    passes = Manager()
    passes.register_pass(ConstantFolding())
    passes.run_passes(model)


def _kept_in_floats(path: Path, model: Any) -> list[str]:
    """Return the names of all products but those of the linear layers of the blocks."""
    products = [node for node in model.get_ops() if node.get_type_name() in ("MatMul", "Convolution")]
    names = [node.get_friendly_name() for node in products if not _is_linear(node)]
    if len(names) == len(products):
        raise SnapvitError(f"{path}: has no linear layer of a block to quantise. Give it a float32 graph of snapvit")
    return names


def _is_linear(node: Any) -> bool:
    """Return True if a product of a block is one with a matrix: of all heads at once, not of each."""
    weight = node.input_value(1)
    constant = weight.get_node().get_type_name() == "Constant" and len(weight.get_node().shape) == 2
    return constant and node.get_friendly_name().startswith(BLOCKS) and node.get_type_name() == "MatMul"


def _quantised(model: Any, kept_in_floats: list[str], images: list[npt.NDArray[Any]], threads: int, path: Path) -> Any:
    with needs("int8 for OpenVINO", extra="openvino"), _quietly(), _without_torch():
        os.environ.setdefault("NNCF_CI", "1")  # otherwise it reports every call to Google Analytics
        import nncf
        from nncf.quantization.range_estimator import RangeEstimatorParametersSet

        advanced = nncf.AdvancedQuantizationParameters(
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=-1),  # off
            activations_range_estimator_params=RangeEstimatorParametersSet.HISTOGRAM,
            disable_bias_correction=True,
        )
        try:
            with _threads(threads):
                return nncf.quantize(
                    model,
                    nncf.Dataset(images),
                    subset_size=len(images),
                    model_type=nncf.ModelType.TRANSFORMER,
                    preset=nncf.QuantizationPreset.MIXED,  # inputs have a zero point: what a GELU gives is lopsided
                    ignored_scope=nncf.IgnoredScope(names=kept_in_floats),
                    advanced_parameters=advanced,
                )
        except Exception as error:  # its own, OpenVINO's, numpy's
            raise SnapvitError(f"{path}: NNCF {nncf.__version__} cannot quantise it: {first_line(error)}") from error


def _name_in_order(model: Any) -> None:
    """Name nodes without a name of their own by their place; OpenVINO numbers all nodes of the process."""
    for number, node in enumerate(model.get_ordered_ops()):
        if not node.get_friendly_name().startswith(OURS):
            node.set_friendly_name(f"{node.get_type_name()}_{number}")


def _write(model: Any, out_stem: Path) -> tuple[Path, Path]:
    """Write both files; as in our ONNX graphs the one names the hash of the other."""
    import openvino

    graph, weights = out_stem.with_name(f"{out_stem.name}.xml"), out_stem.with_name(f"{out_stem.name}.bin")
    with scratch_folder() as folder:
        openvino.save_model(model, folder / "int8.xml", compress_to_fp16=False)
        hashes = {weights.name: sha256(folder / "int8.bin")}
        model.set_rt_info(to_json(hashes).decode(), [METADATA, "snapvit.weights"])
        model.set_rt_info("int8-static", [METADATA, "snapvit.precision"])
        openvino.save_model(model, folder / "int8.xml", compress_to_fp16=False)
        graph.unlink(missing_ok=True)  # never an old graph with new weights
        write_atomically(weights, (folder / "int8.bin").read_bytes())
        write_atomically(graph, (folder / "int8.xml").read_bytes())
    return graph, weights


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Give the Core that NNCF makes our settings: it takes none for it."""
    import openvino

    class Core(openvino.Core):
        def compile_model(self, model: Any, device_name: str | None = None, config: Any = None, **rest: Any) -> Any:
            return super().compile_model(model, device_name, settings(count), **rest)

    original, openvino.Core = openvino.Core, Core
    try:
        yield
    finally:
        openvino.Core = original


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence NNCF, which prints progress, logs to stdout and replaces the class of all loggers."""
    level, kind = logging.root.manager.disable, logging.getLoggerClass()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        logging.setLoggerClass(kind)


class _NoTorch:
    """A finder and loader that hides torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        raise ImportError("torch is not used here", name="torch")

    def exec_module(self, module: object) -> None:
        """Never called: `create_module` raises."""


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Hide torch from NNCF, which imports it where it is installed, for seconds and hundreds of megabytes, unused."""
    finder = _NoTorch()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
