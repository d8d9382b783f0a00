"""Advance: the next step of the server in virtual time, by the run's schedule.

Nothing sleeps. What a client computes is computed from the state at its dispatch, together with the clients that are
dispatched at the same version, and its upload is held until the time at which it arrives. Between two steps of the
server no state changes, so the clients that will be dispatched at a version can be computed before their turn.
"""

from __future__ import annotations

from fedloom.engine.job import Job
from fedloom.engine.state import State
from fedloom.engine.virtual.rounds import cut_round, whole_round
from fedloom.engine.virtual.stream import Version
from fedloom.processes.clients import Clients, LocalClients
from fedloom.schedule import Deadline, OverSelection, Stream


def advance(job: Job, clients: Clients, state: State) -> tuple[State, tuple[str, ...]]:
    """Go on to the next step of the server.

    Returns:
        The state after it, with the time at which it was taken; and sentences on what happened.

    Raises:
        RunStopped: too few uploads are usable or can arrive, or the server's state is not finite.
    """
    assert isinstance(clients, LocalClients)  # real sites have a clock of their own
    match job.setting.schedule:
        case Stream() as schedule:
            return Version(job, clients, state, schedule).run()
        case Deadline() | OverSelection():
            return cut_round(job, clients, state)
        case _:
            return whole_round(job, clients, state)
