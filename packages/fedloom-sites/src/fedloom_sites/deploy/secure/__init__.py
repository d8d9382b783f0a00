"""Secure aggregation at the server and the sites: masked sums of uploads and scores."""
