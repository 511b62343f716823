"""What reaches a layer: its input when something is run, without running what comes after it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class _Reached(Exception):
    """The layer got its input: the rest need not run."""


def input_of(linear: nn.Linear, run: Callable[[], object]) -> Tensor:
    """The input that `linear` gets when `run` is called: (B, T, d)."""
    found: list[Tensor] = []

    def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
        found.append(inputs[0])
        raise _Reached

    handle = linear.register_forward_pre_hook(hook)
    try:
        run()
    except _Reached:
        pass
    finally:
        handle.remove()
    return found[0]
