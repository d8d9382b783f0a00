"""Runs: the round, the clients' store, workers, checkpoints, metrics."""
