"""The hybrid model: for every client the personal or the global model, whichever is better on one of its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.engine.scoring import Scores

HIGHER = ("accuracy", "auroc", "r2")
"""Metrics by which the hybrid chooses, the first that the task has; more is better."""


def choose_model(scores: Scores, select_on: str) -> Tensor:
    """Clients ``[n]`` that take the global model.

    The personal model stays where the global one is not strictly better on the part ``select_on``, and where that
    part is empty (FLAME, model selection).
    """
    personal, shared = scores["personal", select_on], scores["global", select_on]
    metric = next((name for name in HIGHER if name in personal), "loss")
    sign = -1.0 if metric == "loss" else 1.0
    return sign * shared[metric] > sign * personal[metric]


def hybrid_scores(scores: Scores, select_on: str) -> Scores:
    """Scores of the hybrid model on every part, from those of the other two."""
    takes_global = choose_model(scores, select_on)
    both = [part for model, part in scores if model == "personal" and ("global", part) in scores]
    parts = [part for part in both if part not in ("common", "")]
    return {
        ("hybrid", part): {
            name: torch.where(takes_global, scores["global", part][name], values)
            for name, values in scores["personal", part].items()
        }
        for part in parts
    }
