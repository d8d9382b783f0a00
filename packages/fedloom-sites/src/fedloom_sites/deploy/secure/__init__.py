"""Secure aggregation: sums of the sites' uploads and scores under masks, at both ends."""
