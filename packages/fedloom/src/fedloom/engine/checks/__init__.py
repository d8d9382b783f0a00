"""Checks before the first round: impossible combinations are rejected, and notes are collected."""
