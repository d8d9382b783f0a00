"""Subjects: the rows of one patient stay together, and splits follow the calendar and keep shares."""
