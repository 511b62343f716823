"""TensorRT: networks parsed and built, engines kept with their record, what a version supports."""
