"""Models as vectors in R^d, and values of clients as tensors [m, d] with one row per client."""
