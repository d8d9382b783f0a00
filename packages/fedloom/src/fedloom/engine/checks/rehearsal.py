"""Rehearsal: what a run is bound to meet in a later round, found before round 1 by playing its draws and one client."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedloom.algorithms import upload_fields
from fedloom.choose import Sampler
from fedloom.engine.clients.messages import first_step, first_upload
from fedloom.engine.problem import RunProblem
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError, Refused, attribute_error
from fedloom.local import Ctx, Work
from fedloom.local.rows import Fields
from fedloom.models.parts import penultimate
from fedloom.schedule import FORWARD, Deadline, OverSelection, Stream, Synchronous

MAX_DRAWS = 20_000_000
"""Clients times rounds that are drawn to look at the cohorts; of a longer run the first rounds are."""

Start = tuple[Fields, Fields, Fields | None]
"""The states of the server, of a client and of what the server keeps of it, before round 1."""


def check_cohorts(setting: Setting, ctx: Ctx, silent: Tensor | None) -> None:
    """Draw the cohort of every round, and refuse a rule or a schedule that one of them is too small for.

    The draws are those of the run: they follow from its seed. Samplers that learn from uploads or query clients draw by
    what only the run knows; their cohorts are not looked at.

    Args:
        setting: the run, presets resolved.
        ctx: all clients, before round 1.
        silent: bool ``[n]`` clients whose devices never answer; None without devices.

    Raises:
        ConfigError: the rule, the round and the number of clients that it has.
    """
    rule, schedule, sampler = setting.aggregator, setting.schedule, setting.sampler
    watches = rule is not None and not (rule.linear or isinstance(schedule, Stream)) and _may_fail(setting, ctx.n)
    waits = silent is not None and bool(silent.any()) and isinstance(schedule, Synchronous | OverSelection)
    if not (watches or waits) or sampler.learns or sampler.probes:
        return
    kinds = upload_fields(type(setting.method)).values()
    grows = any(kind.keeps or (kind.accumulates and kind.base.startswith("rows.")) for kind in kinds)
    seen, state = torch.zeros(ctx.n, dtype=torch.bool), _draws_of(sampler, ctx)
    worst: tuple[int, ConfigError] | None = None
    for t in range(1, 1 + min(setting.rounds, max(1, MAX_DRAWS // ctx.n))):
        with attribute_error("sampler", sampler, f"round {t}"):
            cohort, state = sampler.apply(state, None, ctx._replace(round=t))
        cohort = cohort.unique()
        if waits and silent is not None:
            _check_answers(setting, t, cohort, silent)
        if rule is None or not watches:
            continue
        used = cohort[: schedule.enough(len(cohort))] if isinstance(schedule, OverSelection) else cohort
        seen[used] = True
        counted = seen.nonzero()[:, 0] if grows else used
        try:
            rule.check_cohort(counted)
        except ConfigError as error:
            if worst is None or len(counted) < worst[0]:
                clients = "1 client" if len(counted) == 1 else f"{len(counted)} clients"
                worst = len(counted), error.placed(f"round {t} of {setting.rounds} has {clients}")
    if worst is not None:
        raise worst[1]


def _may_fail(setting: Setting, n: int) -> bool:
    """Whether a cohort of this sampler may be one that the rule refuses."""
    rule, fewest = setting.aggregator, setting.sampler.smallest(n)
    assert rule is not None
    return fewest is None or (fewest < n and rule.needs_client)


def _draws_of(sampler: Sampler, ctx: Ctx) -> object:
    with attribute_error("sampler", sampler, "init"):
        state: object = sampler.init(ctx)
    return state


def _check_answers(setting: Setting, t: int, cohort: Tensor, silent: Tensor) -> None:
    """Refuse a round that waits for a client whose device never answers."""
    schedule, lost = setting.schedule, cohort[silent[cohort]].tolist()
    enough = schedule.enough(len(cohort)) if isinstance(schedule, OverSelection) else len(cohort)
    if len(cohort) - len(lost) < enough:
        raise Refused(
            f"round {t} waits for {enough} of {len(cohort)} clients, and those of {lost[:8]} never answer",
            rule="client-never-answers",
            fix="set {schedule = {'kind': 'deadline', 'seconds': 60.0}}, or give these clients a speed",
        )


def check_times(problem: RunProblem, start: Start) -> None:
    """Refuse a deadline or a timeout that no client meets: the fastest client trains its first round for it.

    A client's seconds are at least its work on its device, its upload and the latency of two messages; times in which
    clients are away only add to them. Clients with fewer samples are taken to work in proportion less.

    Args:
        problem: the run.
        start: the states before round 1.

    Raises:
        Refused: the limit and the seconds of the fastest client.
    """
    schedule, fleet = problem.setting.schedule, problem.fleet
    is_deadline = isinstance(schedule, Deadline)
    limit = schedule.seconds if is_deadline else getattr(schedule, "timeout", None)
    if fleet is None or limit is None:
        return
    sizes, partial = problem.train_sizes[:, 0].double(), is_deadline and schedule.partial
    fastest = (fleet.seconds.double() * sizes + 2 * fleet.latency).argmin()[None]
    weight = problem.alpha[fastest].to(problem.oracle.device)
    steps = 1 if partial else None
    work = Work(problem.oracle, fastest, weight, problem.setting.local, seed=problem.setting.seed, steps=steps)
    with attribute_error("method", problem.algorithm, "a first round"):
        upload = first_upload(problem.algorithm, start, problem.ctx(1, fastest), work)
    sends = problem.setting.channel is None and len(upload) > 0
    length = int(problem.messages.up(upload).lengths()[0].max()) if sends else 1
    worked = float(work.counts.backward[0] + FORWARD * work.counts.forward[0])
    part = torch.ones_like(sizes) if partial else (sizes / sizes[fastest]).clamp(max=1.0)
    seconds = worked * part * fleet.seconds.double().nan_to_num(posinf=math.inf) + 2 * fleet.latency + length / fleet.up
    least = float(seconds.nan_to_num(nan=math.inf).min())
    if least <= limit:
        return
    key = "seconds" if is_deadline else "timeout"
    fix = f"set {{schedule.{key} = {float(f'{2 * least:.2g}')}}}, or more"
    raise Refused(
        f"schedule {schedule.kind!r}: no client answers within {limit:g} s, as the fastest one takes {least:.3g} s for "
        f"{'one step' if partial else 'its work'} and its messages",
        rule="deadline-unmet",
        fix=fix if math.isfinite(least) else "leave {schedule} and {devices} out",
    )


def check_head(problem: RunProblem, start: Start) -> None:
    """Refuse a method that needs a head, or layers below it, in a model that has none: one client takes a step.

    Raises:
        ConfigError: the method does not find the layers in a first step.
    """
    module = problem.oracle.module
    try:
        penultimate(module)
    except ConfigError:
        pass
    else:
        return
    ids = torch.tensor([0])
    try:
        work = Work(problem.oracle, ids, problem.alpha[ids].to(problem.oracle.device), problem.setting.local, steps=1)
        down, rows, _ = first_step(problem.algorithm, start, problem.ctx(1, ids), work)
        problem.personal(down, rows, work)
    except ConfigError:
        raise
    except (KeyError, AttributeError) as error:
        name = type(problem.algorithm).__name__
        raise Refused(
            f"{name} looks for layers by their names, and does not find them in {type(module).__name__} ({error!r})",
            rule="head-missing",
            fix="put a layer before the last one: torch.nn.Sequential(torch.nn.Flatten(), layer)",
        ) from error
    except Exception:
        return  # the run itself names the client, the round and the line


def rehearse(problem: RunProblem, start: Start) -> None:
    """Find what a round of this run is bound to meet, before round 1.

    Args:
        problem: the run.
        start: the states before round 1.

    Raises:
        ConfigError: a cohort that the rule or the schedule cannot work on, a limit that no client meets, or a model
            without the layers that the method looks for.
    """
    silent = None if problem.fleet is None else ~problem.fleet.seconds.isfinite()
    if problem.replay.cohorts is None:
        check_cohorts(problem.setting, problem.ctx(0), silent)
    check_times(problem, start)
    check_head(problem, start)
