"""What an exported file says of itself: enough to feed it with images and to read its answers. Light."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..calibration.preprocessing import Preprocessing
from ..errors import FileFormatError, SnapvitError
from ..family.manifest import MANIFEST, read_family
from ..graph.read import read_graph
from ..storage.atomic import sha256
from ..storage.json import from_json
from ..target import Precision, check_precision
from .exported_model import About

SUFFIXES = (".onnx", ".xml")


def about_file(path: Path) -> tuple[About, Precision]:
    """Read what an export wrote into the file; a manifest beside it knows the names of ImageNet's classes too."""
    if not path.is_file():
        raise SnapvitError(f"{path}: no such file")
    said = _of_openvino(path) if path.suffix == ".xml" else _of_onnx(path)
    if "snapvit.preprocessing" not in said:
        raise FileFormatError(f"{path}: not made by snapvit, so how its images are prepared is not known")
    labels = from_json(said.get("snapvit.labels", "[]"), tuple[str, ...], str(path))
    about = About(
        name=f"{said.get('snapvit.model', 'model')} {said.get('snapvit.variant', path.stem)}",
        sha256=sha256(path),
        preprocessing=from_json(said["snapvit.preprocessing"], Preprocessing, str(path)),
        labels=labels or _of_family(path),
        takes_bytes=said.get("snapvit.input", "").startswith("uint8"),
    )
    return about, check_precision(said.get("snapvit.precision", "fp32"))


def _of_family(path: Path) -> tuple[str, ...]:
    if not (path.parent / MANIFEST).is_file():
        return ()
    manifest = read_family(path.parent)
    return manifest.labels if path.name in {variant.file for variant in manifest.variants} else ()


def _of_onnx(path: Path) -> Mapping[str, str]:
    return {entry.key: entry.value for entry in read_graph(path).metadata_props}


def _of_openvino(path: Path) -> Mapping[str, str]:
    from ..runtimes.openvino import read_model
    from ..runtimes.openvino_nncf import METADATA

    model = read_model(path)
    if not model.has_rt_info([METADATA]):
        return {}
    return {name: model.get_rt_info([METADATA, name]).astype(str) for name in model.get_rt_info([METADATA]).value}
