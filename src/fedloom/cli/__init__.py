"""The command line: ``fedloom run FILE.toml`` and what goes with it. Only the commands that need torch import it."""

from __future__ import annotations

from fedloom.cli import bench, deploy, facts, init, map, models, reproduce, runs, tune, watch
from fedloom.cli._app import app

__all__ = ["app", "bench", "deploy", "facts", "init", "main", "map", "models", "reproduce", "runs", "tune", "watch"]


def main() -> None:
    """Entry point of the command ``fedloom``."""
    app()
