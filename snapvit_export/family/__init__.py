"""The family folder: its manifest, the values in it, and the list of its own files. Light."""
