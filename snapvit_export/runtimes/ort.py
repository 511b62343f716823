"""ONNX Runtime on the CPU."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, first_line, needs

PROVIDER = "CPUExecutionProvider"


def version() -> str:
    """The version of ONNX Runtime that really loads; an error if it does not, or if two packages share its folder."""
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(installed) == 2:
        raise SnapvitError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files. "
            "Try: pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'snapvit-export[ort]'"
        )
    with needs("running ONNX files", extra="ort"):
        import onnxruntime
    return str(onnxruntime.__version__)


class OrtSession:
    """An open model.

    >>> with OrtSession(path, threads=1) as session: logits = session.run(images)
    """

    def __init__(self, path: Path | bytes, threads: int) -> None:
        version()
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors only: warnings about the machine are not ours to print
        source, where = (path, "graph") if isinstance(path, bytes) else (str(path), str(path))
        try:
            self._session: Any = ort.InferenceSession(source, options, providers=[PROVIDER])
        except Exception as error:  # onnxruntime's own exception types share no base of their own
            raise SnapvitError(f"{where}: ONNX Runtime cannot open it: {first_line(error)}") from error
        if self._session.get_providers() != [PROVIDER]:
            raise SnapvitError(f"{where}: asked for {PROVIDER}, ONNX Runtime runs {self._session.get_providers()}")
        given = self._session.get_inputs()[0]
        self._input, self._where = given.name, where
        self._batch = given.shape[0] if isinstance(given.shape[0], int) else None  # None: any

    def run(self, images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Run a batch, (B, 3, H, W) or (B, H, W, 3) bytes, and return the first output (B, features).

        A graph with a fixed batch runs as often as it must; the last run is filled up with images that are not told of.
        """
        if self._batch is None or len(images) == self._batch:
            return self._run(images)[0]
        whole = np.resize(images, (-(-len(images) // self._batch) * self._batch, *images.shape[1:]))
        parts = [self._run(whole[start : start + self._batch])[0] for start in range(0, len(whole), self._batch)]
        return np.concatenate(parts)[: len(images)]

    def run_all(self, images: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Run a batch and return every output by name."""
        return dict(zip((output.name for output in self._session.get_outputs()), self._run(images)))

    def _run(self, images: npt.NDArray[Any]) -> list[Any]:
        try:
            return self._session.run(None, {self._input: images})
        except Exception as error:  # onnxruntime's own exception types share no base of their own
            raise SnapvitError(f"{self._where}: ONNX Runtime cannot run it: {first_line(error)}") from error

    def close(self) -> None:
        """Give back the memory."""
        self._session = None

    def __enter__(self) -> OrtSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
