"""Latency on the device: timing, conditions, drift, Profiles, the latency model. Light: it runs on the device.

May import the standard library, numpy and one runtime, never torch. tests/test_imports.py holds us to it.
"""
