"""Second step of creating a job: build the model, the clients' local problems, and their weights in the objective."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.choose.shares import check_clusters, cluster_shares, clusters_of, shares_of, uses_clusters
from fedloom.data.federation import Federation
from fedloom.engine.replay import Replay
from fedloom.engine.setting import Setting
from fedloom.engine.setup.participants import Participants
from fedloom.errors import Refused
from fedloom.local import Ctx
from fedloom.local.oracles import Network, make_oracle
from fedloom.tasks import make_task


class LocalProblems(NamedTuple):
    """The clients' local problems before round 1.

    Attributes:
        oracle: object that computes losses and gradients.
        ctx: context of all clients, including their weights.
        x0: initial model ``[d]``.
        spent: work and traffic ``[7]`` for computing the weights (see `CLIENT_COUNTS`). None if there was no cost.
    """

    oracle: Network
    ctx: Ctx
    x0: Tensor
    spent: Tensor | None


def build_problems(participants: Participants, replay: Replay, *, finds: bool) -> LocalProblems:
    """Build the model and the clients' local problems.

    Args:
        participants: the checked run and its clients.
        replay: values that replace the run's own random draws.
        finds: True to compute the clusters that determine client weights, for which all clients train once. If False,
            weights are uniform.

    Raises:
        ConfigError: the model or the client weights are not suitable for the data.
    """
    setting, fed = participants.setting, participants.fed
    oracle = _build_oracle(setting, fed)
    sizes, shares = fed.sizes("train").cpu()[:, None], shares_of(setting.client_weights, fed)
    replay.check(setting.method, setting.sampler, setting.rounds, sizes)
    ids, projection, alpha = torch.arange(fed.n), replay.projection, shares.to(oracle.dtype)
    ctx = Ctx(
        0, fed.n, fed.n, ids, oracle.layout, alpha, sizes, fed.groups, setting.local, setting.seed, setting.rounds,
        projection,
    )  # fmt: skip
    x0 = replay.start(oracle.layout.vector(oracle.module, oracle.dtype).to(oracle.device), oracle.layout)
    if not bool(x0.isfinite().all()):
        raise Refused(
            f"model {type(oracle.module).__name__!r} contains NaN or infinity before round 1",
            rule="initial-model-not-finite",
            fix="initialize all parameters with finite values",
        )
    if not uses_clusters(setting.client_weights):
        return LocalProblems(oracle, ctx, x0, None)
    clusters = clusters_of(setting.client_weights)
    check_clusters(clusters, ctx)
    if not finds:
        return LocalProblems(oracle, ctx, x0, None)
    shares, spent = cluster_shares(clusters, oracle, x0, ctx, setting.attack, participants.attackers)
    return LocalProblems(oracle, ctx._replace(weight=shares.to(oracle.dtype)), x0, spent)


def _build_oracle(setting: Setting, fed: Federation) -> Network:
    """Build the local problems for a run's model on a federation.

    Raises:
        ConfigError: the model, the task or the gradient engine is not suitable for the data.
    """
    engine, augment, task = setting.engine, setting.augment, make_task(fed.data, setting.task)
    task_keys = [key for key, value in setting.task if value is not None]
    for construction in setting.model.constructions:
        construction.check_task(fed.data.classed, fed.data.each, task_keys)
    module = setting.model.build(tuple(fed.data.shape), task.outputs, setting.seed, fed.data.tokens)
    oracle = make_oracle(
        module, task, fed, engine.gradient_engine, augment if augment.changes else None, engine.precision
    )
    if engine.precision != "full" and setting.method.full_gradients:
        why = setting.method.full_gradients
        raise Refused(
            f"{why} uses full gradients, which are always computed in float32",
            rule="precision-of-full-gradients",
            fix="omit {engine.precision}",
        )
    return oracle
