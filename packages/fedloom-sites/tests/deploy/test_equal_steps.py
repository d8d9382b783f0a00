"""A site without an answer takes the steps of all other sites, so that its time does not show that it has none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedloom.errors import Refused, Stop
from fedloom_sites.deploy.analyses import AgreedAnalysis
from fedloom_sites.deploy.site import trainer as trainer_module
from fedloom_sites.deploy.site.analyses import SiteAnalyses
from fedloom_sites.deploy.site.groups import SiteGroups
from fedloom_sites.deploy.site.trainer import Trainer
from fedloom_sites.transport import node as node_module
from tests.deploy.grid import FakeGrid
from tests.deploy.scene import FIRST, Scene
from tests.deploy.sessions import secured

pytestmark = pytest.mark.attack("measures the time until sites answer")

UNABLE = 1
"""The site that has no answer."""
STEPS: tuple[tuple[Any, str], ...] = (
    (node_module, "run_clients"), (trainer_module, "neutral_upload"), (AgreedAnalysis, "answer"), (SiteGroups, "cells"),
)  # fmt: skip
"""All long computations of a site."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def test_a_site_takes_the_same_steps_with_and_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends neutral uploads, has no scores, and its rows are not those of the first question."""
    here = secured(
        tmp_path, "fedavg", rounds=2, evaluate={"every": 1},
        analysis=[{"kind": "pooled-importance", "rules": {"min_subjects": 2}}],
    )  # fmt: skip
    seen, now = {site.client: list[str]() for site in here.sites}, [0]
    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, noting(seen, now, name, getattr(owner, name)))
    make, scores, are_apart = trainer_module.Trainer._check_result, Trainer.scores, SiteAnalyses._are_apart

    def fails(trainer: Trainer, *args: Any) -> None:
        make(trainer, *args)
        if trainer.site.client == UNABLE:
            raise Refused("not finite")

    monkeypatch.setattr(Trainer, "_check_result", fails)
    monkeypatch.setattr(Trainer, "scores", lambda t, *a, **m: {} if t.site.client == UNABLE else scores(t, *a, **m))
    monkeypatch.setattr(SiteAnalyses, "_are_apart", lambda s, *a: are_apart(s, *a) and s._trainer.site.client != UNABLE)
    assert here.serve(asking(here, now)) is Stop.DONE
    assert here.audit("neutral uploads")
    assert here.audit("scores given up")
    assert here.audit("no result")
    assert set(seen[0]) == {name for _, name in STEPS}
    assert all(steps == seen[0] for steps in seen.values())


def noting(seen: dict[int, list[str]], now: list[int], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which also notes its name for the site that answers now."""

    def noted(*args: Any, **more: Any) -> Any:
        seen[now[0]].append(name)
        return call(*args, **more)

    return noted


def asking(here: Scene, now: list[int]) -> FakeGrid:
    """A grid that notes which site answers."""

    def node(client: Any) -> Callable[[Message], Message]:
        def answer(message: Message) -> Message:
            now[0] = client.site.client
            return client.answer(message)

        return answer

    return FakeGrid({FIRST + client.site.client: node(client) for client in here.clients()})


def test_an_honest_upload_is_not_changed_by_the_neutral_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing it draws no random number and leaves no trace in the state of the site."""
    models = list[torch.Tensor]()
    for k, compute in enumerate((trainer_module.neutral_upload, lambda *args: args[-1])):
        monkeypatch.setattr(trainer_module, "neutral_upload", compute)
        here = secured(tmp_path / f"{k}", "scaffold", rounds=3, local={"lr": 0.05, "epochs": 1, "batch_size": 4})
        assert here.serve() is Stop.DONE
        models.append(here.model())
    assert torch.equal(*models)
