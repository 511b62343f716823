"""`triton/NAME/`: a model of Triton Inference Server, whose engine is to be copied beside. Light.

The fields are those of Triton's `model_config.proto`. An engine from the Jetson agent takes one number of images; where
that is one, Triton's own batch dimension of 1 stands for it, otherwise a request brings the whole batch.
"""

from __future__ import annotations

from ..layout import LABELS
from .interface import Interface
from .places import CONFIG

FOLDER = "triton"
TYPES = {"float32": "TYPE_FP32", "uint8": "TYPE_UINT8"}


def files(about: Interface) -> dict[str, str]:
    """Return the settings and labels by their paths in the family's folder."""
    place = f"{FOLDER}/{about.plain_name}"
    labels = {f"{place}/{LABELS}": "".join(f"{name}\n" for name in about.labels)} if about.labels else {}
    return {f"{place}/{CONFIG}": config(about), **labels}


def config(about: Interface) -> str:
    """Return the text of `config.pbtxt`."""
    batched = about.has_any_batch and about.batch == 1
    source, result = (about.image, (about.outputs,)) if batched else (about.shape, (about.batch, about.outputs))
    labels = f'\n    label_filename: "{LABELS}"' if about.labels else ""
    return f"""\
# {about.title}
# The engine goes into the folder 1 beside this file, as model.plan. Images are prepared by the client: see run.py.
# To run model.onnx instead: backend "onnxruntime" in the place of platform, and 1/model.onnx.
name: "{about.plain_name}"
platform: "tensorrt_plan"
max_batch_size: {1 if batched else 0}
input [
  {{
    name: "{about.source}"
    data_type: {TYPES[about.given.type]}
    dims: [ {_list(source)} ]
  }}
]
output [
  {{
    name: "{about.result}"
    data_type: TYPE_FP32
    dims: [ {_list(result)} ]{labels}
  }}
]
instance_group [
  {{
    count: 1
    kind: KIND_GPU
  }}
]
# The latency of the profile is with a CUDA graph.
optimization {{
  cuda {{
    graphs: true
  }}
}}
"""


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
