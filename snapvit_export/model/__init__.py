"""What a ViT is made of and what is kept of it: plain values and their files. Light: no torch."""
