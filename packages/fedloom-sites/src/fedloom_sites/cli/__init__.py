"""``fedloom deploy``, and a function that finds a deployment's results, both loaded through entry points."""

from __future__ import annotations

from pathlib import Path

from fedloom_sites.cli import deploy, deploy_members, deploy_models

__all__ = ["deploy", "deploy_members", "deploy_models", "results_of"]


def results_of(folder: Path) -> Path:
    """Return a deployment's run directory.

    Raises:
        ConfigError: the folder is not the directory of a deployment.
    """
    from fedloom_sites.deploy.ops.status import find_server

    return find_server(folder).results
