"""Models as vectors in R^d, and clients' values as tensors [m, d] with one row per client."""
