"""Checks of a run before its first round: impossible combinations, and notes."""
