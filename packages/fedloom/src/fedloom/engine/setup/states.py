"""Third step of creating a job: derive the method's options, and create the states before round 1."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm
from fedloom.engine.checks.notes import GLOBAL_DRAWS_NOTE, collect_notes
from fedloom.engine.checks.refusals import (
    add_rule_to_errors,
    check_initial_states,
    check_mixed_width,
    check_tested,
    check_width,
)
from fedloom.engine.checks.rehearsal import Start, check_layers
from fedloom.engine.clients.messages import Messages, first_upload, idle_upload
from fedloom.engine.clients.regroup import check_shares
from fedloom.engine.problem import JobFacts
from fedloom.engine.replay import Replay
from fedloom.engine.setting import Setting
from fedloom.engine.setup.participants import Participants
from fedloom.engine.setup.problems import LocalProblems
from fedloom.engine.workers import note_idle_workers
from fedloom.errors import Refused, attribute_error
from fedloom.local import Ctx, Nothing, Work
from fedloom.local.optimizer import OptimizerStates, find_slots
from fedloom.local.oracles import Network
from fedloom.local.rows import Fields
from fedloom.rows.channels import Channel
from fedloom.seeds import rng_states


class StartedMethod(NamedTuple):
    """A method with its states before round 1.

    Attributes:
        setting: settings of the run, with the method's derived options.
        states: initial states of the server, a client, and the fields that the server stores for a client.
        memory: layout of stored optimizer states. None if optimizers start every round from scratch.
        residue: initial state of the channel for one client.
        notes: notes from before round 1.
    """

    setting: Setting
    states: Start
    memory: OptimizerStates | None
    residue: Fields
    notes: list[str]


def start_method(participants: Participants, problems: LocalProblems, replay: Replay) -> StartedMethod:
    """Derive the method's options, create its states, and check whether the run is possible with them.

    Raises:
        ConfigError: values are impossible or cannot be combined.
    """
    setting, (oracle, ctx, x0, _), n = participants.setting, problems, participants.fed.n
    method, sampler = setting.method, setting.sampler
    with attribute_error("method", method, "init"), add_rule_to_errors(f"method-{type(method).__name__.lower()}"):
        method, drawn = method.derive_options(ctx), rng_states()
        states = check_initial_states(method, x0, ctx)
        draws = [GLOBAL_DRAWS_NOTE] * (rng_states() != drawn)
    setting = setting.with_(algorithm=method)
    server = states[0]
    check_shares(setting, server, ctx)
    if sampler.probes and method.global_model(server) is None:
        name = type(method).__name__
        raise Refused(
            f"sampler {sampler.kind!r} asks clients about the global model, but {name} has no global model",
            rule="sampler-needs-a-global-model",
            fix="omit {sampler}",
        )
    fewest = sampler.smallest(n) if replay.cohorts is None else min(len(set(map(int, c))) for c in replay.cohorts)
    if setting.personalized_aggregation is not None:
        with attribute_error("method", method, "down"):
            check_mixed_width(method, method.down(server, None, ctx), oracle.layout.d)
    with add_rule_to_errors(f"method-{type(method).__name__.lower()}"):
        method_notes = collect_notes(setting, oracle, server, ctx, fewest, participants.attackers)
    tested = check_tested(setting, participants.eval_fed)
    notes = [*participants.notes, *tested, *draws, *method_notes, *note_idle_workers(setting.engine)]
    if setting.aggregator is not None and fewest is not None:
        setting.aggregator.check(fewest)
    check_layers(setting, oracle, ctx, states)
    memory = _find_optimizer_states(method, states, oracle, ctx)
    return StartedMethod(setting, states, memory, _check_parts(setting, states, oracle, ctx), notes)


def _check_parts(setting: Setting, states: Start, oracle: Network, ctx: Ctx) -> Fields:
    """Check the weigher, the sampler and the channel, which all read uploads.

    Return the channel's initial state for one client.

    Raises:
        ConfigError: a weigher or a sampler reads models, but clients do not send them.
    """
    method, channel = setting.method, setting.upload_transform
    if channel is None and not (setting.aggregation_weights.probes or setting.sampler.learns):
        return Nothing()
    sample = idle_upload(method, states, oracle, ctx)
    check_width(method, sample, setting.aggregation_weights, setting.sampler, oracle.layout.d)
    if channel is None:
        return Nothing()
    return _initial_residue(
        Messages(method, oracle.layout, oracle.device, channel), channel, sample, states[2], oracle.dtype
    )


def make_templates(problem: JobFacts, started: StartedMethod, x0: Tensor) -> dict[str, Fields]:
    """Return a client's initial state (without a client dimension), keyed by the store in `Job` that holds it.

    Args:
        problem: facts about the run.
        started: method with its states before round 1.
        x0: initial model ``[d]``.
    """
    _, client, kept = started.states
    mixes_models = problem.setting.personalized_aggregation is not None and not problem.fields[problem.primary].keeps
    return {
        "clients": client,
        "kept": Nothing() if kept is None else kept,
        "models": LastModel(x0) if mixes_models else Nothing(),
        "summed": _summed_rows(problem, client),
        "residue": started.residue,
        "optimizer": Nothing() if started.memory is None else Moments(started.memory.rows[0]),
    }


def _summed_rows(problem: JobFacts, client: Fields) -> Fields:
    """Return the initial rows of the per-client sums of `JobFacts.summed_fields`.

    Changes of a client's row are added to the row's initial value. All other fields are added to zero.
    """
    names = problem.summed_fields
    sources = [problem.fields[name].base.partition(".") for name in names]
    zero = problem.oracle.layout.vector(problem.oracle.module, problem.oracle.dtype) * 0
    rows = [getattr(client, field) if source == "rows" else zero for source, _, field in sources]
    if not names:
        return Nothing()
    make: Callable[..., Fields] = namedtuple("Summed", [*names])  # type: ignore[misc]  # the method's fields are its own
    return make(*rows)


class LastModel(NamedTuple):
    """Last model ``[d]`` of a client."""

    w: Tensor


class Residue(NamedTuple):
    """Unsent part of an update, or the server's copy of the client's last upload, ``[m, D]``."""

    e: Tensor


class Moments(NamedTuple):
    """Optimizer states of a client ``[m, S W]`` (see `fedloom.local.optimizer.OptimizerStates`)."""

    s: Tensor


def _find_optimizer_states(method: Algorithm, start: Start, oracle: Network, ctx: Ctx) -> OptimizerStates | None:
    """Let a client take a trial step to find the optimizer states that must be stored. Return None if there are none.

    Raises:
        ConfigError: the optimizer does not work with this model, or the method does not use the optimizer.
    """
    local = ctx.local
    if local.optimizer == "sgd":
        return None
    like = oracle.layout.vector(oracle.module)
    memory = OptimizerStates(like.new_zeros(1, 0), find_slots(local, oracle.layout, like))
    work = Work(oracle, ctx.ids[:1], ctx.weight[:1].to(like), local, steps=1, memory=memory)
    with attribute_error("method", method, "a first step"):
        first_upload(method, start, ctx, work)
    if not memory.streams:
        raise Refused(
            f"{type(method).__name__} implements its own local steps with plain SGD",
            rule="method-optimizer",
            fix="set {local.optimizer = 'sgd'}",
        )
    return memory.replace_rows(memory.rows * 0) if local.optimizer_state == "persistent" else None


def _initial_residue(
    messages: Messages, channel: Channel, upload: Fields, kept: Fields | None, dtype: torch.dtype
) -> Fields:
    """Return the channel's initial state for uploads with this structure."""
    if messages.tracks:
        return Residue(getattr(kept, messages.changed))
    state = channel.init(messages.update(upload).shape[1], dtype)
    return Nothing() if state is None else Residue(state)
