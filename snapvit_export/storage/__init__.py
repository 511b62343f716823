"""Files: atomic writes, strict JSON, checksummed safetensors, many arrays in one mapped file. Light."""
