"""Segmentation masks, which give every pixel of an image its class, and the layout of Pascal VOC. Light: numpy.

The mask of an image is a `.png` with one channel: of the same name beside a `.jpg`, or in `SegmentationClass` where
the image is in `JPEGImages`, as Pascal VOC has it. There `ImageSets/Segmentation` lists the images of each split, and
`val.txt` is the test split: the labels of the official one were never published.

Some values mean no class (a border, 255) and are ignored; the others become 0, 1, ... in rising order. A mask is
resized and cropped as its image is, taking the nearest pixel.

A mask belongs to the image as a viewer shows it, turned as its EXIF says, and must have that size. It is turned itself
only if it has an EXIF of its own; a mask that was drawn over the stored, unturned pixels has to be turned first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, first_line
from ..storage.reading import MOST_TEXT, check_readable
from .decode import UnreadableImage, check_size, open_image, opened, turning
from .preprocessing import Preprocessing
from .source import Source

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES, MASKS, LISTS = "JPEGImages", "SegmentationClass", "ImageSets/Segmentation"  # folders of Pascal VOC
UNKNOWN = 255  # by custom: a pixel that counts for no class
Masks = npt.NDArray[np.uint8]  # (N, H, W)


def is_voc(folder: Path) -> bool:
    """Return True for a folder in the layout of Pascal VOC."""
    return all((folder / part).is_dir() for part in (IMAGES, MASKS, LISTS))


def voc_splits(folder: Path) -> dict[str, Source]:
    """Return the splits of a Pascal VOC folder: `train`, and `val` as the test split. They have no labels."""
    return {split: _listed(folder, file) for split, file in (("train", "train.txt"), ("test", "val.txt"))}


def _listed(folder: Path, file: str) -> Source:
    path = folder / LISTS / file
    check_readable(path, MOST_TEXT)
    try:
        names = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SnapvitError(f"{path}: cannot be read ({first_line(error)}). Pascal VOC has one there") from error
    if not names:
        raise SnapvitError(f"{path}: names no images. Write one name per line, without .jpg")
    if strange := [name for name in names if "/" in name or "\\" in name or name.startswith(".")]:
        raise SnapvitError(f"{path}: '{strange[0]}' is not the bare name of an image. Write it without folder and .jpg")
    paths = [folder / IMAGES / f"{name}.jpg" for name in names]
    return Source(str(path), lambda i: open_image(paths[i]), len(paths), lambda i: str(paths[i]))


def mask_of(title: str) -> Path:
    """Return the path of the mask of an image."""
    image = Path(title)
    folder = image.parent
    if folder.name == IMAGES and (folder.parent / MASKS).is_dir():
        return folder.parent / MASKS / f"{image.stem}.png"
    return image.with_suffix(".png")


def check_masks(source: Source) -> None:
    """Refuse a source with an image that has no mask."""
    if source.mask is not None:
        return
    for title in map(source.title, range(source.count)):
        if mask_of(title) == Path(title) or not mask_of(title).is_file():
            layouts = "a .png beside each .jpg, or Pascal VOC"
            raise SnapvitError(f"{title}: has no mask. Give --data a folder with masks: {layouts}")


def prepare_masks(
    source: Source,
    preprocessing: Preprocessing,
    left_out: Collection[str] = (),
    progress: Callable[[], None] = lambda: None,
) -> Masks:
    """Read the masks of a source's images, except those `left_out`, with their values as they are: (N, H, W)."""
    height, width = preprocessing.input_size[1:]
    wanted = [i for i in range(source.count) if source.title(i) not in left_out]
    masks = np.empty((len(wanted), height, width), np.uint8)
    for row, i in enumerate(wanted):
        masks[row] = _in_column(source, i, preprocessing) if source.mask else _beside(source.title(i), preprocessing)
        progress()
    return masks


def _beside(title: str, preprocessing: Preprocessing) -> npt.NDArray[np.uint8]:
    """Read the mask whose file lies beside the image's."""
    path = mask_of(title)
    mask = _upright(path)
    if mask.mode not in ("L", "P"):
        raise SnapvitError(f"{path}: is of kind {mask.mode}, a mask has one channel of bytes. Save class numbers in it")
    return _placed(mask, open_image(title), str(path), preprocessing)


def _in_column(source: Source, i: int, preprocessing: Preprocessing) -> npt.NDArray[np.uint8]:
    """Read the mask that a dataset has in a column; in colours, it is one of Pascal VOC's."""
    assert source.mask is not None
    mask, title = source.mask(i), f"the mask of {source.title(i)}"
    if mask.mode == "RGB":
        mask = _by_colours(mask, title)
    elif mask.mode not in ("L", "P"):
        raise SnapvitError(f"{title}: is of kind {mask.mode}, a mask has one channel of bytes. Give --data a folder")
    return _placed(mask, source.open(i), title, preprocessing)


def _placed(mask: Image, image: Image, title: str, preprocessing: Preprocessing) -> npt.NDArray[np.uint8]:
    if mask.size != image.size:
        sizes = f"{mask.size[0]}x{mask.size[1]}, its image {image.size[0]}x{image.size[1]}"
        raise SnapvitError(f"{title}: is {sizes}, turned as its EXIF says. Mend it")
    return preprocessing.mask(mask)


def voc_colours() -> npt.NDArray[np.uint8]:
    """The colours in which Pascal VOC shows the classes 0 to 255: (256, 3).

    Bit k of a class's three octal digits, from the lowest digit up, is bit 7, 6, 5 of red (k=0), green and blue.
    """
    classes = np.arange(256)
    colours = np.zeros((256, 3), np.uint8)
    for digit in range(3):
        for channel in range(3):
            bit = classes >> (3 * digit + channel) & 1
            colours[:, channel] |= (bit << (7 - digit)).astype(np.uint8)
    return colours


def _by_colours(mask: Image, title: str) -> Image:
    """Return the classes of a mask that was saved in the colours of Pascal VOC."""
    from PIL.Image import fromarray

    pixels = np.asarray(mask).astype(np.int64) @ (1 << 16, 1 << 8, 1)  # (H, W)
    known = voc_colours().astype(np.int64) @ (1 << 16, 1 << 8, 1)
    order = np.argsort(known)
    found = order[np.searchsorted(known[order], pixels).clip(max=255)]
    if (known[found] != pixels).any():
        strange = np.asarray(mask)[known[found] != pixels][0].tolist()
        raise SnapvitError(f"{title}: has the colour {strange}, which is no class of Pascal VOC. Give --data a folder")
    return fromarray(found.astype(np.uint8))


def _upright(path: Path) -> Image:
    try:
        with opened(path) as mask:
            check_size(mask.size, str(path))
            mask.load()
            turn = turning(mask)
            return mask.copy() if turn is None else mask.transpose(turn)
    except UnreadableImage as error:
        raise SnapvitError(str(error).replace("as an image", "as a mask")) from error
    except Exception as error:  # damaged files make the decoders raise whatever they like
        raise SnapvitError(f"{path}: cannot be read as a mask ({first_line(error)}). Mend or remove it") from error


def numbered(masks: dict[str, Masks], ignore: Collection[int] = (UNKNOWN,)) -> tuple[dict[str, Masks], tuple[int, ...]]:
    """Replace the values of all masks by classes 0, 1, ..., or UNKNOWN if ignored; return them and the values."""
    present = sorted(set(np.concatenate([np.unique(part) for part in masks.values()]).tolist()) - set(ignore))
    if len(present) < 2:
        seen = ", ".join(map(str, present)) or "none"
        raise SnapvitError(
            f"masks need at least two classes beside what is ignored, these have {seen}. Change --ignore"
        )
    if len(present) > UNKNOWN:
        raise SnapvitError(f"masks have {len(present)} classes, at most {UNKNOWN} are supported. Give --ignore 255")
    numbers = np.full(256, UNKNOWN, np.uint8)
    numbers[present] = np.arange(len(present))
    return {split: numbers[part] for split, part in masks.items()}, tuple(present)
