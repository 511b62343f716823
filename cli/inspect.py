"""`snapvit inspect`: describes an ONNX file and checks that a target can run it, or a TensorRT engine by its record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..visible import say
from .output import print_json


def inspect(
    file: Annotated[Path, typer.Argument(help="An ONNX file, ours or another; or an engine of TensorRT, ours.")],
    runtime: Annotated[
        Optional[str], typer.Option(help="Also check that this can run it: onnxruntime, openvino or tensorrt.")
    ] = None,
    target: Annotated[Optional[str], typer.Option(hidden=True, help="The older name of --runtime.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in an ONNX file or an engine.

    Its blocks, heads, neurons, precision, opset and size.
    """
    from ..checks.inspect import inspect as read
    from ..checks.inspect import why_not
    from ..checks.inspect_engine import is_engine
    from ..errors import SnapvitError, UsageError

    target = runtime or target
    if is_engine(file):
        if target is not None:
            raise UsageError("--runtime is for ONNX files: an engine is built for one already. Leave it out")
        _inspect_engine(file, as_json)
        return
    found = read(file)
    refusal = None if target is None else why_not(file, found, target)
    if as_json:
        print_json(found)
    else:
        from ..report.terminal import print_inspection

        print_inspection(found)
    if refusal is not None:
        raise SnapvitError(refusal)
    if target is not None and not as_json:
        say(f"{target} can run it.")


def _inspect_engine(file: Path, as_json: bool) -> None:
    from ..checks.inspect_engine import inspect_engine

    found = inspect_engine(file)
    if as_json:
        print_json(found)
        return
    from ..report.terminal import print_engine

    print_engine(found)
