"""Comparisons from Python: `fedloom.compare`."""
