"""A kernel plan: the kernels that a compiler made of a graph, their number types, and the ONNX nodes in each. Light.

It names the compiler, since another one, or another release, fuses other things: what TensorRT-RTX does says nothing
certain of TensorRT 10.3. A plan shows what is launched, in which types and of which nodes. It does not show how long a
kernel takes, and which of several implementations runs is decided on the GPU.

Nodes are told apart by the names that our graphs give them, such as `blocks.3.attn.softmax`. One node may be in several
kernels: the product in one, its scales or its padding in others. `plan_reader` reads plans.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...storage.json import Count, Value

ACTIVATIONS = {"erf", "tanh", "sigmoid", "relu", "gelu"}
PRODUCTS = {"gemm", "matmul"}
EIGHT_BITS = {"int8", "fp8"}
_PART = re.compile(r"blocks\.\d{1,4}\.(?:attn|mlp|merge)(?=\.|\Z)", re.ASCII)
_BLOCK = re.compile(r"blocks\.(\d{1,4})(?=\.|\Z)", re.ASCII)
_NUMBERED = re.compile(r"(\w+?)(?:_(\d{1,9}))?", re.ASCII)  # the last word of a node's name: gemm, gemm_2
_LAYER_OF_PRODUCT = re.compile(r"gemm|matrix|convolution|correlation", re.IGNORECASE)
_NAME_OF_PRODUCT = re.compile(r"_gem[mv]_|Fc|MulSum")  # a kernel that fuses a product with more
Part = Literal["attn", "mlp"]


class Kernel(Value, frozen=True, kw_only=True):
    """One kernel of a plan."""

    name: str  # as the compiler calls it
    kind: str  # its type of layer: gemm, kgen, runtime_fusion, ...
    part: str  # of the model: blocks.3.attn, embed, ...; without nodes of its own that of the kernel before
    reads: tuple[str, ...]  # number types of its inputs
    weight: str  # number type of the largest matrix that is stored in it; empty if there is none
    writes: tuple[str, ...]
    nodes: tuple[str, ...]  # of the ONNX graph

    @property
    def multiplies(self) -> bool:
        """True if it computes a matrix product."""
        return bool(_LAYER_OF_PRODUCT.search(self.kind) or _NAME_OF_PRODUCT.search(self.name))

    @property
    def product_type(self) -> str:
        """The number type of its matrix product: that of the stored matrix, or else of its first input.

        Of 8 bits it is only if what the matrix is multiplied by has them too.
        """
        first = self.reads[0] if self.reads else ""
        quantises = any(_op(node) == "quantizelinear" for node in self.nodes)
        is_wider = self.weight in EIGHT_BITS and self.weight not in self.reads and not quantises
        return first if is_wider or not self.weight else self.weight


class Summary(Value, frozen=True, kw_only=True):
    """A plan in numbers."""

    kernels: Count
    attention_fused: tuple[Count, ...]  # blocks whose attention is one kernel
    attention_not_fused: tuple[Count, ...]
    products: dict[str, Count]  # matrix products by number type


class BlockKernels(Value, frozen=True, kw_only=True):
    """What one block became; None where it has no such thing."""

    block: Count
    kernels: Count
    attention_fused: bool | None
    activation_fused: bool | None
    residuals_fused: bool | None  # of both sub-layers
    products: dict[str, Count]  # matrix products by number type


class KernelPlan(Value, frozen=True, kw_only=True, dict=True):
    """All kernels that a compiler made of a graph, in the order of launches.

    >>> import tensorrt_rtx
    >>> plan = TensorRT(tensorrt_rtx).parse(written.graph).build(BuildSettings()).kernels
    >>> plan.attention_fused(0), len(plan.of("blocks.0"))
    """

    compiler: str  # package and version: tensorrt_rtx 1.7.1
    summary: Summary | UnsetType = UNSET  # of the kernels, for those who read the file
    kernels: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        made = self._summarised()
        if self.summary is UNSET:
            msgspec.structs.force_setattr(self, "summary", made)
        elif self.summary != made:
            raise ValueError("the summary is not that of the kernels")

    def _summarised(self) -> Summary:
        fused = {i: self.attention_fused(i) for i in self.blocks}
        return Summary(
            kernels=len(self.kernels),
            attention_fused=tuple(i for i, whole in fused.items() if whole),
            attention_not_fused=tuple(i for i, whole in fused.items() if whole is False),
            products=_counted(self.product_types.values()),
        )

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The blocks of the model that there are nodes of."""
        return tuple(sorted({block for part in self._parts if (block := _block(part)) is not None}))

    def of(self, part: str) -> tuple[Kernel, ...]:
        """Return the kernels of a part of the model, `blocks.3` or `blocks.3.attn`; each is of one part alone."""
        return tuple(kernel for kernel in self.kernels if _within(kernel.part, part))

    def with_node(self, node: str) -> tuple[Kernel, ...]:
        """Return the kernels that a node of the graph is in."""
        return tuple(self.kernels[place] for place in self._places.get(node, ()))

    def attention_fused(self, block: int) -> bool | None:
        """Return True if a block's softmax is in one kernel with the products before and after; None without any."""
        part = f"blocks.{block}.attn"
        whole = [k for node in self._nodes(part, {"softmax"}) for k in self.with_node(node)]
        return all(len(_of_ops(k.nodes, part, {"matmul"})) >= 2 for k in whole) if whole else None

    def activation_fused(self, block: int) -> bool | None:
        """Return True if fc1, its bias and the activation are one kernel; None without an MLP."""
        part = f"blocks.{block}.mlp"
        active = {k for node in self._nodes(part, ACTIVATIONS) for k in self.with_node(node)}
        firsts = self._nodes(part, {"gemm"})[:-1]
        return len(active) == 1 and any({*self.with_node(node)} == active for node in firsts) if active else None

    def residual_fused(self, block: int, part: Part) -> bool | None:
        """Return True if proj (of attn) or fc2 (of mlp), its bias and the residual are one kernel; None without it."""
        layers = self._nodes(f"blocks.{block}.{part}", {"gemm"})
        if not layers:
            return None
        kernels, sums = self.with_node(layers[-1]), {f"blocks.{block}.attended", f"blocks.{block}.stream"}
        return len(kernels) == 1 and not sums.isdisjoint(kernels[0].nodes)

    @cached_property
    def product_types(self) -> dict[str, str]:
        """The number type of every matrix product, by its node."""
        found = {}
        for node in (node for node in self._places if _op(node) in PRODUCTS):
            makers = [k for k in self.with_node(node) if k.multiplies]
            named = [k for k in makers if node in re.split(r"\+|_U\d+|_myl\d+", k.name)]  # others may pad its inputs
            if makers:
                found[node] = (named or makers)[0].product_type
        return found

    def by_block(self) -> tuple[BlockKernels, ...]:
        """Return what every block became."""
        kernels = Counter(_block(kernel.part) for kernel in self.kernels)
        types: dict[int | None, list[str]] = {}
        for node, kind in self.product_types.items():
            types.setdefault(_block(node), []).append(kind)
        return tuple(
            BlockKernels(
                block=i,
                kernels=kernels[i],
                attention_fused=self.attention_fused(i),
                activation_fused=self.activation_fused(i),
                residuals_fused=_all(self.residual_fused(i, "attn"), self.residual_fused(i, "mlp")),
                products=_counted(types.get(i, ())),
            )
            for i in self.blocks
        )

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        """The numbers of the kernels that each node is in."""
        found: dict[str, list[int]] = {}
        for place, kernel in enumerate(self.kernels):
            for node in kernel.nodes:
                found.setdefault(node, []).append(place)
        return found

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        """The nodes of each part."""
        found: dict[str, list[str]] = {}
        for node in self._places:
            found.setdefault(part_of([node]), []).append(node)
        return found

    def _nodes(self, part: str, ops: set[str]) -> list[str]:
        """Return the nodes of a part with one of these operators, in the order of the graph."""
        return sorted(_of_ops(self._parts.get(part, ()), part, ops), key=_op_and_number)


def part_of(nodes: Iterable[str]) -> str:
    """Return the part of the model that the first of these nodes belongs to; empty if there are none.

    >>> part_of(["blocks.3.attn.softmax"]), part_of(["blocks.3.attended"]), part_of(["embed.conv"])
    ('blocks.3.attn', 'blocks.3.attn', 'embed')
    """
    node = next(iter(nodes), "")
    if found := _PART.match(node):
        return found[0]
    if found := _BLOCK.match(node):
        return f"{found[0]}.attn" if node.endswith(".attended") else found[0]
    return node.partition(".")[0]


def _block(name: str) -> int | None:
    found = _BLOCK.match(name)
    return int(found[1]) if found else None


def _of_ops(nodes: Iterable[str], part: str, ops: set[str]) -> list[str]:
    return [node for node in nodes if _op(node) in ops and _within(node, part)]


def _op(node: str) -> str:
    return _op_and_number(node)[0]


def _op_and_number(node: str) -> tuple[str, int]:
    """Return the operator of a node and which of its kind in its part it is."""
    found = _NUMBERED.fullmatch(node.rpartition(".")[2])
    return (found[1], int(found[2] or 1)) if found else ("", 0)


def _within(name: str, part: str) -> bool:
    return not part or name == part or name.startswith(f"{part}.")


def _counted(types: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(types).items()))


def _all(*found: bool | None) -> bool | None:
    known = [one for one in found if one is not None]
    return all(known) if known else None
