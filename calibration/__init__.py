"""Images to calibrate and to evaluate on: sources, a model's preprocessing, fingerprints. Light: no torch."""
