"""Write programs and settings for the engine of a chosen variant, and tell of them. Light."""

from __future__ import annotations

from pathlib import Path

from ...storage.atomic import write_atomically
from ..layout import APPLICATIONS, LABELS, RUN_ENGINE, Application
from ..manifest import Manifest, Variant
from . import cpp, deepstream, run_engine, triton
from .interface import Interface
from .places import RUNTIME

README = """
On the device, in TensorRT 10.3 or newer. Nothing below was ever run on a GPU by those who wrote it: compare its
answers with those of run.py before you trust them.

Engine    engines/{engine} of the Jetson agent, or built there (TensorRT 11: without --stronglyTyped):
          {own_build}
Python    python3 {run_engine} --engine {engine} image.jpg
C++       cmake -S {cpp} -B build && cmake --build build
          build/classify {engine} image.ppm{labels}
Triton    cp -r {triton}/{name} REPOSITORY && mkdir REPOSITORY/{name}/1
          cp {engine} REPOSITORY/{name}/1/model.plan
Streams   DeepStream's nvinfer with config-file-path={config}, after
          {streams_build}
"""


def interface_of(manifest: Manifest, variant: Variant, model: Path) -> Interface | None:
    """Return the interface of the engine of a variant whose graph is `model`; None if it does not run in TensorRT."""
    return Interface.of(manifest, variant, model) if manifest.target.runtime == RUNTIME else None


def write_applications(folder: Path, about: Interface, model: Path, largest: int) -> tuple[Application, ...]:
    """Write what runs an engine of the graph `model`; return the names. `largest`: bytes of weights in an ONNX file."""
    for kind in (run_engine, cpp, triton, deepstream):
        for path, text in kind.files(about).items():
            write_atomically(folder / path, text.encode())
    deepstream.write_graph(folder, about, model, largest)
    return APPLICATIONS


def readme_of(about: Interface) -> str:
    """Return what `README.txt` says of them."""
    return README.format(
        engine=about.engine,
        labels=f" --labels {LABELS}" if about.labels else "",
        name=about.plain_name,
        own_build=about.own_build,
        run_engine=RUN_ENGINE,
        cpp=cpp.FOLDER,
        triton=triton.FOLDER,
        config=deepstream.CONFIG,
        streams_build=deepstream.build_command(about),
    )
