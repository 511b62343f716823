"""Models in torch: load them, read their Anatomy, slice and mask them, extract their features."""
