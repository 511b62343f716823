"""Data types of a network's matrix products, and the check that they are its nominal precision. Light.

A builder that is asked for "fp16" and finds fp32 in the graph may build fp32, run it and be timed under the wrong name.
So the products are counted in the parsed network, before anything is built.

A product of quantised values computes in the type that they were stored in: that behind each DequantizeLinear, not the
floats that the graph has after it. Where only the weight is quantised, the product is one of floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...errors import GateFailed
from ...graph.precision import OF_STREAM, STREAM
from ...target import Precision

QUANTISED: dict[Precision, str] = {"int8-dynamic": "int8", "int8-static": "int8", "fp8": "fp8"}  # their products


@dataclass(frozen=True)
class Product:
    """One matrix product."""

    name: str  # of its node, which begins with the part of the model: blocks.3.mlp
    kind: str  # fp32, fp16, int8, fp8, ...
    of_weight: bool = True  # False: of two values that both depend on the image, as in attention


@dataclass(frozen=True)
class MatmulDtypes:
    """The matrix products of a network and their data types."""

    products: tuple[Product, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of products by data type."""
        return dict(sorted(Counter(product.kind for product in self.products).items()))


def kind_of_product(floats: str, behind: Sequence[str | None]) -> str:
    """Return the type that a product computes in: `floats` as the graph has it, or the one behind both inputs.

    `behind`: the type that each input was dequantised from; None where it was not.

    >>> kind_of_product("fp16", ["fp8", "fp8"]), kind_of_product("fp16", [None, "int8"])
    ('fp8', 'fp16')
    """
    stored = set(behind)
    return floats if len(stored) != 1 else stored.pop() or floats


def require_precision(found: MatmulDtypes, precision: Precision, where: str, wide: Collection[str] = ()) -> None:
    """Refuse a network whose products are not in its nominal precision; `wide`: parts that stay in float32."""
    counts = ", ".join(f"{count} in {kind}" for kind, count in found.counts.items()) or "none"
    if not found.products:
        raise GateFailed(f"{where}: has no matrix products, so it is no {precision} model")
    if (
        quantised := QUANTISED.get(precision)
    ) is not None:  # the linear layers of all blocks; attention stays in floats
        linear = [p for p in found.products if p.of_weight and p.name.startswith("blocks.")]
        wrong = [p for p in linear or found.products if p.kind != quantised]
    else:
        wrong = [p for p in found.products if p.kind != precision and not (p.kind == "fp32" and _within(p.name, wide))]
    if wrong:
        name, kind = wrong[0].name, wrong[0].kind
        raise GateFailed(f"{where}: called {precision}, but {name} computes in {kind} (products: {counts})")


def _within(name: str, parts: Collection[str]) -> bool:
    if STREAM in parts and f".{OF_STREAM}." in name:
        return True
    return any(name == part or name.startswith(f"{part}.") for part in parts)
