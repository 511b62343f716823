"""A peer of `all_peers.py`: NVIDIA ModelOpt's int8 of an ONNX graph, in an environment of its own.

    python -m venv modelopt && modelopt/bin/pip install 'nvidia-modelopt[onnx]'
    modelopt/bin/python benchmarks/peers/modelopt_int8.py dense.onnx images.npy int8.onnx

images.npy holds (n, 3, 224, 224) float32, already normalised. Its own settings for int8, with matrix products alone
quantised and everything else in float32: its documentation recommends that for ViTs, and the CPU computes no float16.
"""

from __future__ import annotations

import sys

import numpy as np
from modelopt.onnx.quantization import quantize


def main() -> None:
    graph, images, out = sys.argv[1:]
    quantize(
        onnx_path=graph,
        quantize_mode="int8",
        calibration_data={"images": np.load(images)},
        op_types_to_quantize=["MatMul", "Gemm"],
        high_precision_dtype="fp32",
        output_path=out,
    )


if __name__ == "__main__":
    main()
