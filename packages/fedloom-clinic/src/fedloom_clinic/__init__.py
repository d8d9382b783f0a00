"""Clinical analyses; the registry of fedloom finds them by their entry points."""
