"""Transformer blocks in torch: where timm keeps heads and neurons, blocks that lack a part, a functional forward."""
