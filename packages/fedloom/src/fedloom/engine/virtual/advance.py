"""Advance a run to the server's next step in time, under the run's schedule.

Nothing waits in virtual time. A client computes from the state at its dispatch, together with all clients that are
dispatched at the same version, and the clock holds its upload until the time at which it arrives. The state does not
change between two server steps, so the clients that will be dispatched at a version can be computed in advance. At real
sites, time is real: a stream works in the same way, but its uploads arrive when the sites send them.
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
    """Return the state after the next step of the server, with the time of the step.

    Returns:
        The state after the step, with the time at which the step was taken. Sentences about events in the step follow.

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
