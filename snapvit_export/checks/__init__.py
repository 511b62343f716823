"""What must hold before a file counts: gates between forms of one model, and what they look at. Light: never torch."""
