"""Records of engines that were never built."""

from snapvit_export.runtimes.tensorrt.engine_file import EngineRecord


def engine_record(**changes: object) -> EngineRecord:
    """The record of an fp16 engine for an Orin, but for what a test changes."""
    given = dict(
        onnx_sha256="aa",
        engine_sha256="",
        package="tensorrt",
        version="10.3.0",
        device="Orin",
        capability="8.7",
        driver="12.6",
        precision="fp16",
        batch=1,
        most_batch=1,
        workspace_bytes=1,
        level=3,
        products={"fp16": 5},
    )
    return EngineRecord(**{**given, **changes})
