"""Weight correction of pruned modules: from factors, block by block along the token stream, or refitted on images."""
