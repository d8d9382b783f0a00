"""Commands with which this package extends the command ``fedloom``."""

from fedloom_clinic.cli import cox, glm, init

__all__ = ["cox", "glm", "init"]
