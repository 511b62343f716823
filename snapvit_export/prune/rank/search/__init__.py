"""The search for factors: ask/tell optimisers, the label-free fitness they minimise, and what makes it fast."""
