"""simulate: one method on one federation, from the first round to the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from fedloom.algorithms import Algorithm, Composition
from fedloom.choose import Sampler, Weigher
from fedloom.data.federation import Federation
from fedloom.engine.chunk import ask, train
from fedloom.engine.job import Job
from fedloom.engine.result import Result
from fedloom.engine.resume import Disk
from fedloom.engine.round import evaluate as evaluate_round
from fedloom.engine.round import play
from fedloom.engine.scoring import score
from fedloom.engine.settings import Engine, Evaluate
from fedloom.engine.setup import check_ranks, make_job
from fedloom.engine.state import State, initial_state
from fedloom.errors import RunStopped, Stop
from fedloom.local import Local
from fedloom.models import Augment, ModelSpec
from fedloom.processes.pool import Handler, Pool
from fedloom.processes.rank_pool import RankPool
from fedloom.processes.ranks import ALONE, Ranks
from fedloom.processes.signals import interruptible
from fedloom.rows.aggregate import Aggregator
from fedloom.rows.attacks import Attack
from fedloom.rows.channel import Channel

Progress = Callable[[State], object]
"""Called after every round, with the state after it; a sentence ends the run (`fedloom.engine.callbacks`)."""


def simulate(
    algorithm: Algorithm | Composition,
    fed: Federation,
    model: str | ModelSpec = "softmax",
    *,
    rounds: int = 100,
    seed: int = 0,
    local: Local | None = None,
    sampler: Sampler | None = None,
    weigher: Weigher | None = None,
    aggregator: Aggregator | None = None,
    attack: Attack | None = None,
    channel: Channel | None = None,
    augment: Augment | None = None,
    weights: Literal["uniform", "samples"] = "uniform",
    evaluate: Evaluate | None = None,
    engine: Engine | None = None,
    folder: Path | str | None = None,
    progress: Sequence[Progress] = (),
    advance: bool = True,
    ranks: Ranks = ALONE,
) -> Result:
    """Run a method on a federation.

    Args:
        algorithm: a method, or what a preset makes.
        fed: the clients and their data.
        model: a name of `fedloom.models`, or a specification.
        rounds: communication rounds, >= 1.
        seed: of everything that is drawn.
        local: how clients train.
        sampler: who takes part; everyone when None.
        weigher: who counts how much in the mean; all the same when None.
        aggregator: how the uploads become one; their weighted mean when None.
        attack: what a part of the clients does instead of being honest.
        channel: what a client's upload passes through.
        augment: random changes of training images; none when None.
        weights: the clients' shares alpha_i of the objective, 1/n or n_i/sum n; the notes say where a method does not
            read them. What weighs uploads is the weigher.
        evaluate: when and on what models are scored.
        engine: how it is computed.
        folder: for checkpoints and client state; running again with the same arguments goes on from there.
            None keeps everything in memory.
        progress: called after every round; a sentence that one returns ends the run (`fedloom.callbacks`).
        advance: False only reads what the folder holds.
        ranks: processes that all make this call, from `fedloom.processes.distributed.joined`; the models are then those
            of rank 0.

    Returns:
        Metrics and models. A run that diverged or was interrupted says so in `Result.stop`.

    Raises:
        ConfigError: values that cannot work, or (Refused) do not work together.
        RunDirError: the folder holds another run.
        ClientError: code of the method failed.
        CheckpointError: a checkpoint cannot be written or read.
    """
    place = None if folder is None else Path(folder)
    job, server = make_job(
        algorithm,
        fed,
        model,
        rounds=rounds,
        seed=seed,
        local=local,
        sampler=sampler,
        weigher=weigher,
        aggregator=aggregator,
        attack=attack,
        channel=channel,
        augment=augment,
        weights=weights,
        evaluate=evaluate,
        engine=engine,
        folder=place,
        ranks=ranks,
    )
    check_ranks(job)
    disk = Disk(job, place)
    state, stop = disk.resume(initial_state(job, server))
    if not advance or stop not in (None, Stop.INTERRUPTED):
        stop = stop or Stop.INTERRUPTED
        return Result(job, state, stop, disk.detail, disk.seconds)
    stop, detail = Stop.DONE, ""
    with one_thread(), pool_of(job) as pool, interruptible() as interrupted:
        try:
            if not state.records.items:
                evaluate_round(job, pool, state)
            while state.round < rounds and stop is Stop.DONE:
                start = time.perf_counter()
                state = play(job, pool, state)
                disk.seconds.append(time.perf_counter() - start)
                if state.round % job.evaluate.every == 0 or state.round == rounds:
                    evaluate_round(job, pool, state)
                said = [sentence for tell in progress if isinstance(sentence := tell(state), str)]
                if state.round < rounds and ranks.any(bool(said)):
                    stop, detail = Stop.STOPPED, "; ".join(said)
                    if state.round % job.evaluate.every:
                        evaluate_round(job, pool, state)
                elif state.round < rounds and ranks.any(interrupted()):
                    stop = Stop.INTERRUPTED
                elif state.round < rounds:
                    disk.save_if_due(state)
        except RunStopped as error:
            stop, detail = error.reason, error.detail
    disk.save(state, stop, detail)
    return Result(job, state, stop, detail, disk.seconds)


def pool_of(job: Job) -> Pool | RankPool:
    """Workers or ranks of a job, with room for a download and for what a chunk sends back."""
    row = job.oracle.layout.d * 8
    down = (len(job.clients.template) + 8) * row * (job.n if job.algorithm.mixes else 1)
    up = (len(job.fields) + 1) * row * (job.chunk + 1 if job.gathers else 1)
    handlers: dict[str, Handler] = {
        "train": lambda shared, task: train(job, shared[0], shared[1], task),
        "ask": lambda shared, task: ask(job, shared, task),
        "score": lambda shared, task: score(job, shared[0], shared[1], task),
    }
    if job.ranks.size > 1:
        return RankPool(handlers, job.ranks, job.homes, up)
    return Pool(handlers, job.workers, down + (1 << 20), up + (1 << 20))


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes with one thread meanwhile: what a run says must not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
