"""Creation of a job: check the setting against the data, build the local problems, and allocate the state."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from fedloom.data.federation import Federation
from fedloom.engine.checks.idle import note_idle_options
from fedloom.engine.checks.learnable import check_learnable as check_learnable  # sites check their plans with it
from fedloom.engine.checks.rehearsal import rehearse_rounds
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
from fedloom.local.oracles.precision import isolate_torch_settings
from fedloom.local.rows import Fields, rebuild_rows
from fedloom.processes.ranks import SINGLE_RANK, Ranks
from fedloom.processes.row_locations import RowLocations
from fedloom.schedule import Stream
from fedloom.seeds import preserve_rng
from fedloom.storage.memory import ForkedMemory
from fedloom.storage.store import Store


@isolate_torch_settings()
def check(setting: Setting, fed: Federation) -> tuple[str, ...]:
    """Check a run against its federation. This builds the model but allocates no client state.

    Returns:
        Notes about the run from before its first round.

    Raises:
        ConfigError: values are impossible or cannot be combined.
    """
    problem, _ = make_problem(setting, fed, finds=False)
    check_learnable(problem.oracle.task, problem.fed)
    return problem.notes


def find_model_kinds(setting: Setting, fed: Federation) -> list[str]:
    """Return the kinds of models that a run evaluates: global, personal and hybrid. No client state is allocated.

    Raises:
        ConfigError: values are impossible, or cannot be combined.
    """
    problem, start = make_problem(setting, fed, finds=False)
    return problem.model_kinds(start.server)


@isolate_torch_settings()
def make_job(
    setting: Setting,
    fed: Federation,
    *,
    folder: Path | None = None,
    ranks: Ranks = SINGLE_RANK,
    replay: Replay = Replay(),  # noqa: B008  # frozen
) -> tuple[Job, Fields]:
    """Create a job and the state of the server before the first round.

    Args:
        setting: setting of the run.
        fed: clients and their data.
        folder: folder for client states. If None, they are kept in memory.
        ranks: processes that run the job together. Each process must make this call.
        replay: values that replace the run's own random draws.

    Raises:
        ConfigError: values are impossible or cannot be combined.
    """
    problem, start = make_problem(setting, fed, replay)
    engine, samples = problem.setting.engine, int(problem.train_sizes.sum())
    workers = worker_count(engine, problem, samples) if ranks.size == 1 else 1

    def store(name: str, template: Fields) -> Store[Fields]:
        on_cpu = rebuild_rows(template, [t.cpu() for t in template])
        path = None if folder is None or ranks.machines[ranks.rank] > 0 else folder / name
        memory = ForkedMemory() if workers > 1 else ranks.memory
        return Store(problem.n, on_cpu, path=path, budget=engine.state_memory_mib << 20, memory=memory)

    facts = {field.name: getattr(problem, field.name) for field in fields(problem)}
    stores = {name: store(name, template) for name, template in start.templates.items()}
    return Job(workers=workers, ranks=ranks, locations=RowLocations(ranks, stores), **facts, **stores), start.server  # type: ignore[arg-type]


class InitialState(NamedTuple):
    """States before the first round.

    Attributes:
        server: state of the server.
        templates: a client's initial state (without a client dimension), keyed by the store in `Job` that will hold it.
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
    """Create a run's problem without allocating storage for client states.

    Three steps determine the participating clients, their local problems, and the method's states.

    Args:
        setting: setting of the run.
        fed: clients and their data.
        replay: values that replace the run's own random draws.
        finds: True to compute the clusters that determine client weights, for which all clients train once. If False,
            weights are uniform.

    Raises:
        ConfigError: values are impossible or cannot be combined.
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
    rehearse_rounds(problem, started.states)
    idle = note_idle_options(problem, started.states[0], participants.setting)
    problem = replace(problem, notes=(*problem.notes, *idle))
    return problem, InitialState(started.states[0], make_templates(problem, started, problems.x0))
