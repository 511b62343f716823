"""Runtimes: what can run an exported file. One file each, imported only when used. Light: never torch.

A runtime opens a file for a Target and gives something that runs a batch, says what it really runs on, and closes.
It never falls back to something slower without saying so: what it cannot do is an error.
"""
