"""An exported file as what runs a model: its embedding and class scores, in the runtime that it is made for. Light."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..calibration.preprocessing import Preprocessing
from ..checks.embedding_output import tapped
from ..errors import GateFailed, UsageError
from ..progress import Progress, Silent
from ..runtimes.device import usable_cores
from ..runtimes.session import Session, open_session
from ..target import ON_CPU, Target
from .accuracy import BATCH
from .features import Array


@dataclass(frozen=True)
class About:
    """What must be known of a file to feed it and to read its answers."""

    name: str
    sha256: str
    preprocessing: Preprocessing
    labels: tuple[str, ...] = ()
    takes_bytes: bool = False


@dataclass(frozen=True)
class Artefact:
    """An exported file that is open: an `exam.Extractor`."""

    about: About
    path: Path
    session: Session
    outputs: int
    runtime: str
    batch: int

    @property
    def name(self) -> str:
        return self.about.name

    @property
    def weights_sha256(self) -> str:
        """Of the graph, which names the hashes of its weight files."""
        return self.about.sha256

    @property
    def preprocessing(self) -> Preprocessing:
        return self.about.preprocessing

    @property
    def labels(self) -> tuple[str, ...]:
        return self.about.labels

    def features(self, images: Images, progress: Progress | None = None) -> tuple[Array, Array | None]:
        """Embeddings (N, E), and logits (N, C) if the model has a head."""
        progress = progress or Silent()
        parts: list[npt.NDArray[np.float32]] = []
        for batch in images.inputs(self.batch, self.about.takes_bytes):
            parts.append(self.session.run(batch))
            progress.advance(len(batch))
        both = np.concatenate(parts)  # (N, E + C)
        if not np.isfinite(both).all():
            raise GateFailed(f"{self.path}: gives values that are not finite numbers")
        width = both.shape[1] - self.outputs
        return both[:, :width], both[:, width:] if self.outputs else None

    def tokens(self, images: Images, progress: Progress | None = None) -> Array:
        """Not in the graph: with token pooling the last block is not even computed for them."""
        raise UsageError(f"{self.path}: gives no patch tokens. Give --by segment the model that it was made from")


@contextmanager
def opened(path: Path, target: Target, about: About) -> Iterator[Artefact]:
    """Open a file as the target runs it, but on all cores: what it says does not depend on them.

    >>> with opened(path, target, about) as artefact: artefact.features(images)
    """
    threads = usable_cores() if target.runtime in ON_CPU else target.threads
    here = msgspec.structs.replace(target, threads=threads)
    shared_scale = target.precision == "int8-dynamic"  # then an answer depends on the others in its batch
    with tapped(path) as tap, open_session(tap.path, here) as session:
        batch = target.batch if shared_scale else BATCH
        yield Artefact(about, path, session, tap.classes, target.runtime, batch)
