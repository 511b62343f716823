"""Models in torch: loaded, understood, cut, masked, and run for their features."""
