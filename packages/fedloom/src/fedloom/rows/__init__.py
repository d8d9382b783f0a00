"""Models as vectors in R^d, and quantities of clients as tensors [m, d] with one row per client."""
