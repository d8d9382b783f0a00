"""Regressions fitted from sums over sites.

The modules implement likelihoods, penalties, the detection of separation, and vectors of integers.
"""
