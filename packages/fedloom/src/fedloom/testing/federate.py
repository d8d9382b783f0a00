"""Reference implementation of a run, written as simply as possible.

The engine is compared with this implementation, and laws are checked against it.

A run has one list of clients per round. If requested, each client is called separately. Sums are computed in Python,
and there are no chunks, stores or files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm, upload_fields
from fedloom.algorithms._messages import base_of, primary_field
from fedloom.local import Ctx, LocalSGD, Work
from fedloom.local.rows import map_rows
from fedloom.testing.trees import select_download, take_rows

if TYPE_CHECKING:
    from fedloom.choose import Weigher
    from fedloom.local.oracles.base import Oracle
    from fedloom.testing.network import Classifier
    from fedloom.testing.problems import Problem

Schedule = Callable[[int], Collection[int]] | Sequence[Collection[int]]
"""Client ids for each round, as a function of the round number (from 1) or as a sequence with one entry per round."""


class ReferenceState(NamedTuple):
    """Complete state of a run between two rounds.

    Attributes:
        round: number of rounds that were run.
        server: state of the algorithm's server.
        rows: states of all n clients.
        kept: rows that the server stores for all n clients, or None.
        weigher: state of the weigher, or None if there is no weigher.
    """

    round: int
    server: Any
    rows: Any
    kept: Any
    weigher: Any

    def parts(self) -> dict[str, Any]:
        """Return all states by name, without the round number."""
        return {name: part for name, part in self._asdict().items() if name != "round"}


class ReferenceFederation(NamedTuple):
    """Parts of a run that stay the same in all rounds: local problems, shares ``[n, 1]``, settings, seed and layout."""

    oracle: Oracle
    weight: Tensor
    local: LocalSGD
    seed: int = 0
    rounds: int = 100

    @property
    def n(self) -> int:
        """Number of all clients."""
        return len(self.weight)

    def ctx(self, round: int, ids: Sequence[int]) -> Ctx:
        """Return the context of a round with the cohort ``ids``, which contains what the server knows."""
        sizes = self.oracle.sizes(torch.arange(self.n))[:, None]
        cohort = torch.tensor(ids, dtype=torch.long)
        return Ctx(
            round, self.n, len(ids), cohort, self.oracle.layout, self.weight, sizes, None, self.local, self.seed,
            self.rounds,
        )  # fmt: skip

    def work(self, round: int, ids: Sequence[int], steps: int | None = None) -> Work:
        """Return the local problems of the clients ``ids``."""
        cohort = torch.tensor(ids, dtype=torch.long)
        return Work(self.oracle, cohort, self.weight[cohort], self.local, seed=self.seed, round=round, steps=steps)


def mixed(algorithm: Algorithm, kept: object, ids: Sequence[int]) -> Any:
    """Return the stored rows that a download mixes (of the cohort or of all clients), or None if nothing is mixed."""
    if not algorithm.mixes:
        return None
    return kept if algorithm.mixes_all else take_rows(kept, ids)


def begin(algorithm: Algorithm, fed: ReferenceFederation, x0: Tensor, weigher: Weigher | None = None) -> ReferenceState:
    """Return the state before the first round. All clients have the same initial rows."""
    ctx = fed.ctx(0, range(fed.n))
    algorithm = algorithm.derive_options(ctx)
    server, template, kept = algorithm.init(x0, ctx)

    def all_clients(tree: object) -> Any:
        return map_rows(lambda t: t.expand(fed.n, *t.shape).clone(), tree)

    return ReferenceState(0, server, all_clients(template), all_clients(kept), weigher.init(ctx) if weigher else None)


def play(
    algorithm: Algorithm, fed: ReferenceFederation, state: ReferenceState, cohort: Collection[int], *,
    dropped: Collection[int] = (), weigher: Weigher | None = None, alone: bool = False,
) -> ReferenceState:  # fmt: skip
    """Run one round, and return the state after it.

    Args:
        algorithm: the method.
        fed: federation that defines the local problems.
        state: state before the round. This state is not changed.
        cohort: ids of the clients that train.
        dropped: ids of the clients in the cohort whose uploads are lost.
        weigher: weigher, or None to weight clients by their shares.
        alone: True to call each client separately, as in a deployment. False to call the whole cohort at once.
    """
    algorithm = algorithm.derive_options(fed.ctx(0, range(fed.n)))
    round, ids = state.round + 1, sorted(cohort)
    accepted = [i for i in ids if i not in set(dropped)]
    down = algorithm.down(state.server, mixed(algorithm, state.kept, ids), fed.ctx(round, ids))
    answers: dict[int, Any] = {}
    for group in [[i] for i in ids] if alone else [ids]:
        got = select_download(down, [ids.index(i) for i in group])
        work = fed.work(round, group)
        before = take_rows(state.rows, group)
        up, rows = algorithm.client(got, before, work)
        info = None
        if weigher and weigher.probes:
            primary = primary_field(type(algorithm))
            base = base_of(upload_fields(type(algorithm))[primary], got, before)
            info = weigher.probe(got, base + getattr(up, primary), work)
        for k, i in enumerate(group):
            answers[i] = take_rows((up, rows, info), k)
    if not accepted:
        return state._replace(round=round)

    ctx = fed.ctx(round, accepted)
    ups = [answers[i][0] for i in accepted]
    kinds = upload_fields(type(algorithm)).values()
    weighs_itself = algorithm.uses_shares or any(getattr(kind, "weight", None) for kind in kinds)
    masses = [1.0] * fed.n if weighs_itself else [float(alpha) for alpha in fed.weight]
    among = [float(fed.weight[i]) for i in accepted]
    shares, remembered = [alpha / sum(among) for alpha in among], state.weigher
    if weigher:
        infos = torch.stack([answers[i][2] for i in accepted]) if weigher.probes else None
        raw, remembered = weigher.apply(state.weigher, infos, ctx)
        shares = [float(p) / float(raw.sum()) for p in raw]
    stored = state.kept
    if stored is not None:
        stored = _replace_rows(stored, accepted, [[getattr(up, name) for name in stored._fields] for up in ups])
    arrived = {}
    for name, kind in upload_fields(type(algorithm)).items():
        values = [getattr(up, name) for up in ups]
        if kind.part is not None:
            values = [value * algorithm.part(kind.part, ctx.layout) for value in values]
        if not kind.averaged:
            arrived[name] = torch.stack(values)
        elif kind.keeps:
            weight = getattr(kind, "weight", None)
            counts = torch.tensor(masses, dtype=values[0].dtype)[:, None] if weight is None else getattr(stored, weight)
            arrived[name] = (counts * getattr(stored, name)).sum(0) / counts.sum(0)
        else:
            added = [masses[i] for i in accepted]
            p = [mass / sum(added) for mass in added] if kind.accumulates else shares
            arrived[name] = torch.stack([share * value for share, value in zip(p, values, strict=True)]).sum(0)
    server = algorithm.server(state.server, type(ups[0])(**arrived), ctx)
    return ReferenceState(
        round, server, _replace_rows(state.rows, accepted, [answers[i][1] for i in accepted]), stored, remembered
    )


def federate(
    algorithm: Algorithm,
    problem: Problem | Classifier | tuple[Oracle, Tensor, Tensor],
    rounds: int,
    *,
    local: LocalSGD | None = None,
    solve: bool = False,
    noise: float = 0.0,
    cohorts: Schedule | None = None,
    dropped: Schedule | None = None,
    weigher: Weigher | None = None,
    alone: bool = False,
    seed: int = 0,
    start: ReferenceState | None = None,
) -> list[ReferenceState]:
    """Run rounds of a method with the reference implementation.

    Args:
        algorithm: the method.
        problem: quadratics or a small network. Alternatively, a tuple of an oracle, the initial model ``[d]`` and the
            shares ``[n, 1]``.
        rounds: number of rounds to run.
        local: settings of local training.
        solve: True to solve the local problems of quadratics exactly.
        noise: standard deviation of the samples' minimizers, for quadratics.
        cohorts: clients that train in each round. If None, all clients train.
        dropped: clients whose uploads are lost. If None, no upload is lost.
        weigher: weigher, or None to weight clients by their shares.
        alone: True to call each client separately.
        seed: seed of the run.
        start: initial state of the run.

    Returns:
        State before the first of these rounds, and the state after each round.
    """
    if isinstance(problem, tuple):
        oracle, x0, weight = problem
    else:
        oracle, x0, weight = problem.oracle(solve=solve, noise=noise), problem.x0, problem.alpha
    fed = ReferenceFederation(oracle, weight, local or LocalSGD(), seed)
    states = [begin(algorithm, fed, x0, weigher) if start is None else start]
    for _ in range(rounds):
        t = states[-1].round + 1
        cohort = range(fed.n) if cohorts is None else _entry(cohorts, t)
        lost = () if dropped is None else _entry(dropped, t)
        states.append(play(algorithm, fed, states[-1], cohort, dropped=lost, weigher=weigher, alone=alone))
    return states


def personal_models(algorithm: Algorithm, fed: ReferenceFederation, state: ReferenceState) -> Tensor | None:
    """Return the personal models of all clients after a round. The download is computed from the new server state.

    Args:
        algorithm: the method.
        fed: federation that defines the local problems.
        state: state after the round, as returned by `federate`.

    Returns:
        Personal models ``[n, d]``. None if the method has no personal models.
    """
    everyone = range(fed.n)
    down = algorithm.down(state.server, state.kept if algorithm.mixes else None, fed.ctx(state.round, everyone))
    return algorithm.personal(down, state.rows, fed.work(state.round, everyone))


def _entry(schedule: Schedule, round: int) -> Collection[int]:
    return schedule(round) if callable(schedule) else schedule[round - 1]


def _replace_rows(tree: Any, ids: Sequence[int], rows: Sequence[Any]) -> Any:
    """Return a copy of ``tree`` with new rows at ``ids``. All other rows remain unchanged."""
    if isinstance(tree, Tensor):
        new = tree.clone()
        for i, row in zip(ids, rows, strict=True):
            new[i] = row
        return new
    if not isinstance(tree, tuple):
        return tree
    columns = [_replace_rows(part, ids, [row[k] for row in rows]) for k, part in enumerate(tree)]
    return type(tree)(*columns) if hasattr(tree, "_fields") else tuple(columns)
