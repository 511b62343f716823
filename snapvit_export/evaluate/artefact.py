"""What an exported file says of images, in the runtime that it is made for. Light."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..errors import GateFailed
from ..graph.tap import tapped
from ..profiling.device import usable_cores
from ..runtimes.opening import Session, open_session
from ..target import ON_CPU, Target
from .accuracy import BATCH


@dataclass(frozen=True)
class Outputs:
    """What a model says of images."""

    features: npt.NDArray[np.float32]  # (N, E)
    logits: npt.NDArray[np.float32] | None  # (N, classes); None for a model without a head


@dataclass(frozen=True)
class Artefact:
    """An exported file that is open for evaluation."""

    path: Path
    session: Session
    embed_dim: int
    as_bytes: bool
    batch: int

    def outputs(self, images: Images, progress: Callable[[int], None] = lambda count: None) -> Outputs:
        """Run all images; `progress` is told how many more are done."""
        parts: list[npt.NDArray[np.float32]] = []
        for batch in images.inputs(self.batch, self.as_bytes):
            parts.append(self.session.run(batch))
            progress(len(batch))
        both = np.concatenate(parts) if parts else np.zeros((0, self.embed_dim), np.float32)  # (N, E + classes)
        if not np.isfinite(both).all():
            raise GateFailed(f"{self.path}: gives values that are not finite numbers")
        features, logits = both[:, : self.embed_dim], both[:, self.embed_dim :]
        return Outputs(features, logits if logits.shape[1] else None)


@contextmanager
def opened(path: Path, target: Target, embed_dim: int, as_bytes: bool = False) -> Iterator[Artefact]:
    """Open a file as the target runs it, but on all cores: what it says does not depend on them.

    >>> with opened(path, target, embed_dim=192) as artefact: artefact.outputs(images)
    """
    threads = usable_cores() if target.runtime in ON_CPU else target.threads
    here = msgspec.structs.replace(target, threads=threads)
    shared_scale = target.precision == "int8-dynamic"  # then an answer depends on the others in its batch
    with tapped(path) as file, open_session(file, here) as session:
        yield Artefact(path, session, embed_dim, as_bytes, target.batch if shared_scale else BATCH)
