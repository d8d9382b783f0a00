"""Trained models: evaluated, adapted to a new client, saved, exported."""
