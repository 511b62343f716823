"""Weight correction in numpy: moments of a layer's input, Cholesky factors, orders, error curves. Light: no torch."""
