"""What goes through chosen linear layers in one forward pass.

Hooks on modules do not see everything: an EVA block with biases of its own calls `F.linear` with the weight of its
qkv, past the module. So the call itself is watched, and a layer is known by its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Recorder(TorchFunctionMode):
    """Within the block, keeps the input and output of each layer whose weight is watched, in the weights' order.

    >>> with Recorder([block.mlp.fc2.weight for block in model.module.blocks]) as record:
    ...     logits = model.module(inputs)
    >>> record.inputs[0]     # (N, T, neurons)
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._watched = list(weights)
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the weight, which `_watched` keeps alive

    @property
    def inputs(self) -> list[Tensor]:
        return [self._seen[id(weight)][0] for weight in self._watched]

    @property
    def outputs(self) -> list[Tensor]:
        return [self._seen[id(weight)][1] for weight in self._watched]

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.linear:
            call = dict(zip(("input", "weight"), args), **(kwargs or {}))
            if any(call["weight"] is weight for weight in self._watched):
                self._seen[id(call["weight"])] = (call["input"], result)
        return result
