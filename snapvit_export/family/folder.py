"""Reads and writes a family folder: variants of one model, and the `manifest.json` that describes them. Light.

Reading checks versions, bounds, sizes and hashes, and refuses names that leave the folder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..elastic.format import own_files as elastic_files
from ..errors import FileFormatError, SnapvitError
from ..graph.read import files_read_by
from ..runtimes.tensorrt.engine_file import engine_files
from ..storage.atomic import inside, sha256
from ..storage.json import read_json, write_json
from ..storage.temporary import alone_in, is_temporary
from .applications.places import own_applications
from .layout import (
    APPLICATIONS,
    MANIFEST,
    RANKING,
    SHIPPED,
    TORCH,
    TORCH_FILES,
    TORCH_KEYS,
    TORCH_MODEL,
    TRACE,
    UNFINISHED,
    VALIDATION,
    report_files,
)
from .manifest import Manifest, Shipped, Variant, WeightFile
from .reference import ReferenceAnswers, ReferenceImages

COMPILED = re.compile(r"__pycache__(/load\.[\w.-]+\.pyc)?")  # what Python leaves beside a load.py that was imported


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`."""
    write_json(folder / MANIFEST, manifest)


@contextmanager
def unchanged(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Let a block write into a family that was read long ago, unless somebody else has written it since.

    Whoever replaces the folder locks the one around it, and whoever writes into it the folder itself.
    """
    place = folder.resolve()
    with alone_in(place.parent), alone_in(place):
        try:
            now = read_json(folder / MANIFEST, Manifest)
        except SnapvitError:
            now = None
        if now != manifest:
            raise SnapvitError(f"{folder / MANIFEST}: somebody else wrote it meanwhile. Run the same command again")
        yield


def read_manifest(folder: Path | str) -> Manifest:
    """Read the manifest of a family alone: whoever uses a file must check it."""
    try:
        return read_json(Path(folder) / MANIFEST, Manifest)
    except FileFormatError as error:
        raise FileFormatError(f"{error}. If another version wrote it, export the family again") from error


def read_family(folder: Path | str) -> Manifest:
    """Read a family and check that every file in it is what its manifest says."""
    folder, manifest = Path(folder), read_manifest(folder)
    for listed in _listed(manifest):
        path = inside(folder, listed.file, MANIFEST)
        if not path.is_file():
            raise FileFormatError(f"{path}: missing, though {MANIFEST} lists it. Export or copy the family again")
        if sha256(path) != listed.sha256:
            raise FileFormatError(f"{path}: damaged: it is not the file that {MANIFEST} describes")
        if isinstance(listed, ReferenceImages | ReferenceAnswers) and path.stat().st_size != listed.size_bytes:
            raise FileFormatError(f"{path}: damaged: it has not the {listed.size_bytes} bytes that {MANIFEST} tells")
    for variant in manifest.variants:
        _check_graph(folder / variant.file, variant.weights)
    if manifest.shipped is not None:
        _check_graph(folder / manifest.shipped.file, manifest.shipped.files)
    return manifest


Listed = WeightFile | Variant | Shipped | ReferenceImages | ReferenceAnswers


def _listed(manifest: Manifest) -> list[Listed]:
    listed: list[Listed] = [*manifest.weights, *manifest.variants]
    if manifest.shipped is not None:
        listed += [manifest.shipped, *manifest.shipped.also]
    if manifest.reference is not None:
        listed += manifest.reference.files
    return listed


def files_to_time(manifest: Manifest) -> dict[str, str]:
    """Return the files beside the manifest that a device needs to time its variants, with their hashes."""
    shipped = manifest.shipped
    left_out = set() if shipped is None else {shipped.file, *(each.file for each in shipped.also)}
    return {each.file: each.sha256 for each in _listed(manifest) if each.file not in left_out}


def _check_graph(path: Path, listed: Sequence[str]) -> None:
    """Refuse a graph that points into files which the manifest does not list for it."""
    if undeclared := sorted(files_read_by(path) - set(listed)):
        raise FileFormatError(f"{path}: reads {undeclared[0]}, which {MANIFEST} does not list for it")


def own_files(folder: Path) -> list[str] | None:
    """Return the names of the files that belong to the family in this folder; None if there is no family."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        manifest = read_json(folder / MANIFEST, Manifest)
    except FileFormatError:
        return None
    graphs = [folder / variant.file for variant in manifest.variants]  # a profile may have built engines beside them
    engines = [path.name for graph in graphs for path in engine_files(graph)]
    listed = [each.file for each in _listed(manifest)]
    left_behind = [path.name for begun in UNFINISHED for path in folder.glob(begun)]
    left_behind += [path.name for path in folder.iterdir() if is_temporary(path.name)]
    shipped = [] if manifest.shipped is None else SHIPPED  # without it, files of such names are somebody's own
    named = [MANIFEST, RANKING, VALIDATION, TRACE, *listed, *shipped, *engines, *report_files(), *left_behind]
    for_torch = [TORCH] if _is_ours(folder / TORCH, {variant.name for variant in manifest.variants}) else []
    return list(dict.fromkeys([*named, *for_torch, *own_applications(folder, manifest)]))


def _is_ours(torch: Path, variants: Collection[str]) -> bool:
    """Return True if a folder holds nothing but variants of its family that an export has written there for torch."""
    if torch.is_symlink() or not torch.is_dir():
        return False
    return all(folder.name in variants and _is_model(folder) for folder in torch.iterdir())


def _is_model(folder: Path) -> bool:
    """Return True if a folder holds a variant for torch, and nothing else."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (name in TORCH_FILES or COMPILED.fullmatch(name)):
            return False
    try:
        return read_json(folder / TORCH_MODEL, dict[str, Any]).keys() >= TORCH_KEYS
    except SnapvitError:
        return False


def parts_beside(path: Path) -> list[Path]:
    """Return the files of the family or the Elastic folder that `path` would lie in: no command writes over them."""
    family, elastic = own_files(path.parent), elastic_files(path.parent)
    names = [*(elastic or ()), *(() if family is None else (*family, *SHIPPED, *APPLICATIONS))]
    return [path.parent / name for name in names]
