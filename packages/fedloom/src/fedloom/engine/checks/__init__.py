"""Checks before the first round: they reject impossible combinations and collect notes."""
