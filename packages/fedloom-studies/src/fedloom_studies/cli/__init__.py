"""The commands ``fedloom reproduce`` and ``fedloom map``.

These commands are found through the entry points of this package.
"""

from fedloom_studies.cli import map, reproduce

__all__ = ["map", "reproduce"]
