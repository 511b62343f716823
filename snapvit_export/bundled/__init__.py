"""The model that needs no network: a small ViT trained on handwritten digits."""
