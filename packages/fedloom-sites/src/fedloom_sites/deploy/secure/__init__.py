"""Secure aggregation at the server and at the sites: masked sums of uploads and scores."""
