"""A recipe of seconds: two methods, two variants of a federation of digits."""

from __future__ import annotations

from fedloom_studies.reproduce.recipe import Recipe, make_recipe, merge_tables

TINY = {
    "rounds": 4,
    "seeds": [3, 4],
    "client_weights": "uniform",
    "data": {"source": "digits"},
    "partition": {"kind": "shards", "clients": 4, "labels_per_client": 3, "max_train_per_client": 60},
    "local": {"lr": 0.05},
    "evaluate": {"every": 2},
    "choose": {"rounds": 1},
    "method": [
        {"algorithm": "fedavg", "choose": {"local.lr": [0.0001, 0.5]}},
        {"algorithm": "flame", "lam": 1.0},
    ],
    "paper": {
        "title": "FLAME, a test",
        "protocol": "none",
        "order": 1,
        "columns": {"a": "flame: personal", "b": "fedavg: global"},
        "cells": {"few": [[0.9, 0.01], []]},
        "claims": [{"text": "personal is better", "higher": "flame: personal", "than": ["fedavg: global"]}],
    },
    "variant": {"few": {"options": {"flame": {"rho": 0.5}}}, "many": {"partition": {"clients": 6}}},
    "scale": {"laptop": {"seeds": [7], "methods": ["flame"], "budget": 1}, "full": {}},
}


def tiny() -> Recipe:
    return make_recipe("tiny", TINY)


def with_claim(**claim: object) -> Recipe:
    table = {"text": "t", "higher": "flame: personal", "than": ["fedavg: global"], **claim}
    table = {k: v for k, v in table.items() if v is not None}
    return make_recipe("tiny", merge_tables(TINY, {"paper": {"claims": [table]}}))


def numbers(**by_reference: list[float]) -> dict[str, dict[str, dict[str, float | None]]]:
    table = {name.replace("_", ": ") + ": accuracy": v for name, v in by_reference.items()}
    return {"few": {name: {str(seed): v for seed, v in enumerate(vs)} for name, vs in table.items()}}


NEAR, FAR = [0.50, 0.51, 0.49, 0.50, 0.52], [0.70, 0.72, 0.69, 0.71, 0.71]
"""Results of five seeds, of which one side is clearly better."""
