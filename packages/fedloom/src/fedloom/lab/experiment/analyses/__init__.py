"""Analyses of a run beyond its metrics: sites left out, patients, references, what drives a model."""
