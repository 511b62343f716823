"""Recovering by short training: the dense model teaches a cut one, or nested ones that share their weights."""
