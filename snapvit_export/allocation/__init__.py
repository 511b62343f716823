"""How much each block keeps: costs, the knapsack over widths, depth, Plans for any target, recipes. Light: numpy."""
