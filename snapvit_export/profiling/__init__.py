"""Latency on the device. May import: standard library, numpy, one runtime. Never torch: this runs on the device.

tests/test_imports.py holds us to it.
"""
