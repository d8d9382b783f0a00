"""fedloom's methods for any Flower app: a strategy for the server, and a decorator for the nodes (docs/flower.md)."""

try:
    import flwr as _flwr  # noqa: F401  # all of the package needs it
except ModuleNotFoundError as error:
    sentence = f"fedloom_sites.flower needs {error.name}. Install it with: pip install fedloom-sites"
    raise ModuleNotFoundError(sentence, name=error.name) from None

from fedloom_sites.flower.analyses import Analyses, analyze
from fedloom_sites.flower.local import Local
from fedloom_sites.flower.node import client, personal_model
from fedloom_sites.flower.strategy import Strategy

__all__ = ["Analyses", "Local", "Strategy", "analyze", "client", "personal_model"]
