"""The command line: one small file per command; each parses, calls the library, prints.

Importing this costs what typer costs. rich, numpy, onnx and torch are imported inside the commands.
"""
