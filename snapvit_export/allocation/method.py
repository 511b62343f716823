"""Methods as `snapvit compare` names them: a recipe or criterion, a correction, and options that differ. Light.

    METHOD = NAME ["+" CORRECTION] (":" OPTION "=" VALUE)*

    paper                                   a recipe
    snip+elastic                            a criterion, and a correction that is not its own
    paper:search-over=mlp:pca=64            a recipe with two of its settings changed
    paper:pairs=0.15:0/0.35:0.2             a list has / between its values, since commas part methods
    paper:data=photos:data=hf:owner/name    calibrated on images of its own, in equal parts

Options are those of `snapvit rank`, and switches are `on` or `off`. A colon begins an option only before a word and an
equals sign, so values may have colons. `str` gives the name in one form, with the options in the order of the table
here: equal methods have equal names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .asked import refuse_same

DATA = "data"
_OPTION = re.compile(r":(?=[a-z][a-z-]*=)")
FORM = "Write it as NAME+CORRECTION:OPTION=VALUE, such as paper:search-over=mlp"


def _word(text: str) -> str:
    return text


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ValueError("a whole number, such as 50")
    return int(text)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("on or off")
    return text == "on"


def _number(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text, re.ASCII) or not math.isfinite(float(text)):
        raise ValueError("numbers with / between them, such as 0.7/0.5")
    return float(text)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part) for part in text.split("/"))


def _pairs(text: str) -> tuple[tuple[float, float], ...]:
    parts = [part.partition(":") for part in text.split("/")]
    try:
        return tuple((_number(mlp), _number(head)) for mlp, _, head in parts)
    except ValueError:
        raise ValueError("ratios of neurons and heads with / between the pairs, such as 0.15:0/0.35:0.2") from None


READERS: dict[str, Callable[[str], Any]] = {
    "allocation": _word,
    "criterion": _word,
    "views": _word,
    "reduction": _word,
    "order": _word,
    "damping": _word,
    "depth": _switch,
    "evaluations": _whole,
    "search-over": _word,
    "optimiser": _word,
    "population": _whole,
    "pairs": _pairs,
    "flops": _numbers,
    "divergence": _word,
    "search-images": _whole,
    "pca": _whole,
    "cka": _switch,
    "cka-images": _whole,
    "racing": _switch,
    "seed": _whole,
}


@dataclass(frozen=True)
class Method:
    """A method as it was asked for.

    >>> str(Method.parse("paper:pca=064:search-over=mlp"))
    'paper:search-over=mlp:pca=64'
    """

    base: str
    correction: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # by the name of the option
    data: tuple[str, ...] = ()  # sources of images of its own

    @staticmethod
    def parse(text: str) -> Method:
        """Parse a method; that there is such a recipe, and what its options may be together, is not known here."""
        first, *rest = _OPTION.split(text.strip())
        base, plus, correction = first.partition("+")
        if not base or ":" in first or (plus and not correction):
            raise UsageError(f"'{text}' is no method. {FORM}")
        options: dict[str, Any] = {}
        data: list[str] = []
        for part in rest:
            name, _, value = part.partition("=")
            if name == DATA and value and value not in data:
                data.append(value)
                continue
            if name in options or name == DATA:
                raise UsageError(f"{text}: {name} is given twice, or without a value. {FORM}")
            options[name] = _value(text, name, value)
        ordered = {name: options[name] for name in READERS if name in options}
        return Method(base, correction or None, ordered, tuple(data))

    @property
    def changes(self) -> dict[str, Any]:
        """The settings that differ from those of the recipe, by the names of `Settings`."""
        found = {name.replace("-", "_"): value for name, value in self.options.items()}
        return found if self.correction is None else {**found, "correction": self.correction}

    def __str__(self) -> str:
        name = self.base if self.correction is None else f"{self.base}+{self.correction}"
        parts = [f"{option}={_text(value)}" for option, value in self.options.items()]
        return ":".join([name, *parts, *(f"{DATA}={source}" for source in self.data)])


def _value(text: str, name: str, value: str) -> Any:
    if name not in READERS:
        known = ", ".join([*READERS, DATA])
        raise UsageError(f"{text}: a method has no option '{name}'. Known: {known}; --images are the same for all")
    try:
        if not value:
            raise ValueError("a value")
        made = READERS[name](value)
    except ValueError as error:
        raise UsageError(f"{text}: {name}={value} is not understood. Give {error}") from None
    if isinstance(made, tuple):
        refuse_same(f"{text}: {name}", made)
    return made


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "/".join(":".join(map(_text, each)) if isinstance(each, tuple) else _text(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
