"""Statistics of a running model: moments of layer inputs, measures of each sub-layer, output divergence."""
