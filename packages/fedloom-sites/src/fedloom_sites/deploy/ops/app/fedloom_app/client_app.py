"""A site's half."""

from fedloom_sites.deploy.apps import client_app as app

__all__ = ["app"]
