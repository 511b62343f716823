"""The search for factors: ask/tell optimisers, the label-free fitness that they minimise, and fast candidates."""
