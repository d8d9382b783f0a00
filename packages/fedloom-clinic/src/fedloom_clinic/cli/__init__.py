"""Commands that this package adds to ``fedloom``."""

from fedloom_clinic.cli import cox, glm, init

__all__ = ["cox", "glm", "init"]
