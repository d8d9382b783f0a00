"""Checks of a run before its first round: refusals, and notes on it."""
