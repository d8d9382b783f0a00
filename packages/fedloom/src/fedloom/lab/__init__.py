"""Experiment files, run directories, comparisons, tuning, reports and the command line, on top of the library."""
