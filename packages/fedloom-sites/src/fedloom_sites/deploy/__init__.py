"""Real sites over TLS, on Flower: the same algorithms as in simulations, unchanged."""
