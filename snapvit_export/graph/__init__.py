"""ONNX graphs written by hand from weights and a Plan. Light: numpy and onnx, never torch."""
