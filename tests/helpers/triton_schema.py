"""The part of Triton's model_config.proto that a model's settings can use, and a parser of the text format for it.

Written down by hand from protobuf/model_config.proto of triton-inference-server/common (July 2026): the names, numbers
and types of the messages that a model with one input and one output needs. A field that is not in it, or a value of
another type, is refused by protobuf's own text format.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

ENUMS = {
    "DataType": (
        "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32 "
        "TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16"
    ),
    "Kind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
    "Format": "FORMAT_NONE FORMAT_NHWC FORMAT_NCHW",
}
MESSAGES = {
    "ModelTensorReshape": "repeated int64 shape = 1",
    "ModelInput": (
        "string name = 1; DataType data_type = 2; Format format = 3; repeated int64 dims = 4; "
        "ModelTensorReshape reshape = 5; bool is_shape_tensor = 6; bool allow_ragged_batch = 7; bool optional = 8; "
        "bool is_non_linear_format_io = 9"
    ),
    "ModelOutput": (
        "string name = 1; DataType data_type = 2; repeated int64 dims = 3; string label_filename = 4; "
        "ModelTensorReshape reshape = 5; bool is_shape_tensor = 6; bool is_non_linear_format_io = 7"
    ),
    "ModelInstanceGroup": (
        "string name = 1; int32 count = 2; repeated int32 gpus = 3; Kind kind = 4; repeated string profile = 5; "
        "bool passive = 7; string host_policy = 9"
    ),
    "Cuda": "bool graphs = 1; bool busy_wait_events = 2; bool output_copy_stream = 4",
    "ModelOptimizationPolicy": "Cuda cuda = 3; uint32 gather_kernel_buffer_threshold = 7; bool eager_batching = 8",
    "ModelDynamicBatching": (
        "repeated int32 preferred_batch_size = 1; uint64 max_queue_delay_microseconds = 2; bool preserve_ordering = 3"
    ),
    "ModelConfig": (
        "string name = 1; string platform = 2; int32 max_batch_size = 4; repeated ModelInput input = 5; "
        "repeated ModelOutput output = 6; repeated ModelInstanceGroup instance_group = 7; "
        "string default_model_filename = 8; ModelDynamicBatching dynamic_batching = 11; "
        "ModelOptimizationPolicy optimization = 12; string backend = 17; string runtime = 25"
    ),
}


def parse_config(text: str) -> Any:
    """Return the ModelConfig of a text; a ParseError if it is none."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))
    return text_format.Parse(text, kind())


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for told in fields.split("; "):
            *words, field, _, number = told.split()
            added = message.field.add(name=field, number=int(number))
            added.label = added.LABEL_REPEATED if words[0] == "repeated" else added.LABEL_OPTIONAL
            if words[-1] in ENUMS or words[-1] in MESSAGES:
                added.type = added.TYPE_ENUM if words[-1] in ENUMS else added.TYPE_MESSAGE
                added.type_name = f".inference.{words[-1]}"
            else:
                added.type = getattr(added, f"TYPE_{words[-1].upper()}")
    return file
