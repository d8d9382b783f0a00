"""A site's half."""

from fedloom.deploy.apps import client_app as app

__all__ = ["app"]
