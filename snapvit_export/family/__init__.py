"""The family folder: its manifest, the values in it, and which files are its own. Light."""
