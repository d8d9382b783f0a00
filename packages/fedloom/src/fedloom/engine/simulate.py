"""Simulation of a method on a federation, from the first round to the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

from torch import Tensor

from fedloom.algorithms import Algorithm, PresetMethod
from fedloom.data.federation import Federation
from fedloom.engine.checkpoints import UNATTACKED_NOTE, RunCheckpoints, check_ranks
from fedloom.engine.checks.guard import Guard
from fedloom.engine.checks.learnable import check_learnable
from fedloom.engine.checks.notes import GLOBAL_DRAWS_NOTE
from fedloom.engine.checks.rehearsal import check_early_stop
from fedloom.engine.clients.chunk import ask_chunk, compute_chunk, train_chunk
from fedloom.engine.clients.scores import score_chunk
from fedloom.engine.early_stop import EarlyStop
from fedloom.engine.job import Job
from fedloom.engine.loop import Hooks, run_rounds
from fedloom.engine.replay import Replay
from fedloom.engine.result import Result
from fedloom.engine.scoring import score_round
from fedloom.engine.setting import Choices, GivenModel, Setting
from fedloom.engine.setup import make_job
from fedloom.engine.state import State, initial_state
from fedloom.engine.virtual.clock import flatten_results
from fedloom.errors import ConfigError, Stop, adapt_wording, place_note, report_exit
from fedloom.local.oracles.precision import isolate_torch_settings, make_repeatable
from fedloom.local.rows import Fields
from fedloom.outputs import check_output_folder
from fedloom.processes.clients import CLIENT_COUNTS, AskTask, Clients, Handlers, LocalClients, ScoreTask, TrainTask
from fedloom.processes.pool import WorkerPool
from fedloom.processes.rank_pool import RankPool
from fedloom.processes.ranks import SINGLE_RANK, Ranks
from fedloom.processes.signals import interruptible
from fedloom.rundir import CHECKPOINTS_FOLDER, WORK_FOLDER, as_path
from fedloom.seeds import SERVER_CLIENT, as_global, generator, rng_states
from fedloom.values import check_type, list_functions

S = TypeVar("S")
K = TypeVar("K", TrainTask, AskTask, ScoreTask)
T = TypeVar("T")
BEST_FOLDER = "best"
"""Checkpoint folder, inside the run's own folder, of the run that repeats the rounds up to the best round."""
Progress = Callable[[State], object]
"""Function that is called with the state after every round. If it returns a sentence, the run ends (see
`fedloom.callbacks`)."""


@isolate_torch_settings()
@report_exit()
def simulate(
    algorithm: Algorithm | PresetMethod | Setting | str,
    fed: Federation | Sequence[Any] | Mapping[str, Any],
    model: GivenModel | None = None,
    *,
    folder: Path | str | None = None,
    callbacks: Sequence[Progress] = (),
    advance: bool = True,
    pause: int | None = None,
    ranks: Ranks = SINGLE_RANK,
    initial: Tensor | Mapping[str, Tensor] | None = None,
    cohorts: Sequence[Sequence[int] | Tensor] | None = None,
    batches: Sequence[Any] | Mapping[int, Any] | None = None,
    projection: Tensor | None = None,
    defaults: Literal["default", "paper", "released"] = "default",
    **choices: Unpack[Choices],
) -> Result:
    """Run a method on a federation.

    Args:
        algorithm: method, name of a method, value created by a preset, or complete `fedloom.Setting`.
        fed: clients and their data. A list of clients or a mapping from names to clients is also accepted, as in
            `Federation.create`.
        model: name in `fedloom.models`, model specification, `nn.Module` whose weights are the initial values, or a
            class or function that returns a module (called as described in `fedloom.models.Import`). None selects
            softmax regression.
        folder: folder for checkpoints and client states. A repeated call with the same arguments resumes the run from
            this folder. If None, everything is kept in memory.
        callbacks: functions that are called after every round. If one returns a sentence, the run ends. If one raises
            an error, a warning is logged (see `fedloom.callbacks`).
        advance: False to only read the folder, without running any more rounds.
        pause: round after which the run is evaluated and paused. To resume the run, repeat the call with a later round
            or without this argument.
        ranks: processes from `fedloom.processes.distributed.join_ranks`, each of which must make this call. The models
            are then available only at rank 0.
        initial: initial model, as a vector ``[d]`` or a state dict. This argument and the next three reproduce other
            code step by step: they replace the run's own random draws, and a folder can be resumed only with the same
            values (see `Replay`).
        cohorts: ids of the clients in each round.
        batches: positions in each client's training set, listed by client, round and step.
        projection: matrix ``[dim, d]`` of a method that works in a subspace.
        defaults: default values of a method that is given by name: "default", "paper" for the paper's values, or
            "released" for the values in its public code.
        choices: other fields of `fedloom.Setting`: ``rounds``, ``seed``, ``task``, ``local``, ``sampler``,
            ``aggregation_weights``, ``personalized_aggregation``, ``aggregator``, ``attack``, ``upload_transform``,
            ``augment``, ``client_weights``, ``devices``, ``schedule``, ``evaluate``, ``engine``, ``early_stop``. None
            keeps a default.

    Returns:
        Metrics and models of the run. `Result.stop` states whether the run diverged or was interrupted. A run has also
            diverged if its training loss is finite but exceeds ten times its initial value in three consecutive
            evaluations or in the last one. Such a run still continues to its last round.

    Raises:
        ConfigError: values are impossible or cannot be combined (Refused).
        RunDirError: the folder contains a different run.
        ClientError: the code of the method failed.
        CheckpointError: a checkpoint cannot be written or read.
    """
    if isinstance(fed, list | Mapping) and not {"x", "train"} & {*(fed if isinstance(fed, Mapping) else ())}:
        fed = Federation.create(fed)
    seed: object = choices.get("seed")
    several = isinstance(seed, Iterable) and not isinstance(seed, str)
    if "seeds" in choices or several or isinstance(algorithm, list | dict):
        raise ConfigError(
            "fl.simulate runs one method with one seed. For several runs, use fl.compare(methods, fed, seeds=range(5))"
        )
    if isinstance(algorithm, Federation):
        raise ConfigError("the method must be the first argument: fl.simulate(method, fed)")
    if not isinstance(fed, Federation):
        raise ConfigError(
            f"fed must be a Federation, got {type(fed).__name__}. Split the data among clients first, as in "
            f"fl.partitions.iid(clients=10)(data, seed=0), or pass a list of clients of the form ((x, y), (x_test, "
            f"y_test)). "
            "If the samples belong to clients, pass clients to fl.Dataset.create, and use fl.partitions.natural()"
        )
    callbacks = list_functions(callbacks, "callbacks must be a list of functions that take a state")
    if any(isinstance(call, EarlyStop) and call.result == "best" for call in callbacks):
        raise ConfigError(
            "an EarlyStop that is passed as a callback cannot keep the best round. Pass it as early_stop=EarlyStop(...)"
        )
    place = None if folder is None else as_path(folder, "folder", ", or None for memory")
    if place is not None:
        check_output_folder(
            place,
            owns=lambda inner: (*inner.parts[:1], len(inner.parts)) in ((CHECKPOINTS_FOLDER, 2), (WORK_FOLDER, 4)),
        )
    check_type("defaults", defaults, str)
    check_type("advance", advance, bool)
    if not all(hasattr(ranks, name) for name in ("rank", "machines", "share", "gather")):
        raise ConfigError(f"ranks must come from fedloom.processes.distributed.join_ranks, got {ranks!r:.60}")
    mapping = {"model": model, "defaults": None if defaults == "default" else defaults, **choices}
    places = Setting.places(algorithm, keys=(*Setting.model_fields, "folder", "callbacks", "defaults"))
    with adapt_wording("python"):
        if isinstance(algorithm, Setting):
            setting = Setting.read(mapping, places=places, base=algorithm)
        else:
            setting = Setting.read({"algorithm": algorithm, **mapping}, places=places)
        replay = Replay(initial, cohorts, batches, projection)
        job, server = make_job(setting, fed, folder=place, ranks=ranks, replay=replay)
        if advance:
            check_learnable(job.oracle.task, job.fed)
    check_ranks(job)
    for call in callbacks:
        if isinstance(call, EarlyStop):
            check_early_stop(call, job, server)
    rule = setting.early_stop  # the result may be from an earlier round
    calls: list[Progress] = [*callbacks, *([] if rule is None else [rule])]
    result = _resume_and_run(job, server, place, calls, pause, advance=advance)
    best = None if rule is None or rule.result == "last" else rule.best_round(result.state.records)
    if best is not None and best < result.state.round and result.stop in (Stop.DONE, Stop.STOPPED):
        words = f"round {best} of {result.state.round} is the best, and the result contains its models"
        reason, place = "; ".join(filter(None, (result.detail, words))), None if place is None else place / BEST_FOLDER
        job, server = make_job(setting, fed, folder=place, ranks=ranks, replay=replay)
        calls = [lambda state: reason if state.round == best else None]
        result = _resume_and_run(job, server, place, calls, pause, advance=advance)
        result.notes.append(f"early_stop: {words}. The work of later rounds is not counted")
    result.notes[:0] = [place_note("data", note) for note in fed.remarks]
    return result


def _resume_and_run(
    job: Job, server: Fields, place: Path | None, callbacks: Sequence[Progress], pause: int | None, *, advance: bool
) -> Result:
    """Resume a run from its folder, and train the remaining rounds unless ``advance`` is False."""
    checkpoints = RunCheckpoints(job, place)
    resumed = checkpoints.resume(initial_state(job, server))
    if not advance or resumed.stop is not None:
        result = Result(job, resumed.state, resumed.stop or Stop.INTERRUPTED, resumed.detail, resumed.diverged)
    else:
        with fix_arithmetic(job), clients_of(job) as clients, interruptible() as interrupted:
            hooks = _Simulation(job, clients, callbacks, interrupted, pause)
            result = Result(job, *run_rounds(job, clients, checkpoints, hooks, resumed.state))
            result.notes += hooks.warnings
    return result


class _Simulation(Hooks):
    """Hooks that a simulation runs before and after each round."""

    def __init__(
        self,
        job: Job,
        clients: Clients,
        callbacks: Sequence[Progress],
        interrupted: Callable[[], bool],
        pause: int | None,
    ) -> None:
        self._job, self._clients, self._callbacks, self._interrupted = job, clients, callbacks, interrupted
        self.pause = pause
        self._guard = Guard()
        self._drawn = rng_states()

    @property
    def warnings(self) -> list[str]:
        """Warnings about callbacks that raised errors."""
        return self._guard.warnings

    def evaluate(self, state: State) -> tuple[State, str]:
        return score_round(self._job, self._clients, state)

    def trained(self, state: State) -> tuple[str, ...]:
        notes, attackers, rounds = list[str](), self._job.attackers, self._job.setting.rounds
        if state.round == 1 and rng_states() != self._drawn and GLOBAL_DRAWS_NOTE not in state.notes:
            notes.append(GLOBAL_DRAWS_NOTE)
        if state.round == 1 and not state.totals[CLIENT_COUNTS.index("samples_backward")]:
            notes.append("no client computed a gradient in round 1, so nothing is trained")
        if state.round == rounds and len(attackers) and not state.uploads[attackers].any():
            notes.append(UNATTACKED_NOTE)
        return tuple(notes)

    def review_round(self, state: State) -> str | None:
        copied = state
        if not all(map(_is_own, self._callbacks)):  # a user's callback may modify its argument
            fields = ("server", "sampler", "weigher", "aggregator", "sums", "totals", "cohort")
            copied = state.with_(**{name: _copy_state(getattr(state, name)) for name in fields})
        answers = [self._guard.call("callback", call, state if _is_own(call) else copied) for call in self._callbacks]
        self._drawn = rng_states()
        return "; ".join(sentence for sentence in answers if isinstance(sentence, str) and sentence) or None

    def interrupted(self) -> bool:
        return self._interrupted()


def _is_own(callback: Progress) -> bool:
    """Return True for callbacks that are part of fedloom and do not change any state."""
    return str(getattr(callback, "__module__", None)).startswith("fedloom.")


def _copy_state(value: Any) -> Any:
    """Return a copy of a tensor without its graph, or a copy of a dictionary or tuple of tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy_state(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        inner = map(_copy_state, value)
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    return value


@contextmanager
def clients_of(job: Job) -> Iterator[LocalClients]:
    """Provide a simulation's clients inside the block.

    Their worker processes have enough shared memory for a download and a chunk's results.
    """
    row = job.oracle.layout.d * 8
    down = (len(job.clients.template) + 8) * row * (job.n if job.mixes else 1) + 8 * job.n * job.reclusters
    up = (len(job.fields) + 1) * row * (job.chunk + 1 if job.gathers_rows else 1)
    handlers = Handlers(
        train=_seed_before_call(
            job, lambda shared, task: train_chunk(job.replace_shares(shared[2]), *shared[:2], task)
        ),
        compute=_seed_before_call(job, lambda shared, task: flatten_results(compute_chunk(job, *shared, task))),
        ask=_seed_before_call(job, lambda model, task: ask_chunk(job, model, task)),
        score=_seed_before_call(
            job, lambda shared, task: score_chunk(job.replace_shares(shared[2]), *shared[:2], task)
        ),
    )
    if job.ranks.size > 1:
        yield LocalClients(handlers, RankPool(job.ranks, job.locations, up), job.chunk)
        return
    with WorkerPool(handlers, job.workers, down + (1 << 20), up + (1 << 20), ahead=True) as pool:
        yield LocalClients(handlers, pool, job.chunk)


def _seed_before_call(job: Job, handle: Callable[[S, K], T]) -> Callable[[S, K], T]:
    """Return a function that seeds the global random generators, which user code may use, and then processes a chunk.

    Random draws do not depend on the number of workers, because the division into chunks does not. The generators are
    restored afterwards.
    """

    def call(shared: S, task: K) -> T:
        first = int(task.ids[0]) if len(task.ids) else SERVER_CLIENT
        with as_global(generator(job.setting.seed, task.round, first, "user code"), job.oracle.device):
            return handle(shared, task)

    return call


@contextmanager
def fix_arithmetic(job: Job) -> Iterator[None]:
    """Let torch use one thread, and deterministic GPU operations, so results do not depend on the machine."""
    with isolate_torch_settings(), make_repeatable(job.oracle.device, job.setting.engine.precision):
        yield
