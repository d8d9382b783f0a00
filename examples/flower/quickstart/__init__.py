"""Flower app that uses a personalized method of fedloom."""
