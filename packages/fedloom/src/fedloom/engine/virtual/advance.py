"""Next server step of a run with a clock, according to the run's schedule.

Virtual time involves no real waiting. A client computes from the server's state at its dispatch, together with all
clients that are dispatched from the same state. The clock holds the client's upload until its arrival time. Since the
state does not change between two server steps, clients that will be dispatched from it later can be computed in
advance. At real sites, time is real: an asynchronous schedule works the same way, but uploads arrive when the sites
send them.
"""

from __future__ import annotations

from fedloom.engine.clients.remote import StreamedClients
from fedloom.engine.job import Job
from fedloom.engine.state import State
from fedloom.engine.virtual.real import RealVersion
from fedloom.engine.virtual.rounds import run_deadline_round, run_whole_round
from fedloom.engine.virtual.stream import VirtualVersion
from fedloom.processes.clients import Clients, LocalClients
from fedloom.schedule import Deadline, OverSelection, Stream


def advance_to_server_step(job: Job, clients: Clients, state: State) -> tuple[State, tuple[str, ...]]:
    """Run a job until the next server step.

    Returns:
        The state after the step, including its time, and sentences about events during the step.

    Raises:
        RunStopped: too few uploads are usable, too few uploads can still arrive, or the server's state is not finite.
    """
    schedule = job.setting.schedule
    if isinstance(clients, StreamedClients):
        assert isinstance(schedule, Stream)  # other schedules have no clock at real sites
        return RealVersion(job, clients, state, schedule).run()
    assert isinstance(clients, LocalClients)
    match schedule:
        case Stream():
            return VirtualVersion(job, clients, state, schedule).run()
        case Deadline() | OverSelection():
            return run_deadline_round(job, clients, state)
        case _:
            return run_whole_round(job, clients, state)
