"""Processes of a run: workers of one machine, ranks of several, and what they exchange."""
