"""One image, decoded: from whatever a file holds to RGB bytes, turned as a viewer shows it. Light: Pillow and numpy.

| Pillow's mode | what becomes of it |
|---|---|
| RGB, L, 1, P, CMYK, YCbCr, LAB, HSV | Pillow converts them; of 16-bit colour it has taken the upper bytes already |
| LA, RGBA, PA, La, RGBa, P with transparency | the colours alone, as in the pipelines that models are trained with |
| I;16, and I in a PNG or PNM file: 16-bit grey | the upper byte, as of 16-bit colour |
| F, other I, TIFFs with signed numbers, 12 bits or 16 with white as 0 | refused: what is black and white is not known |

Also refused, as an image that cannot be read: formats beyond `FORMATS` (Pillow would start Ghostscript for some), no
pixels, more than `MOST_PIXELS`, and strips whose sides differ more than `MOST_PROPORTION` times, of which a model
would see next to nothing. `family/run.py.in` does the same, and a test holds them equal.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SnapvitError, first_line
from ..storage.reading import MOST_IMAGE, why_not_read

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "TIFF", "BMP", "DIB", "PPM", "GIF", "JPEG2000", "AVIF", "ICO", "TGA", "PCX")
MOST_PIXELS = 1 << 27  # 512 MB in memory; the largest cameras have 100 million
MOST_PROPORTION = 100  # of the longer side to the shorter
ORIENTATION = 0x0112  # tag of EXIF and TIFF
BITS, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF
UNSIGNED = {1, 4}  # sample formats: whole numbers, and not said


class UnreadableImage(SnapvitError):
    """One image cannot be decoded; `prepare` leaves it out if few others are like it."""


def unreadable(title: str, reason: str) -> UnreadableImage:
    return UnreadableImage(f"{title}: cannot be read as an image ({reason}). Mend or remove it")


def open_image(path: str | Path) -> Image:
    """Decode one image file as RGB."""
    with opened(path) as image:
        return as_rgb(image, str(path))


def decode_bytes(data: bytes, title: str = "the image", most_pixels: int = MOST_PIXELS) -> Image:
    """Decode one image file as RGB that is in memory."""
    with _header_read(io.BytesIO(data), title) as image:
        check_size(image.size, title, most_pixels)
        return as_rgb(image, title)


@contextmanager
def opened(path: str | Path) -> Iterator[Image]:
    """Yield an image file of which only the header was read."""
    if not os.path.lexists(path):
        raise unreadable(str(path), "no such file")
    if reason := why_not_read(path, MOST_IMAGE):  # Pillow would wait for ever at a pipe
        raise unreadable(str(path), reason)
    with _header_read(path, str(path)) as image:
        yield image


@contextmanager
def _header_read(source: str | Path | io.BytesIO, title: str) -> Iterator[Image]:
    from PIL import Image, UnidentifiedImageError

    Image.init()
    try:
        image = Image.open(source, formats=[name for name in FORMATS if name in Image.OPEN])
    except UnidentifiedImageError as error:
        reason = "of no known format" if isinstance(source, io.BytesIO) else first_line(error)
        raise unreadable(title, reason) from error
    except Exception as error:  # damaged files make the decoders raise whatever they like
        raise unreadable(title, first_line(error)) from error
    with image:
        yield image


def as_rgb(image: Image, title: str = "the image") -> Image:
    """Return an image as RGB bytes, turned as its EXIF says; what has no defined black and white is refused."""
    check_size(image.size, title)
    try:
        image.load()
        turn = turning(image)
        reason = _undefined(image)
        rgb = None if reason else _eight_bits(image).convert("RGB")
    except Exception as error:  # damaged files make the decoders raise whatever they like
        raise unreadable(title, first_line(error)) from error
    if rgb is None:
        raise unreadable(title, f"{reason}: what is black and white is not defined")
    if turn is not None:
        rgb = rgb.transpose(turn)
    rgb.info = {}  # its EXIF would turn it again
    return rgb


def check_size(size: tuple[int, int], title: str, most_pixels: int = MOST_PIXELS) -> None:
    """Refuse an image without pixels, with too many, or in the shape of a thread."""
    shorter, longer = sorted(size)
    if shorter < 1 or shorter * longer > most_pixels or longer > MOST_PROPORTION * shorter:
        limits = f"at most {most_pixels // 10**6} million, and {MOST_PROPORTION} to 1"
        raise unreadable(title, f"{size[0]} x {size[1]} pixels; {limits}")


def turning(image: Image) -> Transpose | None:
    """Return how a decoded image must be turned to be seen upright; None: not at all, or its EXIF is damaged."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        return turns.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # what a viewer shows as it is stored
        return None


def _undefined(image: Image) -> str | None:
    """Return what an image holds whose range is not known; None for the others."""
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    if image.mode == "F":
        return "floating-point numbers"
    if set(tags.get(SAMPLE_FORMAT, UNSIGNED)) - UNSIGNED:
        return "signed numbers"
    if image.mode == "I" and image.format not in ("PNG", "PPM"):
        return "32-bit numbers"
    if image.mode.startswith("I;16") and tags and (tags.get(BITS), tags.get(PHOTOMETRIC)) != ((16,), 1):
        return "grey of 12 bits, or with white as 0"
    return None


def _eight_bits(image: Image) -> Image:
    """Return an image in a mode from which Pillow converts rightly to RGB."""
    from PIL import Image as PIL

    if image.mode.startswith("I"):
        return PIL.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("La", "RGBa"):
        return image.convert(image.mode.upper())
    if image.mode == "P" and "transparency" in image.info:  # which Pillow would warn of
        return image.convert("RGBA")
    return image
