"""Subjects: the rows of one patient stay together, and splits respect time and strata."""
