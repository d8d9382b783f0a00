"""Checks before the first round, which reject impossible combinations and collect notes."""
