"""Reads kernel plans, one parser for each source. Light.

TensorRT-RTX tells its plan in the verbose log of a build, which needs no GPU (`parse_log`). An engine of TensorRT tells
it to the inspector once it is loaded, and `trtexec --exportLayerInfo` writes the same JSON (`parse_layers`). Both are
foreign text: what is not understood is a `FileFormatError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...errors import FileFormatError, first_line
from ..jetson_agent import number_type
from .kernel_plan import Kernel, KernelPlan, part_of

SECTION, KIND = "Layers:", ", LayerType: "  # begins the plan in a log, and is in every line of it
NOT_LAUNCHED = {"signal", "wait", "noop", "constant", "shape_call"}  # layers of an inspector that are no kernels
_NODES = re.compile(r"\[ONNX Layer: ([^\[\]]*)\]")
_TENSOR = re.compile(r"Name: (.{0,500}?), (?:Location: \w+, )?Dimensions: \[([-\d, ]{0,200})\]", re.ASCII)
_SIZE = re.compile(r"-?\d{1,12}", re.ASCII)
_TYPE = re.compile(r"(?:Format/)?Data[tT]ype: ([^,}]{1,100})")


class _Tensor(NamedTuple):
    name: str
    sizes: tuple[int, ...]
    type: str

    @property
    def is_stored(self) -> bool:
        """True for a constant, which TensorRT 10 lists among the inputs."""
        return "const" in self.name.lower()


def parse_log(text: str, compiler: str) -> KernelPlan:
    """Read the plan from the verbose log of a build; of several the last one.

    >>> told = "Name: k, LayerType: gemm, Inputs: [], Outputs: [], Metadata: [ONNX Layer: blocks.0.mlp.gemm]"
    >>> parse_log(told, "tensorrt_rtx 1.7.1").kernels[0].part
    'blocks.0.mlp'
    """
    lines = [line for line in text.rpartition(SECTION)[2].splitlines() if line.startswith("Name: ") and KIND in line]
    made: list[Kernel] = []
    for line in lines:
        name, _, rest = line.removeprefix("Name: ").partition(KIND)
        kind, _, rest = rest.partition(", Inputs: [")
        inputs, _, rest = rest.partition("], Outputs: [")
        outputs, ends, metadata = rest.partition(", Metadata: ")
        if not ends:
            raise FileFormatError(f"{compiler}: its log is cut off in kernel {len(made)}: {name[:60]}. Build again")
        inputs, _, constants = inputs.partition("], Constants: [")
        _add(made, name, kind, _listed(inputs), _listed(constants), _listed(outputs), metadata)
    if not made:
        raise FileFormatError(f"{compiler}: its log tells of no kernels. Build with a verbose logger and with details")
    return KernelPlan(compiler=compiler, kernels=tuple(made))


def parse_layers(found: Any, compiler: str) -> KernelPlan:
    """Read the plan from what an inspector tells of an engine, as JSON that was read.

    >>> layer = {"Name": "k", "LayerType": "gemm", "Metadata": "[ONNX Layer: blocks.0.mlp.gemm]"}
    >>> parse_layers({"Layers": [layer]}, "tensorrt 10.3.0").kernels[0].part
    'blocks.0.mlp'
    """
    made: list[Kernel] = []
    try:
        for layer in found["Layers"]:
            if isinstance(layer, str) or layer["Name"].startswith("{ForeignNode"):
                raise FileFormatError(f"{compiler}: the engine does not tell its kernels. Build it with details")
            name, kind = str(layer["Name"]), str(layer["LayerType"])
            if kind.lower() not in NOT_LAUNCHED:
                inputs, constants, outputs = (_all_described(layer, key) for key in ("Inputs", "Constants", "Outputs"))
                _add(made, name, kind, inputs, constants, outputs, str(layer.get("Metadata") or ""))
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise FileFormatError(f"{compiler}: not what an inspector tells of an engine: {first_line(error)}") from error
    if not made:
        raise FileFormatError(f"{compiler}: the engine tells of no kernels. Build it with details")
    return KernelPlan(compiler=compiler, kernels=tuple(made))


def _add(
    made: list[Kernel],
    name: str,
    kind: str,
    inputs: Sequence[_Tensor],
    constants: Sequence[_Tensor],
    outputs: Sequence[_Tensor],
    metadata: str,
) -> None:
    stored = (*constants, *(tensor for tensor in inputs if tensor.is_stored))
    matrices = [tensor for tensor in stored if sum(size > 1 for size in tensor.sizes) > 1]
    largest = max(matrices, key=lambda tensor: math.prod(tensor.sizes), default=None)
    nodes = tuple(dict.fromkeys(_NODES.findall(metadata)))
    kernel = Kernel(
        name=name,
        kind=kind,
        part=_part(name, nodes) or (made[-1].part if made else ""),
        reads=tuple(tensor.type for tensor in inputs if not tensor.is_stored),
        weight="" if largest is None else largest.type,
        writes=tuple(tensor.type for tensor in outputs),
        nodes=nodes,
    )
    made.append(kernel)


def _part(name: str, nodes: Sequence[str]) -> str:
    """Return the part of the node that a kernel is called after, or of its first node."""
    return part_of([node for node in nodes if name.startswith(node)] or nodes)


def _listed(text: str) -> list[_Tensor]:
    """Read `{ Name: x, Dimensions: [1,64], Datatype: Half, Format: ... }, { ... }`."""
    found = []
    for one in text.split("}, {"):
        named, typed = _TENSOR.search(one), _TYPE.search(one)
        if named and typed:
            found.append(_Tensor(named[1], _sizes(_SIZE.findall(named[2])), number_type(typed[1].strip())))
    return found


def _all_described(layer: dict[str, Any], key: str) -> list[_Tensor]:
    return [_described(tensor) for tensor in layer.get(key) or ()]


def _described(tensor: dict[str, Any]) -> _Tensor:
    kind = tensor.get("DataType") or tensor.get("Datatype") or tensor.get("Format/Datatype") or ""
    return _Tensor(str(tensor["Name"]), _sizes(tensor.get("Dimensions") or ()), number_type(str(kind)))


def _sizes(found: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in found)
