"""From a budget to the densest variant that fits: bracketed, built, timed and proved. Light: never torch."""
