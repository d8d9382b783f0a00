"""Real sites on Flower over TLS, with the same algorithms as in simulations."""
