"""OpenVINO on the CPU: ONNX graphs with the weights beside them, and its own files, NAME.xml with NAME.bin.

A graph that takes any batch is opened for one. With all sizes known a ViT-Ti runs 2 to 6 % faster, and int8 does not
compile otherwise (2026.4). The request is compared with what OpenVINO made of it: device, threads, and the
precision of the matrix products, since it computes int8 layers that it does not recognise in float32.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, first_line, needs
from ..graph.read import OPENVINO, openvino_weights
from .fixed_batch import in_batches

DEVICE = "CPU"
FRONT_ENDS = {".onnx": "onnx", ".xml": "ir"}
PRODUCTS = ("FullyConnected", "MatMul", "Convolution")  # layers by OpenVINO's names
INT8, HALF = ("i8", "u8"), ("bf16", "f16")
RECOGNISED = 0.9  # of the int8 matrices, at least, must be multiplied in int8
ADVICE = {  # words in OpenVINO's error: advice
    "operations": "Export it with --flavour portable, which every version reads",
    "Unsupported operation": "It was made for a newer version: make it again with this one",
    "external": "Its weights must lie beside it as they were written",
    "bin file": "Its NAME.bin must lie beside it as it was written",
}


def version() -> str:
    """Return the version of OpenVINO that really loads; an error if it does not."""
    with needs("running in OpenVINO", extra="openvino"):
        import openvino
    return str(openvino.__version__).partition("-")[0]


def settings(threads: int) -> dict[str, Any]:
    """Return the settings that a graph is compiled with."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,  # one batch after the other, each on all threads
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # by itself it takes bf16 even where that is emulated, 30 times slower
        "ENABLE_CPU_PINNING": False,  # --pin chooses the cores, and two sessions would share one
        "SNIPPETS_MODE": "DISABLE",  # they gain 1 %, and crash on blocks of 256 neurons or fewer (2026.4)
    }


class OpenVinoSession:
    """An open model.

    >>> with OpenVinoSession(written.graph, threads=1) as session: logits = session.run(batch)
    """

    def __init__(self, path: Path, threads: int, batch: int = 1) -> None:
        """`batch`: the one that a graph that takes any is opened for; others run in as many parts as they need."""
        model, self._where = read_model(path), str(path)
        given = model.inputs[0]
        if given.partial_shape[0].is_dynamic:
            model.reshape([batch, *list(given.partial_shape)[1:]])
        try:
            compiled = core().compile_model(model, DEVICE, settings(threads))
        except Exception as error:  # RuntimeError, or one of its own
            raise SnapvitError(f"{path}: OpenVINO {version()} cannot compile it: {_reason(error)}") from error
        self.products = _products(compiled)
        _require_as_asked(path, compiled, threads)
        _require_honest(path, model, self.products)
        self._request: Any = compiled.create_infer_request()
        self._type, self._batch = given.element_type.to_dtype(), int(model.inputs[0].shape[0])

    def run(self, images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Run a batch, (B, 3, H, W) or (B, H, W, 3) bytes, and return the first output (B, features)."""
        return in_batches(self._run, images, self._batch)

    def _run(self, images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        if images.dtype != self._type:  # OpenVINO would convert it: bytes to floats, say, that are not normalised
            raise SnapvitError(f"{self._where}: takes {self._type}, not {images.dtype}")
        try:
            found: npt.NDArray[np.float32] = self._request.infer([images], share_inputs=True)[0]
            return found
        except Exception as error:  # RuntimeError, or one of its own
            raise SnapvitError(f"{self._where}: OpenVINO cannot run it: {_reason(error)}") from error

    def close(self) -> None:
        """Release its memory."""
        self._request = None

    def __enter__(self) -> OpenVinoSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def core() -> Any:
    """Return OpenVINO's Core; it counts the cores that a process may use only once, at its first use."""
    import openvino

    return openvino.Core()


def read_model(path: Path) -> Any:
    """Return the graph in a file, for OpenVINO to compile or to change."""
    version()
    kind = path.suffix.lower()
    if kind not in FRONT_ENDS:
        raise SnapvitError(f"{path}: OpenVINO opens .onnx and .xml files here")
    if not path.is_file():
        raise SnapvitError(f"{path}: no such file")
    if kind == OPENVINO:
        openvino_weights(path)  # which it would follow anywhere
    try:
        front_end = _front_ends().load_by_framework(FRONT_ENDS[kind])
        model = front_end.convert(front_end.load(str(path)))
    except Exception as error:  # RuntimeError, or one of its own
        raise SnapvitError(f"{path}: OpenVINO {version()} cannot read it: {_reason(error)}") from error
    if not model.inputs:
        raise SnapvitError(f"{path}: OpenVINO finds no input in it. Export it again")
    return model


@cache
def _front_ends() -> Any:
    """Return what reads files; `core().read_model` would also try those for other formats, which print messages."""
    from openvino.frontend import FrontEndManager

    return FrontEndManager()


def _reason(error: Exception) -> str:
    """Return the cause of an OpenVINO error, and advice: lines above the last one name places in its own source."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in reversed(lines) if _advice(line)), lines[-1] if lines else first_line(error))
    return ". ".join(filter(None, (cause[:160].rstrip(".! "), _advice(cause))))


def _advice(cause: str) -> str:
    return next((advice for words, advice in ADVICE.items() if words in cause), "")


def _products(compiled: Any) -> Counter[str]:
    """Count the layers with matrix products by the precision that they compute in."""
    layers = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    return Counter(
        layer["runtimePrecision"].astype(str) for layer in layers if layer["layerType"].astype(str) in PRODUCTS
    )


def _require_as_asked(path: Path, compiled: Any, threads: int) -> None:
    devices, given = compiled.get_property("EXECUTION_DEVICES"), compiled.get_property("INFERENCE_NUM_THREADS")
    if devices != [DEVICE]:
        raise SnapvitError(f"{path}: asked for {DEVICE}, OpenVINO runs it on {', '.join(devices)}")
    if given != threads:
        raise SnapvitError(
            f"{path}: asked for {threads} threads, OpenVINO takes {given}: as many as it found cores to use when it "
            "started. Ask for no more"
        )
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if precision != "f32":
        raise SnapvitError(f"{path}: asked for float32, OpenVINO computes in {precision}")


def _require_honest(path: Path, model: Any, products: Counter[str]) -> None:
    """Refuse a graph that is computed in another precision than it is stored in."""
    if half := [kind for kind in HALF if products[kind]]:
        raise SnapvitError(f"{path}: OpenVINO computes parts of it in {half[0]}, which nobody asked for")
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    stored = sum(
        c.get_element_type().get_type_name() in INT8 and len(c.shape) > 1 and min(c.shape) > 1 for c in constants
    )
    used = sum(products[kind] for kind in INT8)
    if used < RECOGNISED * stored:
        raise SnapvitError(
            f"{path}: OpenVINO computes only {used} of {stored} int8 layers in int8. "
            "Let it be made for OpenVINO: --runtime openvino --precision int8"
        )
