"""Programs and settings that run a chosen variant's TensorRT engine, written beside the model. Light."""
