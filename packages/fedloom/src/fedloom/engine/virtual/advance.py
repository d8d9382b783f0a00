"""Advance: the next step of the server in time, by the run's schedule.

In virtual time, nothing sleeps. What a client computes is computed from the state at its dispatch, together with the
clients that are dispatched at the same version, and its upload is held until the time at which it arrives. Between two
steps of the server no state changes, so the clients that will be dispatched at a version can be computed before their
turn. At real sites, which take their own time, a stream is the same with uploads that arrive when they do.
"""

from __future__ import annotations

from fedloom.engine.clients.remote import StreamedClients
from fedloom.engine.job import Job
from fedloom.engine.state import State
from fedloom.engine.virtual.real import RealVersion
from fedloom.engine.virtual.rounds import cut_round, whole_round
from fedloom.engine.virtual.stream import VirtualVersion
from fedloom.processes.clients import Clients, LocalClients
from fedloom.schedule import Deadline, OverSelection, Stream


def advance(job: Job, clients: Clients, state: State) -> tuple[State, tuple[str, ...]]:
    """Go on to the next step of the server.

    Returns:
        The state after it, with the time at which it was taken. And sentences on what happened.

    Raises:
        RunStopped: too few uploads are usable or can arrive, or the server's state is not finite.
    """
    schedule = job.setting.schedule
    if isinstance(clients, StreamedClients):
        assert isinstance(schedule, Stream)  # other rounds of real sites end by the server's settings
        return RealVersion(job, clients, state, schedule).run()
    assert isinstance(clients, LocalClients)
    match schedule:
        case Stream():
            return VirtualVersion(job, clients, state, schedule).run()
        case Deadline() | OverSelection():
            return cut_round(job, clients, state)
        case _:
            return whole_round(job, clients, state)
