"""Version of this release of fedloom."""

__version__ = "0.1.0"
