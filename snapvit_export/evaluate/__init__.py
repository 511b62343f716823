"""What a variant is worth: accuracy from the exported file itself. Light: never torch."""
