"""Models as vectors of R^d, and quantities of clients as tensors [m, d] with one row per client."""
