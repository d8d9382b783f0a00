"""Computation of clients at their dispatch, and server steps with arrived uploads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms import Algorithm
from fedloom.engine.clients.chunk import accept_uploads, count_chunk_output
from fedloom.engine.clients.forging import forge_models
from fedloom.engine.clients.uploads import Uploads, compute_weights
from fedloom.engine.job import Job
from fedloom.engine.round import sort_by_samples, update_server
from fedloom.engine.state import State
from fedloom.engine.virtual.clock import Flight, FlightPiece, Ids, ReplyOutcome, Rows, combine_pieces, flatten_results
from fedloom.engine.virtual.staleness import convert_stale_uploads
from fedloom.local.rows import Fields
from fedloom.processes.clients import ChunkResult, Clients, LocalClients, TrainRequest, TrainTask
from fedloom.schedule import Fleet, Stream


def log_rows(fleet: Fleet, ids: Ids, counts: Tensor, version: int, round: int, start: float) -> Rows:
    """Return log rows ``[m, 7]`` for clients that all start at time ``start`` and whose uploads are all used."""
    busy = fleet.busy(ids, counts.numpy())
    same = np.ones(len(ids))
    columns = (
        ids,
        version * same,
        round * same,
        start * same,
        fleet.ends(ids, start, busy),
        busy,
        ReplyOutcome.USED * same,
    )
    return np.stack(columns, 1)


def compute_results(
    job: Job, clients: LocalClients, state: State, ids: Tensor, times: Tensor, steps: Tensor | None = None
) -> list[Flight]:
    """Train clients from a given state, and return their results in the order of a synchronous round.

    Args:
        job: the run.
        clients: object that trains the clients.
        state: state of the run at dispatch.
        ids: ids of the clients ``[m]`` in ascending order.
        times: number of times that each client was drawn ``[m]``.
        steps: each client's number of local steps ``[m]``. If None, the number in the run's settings is used.
    """
    t = state.round + 1
    order = sort_by_samples(job, ids)
    ids, times, steps = ids[order], times[order], None if steps is None else steps[order]
    if job.mixes:
        job.locations.replicate(job.mixed(ids))
    down, share = job.down(state.server, t, ids), times[:, None].double()
    places, forging = job.places_by_honesty(ids)
    flights = list[Flight]()
    if len(places):
        some = None if steps is None else steps[places]
        request = TrainRequest(t, places, ids[places], share[places], down, state.server, some)
        for task, fields in clients.compute(request):
            flights.append(Flight.create(state.round, task.ids, task.share[:, 0].long(), fields))
    if len(forging):
        task = TrainTask(t, forging, ids[forging], share[forging], None if steps is None else steps[forging])
        models = [f.fields["trained"] for f in flights if "trained" in f.fields]
        honest = torch.cat(models) if models else None

        def attack() -> dict[str, Tensor]:
            received, output = forge_models(job, down, task, honest, len(ids))
            return flatten_results(count_chunk_output(job, state.server, task.ids, received, output))

        flights.append(Flight.create(state.round, task.ids, times[forging], clients.call_once(task.ids, attack)))
    return flights


def step_server(
    job: Job,
    clients: Clients,
    state: State,
    t: int,
    pieces: Sequence[FlightPiece],
    sampler: Fields,
    query_counts: Tensor,
) -> tuple[State, tuple[str, ...], NDArray[np.int64]]:
    """Take a server step with arrived uploads.

    Return the new state, sentences about events, and the clients whose uploads were used.
    """
    cohort = torch.from_numpy(np.concatenate([flight.ids[places] for flight, places in pieces]))
    times = np.concatenate([flight.times[places] for flight, places in pieces])
    shares = torch.from_numpy(times.astype(np.float64))[:, None]
    if not job.setting.aggregation_weights.probes:
        shares = shares * compute_weights(job, state.weigher, None, job.ctx(t, cohort))[0]
    for store in job.stores.values():
        store.touch(cohort)
    uploads, begin = Uploads(job, state.sums), 0
    for group in _group_pieces(job, pieces, t):
        m = sum(len(places) for _, places in group)
        part = slice(begin, begin + m)
        begin += m
        task = TrainTask(t, torch.arange(m), cohort[part], shares[part])

        def arrive(group: Sequence[FlightPiece] = group, task: TrainTask = task) -> ChunkResult:
            down, output, counts = combine_pieces(job, group)
            applied = None
            if isinstance(job.setting.schedule, Stream):
                lags = [t - 1 - flight.version for flight, places in group for _ in places]
                applied = convert_stale_uploads(job, state.server, t, task.ids, output.upload, down, torch.tensor(lags))
            return accept_uploads(job, state.server, task, down, output, counts, applied)

        uploads.add(clients.call_once(task.ids, arrive))
    new, events = update_server(job, state, t, cohort, sampler, query_counts, uploads)
    return new, events, torch.cat(uploads.ids).numpy()


def _group_pieces(job: Job, pieces: Sequence[FlightPiece], t: int) -> list[list[FlightPiece]]:
    """Group the pieces that are processed together, with at most a chunk's number of clients if possible.

    Complete chunks dispatched from the current state are processed one by one, as in a synchronous round, so results
    are bit-for-bit identical. Pieces are also processed one by one if the method computes a client's received model
    from a single download.
    """
    whole = all(flight.version == t - 1 and len(places) == len(flight.ids) for flight, places in pieces)
    if whole or type(job.algorithm).received is not Algorithm.received:
        return [[piece] for piece in pieces]
    groups, m = list[list[FlightPiece]](), job.chunk
    for piece in pieces:
        if m + len(piece[1]) > job.chunk:
            groups.append([])
            m = 0
        groups[-1].append(piece)
        m += len(piece[1])
    return groups
