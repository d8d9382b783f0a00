"""Clinical analyses. The registry of fedloom finds them by their entry points."""
