"""Subjects: all rows of a patient stay together, and splits respect time and strata."""
