"""Corrected modules: from factors, along the stream of tokens, or refitted on the images."""
