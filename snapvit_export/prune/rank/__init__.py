"""From a model and images to a Ranking: criteria, search, damage curves, rounds; resumable and distributed."""
