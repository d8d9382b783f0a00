"""Measurement of runs: the cost of a round, and the speed of an experiment on this machine."""
