"""Ranks a model that is known by its tensors alone: its own graph runs in ONNX Runtime. Light: no torch."""
