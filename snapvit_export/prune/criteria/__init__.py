"""Criteria: what makes a head or a neuron worth keeping, in a table by name."""
