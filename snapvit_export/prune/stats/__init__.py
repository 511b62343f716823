"""Statistics of a running model: moments of what layers read, what each sub-layer does, how far outputs diverge."""
