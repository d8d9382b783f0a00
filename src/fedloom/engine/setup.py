"""From what a caller says to a job: every choice is checked, alone and together, before any work starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm, check_declaration, primary_field, upload_fields
from fedloom.choose import Sampler, SamplesWeigher, SharesWeigher, Uniform, UniformWeigher, Weigher
from fedloom.data.federation import Federation
from fedloom.engine.job import Job
from fedloom.engine.messages import Messages, first_upload, idle_upload
from fedloom.engine.privacy import check_privacy
from fedloom.engine.setting import Engine, Setting
from fedloom.errors import ConfigError, Refused, blamed
from fedloom.local import Ctx, LocalSGD, Nothing, Work
from fedloom.local.optimizer import Memory, slots_of
from fedloom.local.oracles import Network, chunk_limit, make_oracle
from fedloom.processes.pool import cores
from fedloom.processes.ranks import ALONE, Ranks
from fedloom.replay import Replay
from fedloom.rows.aggregate import Aggregator
from fedloom.rows.attacks import Forgery, Poison
from fedloom.rows.channel import Channel
from fedloom.seeds import generator
from fedloom.storage.memory import Forked
from fedloom.storage.store import Store
from fedloom.tasks import task_of

WORTH_FORKING = 2e11
"""Multiply-adds of a run, about four seconds of one core, from which more workers pay."""


def make_job(
    setting: Setting,
    fed: Federation,
    *,
    folder: Path | None = None,
    ranks: Ranks = ALONE,
    replay: Replay = Replay(),  # noqa: B008  # frozen
) -> tuple[Job, Any]:
    """The job, and the server's state before the first round.

    Args:
        setting: the run.
        fed: the clients and their data.
        folder: of the clients' state; None keeps it in memory.
        ranks: processes that all make this call.
        replay: what is given in place of the run's own draws.

    Raises:
        ConfigError: values that cannot work, or (Refused) do not work together.
    """
    pooled, setting = setting.pooled, setting.resolved()
    method, engine = setting.method, setting.engine
    check_declaration(type(method))
    setting.local.check(setting.rounds)
    device, dtype = torch.device(engine.device), getattr(torch, engine.dtype)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {engine.device!r}, but no CUDA device is there; use 'cpu'")
    judge = fed.to(device, dtype)
    fed = judge.pooled() if pooled else judge
    check_together(method, setting.local, setting.weigher, setting.aggregator, setting.channel)
    check_sampler(method, setting.sampler, setting.weigher)
    alone: list[str] = []
    if pooled:
        none = dict.fromkeys(("aggregator", "attack", "channel"))
        pool = setting.with_(sampler=Uniform(), weigher=SharesWeigher(), weights="samples", **none)
        alone = [f"[{name}]" for name in ("sampler", "weigher", *none) if getattr(pool, name) != getattr(setting, name)]
        setting = pool
    sampler, weigher, aggregator = setting.sampler, setting.weigher, setting.aggregator
    attack, channel, augment, seed = setting.attack, setting.channel, setting.augment, setting.seed
    check_privacy(method, channel, aggregator, sampler, weigher)
    sampler.check(fed.n)
    weigher.check(fed.n)
    attackers = torch.arange(0) if attack is None else attack.attackers(fed.n, seed)
    if isinstance(attack, Poison):
        fed = poisoned(fed, attack, attackers, seed)
    task = task_of(fed.data, setting.task)
    module = setting.model.build(tuple(fed.data.shape), task.outputs, seed, fed.data.tokens)
    oracle = make_oracle(module, task, fed, engine.oracle, augment if augment.changes else None, engine.precision)
    if oracle.low and method.full_gradients:
        raise Refused(f"{method.full_gradients} takes full gradients, which stay float32; leave engine.precision out")
    layout = oracle.layout
    sizes = fed.sizes("train").cpu()[:, None]
    shares = shares_of(setting.weights, fed)
    ids = torch.arange(fed.n)
    replay.check(method, setting.sampler, setting.rounds, sizes)
    given, rounds, alpha = replay.projection, setting.rounds, shares.to(dtype)
    ctx = Ctx(0, fed.n, fed.n, ids, layout, alpha, sizes, fed.groups, setting.local, seed, rounds, given)
    x0 = replay.start(layout.vector(module, dtype).to(device), layout)
    with blamed("method", method, "init"):
        method = method.settled(ctx)
        server, template, kept = method.init(x0, ctx)
    if sampler.probes and method.global_model(server) is None:
        name = type(method).__name__
        raise Refused(f"sampler {sampler.kind!r} asks clients about the global model, but {name} has none")
    notes = [f"pooled data are those of one client: {_nothing(alone)}"] if alone else []
    notes += [*method.check(layout, ctx), *_counted_once(method, sampler), *sampler.remarks(ctx), *weigher.remarks()]
    notes += [*_unweighed(setting, len(shares.unique()) > 1), *_normalised(setting, oracle, server)]
    if isinstance(attack, Forgery) and not upload_fields(type(method)):
        name = type(method).__name__
        notes.append(f"attack {_kind(attack)!r} changes nothing in {name}, which uploads nothing to forge")
    notes += _idle(setting)
    workers = worker_count(engine, setting.rounds, layout.d, int(sizes.sum())) if ranks.size == 1 else 1
    fewest = sampler.smallest(fed.n) if replay.cohorts is None else min(len(set(map(int, c))) for c in replay.cohorts)
    if method.global_model(server) is not None:
        notes += _slow_with(method, fed.n if fewest is None else fewest, fed.n)
    if aggregator is not None and fewest is not None:
        aggregator.check(fewest)

    memory = _memory(method, (server, template, kept), oracle, ctx)
    width = 0
    if channel is not None or weigher.probes or sampler.learns:
        sample = idle_upload(method, (server, template, kept), oracle, ctx)
        check_width(method, sample, weigher, sampler, layout.d)
        if channel is not None:
            width = Messages(method, layout, device, channel).update(sample).shape[1]

    def store(name: str, template: Any) -> Store[Any]:
        on_cpu = type(template)(*[t.cpu() for t in template])
        path = None if folder is None or ranks.machines[ranks.rank] > 0 else folder / name
        memory = Forked() if workers > 1 else ranks.memory
        return Store(fed.n, on_cpu, path=path, budget=engine.store_budget << 20, memory=memory)

    job = Job(
        setting=setting.with_(algorithm=method),
        oracle=oracle,
        fed=fed,
        eval_fed=judge,
        attackers=attackers,
        alpha=ctx.weight,
        workers=workers,
        ranks=ranks,
        chunk=engine.chunk or chunk_limit(oracle),
        clients=store("clients", template),
        kept=store("kept", Nothing() if kept is None else kept),
        residue=store("residue", _residue(channel, width, dtype)),
        optimizer=store("optimizer", Nothing() if memory is None else Moments(memory.rows[0])),
        memory=memory,
        notes=tuple(notes),
        replay=replay,
    )
    return job, server


class Residue(NamedTuple):
    """What the channel has not sent yet: ``[m, D]``."""

    e: Tensor


class Moments(NamedTuple):
    """The states of a client's optimisers ``[m, S W]``; see `fedloom.local.optimizer.Memory`."""

    s: Tensor


def _memory(method: Algorithm, start: tuple[Any, Any, Any], oracle: Network, ctx: Ctx) -> Memory | None:
    """How states of optimisers are kept; None where they are not. One client takes a step, which nobody sees.

    Raises:
        ConfigError: the optimiser does not work with this model, or (Refused) the method does not train by it.
    """
    local = ctx.local
    if local.optimizer == "sgd":
        return None
    like = oracle.layout.vector(oracle.module)
    memory = Memory(like.new_zeros(1, 0), slots_of(local, oracle.layout, like))
    work = Work(oracle, ctx.ids[:1], ctx.weight[:1].to(like), local, steps=1, memory=memory)
    with blamed("method", method, "a first step"):
        first_upload(method, start, ctx, work)
    if not memory.streams:
        raise Refused(
            f"{type(method).__name__} takes its local steps itself, and they are steps of plain SGD; set "
            "local.optimizer = 'sgd'"
        )
    return memory.of(memory.rows * 0) if local.optimizer_state == "kept" else None


def _residue(channel: Channel | None, width: int, dtype: torch.dtype) -> Any:
    """Template of the channel's memory at a client."""
    state = None if channel is None else channel.init(width, dtype)
    return Nothing() if state is None else Residue(state)


def check_width(method: Algorithm, upload: Any, weigher: Weigher, sampler: Sampler, d: int) -> None:
    """Refuse plug-ins that look at models if what the method uploads is not one.

    Raises:
        Refused: the sentence says why.
    """
    if not upload or getattr(upload, primary_field(type(method))).shape[1] == d:
        return
    for what, value, looks in (("weigher", weigher, weigher.probes), ("sampler", sampler, sampler.learns)):
        if looks:
            name = type(method).__name__
            raise Refused(f"{what} {value.kind!r} looks at clients' models, but {name} uploads something smaller")


def poisoned(fed: Federation, attack: Poison, attackers: Tensor, seed: int) -> Federation:
    """The federation whose attackers train on other labels; what models are evaluated on is left alone."""
    y, classes = fed.data.y.clone(), len(fed.data.classes)
    for i in attackers.tolist():
        index = fed.indices("train", i)
        own = y[index].cpu()
        wrong = attack.poison(own.clamp(min=0), classes, generator(seed, 0, i, "poison"))
        y[index] = torch.where(own < 0, own, wrong).to(y.device)
    return replace(fed, data=replace(fed.data, y=y))


def check_together(
    algorithm: Algorithm,
    local: LocalSGD,
    weigher: Weigher,
    aggregator: Aggregator | None = None,
    channel: Channel | None = None,
) -> None:
    """Refuse combinations that make no sense; which do follows from the kinds of the upload's fields.

    Raises:
        Refused: the sentence says why.
    """
    name = type(algorithm).__name__
    kinds = upload_fields(type(algorithm)).values()
    if algorithm.plain_sgd and local.momentum:
        raise Refused(f"{name} cannot take momentum: {algorithm.plain_sgd}; set local.momentum = 0")
    why = algorithm.plain_sgd or algorithm.needs_sgd
    if why and local.optimizer != "sgd":
        raise Refused(f"{name} cannot take optimizer {local.optimizer!r}: {why}; set local.optimizer = 'sgd'")
    if algorithm.full_gradients and (local.momentum or local.clip is not None or local.optimizer != "sgd"):
        raise Refused(
            f"{algorithm.full_gradients} takes full gradients as they are; set local.momentum = 0 and "
            "local.optimizer = 'sgd', and leave local.clip out"
        )
    if not isinstance(weigher, SharesWeigher | UniformWeigher) and not any(k.weighable for k in kinds):
        if not kinds:
            why = "it uploads nothing"
        elif any(k.keeps for k in kinds):
            why = "its server keeps every client's last upload"
        else:
            why = "its server adds uploads up over rounds"
        cure = "leave the weigher out"
        if isinstance(weigher, SamplesWeigher):
            cure += "; weights = 'samples' weighs every method's clients by their samples"
        raise Refused(f"weigher {weigher.kind!r} has nothing to act on in {name}: {why}; {cure}")
    if weigher.signed and aggregator is not None and aggregator.weighted and not aggregator.linear:
        raise Refused(
            f"weigher {weigher.kind!r} without its floor gives negative weights, with which aggregator "
            f"{_kind(aggregator)!r} has no meaning; keep the floor, or use aggregator 'mean'"
        )
    for what, value in (("aggregator", aggregator), ("channel", channel)):
        if value is not None and not kinds:
            raise Refused(f"{what} {_kind(value)!r} has nothing to act on in {name}: it uploads nothing; leave it out")
    if aggregator is not None and not aggregator.linear:
        if any(k.accumulates for k in kinds):
            raise Refused(
                f"aggregator {_kind(aggregator)!r} cannot be used with {name}: its server adds uploads up over rounds, "
                "which is right for a mean only; use aggregator 'mean'"
            )
        if algorithm.mixes:
            raise Refused(
                f"aggregator {_kind(aggregator)!r} has nothing to act on in {name}: its server mixes single models for "
                "every client; leave it out"
            )
    if channel is not None and channel.remembers and any(k.primary and k.base == "zero" for k in kinds):
        raise Refused(
            f"channel {_kind(channel)!r} compresses differences, but {name} uploads absolute values; use clip or noise"
        )


def check_sampler(algorithm: Algorithm, sampler: Sampler, weigher: Weigher) -> None:
    """Refuse a sampler that needs what the method does not have, or spoils the weigher's weights.

    Raises:
        Refused: the sentence says why.
    """
    name = type(algorithm).__name__
    if sampler.learns and not upload_fields(type(algorithm)):
        raise Refused(f"sampler {sampler.kind!r} looks at uploads, but {name} uploads nothing")
    if sampler.repeats and weigher.signed:
        raise Refused(
            f"sampler {sampler.kind!r} may draw a client twice, so that the weights of {weigher.kind!r} without its "
            "floor need not have a positive sum; keep the floor"
        )


def shares_of(weights: Any, fed: Federation) -> Tensor:
    """The clients' shares alpha_i of the objective, ``[n, 1]`` float64, which sum to 1.

    Args:
        weights: ``Setting.weights``.
        fed: the clients; those without training samples have no share by samples.

    Raises:
        ConfigError: a number for each of other clients, or none above zero.
        Refused: groups of clients that are in none.
    """
    if weights == "samples":
        masses = fed.sizes("train").cpu().double()
    elif weights == "groups":
        if fed.groups is None:
            raise Refused(
                "weights = 'groups' needs clients in groups, and this partition has none; use weights = 'samples'"
            )
        groups = fed.groups.cpu()
        masses = 1 / torch.bincount(groups)[groups].double()
    elif weights == "uniform":
        masses = torch.ones(fed.n, dtype=torch.float64)
    else:
        masses = torch.tensor(weights, dtype=torch.float64)
        if len(masses) != fed.n or not bool(masses.sum() > 0):
            raise ConfigError(
                f"weights must be a number for each of the {fed.n} clients, not all of them zero, got {list(weights)}"
            )
    return (masses / masses.sum())[:, None]


def _unweighed(setting: Setting, unequal: bool) -> list[str]:
    """The notes on shares or a weigher that a mean does not read.

    Args:
        setting: the run, presets resolved.
        unequal: the clients' shares differ.
    """
    weigher, aggregator, weights = setting.weigher, setting.aggregator, setting.weights
    name, kinds = type(setting.method).__name__, upload_fields(type(setting.method)).values()
    if weights != "samples" and any(getattr(kind, "weight", None) for kind in kinds):
        return [f"weights = {weights!r} changes nothing in {name}, whose clients count by what they send"]
    if aggregator is not None and not aggregator.weighted and kinds:
        if isinstance(weigher, SharesWeigher | UniformWeigher):
            reads = f"weights = {weights!r}" if unequal and isinstance(weigher, SharesWeigher) else ""
        else:
            reads = f"weigher {weigher.kind!r}"
        return [f"aggregator {_kind(aggregator)!r} counts all clients alike: {reads} changes nothing"] if reads else []
    if unequal and isinstance(weigher, UniformWeigher) and not setting.sampler.by_samples:
        return [
            f"weigher 'uniform' takes the place of weights = {weights!r} in the mean of uploads; for the same in every "
            "method, leave it out and set weights = 'uniform'"
        ]
    return []


def _normalised(setting: Setting, oracle: Network, server: Any) -> list[str]:
    """The note on the statistics of normalisation layers, which are no parameters, where there is a global model."""
    if not oracle.normalisers or setting.method.global_model(server) is None:
        return []
    whose = {"averaged": "averaged over the round's clients", "own": "the client's own"}[setting.evaluate.statistics]
    return [
        "normalisation layers: statistics do not travel; a global model is scored with those of training samples under "
        f"this model, {whose} (evaluate.statistics)"
    ]


def _counted_once(algorithm: Algorithm, sampler: Sampler) -> list[str]:
    """The note that a client which is drawn twice counts once in kept and accumulating fields, if there are any."""
    once = [n for n, kind in upload_fields(type(algorithm)).items() if kind.keeps or kind.accumulates]
    if not sampler.repeats or not once:
        return []
    return [
        f"sampler {sampler.kind!r} may draw a client twice; it counts once in what {type(algorithm).__name__} keeps or "
        f"adds up over rounds ({', '.join(once)})"
    ]


def _idle(setting: Setting) -> list[str]:
    """The notes on what is given and changes nothing beside another choice."""
    method, local = setting.method, setting.local
    keys = [f"local.{key}" for key in method.ignored if local.given(key)]
    name = method.full_gradients or type(method).__name__
    notes = [f"{name} takes steps of its own: {_nothing(keys)}"] if keys else []
    parts = (setting.sampler, setting.weigher, setting.aggregator, setting.attack, setting.channel, setting.augment)
    for value in (method, local, *(part for part in parts if part is not None)):
        for key, beside in value.needs.items():
            other, *values = beside.split()
            owner, field = (local, other.removeprefix("local.")) if other.startswith("local.") else (value, other)
            now = getattr(owner, field)
            if value.given(key) and not (now in values if values else owner.given(field)):
                where = " or ".join(map(repr, values)) or f"not {now!r}"
                said = f"{type(value).__name__}: {key} = {getattr(value, key)!r} changes nothing with {other} = {now!r}"
                notes.append(f"{said}; it acts where {other} is {where}")
    return notes


def _nothing(keys: list[str]) -> str:
    return f"{' and '.join(keys)} change{'s' * (len(keys) == 1)} nothing"


def _slow_with(algorithm: Algorithm, fewest: int, n: int) -> list[str]:
    """The note that a mean over all clients, absent ones as they last were, moves little where most are absent."""
    if 2 * fewest >= n or not algorithm.counts_absent:
        return []
    return [
        f"{type(algorithm).__name__} counts absent clients by what they last sent: with {fewest} of {n} in a round its "
        f"global model goes about {fewest / n:.0%} as far as with all; set sampler.fraction or rounds higher"
    ]


def _kind(value: Any) -> str:
    return str(value.kind)


def worker_count(engine: Engine, rounds: int, d: int, samples: int) -> int:
    """Processes of a run; ``auto`` uses the cores when there is enough to do to pay for starting them."""
    if engine.workers != "auto":
        if engine.workers < 1:
            raise ConfigError(f"engine.workers must be at least 1 or 'auto', got {engine.workers}")
        return engine.workers
    return cores() if engine.device == "cpu" and 3.0 * rounds * samples * d > WORTH_FORKING else 1
