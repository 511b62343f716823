"""Exported graphs and the gates they must pass. Light: numpy and onnx, never torch."""
