"""Fits of regressions from sums: likelihoods, penalties, detection of separation, and vectors of integers."""
