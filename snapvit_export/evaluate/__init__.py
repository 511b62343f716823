"""Evaluation of models: accuracy, probes and fidelity, from torch or from the exported file. Light: never torch."""
