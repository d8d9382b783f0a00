"""Experiment files, run directories, comparisons, tuning, reports and the command line, beside the library."""
