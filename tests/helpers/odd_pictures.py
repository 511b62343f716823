"""Picture files that no camera writes, byte by byte."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def flat_png(path: Path, width: int, height: int, more: bytes = b"") -> Path:
    """A black picture of one bit a pixel, in few bytes whatever its size; `more`: chunks before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packer, row = zlib.compressobj(9), bytes(1 + (width + 7) // 8)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    path.write_bytes(SIGNATURE + chunk(b"IHDR", header) + more + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))
    return path


def tiff(
    path: Path, pixels: np.ndarray, bits: int, photometric: int = 1, sample_format: int = 1, order: str = "<"
) -> Path:
    """A TIFF of one channel that says of its bytes what it is told to; `order` of the bytes of a number: < or >."""
    height, width = pixels.shape
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    entries = [
        (256, 4, width),
        (257, 4, height),
        (258, 3, bits),
        (259, 3, 1),  # not compressed
        (262, 3, photometric),
        (273, 4, 8),  # where the pixels begin
        (277, 3, 1),
        (278, 4, height),
        (279, 4, len(data)),
        (339, 3, sample_format),
    ]
    directory = struct.pack(f"{order}H", len(entries))
    for tag, kind, value in entries:
        directory += struct.pack(f"{order}HHI", tag, kind, 1)
        directory += struct.pack(f"{order}HH", value, 0) if kind == 3 else struct.pack(f"{order}I", value)
    mark = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, 8 + len(data))
    path.write_bytes(mark + data + directory + bytes(4))
    return path


def gradient(width: int = 50, height: int = 40) -> np.ndarray:
    """All levels of grey, differently in all corners: (height, width) bytes."""
    down, across = np.linspace(0, 155, height)[:, None], np.linspace(0, 100, width)[None]
    return (down + across).round().astype(np.uint8)


def turned(path: Path, orientation: int, picture: Image.Image | None = None) -> Path:
    """A picture whose EXIF says how it must be turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    (picture or Image.fromarray(gradient())).save(path, exif=exif)
    return path
