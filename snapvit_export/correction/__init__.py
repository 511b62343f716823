"""Weight correction: moments of a layer's input, Cholesky factors, orders, error curves. Light: numpy."""
