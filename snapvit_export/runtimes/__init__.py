"""Runtimes that run an exported file, one module each, imported only when used. Light: never torch.

A runtime opens a file for a Target and returns a session, which runs batches. It never falls back to a slower device
or another precision without saying so: what it cannot do is an error.
"""
