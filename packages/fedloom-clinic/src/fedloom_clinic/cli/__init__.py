"""Commands that this package adds to the command ``fedloom``."""

from fedloom_clinic.cli import cox, glm, init

__all__ = ["cox", "glm", "init"]
