"""Real sites over TLS, on Flower: the algorithms that were simulated, unchanged."""
