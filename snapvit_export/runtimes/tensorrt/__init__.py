"""TensorRT: networks parsed and built, engines kept with their record, opsets that a version supports."""
