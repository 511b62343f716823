"""The parts of a ViT and which of them are kept: plain values and their files. Light: no torch."""
