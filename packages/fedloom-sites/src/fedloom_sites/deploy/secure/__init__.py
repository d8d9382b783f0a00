"""Secure aggregation at the server and the sites: sums of uploads and scores under masks."""
