"""Gates between two forms of one model: their outputs must agree on real images, or the work stops. Light.

The forms are a torch module and a graph, two flavours, two precisions, or two runtimes. A gate that fails names the
first block whose output differs, and by how much. Outputs in reduced precision cannot be equal; there a cosine decides.

Every other runtime is compared with ONNX Runtime on the CPU, on the very file that is timed, before it is timed:
runtimes have computed wrong outputs fast (DINOv3 in TensorRT 10.3). All tolerances between files are here.

Forms that merge tokens are compared with the same merges: ties between matches must not decide (`merging` says how).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import GateFailed
from ..runtimes.device import usable_cores
from ..runtimes.ort import OrtSession
from ..runtimes.session import open_session, with_cores_here
from ..runtimes.tensorrt.engine_file import mark_agreed
from ..storage.json import Value
from ..target import Precision, Target
from .comparison import Compared, compare
from .merging import ALLOWED, ByBlock, followed, merging_blocks, require_best, run_and_read, smallest_margins

Outputs = npt.NDArray[np.float32]
Streams = Mapping[int, npt.NDArray[np.float32]]  # the output of each block, (images, tokens, E); or of first tokens
TOLERANCE = 1e-4  # of the largest value, between forms in float32
BLOCK_TOLERANCE: dict[Precision, float] = {
    "fp16": 0.01,
    "fp8": 0.1,
    "int8-dynamic": 0.1,
    "int8-static": 0.1,
}  # of a block's largest value, in reduced precision
RUNTIME_TOLERANCE = 1e-3  # between runtimes in fp32: other orders of summing
SAME_WEIGHTS = 1e-3  # between dense graphs that should be of one model: rounding stays below, other weights far above
REDUCED_FLAVOURS = 0.05  # between both flavours of one int8 variant: sums differ by the order of operators
LEAST_COSINE: dict[Precision, float] = {
    "fp16": 0.9999,
    "fp8": 0.9,
    "int8-dynamic": 0.9,
    "int8-static": 0.9,
}  # to float32


def flavour_tolerance(precision: Precision) -> float:
    """Return the largest difference of the two flavours of one variant, relative to the largest value."""
    return TOLERANCE if precision == "fp32" else REDUCED_FLAVOURS


class Agreement(Value, frozen=True, kw_only=True):
    """The distance of two outputs. `max_abs` is in units of the reference's largest value."""

    max_abs: float
    cosine: float


def agreement(reference: Outputs, other: Outputs) -> Agreement:
    """Compare two outputs of shape (images, features)."""
    scale = max(float(np.abs(reference).max()), 1e-12)
    furthest = float(np.abs(reference.astype(np.float64) - other).max())
    return Agreement(max_abs=furthest / scale, cosine=float(_cosines(reference, other).min()))


def _cosines(reference: Outputs, other: Outputs) -> npt.NDArray[np.float64]:
    """Return the cosine of both outputs for each image."""
    a, b = reference.astype(np.float64), other.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    found: npt.NDArray[np.float64] = (a * b).sum(1) / np.maximum(norms, 1e-300)
    return np.where((a == b).all(1), 1.0, found)  # also where both are zero


def require_equal(
    what: str,
    reference: Outputs,
    other: Outputs,
    tolerance: float = TOLERANCE,
    where: Callable[[], str] = lambda: "",
) -> Agreement:
    """Pass if both outputs agree to `tolerance` of the largest value; `what` names the two forms.

    `where` is asked only if they do not: which part is to blame, as a sentence.
    """
    _require_comparable(what, reference, other, where)
    found = agreement(reference, other)
    if not found.max_abs <= tolerance:
        raise GateFailed(
            f"{what}: outputs differ by {found.max_abs:.2e} of the largest value (allowed {tolerance:g}){where()}"
        )
    return found


def require_close(
    what: str, reference: Outputs, other: Outputs, precision: Precision, where: Callable[[], str] = lambda: ""
) -> Agreement:
    """Pass if every output in reduced precision has nearly the direction of that in float32."""
    return require_cosine(what, reference, other, LEAST_COSINE[precision], where)


def require_cosine(
    what: str, reference: Outputs, other: Outputs, least: float, where: Callable[[], str] = lambda: ""
) -> Agreement:
    """Pass if every output of one form has nearly the direction of that of the other."""
    _require_comparable(what, reference, other, where)
    found = agreement(reference, other)
    if not found.cosine >= least:
        raise GateFailed(
            f"{what}: the cosine is {found.cosine:.6f} (at least {least:g} is asked){where()}. Use another --precision"
        )
    return found


def require_same_graph(
    what: str,
    reference: Outputs,
    matches: ByBlock,
    path: Path,
    inputs: npt.NDArray[Any],
    tolerance: float = TOLERANCE,
    where: Callable[[], str] = lambda: "",
) -> Agreement:
    """Pass if a graph has the outputs of a reference; `matches`: what the reference merged to get them, if it did."""
    found = _outputs(path, inputs)
    differs = _differing(what, reference, found, tolerance, where)
    if differs.any() and merging_blocks(path):
        some = {i: match.of(differs) for i, match in matches.items()}
        found[differs] = followed(what, path, inputs[differs], some, tolerance, where)
    return require_equal(what, reference, found, tolerance, where)


def require_close_graph(
    what: str,
    exact: Path,
    path: Path,
    inputs: npt.NDArray[Any],
    precision: Precision,
    where: Callable[[], str] = lambda: "",
) -> Agreement:
    """Pass if a graph in reduced precision has nearly the outputs of the one in float32, for the same merges."""
    wanted, found = _outputs(exact, inputs), _outputs(path, inputs)
    _require_comparable(what, wanted, found, where)
    differs = _cosines(wanted, found) < LEAST_COSINE[precision]
    if differs.any() and merging_blocks(path):
        found[differs], matches = run_and_read(path, inputs[differs])
        require_best(what, matches)
        wanted[differs] = followed(what, exact, inputs[differs], matches, BLOCK_TOLERANCE[precision], where)
    return require_close(what, wanted, found, precision, where)


def _outputs(path: Path, inputs: npt.NDArray[Any]) -> Outputs:
    with OrtSession(path, usable_cores()) as session:
        return session.run(inputs)


def _differing(
    what: str, reference: Outputs, other: Outputs, tolerance: float, where: Callable[[], str] = lambda: ""
) -> npt.NDArray[np.bool_]:
    """Return the images whose outputs differ by more than the tolerance, relative to the largest value of all."""
    _require_comparable(what, reference, other, where)
    scale = max(float(np.abs(reference).max()), 1e-12)
    return np.abs(reference.astype(np.float64) - other).max(axis=1) > tolerance * scale


def first_difference(reference: Streams, other: Streams, tolerance: float = TOLERANCE) -> str:
    """The end of a gate's message: the first block whose output differs by more than the tolerance, or the worst."""
    found = {i: _difference(reference[i], other[i]) for i in sorted(set(reference) & set(other))}
    if not found:
        return ""
    beyond = [i for i, value in found.items() if not value <= tolerance]
    if not beyond:
        worst = max(found, key=lambda i: found[i])
        return f"; block {worst} differs most, by {found[worst]:.2e} of its largest value, so it may come after them"
    return f"; the first block that differs is {beyond[0]}, by {found[beyond[0]]:.2e} of its largest value"


def _difference(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    tokens = min(reference.shape[1], other.shape[1])
    a, b = reference[:, :tokens].astype(np.float64), other[:, :tokens].astype(np.float64)
    return float(np.abs(a - b).max()) / max(float(np.abs(a).max()), 1e-12)


def _require_comparable(what: str, reference: Outputs, other: Outputs, where: Callable[[], str]) -> None:
    if reference.shape != other.shape:
        raise GateFailed(f"{what}: outputs have shapes {reference.shape} and {other.shape}")
    if not (np.isfinite(reference).all() and np.isfinite(other).all()):
        raise GateFailed(f"{what}: outputs hold values that are not finite numbers{where()}")


def require_same_in_runtime(
    name: str, path: Path, target: Target, images: npt.NDArray[Any], scores: bool = True
) -> Compared | None:
    """Refuse a file whose answers to real images differ in the target's runtime; return how they compare.

    None for ONNX Runtime itself, and for OpenVINO's own files, which were compared when they were made. `scores`: of
    classes, or else embeddings.
    """
    if target.runtime == "onnxruntime" or path.suffix != ".onnx":
        return None
    wanted = _outputs(path, images)
    with open_session(path, with_cores_here(target)) as opened:
        found = opened.run(images)
    what, exact = f"{name}: {target.runtime} and ONNX Runtime", target.precision == "fp32"
    _require_comparable(what, wanted, found, lambda: "")
    compared = compare(wanted, found, target.precision, scores)
    if not compared.passed and merging_blocks(path):
        may = undecided(path, images, target.precision)
        compared = compare(wanted, found, target.precision, scores, may)
    if exact:
        differs = _differing(what, wanted, found, RUNTIME_TOLERANCE)
        kept = _kept(what, path, images, differs, RUNTIME_TOLERANCE)
        require_equal(what, wanted[kept], found[kept], RUNTIME_TOLERANCE)
    if not compared.passed:
        raise GateFailed(f"{what}: {compared.told} (at least {compared.asked:g} is asked). Use another --precision")
    mark_agreed(path)
    return compared


def undecided(path: Path, images: npt.NDArray[Any], precision: Precision) -> npt.NDArray[np.bool_]:
    """Return for each image True if rounding decides which tokens a graph merges, so that a runtime may differ."""
    if not merging_blocks(path):
        return np.zeros(len(images), bool)
    tolerance = BLOCK_TOLERANCE.get(precision, RUNTIME_TOLERANCE)
    return np.asarray(smallest_margins(path, images) < ALLOWED * tolerance)


def require_close_elsewhere(
    what: str, exact: Path, found: Outputs, inputs: npt.NDArray[Any], precision: Precision
) -> Agreement:
    """Pass if outputs of another runtime in reduced precision are nearly those of the float32 graph."""
    wanted = _outputs(exact, inputs)
    _require_comparable(what, wanted, found, lambda: "")
    differs = _cosines(wanted, found) < LEAST_COSINE[precision]
    kept = _kept(what, exact, inputs, differs, BLOCK_TOLERANCE[precision])
    return require_close(what, wanted[kept], found[kept], precision)


def _kept(
    what: str, path: Path, inputs: npt.NDArray[Any], differs: npt.NDArray[np.bool_], tolerance: float
) -> npt.NDArray[np.bool_]:
    """Return the images that must agree with a runtime whose merges cannot be read: of a graph without any, all."""
    if not differs.any() or not merging_blocks(path):
        return np.ones(len(differs), bool)
    return ~_left_out(what, differs, smallest_margins(path, inputs), ALLOWED * tolerance)


def _left_out(
    what: str, differs: npt.NDArray[np.bool_], margins: npt.NDArray[np.float64], bound: float
) -> npt.NDArray[np.bool_]:
    """Return the images that a gate leaves out: those that differ, and may, since rounding decides what they merge."""
    found: npt.NDArray[np.bool_] = differs & (margins < bound)
    if 2 * found.sum() > len(found):
        raise GateFailed(
            f"{what}: {found.sum()} of {len(found)} images differ, all of them with matches of tokens that rounding "
            "decides. At least half must agree. Use more images, or merge fewer tokens"
        )
    return found
