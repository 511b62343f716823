"""Allocation of heads and neurons: costs, the knapsack over widths, depth, Plans for any target, recipes. Light."""
