"""Experiment files, run directories, comparisons, tuning, reports and the command line, built on the library."""
