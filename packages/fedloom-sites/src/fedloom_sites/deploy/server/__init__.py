"""The server: a run's rounds at real sites, the way to them, and which of them answer."""
