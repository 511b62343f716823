"""Weight correction of pruned modules: from factors, block by block along the stream, or refitted on images."""
