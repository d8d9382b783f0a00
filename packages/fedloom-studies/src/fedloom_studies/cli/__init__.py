"""Commands ``fedloom reproduce`` and ``fedloom map``. Fedloom loads them through the package's entry points."""

from fedloom_studies.cli import map, reproduce

__all__ = ["map", "reproduce"]
