"""ViTs out of ONNX files that others have exported: recognised, and proven equal to the file. No torch."""
