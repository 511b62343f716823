"""The torch half: load models, score them, cut them, export them. Runs on a workstation, not on a device."""
