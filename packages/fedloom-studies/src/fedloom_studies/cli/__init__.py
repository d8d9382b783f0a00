"""The commands ``fedloom reproduce`` and ``fedloom map``. Fedloom loads them by its entry points."""

from fedloom_studies.cli import map, reproduce

__all__ = ["map", "reproduce"]
