"""Weight correction and what follows from it, in numpy: statistics, factors, orders, error curves. Light: no torch."""
