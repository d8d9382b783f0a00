"""fedloom at real sites: Flower apps, and deployments over TLS with secure sums."""
