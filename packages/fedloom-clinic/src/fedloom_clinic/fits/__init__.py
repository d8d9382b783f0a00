"""Fits of regressions computed from sums over sites.

The modules contain likelihoods, penalties, the detection of separation, and vectors of integers.
"""
