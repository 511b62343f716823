"""Buffers: many arrays in one plain file, page-aligned and memory-mapped, with an index. Light: numpy.

Every array begins at a multiple of 4096 bytes. Opening a buffer copies nothing, since pages are read when they are
touched, and an ONNX graph can point into the same file by offset and length. The index is checked before the file is:
names, shapes, sizes, alignment, bounds, overlaps. Hashes are checked by whoever uses an array first (`check_hash`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..errors import FileFormatError, SnapvitError
from .atomic import inside, writing
from .json import Count, Name, Value

ALIGNMENT = 4096  # bytes: a page, so that every array can be mapped alone
DataType = Literal["float32", "float64", "float16", "int8", "float8"]
STORED: dict[DataType, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
    "int8": np.dtype("i1"),
    "float8": np.dtype("u1"),  # E4M3: numpy has no such type, so arrays hold its bytes
}
Array = npt.NDArray[Any]


class Tensor(Value, frozen=True, kw_only=True):
    """The place of one array in the file; C order, little endian."""

    name: str
    dtype: DataType
    shape: tuple[Count, ...]
    offset: Count
    size_bytes: Count
    sha256: str


class Buffer(Value, frozen=True, kw_only=True):
    """A file and the index of its arrays, in the order of the file."""

    file: Name  # in the folder
    size_bytes: Count
    tensors: tuple[Tensor, ...]


def write_buffer(path: Path, arrays: Iterable[tuple[str, Array]], dtype: DataType | None = None) -> Buffer:
    """Write arrays one after the other, holding only one of them, as `dtype` or as they are; return the index."""
    tensors = []
    with writing(path), open(path, "wb") as file:
        for name, array in arrays:
            stored = dtype or _kind(array)
            data = np.ascontiguousarray(array, STORED[stored])
            file.write(bytes(-file.tell() % ALIGNMENT))
            offset, raw = file.tell(), data.reshape(-1).view(np.uint8).data
            file.write(raw)
            digest = hashlib.sha256(raw).hexdigest()
            shape, size = tuple(data.shape), data.nbytes
            tensors.append(Tensor(name=name, dtype=stored, shape=shape, offset=offset, size_bytes=size, sha256=digest))
        size = file.tell()
    return Buffer(file=path.name, size_bytes=size, tensors=tuple(tensors))


def _kind(array: Array) -> DataType:
    for name in get_args(DataType):
        if array.dtype == STORED[name]:
            return name
    raise ValueError(f"arrays of {array.dtype} are not stored")


def map_buffer(
    folder: Path, buffer: Buffer, shapes: Mapping[str, tuple[int, ...]], dtype: DataType, listed_in: str
) -> dict[str, Array]:
    """Map the arrays of a buffer that must hold exactly `shapes`; read-only, and nothing is read yet."""
    _check_index(buffer, shapes, dtype, folder / listed_in)
    path = inside(folder, buffer.file, listed_in)
    if not path.is_file():
        raise FileFormatError(f"{path}: missing, though {listed_in} lists it. Make or copy the folder again")
    if path.stat().st_size != buffer.size_bytes:
        raise FileFormatError(
            f"{path}: damaged: it has {path.stat().st_size} bytes, {listed_in} says {buffer.size_bytes}"
        )
    try:
        pages = np.asarray(np.memmap(path, np.uint8, mode="r"))  # as a plain array: its slices are cheaper
    except OSError as error:
        raise SnapvitError(f"{path}: cannot be read: {error.strerror or error}") from error
    return {
        tensor.name: pages[tensor.offset : tensor.offset + tensor.size_bytes].view(STORED[dtype]).reshape(tensor.shape)
        for tensor in buffer.tensors
    }


def check_hash(array: Array, tensor: Tensor, path: Path) -> None:
    """Refuse an array that is not what was written."""
    if hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest() != tensor.sha256:
        raise FileFormatError(f"{path}: damaged: {tensor.name} does not match its hash. Make or copy the folder again")


def _check_index(buffer: Buffer, shapes: Mapping[str, tuple[int, ...]], dtype: DataType, where: Path) -> None:
    names = [tensor.name for tensor in buffer.tensors]
    if wrong := sorted(set(names) ^ set(shapes)):
        what = "lacks" if wrong[0] in shapes else "has unknown"
        raise FileFormatError(f"{where}: the index of {buffer.file} {what} {wrong[0]}")
    if len(names) != len(shapes):
        raise FileFormatError(f"{where}: the index of {buffer.file} names a tensor twice")
    end = 0
    for tensor in sorted(buffer.tensors, key=lambda tensor: tensor.offset):
        _check_tensor(tensor, shapes[tensor.name], dtype, f"{where}: {tensor.name} in {buffer.file}")
        if tensor.offset < end:
            raise FileFormatError(f"{where}: {tensor.name} in {buffer.file} overlaps what lies before it")
        end = tensor.offset + tensor.size_bytes
        if end > buffer.size_bytes:
            raise FileFormatError(f"{where}: {tensor.name} in {buffer.file} reaches beyond the end of the file")


def _check_tensor(tensor: Tensor, shape: tuple[int, ...], dtype: DataType, where: str) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise FileFormatError(f"{where} is {tensor.dtype} {tensor.shape}, the anatomy needs {dtype} {shape}")
    if tensor.size_bytes != math.prod(shape) * STORED[dtype].itemsize:
        raise FileFormatError(f"{where} has {tensor.size_bytes} bytes, which is not what its shape needs")
    if tensor.offset % ALIGNMENT:
        raise FileFormatError(f"{where} begins at byte {tensor.offset}, which is not a multiple of {ALIGNMENT}")
