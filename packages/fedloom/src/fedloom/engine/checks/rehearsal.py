"""Rehearsal of a run before round 1. It finds errors that would otherwise appear only in later rounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedloom.algorithms import upload_fields
from fedloom.choose import Sampler, SharesWeigher
from fedloom.choose.shares import uses_clusters
from fedloom.engine.clients.messages import first_step, first_upload
from fedloom.engine.early_stop import EarlyStop
from fedloom.engine.problem import JobFacts
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError, Refused, attribute_error
from fedloom.local import Ctx, Work
from fedloom.local.oracles import Network
from fedloom.local.rows import Fields, rebuild_rows
from fedloom.models.parts import penultimate_layer
from fedloom.schedule import FORWARD_COST, Deadline, OverSelection, Stream, Synchronous
from fedloom.tasks.sums import metric_names

MAX_DRAWS = 20_000_000
"""Maximum number of client draws (clients times rounds) that are checked. In a run with more draws, only the first
rounds are checked."""

Start = tuple[Fields, Fields, Fields | None]
"""States before round 1: the server's, a client's, and those of the fields that the server stores for a client."""


def check_cohorts(setting: Setting, ctx: Ctx, silent: Tensor | None) -> None:
    """Draw each round's cohort, and raise an error if one is too small for the aggregation rule or schedule.

    The cohorts are the same as in the run itself, because they depend only on its seed. For a sampler that learns from
    uploads, cohorts are drawn as if it had not learned anything yet, and their weights are not checked. A sampler that
    queries clients is not checked, because all its cohorts have the same size.

    Args:
        setting: setting of the run, with presets resolved.
        ctx: context of all clients, before round 1.
        silent: bool mask ``[n]`` of the clients whose devices never answer. None if the run simulates no devices.

    Raises:
        ConfigError: a cohort is too small, or all its clients have weight 0. The message states the violated
            requirement, the round and the number of clients.
    """
    rule, schedule, sampler = setting.aggregator, setting.schedule, setting.sampler
    watches = rule is not None and not (rule.linear or isinstance(schedule, Stream)) and _may_fail(setting, ctx.n)
    waits = silent is not None and bool(silent.any()) and isinstance(schedule, Synchronous | OverSelection)
    kinds = upload_fields(type(setting.method)).values()
    weightless = ctx.weight[:, 0].cpu() == 0
    weighs = bool(weightless.any()) and not sampler.learns and _averages_by_shares(setting)
    if not (watches or waits or weighs) or sampler.probes:
        return
    grows = any(kind.keeps or (kind.accumulates and kind.base.startswith("rows.")) for kind in kinds)
    trained, state = torch.zeros(ctx.n, dtype=torch.bool), _draw_cohorts(sampler, ctx)
    worst: tuple[int, ConfigError] | None = None
    for t in range(1, 1 + min(setting.rounds, max(1, MAX_DRAWS // ctx.n))):
        with attribute_error("sampler", sampler, f"round {t}"):
            cohort, state = sampler.apply(state, None, ctx._replace(round=t))
        cohort = cohort.unique()
        if waits and silent is not None:
            _check_answers(setting, t, cohort, silent)
        if weighs and bool(weightless[cohort].all()):
            raise Refused(
                f"all clients in round {t} have weight 0 ({cohort.tolist()[:8]}), so their uploads have no mean",
                rule="cohort-without-weight",
                fix="give one of these clients a weight above 0 in {client_weights}, or change {sampler}",
            )
        if rule is None or not watches:
            continue
        used = cohort[: schedule.enough(len(cohort))] if isinstance(schedule, OverSelection) else cohort
        trained[used] = True
        counted = trained.nonzero()[:, 0] if grows else used
        try:
            rule.check_cohort(counted)
        except ConfigError as error:
            if worst is None or len(counted) < worst[0]:
                clients = "1 client" if len(counted) == 1 else f"{len(counted)} clients"
                worst = len(counted), error.placed(f"round {t} of {setting.rounds} has {clients}")
    if worst is not None:
        raise worst[1]


def _averages_by_shares(setting: Setting) -> bool:
    """Return True if the server averages a cohort's uploads with the clients' weights in the objective."""
    rule, kinds = setting.aggregator, upload_fields(type(setting.method)).values()
    return (
        isinstance(setting.aggregation_weights, SharesWeigher)
        and not isinstance(setting.schedule, Stream)
        and (rule is None or rule.weighted)
        and any(kind.averaged and not kind.keeps and not kind.weight for kind in kinds)
    )


def _may_fail(setting: Setting, n: int) -> bool:
    """Return True if the aggregation rule may reject one of this sampler's cohorts."""
    rule, fewest = setting.aggregator, setting.sampler.smallest(n)
    assert rule is not None
    return fewest is None or (fewest < n and rule.needs_client)


def _draw_cohorts(sampler: Sampler, ctx: Ctx) -> object:
    with attribute_error("sampler", sampler, "init"):
        state: object = sampler.init(ctx)
    return state


def _check_answers(setting: Setting, t: int, cohort: Tensor, silent: Tensor) -> None:
    """Raise an error if a round waits for more clients than have responsive devices."""
    schedule, lost = setting.schedule, cohort[silent[cohort]].tolist()
    enough = schedule.enough(len(cohort)) if isinstance(schedule, OverSelection) else len(cohort)
    if len(cohort) - len(lost) < enough:
        raise Refused(
            f"round {t} waits for {enough} of {len(cohort)} clients, but the devices of {lost[:8]} never answer",
            rule="client-never-answers",
            fix="set {schedule = {'kind': 'deadline', 'seconds': 60.0}}, or set a speed for these clients",
        )


def check_times(problem: JobFacts, start: Start) -> None:
    """Train the fastest client for one round, and raise an error if even this client misses the deadline or timeout.

    A client needs at least the time for training on its device, its upload, and the latency of two messages. Periods of
    absence can only increase this time. Clients with fewer samples are assumed to train for a proportionally shorter
    time.

    Args:
        problem: the run.
        start: states before round 1.

    Raises:
        ConfigError: no client meets the deadline or timeout. The message states how many seconds the fastest client
            needs.
    """
    schedule, fleet = problem.setting.schedule, problem.fleet
    deadline = schedule if isinstance(schedule, Deadline) else None
    limit = getattr(schedule, "timeout", None) if deadline is None else deadline.seconds
    if fleet is None or limit is None:
        return
    sizes, partial = problem.train_sizes[:, 0].double(), deadline is not None and deadline.partial
    fastest = (fleet.seconds.double() * sizes + 2 * fleet.latency).argmin()[None]
    weight = problem.alpha[fastest].to(problem.oracle.device)
    steps = 1 if partial else None
    work = Work(problem.oracle, fastest, weight, problem.setting.local, seed=problem.setting.seed, steps=steps)
    with attribute_error("method", problem.algorithm, "a first round"):
        upload = first_upload(problem.algorithm, start, problem.ctx(1, fastest), work)
    sends = problem.setting.upload_transform is None and len(upload) > 0
    length = int(problem.messages.up(upload).lengths()[0].max()) if sends else 1
    worked = float(work.counts.backward[0] + FORWARD_COST * work.counts.forward[0])
    part = torch.ones_like(sizes) if partial else (sizes / sizes[fastest]).clamp(max=1.0)
    seconds = worked * part * fleet.seconds.double().nan_to_num(posinf=math.inf) + 2 * fleet.latency + length / fleet.up
    least = float(seconds.nan_to_num(nan=math.inf).min())
    if least <= limit:
        return
    key = "timeout" if deadline is None else "seconds"
    fix = f"set {{schedule.{key} = {float(f'{2 * least:.2g}')}}}, or more"
    raise Refused(
        f"schedule {schedule.kind!r}: no client answers within {limit:g} s, because the fastest client takes "
        f"{least:.3g} s for {'one step' if partial else 'its work'} and its messages",
        rule="deadline-unmet",
        fix=fix if math.isfinite(least) else "omit {schedule} and {devices}",
    )


def check_layers(setting: Setting, oracle: Network, ctx: Ctx, start: Start) -> None:
    """Let a client take one step, and raise an error if the model lacks a head or layers, or the data lack classes.

    Args:
        setting: setting of the run, with presets resolved.
        oracle: the local problems.
        ctx: context of all clients, before round 1.
        start: states before round 1.

    Raises:
        ConfigError: the method, the client weights or the weigher need something that the model or the data do not
            provide.
    """
    module, method, data = oracle.module, setting.method, oracle.fed.data
    try:
        penultimate_layer(module)
    except ConfigError:
        if setting.aggregation_weights.describes or uses_clusters(setting.client_weights):
            raise
    else:
        if data.classed and not data.each:
            return
    try:
        _play_two_rounds(setting, oracle, ctx, start)
    except ConfigError:
        raise
    except (KeyError, AttributeError) as error:
        raise Refused(
            f"{type(method).__name__} finds layers by name, but {type(module).__name__} does not contain them "
            f"({error!r})",
            rule="head-missing",
            fix="put a layer before the last one: torch.nn.Sequential(torch.nn.Flatten(), layer)",
        ) from error
    except Exception:
        return  # the run reports this error with client, round and line


def _play_two_rounds(setting: Setting, oracle: Network, ctx: Ctx, start: Start) -> None:
    """Let a client take one step in each of two rounds, because a method may use results of the previous round."""
    method, one = setting.method, ctx._replace(m=1, ids=ctx.ids[:1])
    for round in (1, 2):
        work = Work(oracle, one.ids, ctx.weight[:1].to(oracle.device), ctx.local, steps=1, round=round)
        down, rows, up = first_step(method, start, ctx, work)
        method.personal(down, rows, work)
        if setting.aggregation_weights.probes:
            setting.aggregation_weights.probe(
                down, ctx.layout.vector(oracle.module, oracle.dtype)[None].to(oracle.device), work
            )
        kinds = upload_fields(type(method))
        whole = rebuild_rows(up, [value[0] if kinds[name].averaged else value for name, value in up._asdict().items()])
        kept = start[2] and rebuild_rows(start[2], [getattr(up, name)[0] for name in start[2]._fields])
        server = method.server(start[0], whole, one._replace(round=round))
        start = server, rebuild_rows(rows, [value[0] for value in rows]), kept


def check_early_stop(rule: EarlyStop, problem: JobFacts, server: Fields) -> None:
    """Raise an error if early stopping monitors a value that is never measured.

    Args:
        rule: rule for ending the run.
        problem: the run.
        server: state of the server before round 1.

    Raises:
        ConfigError: the part is empty or is not evaluated, or there is no such model or metric. The message states the
            reason.
    """
    parts = problem.setting.evaluate.parts
    if rule.part not in parts:
        raise Refused(
            f"early_stop monitors the {rule.part} part, but evaluate.parts does not contain it",
            rule="early-stop-part",
            fix=f"set {{evaluate.parts = {[*parts, rule.part]}}}",
        )
    if not int(problem.eval_fed.sizes(rule.part).sum()):
        raise Refused(
            f"early_stop monitors the {rule.part} part, but no client has samples in it",
            rule="early-stop-part-empty",
            fix="set {early_stop.part = 'train'}, or use a larger {partition.validation}",
        )
    kinds, metrics = problem.model_kinds(server), metric_names(problem.oracle.task)
    if rule.model is not None and rule.model not in kinds:
        raise Refused(
            f"early_stop monitors the {rule.model} model, but {type(problem.algorithm).__name__} has only these "
            f"models: "
            f"{', '.join(kinds)}",
            rule="early-stop-model",
            fix="omit {early_stop.model}",
        )
    if rule.metric not in metrics:
        raise Refused(
            f"early_stop monitors the metric {rule.metric!r}, but for these data it must be one of: "
            f"{', '.join(sorted(metrics))}",
            rule="early-stop-metric",
            fix="omit {early_stop.metric}, or choose one of these metrics",
        )


def rehearse_rounds(problem: JobFacts, start: Start) -> None:
    """Find errors before round 1 that would otherwise occur only in a later round.

    Args:
        problem: the run.
        start: states before round 1.

    Raises:
        ConfigError: a cohort is too small for the aggregation rule or the schedule, every client exceeds a time limit,
            or early stopping monitors a value that is never measured.
    """
    silent = None if problem.fleet is None else ~problem.fleet.seconds.isfinite()
    if problem.replay.cohorts is None:
        check_cohorts(problem.setting, problem.ctx(0), silent)
    check_times(problem, start)
    if problem.setting.early_stop is not None:
        check_early_stop(problem.setting.early_stop, problem, start[0])
