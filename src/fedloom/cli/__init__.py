"""The command line: ``fedloom run FILE.toml`` and what goes with it. Only the commands that need torch import it."""

from __future__ import annotations

from importlib.metadata import entry_points

from fedloom.cli import bench, cox, deploy, facts, init, models, runs, tune, watch
from fedloom.cli._app import app

__all__ = ["app", "bench", "cox", "deploy", "facts", "init", "main", "models", "runs", "tune", "watch"]

for _package in entry_points(group="fedloom.commands"):
    _package.load()


def main() -> None:
    """Entry point of the command ``fedloom``."""
    app()
