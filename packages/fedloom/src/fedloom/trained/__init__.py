"""Trained models: evaluation, adaptation to a new client, saving and export."""
