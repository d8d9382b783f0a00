"""Rows: a model is a vector of R^d, a quantity of the clients is a tensor [m, d] with one row per client."""
