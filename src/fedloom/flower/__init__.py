"""Any method in anyone's Flower app: a strategy at the server, a decorator at the nodes; see docs/flower.md."""

from fedloom.flower.local import Local
from fedloom.flower.node import client, personal_model
from fedloom.flower.strategy import Strategy

__all__ = ["Local", "Strategy", "client", "personal_model"]
