"""Measure runs: what a round costs, and how fast an experiment runs here."""
