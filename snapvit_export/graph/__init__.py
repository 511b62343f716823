"""ONNX graphs, written by hand from weights and a Plan, and read back. Light: numpy and onnx, never torch."""
