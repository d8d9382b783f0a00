"""Job creation: check a setting against its data, create the problem, and allocate state."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from fedloom.data.federation import Federation
from fedloom.engine.checks.rehearsal import rehearse
from fedloom.engine.job import Job
from fedloom.engine.problem import JobFacts
from fedloom.engine.replay import Replay
from fedloom.engine.setting import Setting
from fedloom.engine.setup.participants import choose_participants
from fedloom.engine.setup.problems import build_problems
from fedloom.engine.setup.states import make_templates, start_method
from fedloom.engine.workers import worker_count
from fedloom.errors import Refused
from fedloom.local.oracles import chunk_limit
from fedloom.local.oracles.precision import undisturbed
from fedloom.local.rows import Fields, remade
from fedloom.processes.ranks import SINGLE_RANK, Ranks
from fedloom.processes.row_locations import RowLocations
from fedloom.schedule import Stream
from fedloom.seeds import preserve_rng
from fedloom.storage.memory import Forked
from fedloom.storage.store import Store


@undisturbed()
def check(setting: Setting, fed: Federation) -> tuple[str, ...]:
    """Check a run against its federation: this builds the model, but no client state.

    Returns:
        Return the notes of the run before its first round.

    Raises:
        ConfigError: values are impossible, or do not work together.
    """
    return make_problem(setting, fed, finds=False)[0].notes


@undisturbed()
def make_job(
    setting: Setting,
    fed: Federation,
    *,
    folder: Path | None = None,
    ranks: Ranks = SINGLE_RANK,
    replay: Replay = Replay(),  # noqa: B008  # frozen
) -> tuple[Job, Fields]:
    """Create a job, and the server's state before the first round.

    Args:
        setting: the run.
        fed: clients and their data.
        folder: folder for the clients' state. None keeps the state in memory.
        ranks: processes, each of which makes this call.
        replay: values that replace the run's own draws.

    Raises:
        ConfigError: values are impossible, or do not work together.
    """
    problem, start = make_problem(setting, fed, replay)
    engine, samples = problem.setting.engine, int(problem.train_sizes.sum())
    workers = worker_count(engine, problem, samples) if ranks.size == 1 else 1

    def store(name: str, template: Fields) -> Store[Fields]:
        on_cpu = remade(template, [t.cpu() for t in template])
        path = None if folder is None or ranks.machines[ranks.rank] > 0 else folder / name
        memory = Forked() if workers > 1 else ranks.memory
        return Store(problem.n, on_cpu, path=path, budget=engine.state_memory_mib << 20, memory=memory)

    facts = {field.name: getattr(problem, field.name) for field in fields(problem)}
    stores = {name: store(name, template) for name, template in start.templates.items()}
    return Job(workers=workers, ranks=ranks, locations=RowLocations(ranks, stores), **facts, **stores), start.server  # type: ignore[arg-type]


class InitialState(NamedTuple):
    """States before the first round.

    Attributes:
        server: the server's state.
        templates: rows of a client, without the client dimension, keyed by the `Job` store that holds them.
    """

    server: Fields
    templates: dict[str, Fields]


@preserve_rng()
def make_problem(
    setting: Setting,
    fed: Federation,
    replay: Replay = Replay(),  # noqa: B008  # frozen
    *,
    finds: bool = True,
) -> tuple[JobFacts, InitialState]:
    """Create the computation of a run, without storage for any client's state.

    Three stages give three results: the clients that participate, their local problems, and the method's states.

    Args:
        setting: the run.
        fed: clients and their data.
        replay: values that replace the run's own draws.
        finds: True to find the clusters on which shares are based, which trains all clients once. Otherwise, shares are
            uniform.

    Raises:
        ConfigError: values are impossible, or do not work together.
    """
    participants = choose_participants(setting, fed)
    problems = build_problems(participants, replay, finds=finds)
    started = start_method(participants, problems, replay)
    setting = started.setting
    problem = JobFacts(
        setting=setting,
        oracle=problems.oracle,
        fed=participants.fed,
        eval_fed=participants.eval_fed,
        attackers=participants.attackers,
        alpha=problems.ctx.weight,
        chunk=setting.engine.clients_per_batch or chunk_limit(problems.oracle),
        memory=started.memory,
        notes=tuple(started.notes),
        replay=replay,
        spent=problems.spent,
    )
    if problem.fleet is not None and isinstance(setting.schedule, Stream) and replay.cohorts is not None:
        raise Refused(f"cohorts are lists of clients per round, but schedule {setting.schedule.kind!r} has no rounds")
    rehearse(problem, started.states)
    return problem, InitialState(started.states[0], make_templates(problem, started, problems.x0))
