"""The server's half."""

from fedloom.deploy.apps import server_app as app

__all__ = ["app"]
