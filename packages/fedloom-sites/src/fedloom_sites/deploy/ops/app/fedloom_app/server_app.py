"""The server's half."""

from fedloom_sites.deploy.apps import server_app as app

__all__ = ["app"]
