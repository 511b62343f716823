"""Numbers of eight bits, E4M3 as in ONNX's FLOAT8E4M3FN: numpy has no such type, so arrays hold their bytes. Light.

A sign, four bits of exponent and three of mantissa; no infinity. The codes of positive numbers rise with the numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LARGEST_FP8 = 448.0
_CODES = np.arange(127)  # positive numbers; 127 is not a number
_LEVELS = np.where(
    _CODES < 8, _CODES * 2.0**-9, (1 + (_CODES & 7) / 8) * 2.0 ** ((_CODES >> 3) - 7)
)  # below 2^-6 evenly spaced
_MIDDLES = (_LEVELS[:-1] + _LEVELS[1:]) / 2


def to_fp8(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Return the bytes of the nearest numbers, of two that are as near the one with an even code; larger ones saturate.

    >>> to_fp8([1.0, -448.0, 1e9]).tolist()
    [56, 254, 126]
    """
    given = np.asarray(values, np.float32)
    size = np.abs(given)
    codes = np.searchsorted(_MIDDLES, size)  # a middle itself goes to the code below
    codes += (codes < len(_MIDDLES)) & (codes & 1 == 1) & (size == _MIDDLES[np.minimum(codes, len(_MIDDLES) - 1)])
    return (codes | np.where(np.signbit(given), 128, 0)).astype(np.uint8)


def from_fp8(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the numbers of such bytes.

    >>> from_fp8(to_fp8([0.3, -17.0])).tolist()
    [0.3125, -16.0]
    """
    sizes = np.append(_LEVELS, np.nan)[codes & 127]
    return np.where(codes & 128, -sizes, sizes).astype(np.float32)
