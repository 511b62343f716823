"""Transformer blocks in torch: the adapter for timm's, blocks with removed parts, and a functional forward pass."""
