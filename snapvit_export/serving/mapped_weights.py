"""The weight files of a family, each mapped once for all variants that read it. Light: numpy.

A graph is given its tensors as views of the mapping, so ten variants hold the pages of one file, and only those that
were read. Two things can happen to a file that is mapped. Who replaces it by another of its name, as our own writers
do, changes nothing here: the old one lives on. Who writes into it changes the weights of a running model, which nobody
notices; so size and time of the open file are compared before every run, a matter of a microsecond.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import FileFormatError
from ..graph.read import read_graph
from ..storage.atomic import inside, sha256
from ..storage.reading import MOST_ARRAYS, why_not_read

Arrays = dict[str, npt.NDArray[Any]]
MOST_KEPT = 1.2  # times the weights of the variant that reads most: so much of all weight files stays in memory


class MappedFile:
    """A file in memory that was compared with its hash."""

    def __init__(self, path: Path, digest: str) -> None:
        if reason := why_not_read(path, MOST_ARRAYS):
            raise FileFormatError(f"{path}: cannot be read: {reason}")
        try:
            if sha256(path) != digest:
                raise FileFormatError(f"{path}: damaged: it is not the file that the manifest describes")
            self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # open for as long as it is mapped
            weakref.finalize(self, os.close, self._file)
            self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise FileFormatError(f"{path}: cannot be read: {error}") from error
        self.path, self._known = path, self._identity()

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int) -> npt.NDArray[Any]:
        """Return a part of the file, without a copy."""
        return np.frombuffer(self._map, dtype, int(np.prod(shape)), offset).reshape(shape)

    @property
    def is_unchanged(self) -> bool:
        """False if somebody has written into it since."""
        return self._identity() == self._known

    def _identity(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    @property
    def size_bytes(self) -> int:
        return self._known[0]

    def forget(self) -> None:
        """Give its pages back; whoever reads it again finds them in the system's cache, if they are still there."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def load(self) -> None:
        """Read a byte of every page, so that whoever reads the file next does not wait for them."""
        self._map[:: mmap.PAGESIZE]


class MappedWeights:
    """The weight files of a folder by name, mapped when they are first read."""

    def __init__(self, folder: Path, digests: Mapping[str, str]) -> None:
        self.folder, self._digests = folder, dict(digests)
        self._files: dict[str, MappedFile] = {}

    def file(self, name: str) -> MappedFile:
        """Return a file, which the manifest must list."""
        if name not in self._digests:
            raise FileFormatError(f"{self.folder / name}: is read by a graph and not listed in the manifest")
        if name not in self._files:
            self._files[name] = MappedFile(inside(self.folder, name, "manifest.json"), self._digests[name])
        return self._files[name]

    def of_graph(self, path: Path) -> tuple[Arrays, list[MappedFile]]:
        """Return the tensors that a graph reads from other files, by name, and these files."""
        from onnx import helper

        found: Arrays = {}
        files: dict[str, MappedFile] = {}
        for tensor in read_graph(path).graph.initializer:
            external = {entry.key: entry.value for entry in tensor.external_data}
            if external:
                name = external["location"]
                files[name] = self.file(name)
                dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
                offset = int(external.get("offset", "0"))
                found[tensor.name] = files[name].array(dtype, tuple(tensor.dims), offset)
        return found, list(files.values())

    def close(self) -> None:
        """Forget the files; each is closed when nobody uses it any more."""
        self._files.clear()


def keep_in_memory(files: Mapping[str, Collection[MappedFile]], latest: Sequence[str]) -> None:
    """Keep the files of the latest variants in memory, of the first and of more within the bound; forget the others.

    Whoever reads these again finds them in the system's cache, which takes a fraction of a millisecond.
    """
    most = MOST_KEPT * max((_size_bytes(set(each)) for each in files.values()), default=0)
    kept: set[MappedFile] = set()
    for name in latest:
        more = kept.union(files.get(name, ()))
        if kept and _size_bytes(more) > most:
            break
        kept = more
    for file in set().union(*files.values()) - kept:
        file.forget()


def _size_bytes(files: Collection[MappedFile]) -> int:
    return sum(file.size_bytes for file in files)
