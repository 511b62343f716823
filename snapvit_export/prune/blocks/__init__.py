"""Transformer blocks in torch: where timm keeps heads and neurons, blocks with removed parts, a functional forward."""
