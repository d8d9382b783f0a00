"""Comparison of methods: families of paired tests, criteria with their winners, and comparisons with a baseline."""
