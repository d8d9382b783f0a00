"""The commands ``fedloom reproduce`` and ``fedloom map``; fedloom loads them by its entry points."""

from fedloom_studies.cli import map, reproduce

__all__ = ["map", "reproduce"]
