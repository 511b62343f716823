"""Selection of the most faithful variant that meets a budget: raced, built, timed and proved. Light: never torch."""
