"""The proof that a foreign file was read correctly: our graph and the file itself agree on real images. Light.

Both run in ONNX Runtime. Recognition is only believed after this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..calibration.preprocessing import Preprocessing
from ..checks.activations import streams, with_outputs
from ..checks.gates import BLOCK_TOLERANCE, LEAST_COSINE, TOLERANCE, Agreement, agreement, first_difference
from ..errors import GateFailed, SnapvitError
from ..graph.read import external_files, read_graph
from ..graph.writer import Blueprint, GraphWriter
from ..model.plan import Plan
from ..runtimes.device import usable_cores
from ..runtimes.fixed_batch import in_batches
from ..runtimes.ort import OrtSession
from ..storage.temporary import scratch_folder
from .recognise import Recognised

Images = npt.NDArray[np.float32]  # as the model takes them: (N, 3, H, W), normalised


def require_same_as_original(found: Recognised, path: Path | str, images: Images) -> Agreement:
    """Pass if the dense graph of what was recognised has the outputs of the file itself, on these images.

    A file that computes in fp16 cannot be equal to ours in fp32; there the cosine of fp16 decides.
    """
    path = Path(path)
    reference = original_outputs(found, path, images)
    with scratch_folder() as folder:
        graph = _emitted(found, path, folder)
        with OrtSession(graph, usable_cores()) as session:
            ours = session.run(images)
        return _require(found, path, graph, reference, ours, images)


def original_outputs(found: Recognised, path: Path, images: Images) -> npt.NDArray[np.float32]:
    """Return the output of the file itself, (N, classes) or (N, E)."""
    with _opened(path, [found.output_name]) as session:
        output = in_batches(lambda x: session.run_all(x)[found.output_name], _typed(found, images), found.batch)
    return found.vectors(output)


@contextmanager
def _opened(path: Path, names: list[str]) -> Iterator[OrtSession]:
    """Open the file with these outputs; only one with weights in other files needs a copy beside it for that."""
    from onnx import helper

    model = read_graph(path)
    missing = [name for name in names if name not in {output.name for output in model.graph.output}]
    if missing and external_files(model):
        with with_outputs(path, names, threads=usable_cores()) as session:
            yield session
        return
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in missing)
    with OrtSession(model.SerializeToString() if missing else path, usable_cores()) as session:
        yield session


def _typed(found: Recognised, images: Images) -> npt.NDArray[np.generic]:
    return images.astype(found.dtype, copy=False)


def _emitted(found: Recognised, path: Path, folder: Path) -> Path:
    """Write the dense graph; its preprocessing plays no part here."""
    height, width = found.anatomy.image
    nothing = Preprocessing(input_size=(3, height, width), mean=(0.0,) * 3, std=(1.0,) * 3)
    drawn = Blueprint(path.stem, found.anatomy, found.wiring, nothing, (), found.dense)
    return GraphWriter(drawn, folder).write("dense", Plan.dense(found.anatomy)).graph


def _require(
    found: Recognised,
    path: Path,
    graph: Path,
    reference: npt.NDArray[np.float32],
    ours: npt.NDArray[np.float32],
    images: Images,
) -> Agreement:
    what = f"{path} and {graph.name}, our graph of it"
    if reference.shape != ours.shape:
        raise GateFailed(f"{what}: outputs have shapes {reference.shape} and {ours.shape}")
    if not np.isfinite(reference).all():
        raise GateFailed(f"{path}: gives values that are not finite numbers. Check the file, and the preprocessing")
    result = agreement(reference, ours)
    if found.is_half:
        if result.cosine >= LEAST_COSINE["fp16"]:
            return result
        text = f"the cosine of outputs is {result.cosine:.6f} (at least {LEAST_COSINE['fp16']:g} is asked in fp16)"
    else:
        if result.max_abs <= TOLERANCE:
            return result
        text = f"outputs differ by {result.max_abs:.2e} of the largest value (allowed {TOLERANCE:g})"
    raise GateFailed(f"{what}: {text}{_first_block(found, path, graph, images)}")


def _first_block(found: Recognised, path: Path, graph: Path, images: Images) -> str:
    """Return the first block whose output differs, as the end of a sentence; nothing if the file does not tell."""
    some = images if found.batch is None else images[: found.batch]
    names = [name for name in found.streams if name]
    if not names or len(some) != (found.batch or len(some)):
        return ""
    try:
        with _opened(path, names) as session:
            values = session.run_all(_typed(found, some))
        ours = streams(graph, some, usable_cores())
    except SnapvitError:
        return ""
    theirs = {
        i: values[name].astype(np.float32).reshape(len(some), -1, found.anatomy.embed_dim)
        for i, name in enumerate(found.streams)
        if name
    }
    return first_difference(theirs, ours, BLOCK_TOLERANCE["fp16"] if found.is_half else TOLERANCE)
