"""Selection of the densest variant that meets a budget: bracketed, built, timed and proved. Light: never torch."""
