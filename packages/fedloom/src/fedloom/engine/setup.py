"""Build a job: check a setting against its data, make the problem, and allocate state."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm, check_declaration
from fedloom.choose import SharesWeigher, Uniform, Weigher
from fedloom.choose.shares import check_clusters, cluster_shares, clusters_of, shares_of, uses_clusters
from fedloom.data.federation import Federation
from fedloom.engine.checks.defaults import adapt_defaults
from fedloom.engine.checks.notes import changes_nothing, notes_of
from fedloom.engine.checks.refusals import (
    check_attack,
    check_mixed_width,
    check_mixer,
    check_mixture,
    check_root,
    check_sampler,
    check_tested,
    check_together,
    check_width,
    initial,
    ruled,
)
from fedloom.engine.checks.rehearsal import check_layers, rehearse
from fedloom.engine.clients.messages import Messages, first_upload, idle_upload
from fedloom.engine.clients.poisoning import add_triggers, poisoned
from fedloom.engine.clients.regroup import check_shares
from fedloom.engine.job import Job
from fedloom.engine.privacy import check_privacy
from fedloom.engine.problem import RunProblem
from fedloom.engine.replay import Replay
from fedloom.engine.setting import Engine, Setting
from fedloom.engine.virtual.check import check_schedule
from fedloom.engine.workers import idle_workers, worker_count
from fedloom.errors import ConfigError, Refused, attribute_error
from fedloom.local import Ctx, Nothing, Work
from fedloom.local.optimizer import OptimizerStates, slots_of
from fedloom.local.oracles import Network, chunk_limit, make_oracle
from fedloom.local.oracles.precision import undisturbed, wake
from fedloom.local.rows import Fields, remade
from fedloom.processes.ranks import SINGLE_RANK, Ranks
from fedloom.processes.row_locations import RowLocations
from fedloom.rows.attacks import Backdoor, Poison
from fedloom.rows.channels import Channel
from fedloom.schedule import Stream, Synchronous
from fedloom.seeds import preserve_rng
from fedloom.storage.memory import Forked
from fedloom.storage.store import Store
from fedloom.tasks import task_of


@undisturbed()
def check(setting: Setting, fed: Federation) -> tuple[str, ...]:
    """Check a run against its federation: the model is built, but nothing is made for the clients' state.

    Returns:
        What is known of the run before its first round.

    Raises:
        ConfigError: values that cannot work, or (Refused) do not work together.
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
    """Make a job, and the server's state before the first round.

    Args:
        setting: the run.
        fed: the clients and their data.
        folder: the folder of the clients' state. None keeps it in memory.
        ranks: processes that all make this call.
        replay: what takes the place of the run's own draws.

    Raises:
        ConfigError: values that cannot work, or (Refused) do not work together.
    """
    problem, start = make_problem(setting, fed, replay)
    engine, samples = problem.setting.engine, int(problem.train_sizes.sum())
    workers = worker_count(engine, problem, samples) if ranks.size == 1 else 1

    def store(name: str, template: Fields) -> Store[Fields]:
        on_cpu = remade(template, [t.cpu() for t in template])
        path = None if folder is None or ranks.machines[ranks.rank] > 0 else folder / name
        memory = Forked() if workers > 1 else ranks.memory
        return Store(problem.n, on_cpu, path=path, budget=engine.store_budget << 20, memory=memory)

    facts = {field.name: getattr(problem, field.name) for field in fields(problem)}
    stores = {name: store(name, template) for name, template in start.templates.items()}
    return Job(workers=workers, ranks=ranks, locations=RowLocations(ranks, stores), **facts, **stores), start.server  # type: ignore[arg-type]


class Start(NamedTuple):
    """The states before the first round.

    Attributes:
        server: the server's state.
        templates: the rows of a client, without the clients' dimension, by the store of `Job` that has room for them.
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
) -> tuple[RunProblem, Start]:
    """Make what a run computes, without room for any client's state.

    Args:
        setting: the run.
        fed: the clients and their data.
        replay: what takes the place of the run's own draws.
        finds: clusters are recovered where shares are theirs, which trains all clients once. Else shares are uniform.

    Raises:
        ConfigError: values that cannot work, or (Refused) do not work together.
    """
    device, dtype = _place(setting.engine)
    check_declaration(type(setting.resolved().method))
    setting.local.check(setting.rounds)
    eval_fed = fed.to(device, dtype)
    fed = eval_fed.pooled() if setting.pooled else eval_fed
    setting, pooled_notes = _checked(setting, fed.n)
    method, sampler, channel = setting.method, setting.sampler, setting.channel
    attackers = torch.arange(0) if setting.attack is None else setting.attack.attackers(fed.n, setting.seed)
    if isinstance(setting.attack, Backdoor):
        fed = eval_fed = add_triggers(eval_fed, setting.attack)
    if isinstance(setting.attack, Poison | Backdoor):
        fed = poisoned(fed, setting.attack, attackers, setting.seed)
    oracle = _oracle(setting, fed)
    sizes, shares = fed.sizes("train").cpu()[:, None], shares_of(setting.weights, fed)
    replay.check(method, sampler, setting.rounds, sizes)
    ids, projection, alpha = torch.arange(fed.n), replay.projection, shares.to(dtype)
    ctx = Ctx(
        0, fed.n, fed.n, ids, oracle.layout, alpha, sizes, fed.groups, setting.local, setting.seed, setting.rounds,
        projection,
    )  # fmt: skip
    x0, spent = replay.start(oracle.layout.vector(oracle.module, dtype).to(device), oracle.layout), None
    if uses_clusters(setting.weights):
        check_clusters(clusters_of(setting.weights), ctx)
    if finds and uses_clusters(setting.weights):
        shares, spent = cluster_shares(clusters_of(setting.weights), oracle, x0, ctx, setting.attack, attackers)
        ctx = ctx._replace(weight=shares.to(dtype))
    with attribute_error("method", method, "init"), ruled(f"method-{type(method).__name__.lower()}"):
        method = method.derive_options(ctx)
        server, client, kept = initial(method, x0, ctx)
    setting = setting.with_(algorithm=method)
    check_shares(setting, server, ctx)
    if sampler.probes and method.global_model(server) is None:
        name = type(method).__name__
        raise Refused(
            f"sampler {sampler.kind!r} queries clients about the global model, but {name} has none",
            rule="sampler-needs-a-global-model",
            fix="leave {sampler} out",
        )
    fewest = sampler.smallest(fed.n) if replay.cohorts is None else min(len(set(map(int, c))) for c in replay.cohorts)
    if setting.mixer is not None:
        with attribute_error("method", method, "down"):
            check_mixed_width(method, method.down(server, None, ctx), oracle.layout.d)
    with ruled(f"method-{type(method).__name__.lower()}"):
        notes = notes_of(setting, oracle, server, ctx, fewest, attackers)
    notes = [*pooled_notes, *check_tested(setting, eval_fed), *notes, *idle_workers(setting.engine)]
    if setting.aggregator is not None and fewest is not None:
        setting.aggregator.check(fewest)
    check_layers(setting, oracle, ctx, (server, client, kept))
    memory = _memory(method, (server, client, kept), oracle, ctx)
    residue: Fields = Nothing()
    if channel is not None or setting.weigher.probes or sampler.learns:
        sample = idle_upload(method, (server, client, kept), oracle, ctx)
        check_width(method, sample, setting.weigher, sampler, oracle.layout.d)
        if channel is not None:
            messages = Messages(method, oracle.layout, device, channel)
            residue = _residue(messages, channel, sample, kept, dtype)
    problem = RunProblem(
        setting=setting,
        oracle=oracle,
        fed=fed,
        eval_fed=eval_fed,
        attackers=attackers,
        alpha=ctx.weight,
        chunk=setting.engine.chunk or chunk_limit(oracle),
        memory=memory,
        notes=tuple(notes),
        replay=replay,
        spent=spent,
    )
    if problem.fleet is not None and isinstance(setting.schedule, Stream) and replay.cohorts is not None:
        raise Refused(f"cohorts are those of rounds, which schedule {setting.schedule.kind!r} does not have")
    rehearse(problem, (server, client, kept))
    mixes_models = setting.mixer is not None and not problem.fields[problem.primary].keeps
    templates: dict[str, Fields] = {
        "clients": client,
        "kept": Nothing() if kept is None else kept,
        "models": LastModel(x0) if mixes_models else Nothing(),
        "summed": _summed(problem, client),
        "residue": residue,
        "optimizer": Nothing() if memory is None else Moments(memory.rows[0]),
    }
    return problem, Start(server, templates)


def _summed(problem: RunProblem, client: Fields) -> Any:
    """Return the client rows to which a robust rule adds the fields of `RunProblem.summed_fields`.

    Changes are added to the row of the client's template that they change, others to zero.
    """
    names = problem.summed_fields
    sources = [problem.fields[name].base.partition(".") for name in names]
    zero = problem.oracle.layout.vector(problem.oracle.module, problem.oracle.dtype) * 0
    rows = [getattr(client, field) if source == "rows" else zero for source, _, field in sources]
    return namedtuple("Summed", names)(*rows) if names else Nothing()  # the method's fields are its own


class LastModel(NamedTuple):
    """A client's last model ``[d]``."""

    w: Tensor


def _place(engine: Engine) -> tuple[torch.device, torch.dtype]:
    """Device and type of a run's numbers.

    Raises:
        ConfigError: the device is not there.
    """
    device: torch.device = torch.device(engine.device)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            what = f"this machine has {count}, counted from 0" if count else "no CUDA device is there"
            use = "cuda:0" if count else "cpu"
            raise ConfigError(
                f"engine.device is {engine.device!r}, but {what}",
                rule="device-missing",
                fix=f"set {{engine.device = {use!r}}}",
            )
        wake(device)
    return device, getattr(torch, engine.dtype)


def _closed(weigher: Weigher) -> Weigher:
    """The weigher, if it needs no further groups.

    Raises:
        ConfigError: it compares two groups of rows, and names none.
    """
    try:
        return weigher.with_groups(())
    except ConfigError as error:
        what = str(error).partition(";")[0]
        raise ConfigError(f"{what}; name them in [weigher], as group = 'sex' or 'age>=75'") from None


def _checked(setting: Setting, n: int) -> tuple[Setting, list[str]]:
    """Resolve presets and check everything that needs no data. Return notes on what pooling leaves out.

    Raises:
        ConfigError: values that cannot work, or (Refused) do not work together.
    """
    pooled, (setting, notes) = setting.pooled, adapt_defaults(setting.resolved(), n)
    setting = setting.with_(weigher=_closed(setting.weigher))
    check_together(setting.method, setting.local, setting.weigher, setting.aggregator, setting.channel)
    check_sampler(setting.method, setting.sampler, setting.weigher)
    if pooled:
        none = dict.fromkeys(("mixer", "aggregator", "attack", "channel", "devices"))
        pool = setting.with_(
            sampler=Uniform(), weigher=SharesWeigher(), weights="samples", schedule=Synchronous(), **none
        )
        keys = [
            f"[{name}]"
            for name in ("sampler", "weigher", "schedule", *none)
            if getattr(pool, name) != getattr(setting, name)
        ]
        notes = [f"pooled data are those of one client: {changes_nothing(keys)}"] if keys else []
        setting = pool
    check_privacy(setting.method, setting.channel, setting.aggregator, setting.sampler, setting.weigher)
    with ruled(f"sampler-{setting.sampler.kind}"):
        setting.sampler.check(n)
    with ruled(f"weigher-{setting.weigher.kind}"):
        setting.weigher.check(n)
    if setting.mixer is not None:
        check_mixer(setting.method, setting.mixer, setting.aggregator)
        setting.mixer.check(n)
    check_schedule(setting, n)
    check_attack(setting)
    check_root(setting.aggregator, n)
    return setting, notes


def _oracle(setting: Setting, fed: Federation) -> Network:
    """Build the local problems of a model on a federation.

    Raises:
        ConfigError: the model, the task or the oracle does not fit the data.
    """
    engine, augment, task = setting.engine, setting.augment, task_of(fed.data, setting.task)
    check_mixture(setting, classed=fed.data.classed, each=fed.data.each)
    module = setting.model.build(tuple(fed.data.shape), task.outputs, setting.seed, fed.data.tokens)
    oracle = make_oracle(module, task, fed, engine.oracle, augment if augment.changes else None, engine.precision)
    if engine.precision != "full" and setting.method.full_gradients:
        why = setting.method.full_gradients
        raise Refused(
            f"{why} takes full gradients, which stay float32",
            rule="precision-of-full-gradients",
            fix="leave {engine.precision} out",
        )
    return oracle


class Residue(NamedTuple):
    """Unsent part of the channel's updates, or the client's last upload as the server has it: ``[m, D]``."""

    e: Tensor


class Moments(NamedTuple):
    """The states of a client's optimisers ``[m, S W]``, see `fedloom.local.optimizer.OptimizerStates`."""

    s: Tensor


def _memory(
    method: Algorithm, start: tuple[Fields, Fields, Fields | None], oracle: Network, ctx: Ctx
) -> OptimizerStates | None:
    """Return the form of kept optimizer states, found by one client's step without effect, or None if none are kept.

    Raises:
        ConfigError: the optimiser does not work with this model, or (Refused) the method does not train by it.
    """
    local = ctx.local
    if local.optimizer == "sgd":
        return None
    like = oracle.layout.vector(oracle.module)
    memory = OptimizerStates(like.new_zeros(1, 0), slots_of(local, oracle.layout, like))
    work = Work(oracle, ctx.ids[:1], ctx.weight[:1].to(like), local, steps=1, memory=memory)
    with attribute_error("method", method, "a first step"):
        first_upload(method, start, ctx, work)
    if not memory.streams:
        raise Refused(
            f"{type(method).__name__} takes its local steps itself, and they are steps of plain SGD",
            rule="method-optimizer",
            fix="set {local.optimizer = 'sgd'}",
        )
    return memory.of(memory.rows * 0) if local.optimizer_state == "kept" else None


def _residue(messages: Messages, channel: Channel, upload: Fields, kept: Fields | None, dtype: torch.dtype) -> Fields:
    """Template of what the channel keeps of a client that sends such an upload."""
    if messages.tracks:
        return Residue(getattr(kept, messages.changed))
    state = channel.init(messages.update(upload).shape[1], dtype)
    return Nothing() if state is None else Residue(state)
