"""Training of a personal model for a client that did not participate in the run, with a fixed server state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fedloom.algorithms import Algorithm, upload_fields
from fedloom.data.federation import Federation
from fedloom.errors import ClientError, ConfigError, FedloomError, describe_cause
from fedloom.local import Ctx, LocalSGD, Work
from fedloom.local.optimizer import OptimizerStates, find_slots
from fedloom.local.oracles import Network, make_oracle
from fedloom.local.rows import rows_of
from fedloom.seeds import derive
from fedloom.tasks import make_task
from fedloom.trained.model import ModelRecipe
from fedloom.values import has_type


class ServerSide(NamedTuple):
    """State of a finished run for training models for clients that join later.

    Attributes:
        algorithm: the method.
        local: settings of local training in the run.
        server: state of the server after the last round.
        kept: rows that the server stores for each client ``[n, .]``, if the method mixes them, or None.
        weight: clients' shares in the objective ``[n, 1]``.
        sizes: clients' numbers of training samples ``[n, 1]``.
        round: number of rounds that were run.
        seed: seed of the run.
    """

    algorithm: Algorithm
    local: LocalSGD
    server: Any
    kept: Any
    weight: Tensor
    sizes: Tensor
    round: int
    seed: int


MAX_ROUNDS = 10_000_000
"""Maximum number of client steps that a new client may take."""


def has_personal(algorithm: Algorithm) -> bool:
    """Return True if a method provides personal models."""
    return type(algorithm).personal is not Algorithm.personal


def adapt_model(side: ServerSide, recipe: ModelRecipe, fed: Federation, rounds: int = 1) -> tuple[Tensor, Network]:
    """Train the personal model ``[d]`` of a new client. Return the model and the client's local problem.

    The client joins the run's n clients with a share equal to their mean. Its state is the method's initial client
    state for the global model, or for the initial model if there is no global model. The client then performs the
    method's client step in ``rounds`` rounds. The server computes a download for each round, but its state does not
    change. Finally, the method's `personal` function returns the model.

    Args:
        side: state of the finished run.
        recipe: recipe for building the run's models.
        fed: federation that contains only the new client.
        rounds: number of client steps, at least 1.

    Raises:
        ConfigError: the method does not provide personal models, ``rounds`` is out of range, or the schedule has
            reduced the step size to 0.
        ClientError: the method's code raised an error, or the resulting model is not finite.
    """
    algorithm, t, n = side.algorithm, side.round, len(side.weight)
    if not has_personal(algorithm):
        raise ConfigError(f"{type(algorithm).__name__} has no personal models: every client uses its global model")
    if has_type(rounds, bool) or not has_type(rounds, int, np.integer) or not 1 <= rounds <= MAX_ROUNDS:
        raise ConfigError(f"rounds must be an integer from 1 to {MAX_ROUNDS:,}, got {rounds!r:.80}")
    if side.local.lr_at(t + rounds) == 0:
        raise ConfigError(f"the run's schedule sets the learning rate to 0 in round {t + rounds}. Set lr")
    fed = fed.to(dtype=recipe.dtype)
    module = recipe.build()
    oracle = make_oracle(module, make_task(fed.data, recipe.objective), fed)
    share = side.weight.mean()
    weight = torch.cat([side.weight, share[None, None]]) / (1 + share)
    sizes = torch.cat([side.sizes, oracle.sizes(torch.tensor([0]))[:, None].to(side.sizes)])
    ctx = Ctx(t, n + 1, n + 1, torch.arange(n + 1), oracle.layout, weight, sizes, None, side.local, side.seed, t)
    ctx = ctx if algorithm.mixes else ctx._replace(m=1, ids=torch.tensor([n]))
    start = algorithm.global_model(side.server)
    _, template, first = algorithm.init(oracle.layout.vector(module) if start is None else start, ctx._replace(round=0))
    rows, first_row = _single_client_row(template), None if first is None else _single_client_row(first)
    seed = derive(side.seed, client=n, purpose="adapt")
    memory = None
    if side.local.optimizer_state == "persistent":
        like = oracle.layout.vector(oracle.module)
        memory = OptimizerStates(like.new_zeros(1, 0), find_slots(side.local, oracle.layout, like))
    try:
        for k in range(1, rounds + 1):
            memory = memory and memory.replace_rows(memory.rows)
            down = _make_download(side, first_row, ctx)
            work = Work(oracle, torch.tensor([0]), weight[-1:], side.local, seed=seed, round=t + k, memory=memory)
            up, rows = algorithm.client(down, rows, work)
            first_row = None if first_row is None else _server_row(algorithm, up, first_row)
        row = algorithm.personal(_make_download(side, first_row, ctx), rows, work)
    except FedloomError:
        raise
    except Exception as error:
        raise ClientError("adapting", t + rounds, [n], describe_cause(error)) from error
    assert row is not None
    if not bool(row.isfinite().all()):
        raise ClientError(
            "adapting", t + rounds, [n], "the adapted model is not finite. Use a smaller lr or fewer rounds"
        )
    return row[0], oracle


def _single_client_row(template: Any) -> Any:
    """Return a client's state as rows with leading dimension 1."""
    return type(template)(*[t[None] for t in template])


def _make_download(side: ServerSide, state: Any, ctx: Ctx) -> Any:
    """Return the download for the new client, which follows all other clients if the method mixes stored rows."""
    if not side.algorithm.mixes:
        return side.algorithm.down(side.server, None, ctx)
    wide = [
        pad(old, (0, new.shape[1] - old.shape[1])) for old, new in zip(side.kept, state, strict=True)
    ]  # n + 1 clients
    kept = type(state)(*[torch.cat([old, new]) for old, new in zip(wide, state, strict=True)])
    return rows_of(side.algorithm.down(side.server, kept, ctx), torch.tensor([ctx.n - 1]))


def _server_row(algorithm: Algorithm, up: object, state: object) -> Any:
    """Return the rows that the server would store for the new client after its upload."""
    return type(state)(*[getattr(up, name) for name, kind in upload_fields(type(algorithm)).items() if kind.keeps])
