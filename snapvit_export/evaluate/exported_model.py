"""An exported file as an `Extractor`: its metadata, and its embeddings, logits and patch tokens. Light.

`read_info` reads from the file what is needed to feed it with images and to read its outputs; `open_exported` opens it
in a runtime. `top1` measures the accuracy of anything that classifies batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..calibration.preprocessing import Preprocessing
from ..checks.embedding_output import with_embedding
from ..checks.patch_tokens import open_patch_tokens
from ..errors import FileFormatError, GateFailed, SnapvitError, UsageError
from ..family.evaluation import Evaluation, share
from ..family.folder import read_family
from ..family.layout import MANIFEST
from ..graph.read import read_graph
from ..progress import Progress, Silent
from ..runtimes.device import usable_cores
from ..runtimes.session import Session, open_session
from ..storage.atomic import sha256
from ..storage.json import from_json
from ..target import ON_CPU, Precision, Target, check_precision
from .features import Array

BATCH = 16
SUFFIXES = (".onnx", ".xml")

Run = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]


def top1(run: Run, images: Images, as_bytes: bool = False) -> Evaluation:
    """Classify every image with `run`, which takes them normalised or as bytes, and compare with the labels."""
    if images.labels is None or not len(images):
        raise ValueError("accuracy needs labelled images")
    guesses = np.concatenate([run(batch).argmax(1) for batch in images.inputs(BATCH, as_bytes)])  # (N,)
    value, error = share(guesses == images.labels)
    return Evaluation(top1=value, standard_errors={"top1": error}, images=len(images), source=images.source)


@dataclass(frozen=True)
class ExportedInfo:
    """The metadata of an exported file: enough to feed it and to read its outputs."""

    name: str
    sha256: str
    preprocessing: Preprocessing
    labels: tuple[str, ...] = ()
    takes_bytes: bool = False


@dataclass(frozen=True)
class ExportedModel:
    """An exported file that is open in a runtime: an `evaluator.Extractor`."""

    info: ExportedInfo
    path: Path
    session: Session
    outputs: int
    runtime: str
    batch: int

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def weights_sha256(self) -> str:
        """Of the graph, which names the hashes of its weight files."""
        return self.info.sha256

    @property
    def preprocessing(self) -> Preprocessing:
        return self.info.preprocessing

    @property
    def labels(self) -> tuple[str, ...]:
        return self.info.labels

    def features(self, images: Images, progress: Progress | None = None) -> tuple[Array, Array | None]:
        """Embeddings (N, E), and logits (N, C) if the model has a head."""
        progress = progress or Silent()
        parts: list[npt.NDArray[np.float32]] = []
        for batch in images.inputs(self.batch, self.info.takes_bytes):
            parts.append(self.session.run(batch))
            progress.advance(len(batch))
        both = np.concatenate(parts)  # (N, E + C)
        if not np.isfinite(both).all():
            raise GateFailed(f"{self.path}: gives values that are not finite numbers")
        width = both.shape[1] - self.outputs
        return both[:, :width], both[:, width:] if self.outputs else None

    def tokens(self, images: Images, progress: Progress | None = None) -> Array:
        """Patch tokens in their places, (N, h, w, E), where the graph has them: not with token pooling."""
        if self.runtime != "onnxruntime" or self.path.suffix.lower() != ".onnx":
            raise UsageError(
                f"{self.path}: gives no patch tokens in {self.runtime}, only .onnx files in ONNX Runtime do. "
                "Give --by segment the model that it was made from"
            )
        progress = progress or Silent()
        parts: list[Array] = []
        with open_patch_tokens(self.path, usable_cores()) as run:
            for batch in images.inputs(self.batch, self.info.takes_bytes):
                parts.append(run(batch))
                progress.advance(len(batch))
        return np.concatenate(parts)


@contextmanager
def open_exported(path: Path, target: Target, info: ExportedInfo) -> Iterator[ExportedModel]:
    """Open a file as the target runs it, but on all cores: its outputs do not depend on their number.

    >>> with open_exported(path, target, info) as exported: features, logits = exported.features(images)
    """
    threads = usable_cores() if target.runtime in ON_CPU else target.threads
    here = msgspec.structs.replace(target, threads=threads)
    shared_scale = target.precision == "int8-dynamic"  # then an output depends on the other images of its batch
    with with_embedding(path) as tap, open_session(tap.path, here) as session:
        batch = target.batch if shared_scale else BATCH
        yield ExportedModel(info, path, session, tap.classes, target.runtime, batch)


def read_info(path: Path) -> tuple[ExportedInfo, Precision]:
    """Read the metadata and precision of a file; a manifest beside it has the names of ImageNet's classes too."""
    if not path.is_file():
        raise SnapvitError(f"{path}: no such file")
    metadata = _openvino_metadata(path) if path.suffix.lower() == ".xml" else _onnx_metadata(path)
    if "snapvit.preprocessing" not in metadata:
        raise FileFormatError(f"{path}: not made by snapvit, so how its images are prepared is not known")
    labels = from_json(metadata.get("snapvit.labels", "[]"), tuple[str, ...], str(path))
    info = ExportedInfo(
        name=f"{metadata.get('snapvit.model', 'model')} {metadata.get('snapvit.variant', path.stem)}",
        sha256=sha256(path),
        preprocessing=from_json(metadata["snapvit.preprocessing"], Preprocessing, str(path)),
        labels=labels or _family_labels(path),
        takes_bytes=metadata.get("snapvit.input", "").startswith("uint8"),
    )
    return info, check_precision(metadata.get("snapvit.precision", "fp32"))


def is_ours(path: Path) -> bool:
    """Return True for an ONNX file that tells how its images are prepared, as all of ours do."""
    return "snapvit.preprocessing" in _onnx_metadata(path)


def _family_labels(path: Path) -> tuple[str, ...]:
    if not (path.parent / MANIFEST).is_file():
        return ()
    manifest = read_family(path.parent)
    return manifest.labels if path.name in {variant.file for variant in manifest.variants} else ()


def _onnx_metadata(path: Path) -> Mapping[str, str]:
    return {entry.key: entry.value for entry in read_graph(path).metadata_props}


def _openvino_metadata(path: Path) -> Mapping[str, str]:
    from ..runtimes.openvino import read_model
    from ..runtimes.openvino_nncf import METADATA

    model = read_model(path)
    if not model.has_rt_info([METADATA]):
        return {}
    return {name: model.get_rt_info([METADATA, name]).astype(str) for name in model.get_rt_info([METADATA]).value}
