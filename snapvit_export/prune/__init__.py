"""Everything that needs torch: load, rank, prune and correct timm models, on a workstation, not on a device."""
