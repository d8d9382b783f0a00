"""Fits of regressions by sums: likelihoods, penalties, separation, and vectors of integers."""
