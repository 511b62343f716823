"""Parses options that hold several numbers, `0.1,0.3`, `0.35:0.2` and `192x160`, or a unit, `12MB` and `3.5M`."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..allocation.asked import refuse_same
from ..errors import UsageError

if TYPE_CHECKING:
    from ..evaluate.results_table import CutSize
    from ..family.manifest import Limits, Prefer
    from ..profiles import Card
    from ..serving.controller import Late
    from ..target import Precision, Runtime
    from ..workflows.onnx_model import OnnxOptions

SIZES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_RESOLUTION = re.compile(r"\s*(\d{1,6})(?:x(\d{1,6}))?\s*", re.ASCII)
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def fractions(text: str | None, option: str) -> list[float]:
    """Parse `0.1,0.3`; the Planner checks the range of the numbers."""
    if text is None:
        return []
    found = [_number(part, option, "0.1,0.3") for part in text.split(",")]
    refuse_same(option, found)
    return found


def pairs(text: str | None, option: str) -> list[tuple[float, float]]:
    """Parse `0.35:0.2,0.65:0.5`: the ratio of neurons and of heads to cut."""
    if text is None:
        return []
    found = []
    for part in text.split(","):
        mlp, colon, head = part.partition(":")
        if not colon:
            raise UsageError(f"{option} '{part}' is not a pair. Write the ratio of neurons and of heads as 0.35:0.2")
        found.append((_number(mlp, option, "0.35:0.2"), _number(head, option, "0.35:0.2")))
    refuse_same(option, found)
    return found


def cut_sizes(pairs: Sequence[tuple[float, float]], sparsity: Sequence[float], flops: Sequence[float]) -> list[CutSize]:
    """Return the sizes of a table: pairs first, then sparsities, then FLOPs."""
    from ..allocation.cut_order import check_ratio
    from ..allocation.planner import check_fraction, check_sparsity
    from ..evaluate.results_table import CutSize

    for mlp, head in pairs:
        check_ratio("neurons", mlp)
        check_ratio("heads", head)
    for fraction in sparsity:
        check_sparsity(fraction)
    for fraction in flops:
        check_fraction("FLOPs", fraction)
    sizes = [CutSize(pair=pair) for pair in pairs] + [CutSize(sparsity=fraction) for fraction in sparsity]
    return sizes + [CutSize(flops=fraction) for fraction in flops]


def names(text: str | None, option: str) -> list[str]:
    """Parse `cifar10,pets`; a path that is there is one name, whatever is in it."""
    if text is None:
        return []
    if Path(text).exists():
        return [text]
    found = [part.strip() for part in text.split(",")]
    if len(found) > 1 and not all(found):
        raise UsageError(f"{option} '{text}' has an empty name. Write it like cifar10,pets")
    return found


def seeds(text: str | None, one: int) -> list[int]:
    """Parse `0,13,42`; the one of --seed where none are given."""
    found = []
    for part in [str(one)] if text is None else text.split(","):
        if not re.fullmatch(r"\s*\d{1,10}\s*", part, re.ASCII) or int(part) >= 2**32:
            raise UsageError(f"--seeds '{part}' is no seed. Write them like 0,13,42")
        found.append(int(part))
    return found


def refuse_in_table(runtime: Runtime | None, onnx: OnnxOptions) -> None:
    """Refuse options of files, which a table of several sizes or data sets is not of."""
    if runtime is not None or not onnx.is_empty:
        raise UsageError(
            "--runtime, --output, --preprocessing, --mean, --std and --resize are of files, and a table is of a model "
            "in torch. Leave them out, or evaluate one file on one --data"
        )


def resolutions(text: str | None, option: str) -> list[int | tuple[int, int]]:
    """Parse `192,160` and `192x160`: pixels of a square, or height and width."""
    found: list[int | tuple[int, int]] = []
    for part in [] if text is None else text.split(","):
        match = _RESOLUTION.fullmatch(part)
        if match is None:
            raise UsageError(f"{option} '{part}' is no size in pixels. Write it like 160 or, height first, 192x160")
        found.append(int(match[1]) if match[2] is None else (int(match[1]), int(match[2])))
    refuse_same(option, found)
    return found


def model_arguments(
    given: list[str] | None, pool: str | None = None, image_size: str | None = None
) -> dict[str, int | float | bool | str | list[int]]:
    """Parse `img_size=384`, `img_size=384x192`, `qkv_bias=false`, `mlp_ratio=2.5` and `global_pool=avg`.

    `pool` and `image_size` are the options that say two of these in short.
    """
    found: dict[str, int | float | bool | str | list[int]] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or not value.strip():
            raise UsageError(f"--model-arg '{text}' is not a name and a value. Write it like img_size=384")
        if name in found:
            raise UsageError(f"--model-arg {name} is given twice. Give it once")
        found[name] = _model_argument(value.strip())
    short = {"--pool": ("global_pool", _pool(pool)), "--image-size": ("img_size", _side(image_size))}
    for option, (argument, meant) in short.items():
        if meant is not None and argument in found:
            raise UsageError(f"{option} says what --model-arg {argument} would. Give one of them")
        if meant is not None:
            found[argument] = meant
    return found


def _pool(text: str | None) -> str | None:
    if text not in (None, "token", "avg"):
        raise UsageError(f"--pool '{text}' is not token (the class token) or avg (the mean of the patches)")
    return text


def _side(text: str | None) -> int | list[int] | None:
    sizes = resolutions(text, "--image-size")
    if len(sizes) > 1:
        raise UsageError(f"--image-size '{text}' is more than one size. Give one, such as 224 or 192x384")
    return None if not sizes else list(sizes[0]) if isinstance(sizes[0], tuple) else sizes[0]


def _model_argument(text: str) -> int | float | bool | str | list[int]:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if sides := re.fullmatch(r"(\d{1,6})x(\d{1,6})", text, re.ASCII):
        return [int(sides[1]), int(sides[2])]
    if re.fullmatch(r"[-+]?\d{1,12}", text, re.ASCII):
        return int(text)
    return float(text) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,2})?", text, re.ASCII) else text


def limits(at: str, max_size: str | None, max_params: str | None) -> Limits:
    """Parse the limits that a choice meets beside its budget."""
    from ..family.manifest import Limits
    from ..profiling.profile import check_percentile

    return Limits(
        at=check_percentile(at),
        max_size_bytes=_quantity(max_size, "--max-size", SIZES, "12MB"),
        max_params=_quantity(max_params, "--max-params", COUNTS, "3.5M"),
    )


def onnx_options(
    output: str | None,
    preprocessing: str | None,
    mean: str | None,
    std: str | None,
    resize: str | None,
    classes: Path | None = None,
) -> OnnxOptions:
    """Parse what an ONNX file does not say itself."""
    from ..workflows.onnx_model import OnnxOptions

    return OnnxOptions(
        output=output,
        preprocessing=preprocessing,
        mean=_channels(mean, "--mean"),
        std=_channels(std, "--std"),
        resize=resize,
        classes=classes,
    )


def _channels(text: str | None, option: str) -> tuple[float, ...] | None:
    """Parse `0.485,0.456,0.406`, one number for each channel, which may be the same."""
    return None if text is None else tuple(_number(part, option, "0.485,0.456,0.406") for part in text.split(","))


def share(text: str | None, option: str) -> float | None:
    """Parse `0.7` or `70%`."""
    if text is None:
        return None
    number, percent, rest = text.strip().partition("%")
    value = _number(number, option, "0.7 or 70%") / (100 if percent else 1)
    if rest or not 0 <= value <= 1:
        raise UsageError(f"{option} '{text}' is not between 0 and 1. Write it like 0.7 or 70%")
    return value


def _quantity(text: str | None, option: str, units: dict[str, int], example: str) -> int | None:
    if text is None:
        return None
    match = _QUANTITY.fullmatch(text)
    number = float(match[1]) * units.get(match[2].lower(), 0) if match else 0.0
    if not 1 <= number <= 2**53:
        raise UsageError(f"{option} '{text}' is not understood. Write it like {example}")
    return int(number)


def _number(text: str, option: str, example: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{option} '{text}' is not a number. Write it like {example}")
    return number


def preference(text: str) -> Prefer:
    """Parse what a choice prefers among the variants that fit."""
    if text not in ("fidelity", "accuracy"):
        raise UsageError(f"--prefer '{text}' is neither fidelity nor accuracy. Give one of them")
    return text  # type: ignore[return-value]


def own_precision(asked: str | None, of_card: Precision, runtime: Runtime, chooses: bool) -> Precision:
    """Return the precision of the dense variant.

    Left to us, it is the card's; but where a budget `chooses` it on a CPU, that begins with fp32, and tries the others.
    """
    from ..target import ON_CPU, parse_precision

    if asked not in (None, "auto"):
        return parse_precision(str(asked), runtime)
    return "fp32" if chooses and runtime in ON_CPU else parse_precision(of_card, runtime)


def command_line() -> str:
    """Return the command that is running, as a person would type it again."""
    words = shlex.join(["snapvit", *sys.argv[1:]])
    return words.encode(errors="backslashreplace").decode()  # a path may hold bytes that are no text, a manifest not


def next_on_device(card: Card, family: Path) -> list[str]:
    """Return the commands that go on from a family for another device."""
    where, name = shlex.quote(str(family)), shlex.quote(family.name)
    if card.name.startswith("jetson"):
        return [
            "Next, build, time and choose on the board, which needs only JetPack (or by hand: docs/jetson.md):",
            f"  snapvit profile {where} --target jetson://user@board --budget 10ms",
        ]
    return [
        "Next, copy it to the device and choose there, or time it from here over ssh:",
        f"  scp -r {where} user@device: && ssh user@device snapvit choose {name} --budget 10ms",
        f"  snapvit profile {where} --target ssh://user@device --out device.json",
    ]


def late_choice(text: str) -> Late:
    """Parse what becomes of a request that nothing can answer in time."""
    if text not in ("run", "refuse"):
        raise UsageError(f"--late '{text}' is neither run nor refuse. Give one of them")
    return text  # type: ignore[return-value]


def size_in_bytes(text: str, option: str) -> int:
    """Parse `10MB`."""
    return _quantity(text, option, SIZES, "10MB") or 0


def pixels(text: str, option: str) -> int:
    """Parse `32M`."""
    return _quantity(text, option, COUNTS, "32M") or 0
