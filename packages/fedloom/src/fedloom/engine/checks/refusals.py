"""Rejection of incompatible parts, for example a method and a sampler that do not work together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fedloom.algorithms import Algorithm, primary_field, upload_fields
from fedloom.choose import Mixer, Sampler, SamplesWeigher, SharesWeigher, UniformWeigher, Weigher
from fedloom.choose.shares import uses_clusters
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.errors import CodeError, ConfigError, Refused, capitalize, rewrite_keys
from fedloom.local import Ctx, LocalSGD
from fedloom.local.rows import Fields
from fedloom.rows.aggregators import Aggregator, FLTrust, PrivateMean
from fedloom.rows.channels import Channel
from fedloom.values import get_kind

_FIX_PATTERN = re.compile(r"(?P<why>.*)(?:; |\. (?=[A-Z]))(?P<fix>.*)", re.DOTALL)
"""Pattern of a message that consists of a reason followed by advice."""
_DOTTED_KEY_PATTERN = re.compile(
    r"(?:\b(?P<table>[a-z]+)\.(?P<key>[a-z_]+)|\bclient_weights)(?: = (?P<value>'[^']*'|[\w.-]+))?"
)


@contextmanager
def add_rule_to_errors(rule: str) -> Iterator[None]:
    """Add a check's id to errors raised inside the block. The last sentence of the message becomes the advice.

    Raises:
        ConfigError: an error was raised inside the block. It now names the rule.
    """
    try:
        yield
    except ConfigError as error:
        if not error.rule:
            sentence = _FIX_PATTERN.fullmatch(str(error))
            why, cure = (sentence["why"], sentence["fix"]) if sentence else ("", str(error))
            error.rule, error.fix = rule, _DOTTED_KEY_PATTERN.sub(lambda match: f"{{{match[0]}}}", cure)
            error.args = (f"{why}. {capitalize(rewrite_keys(error.fix))}" if why else rewrite_keys(error.fix),)
        raise


NOT_EVALUATED = "trained but not evaluated, because there are no test rows"
"""Last part of a message about a run without a test set."""


def check_width(method: Algorithm, upload: Fields, weigher: Weigher, sampler: Sampler, d: int) -> None:
    """Raise an error if a weigher or sampler reads clients' models but the method does not upload complete models.

    Raises:
        ConfigError: the parts cannot be combined. The message states the reason.
    """
    name = primary_field(type(method)) if upload else ""
    if not upload or (getattr(upload, name).shape[1] == d and upload_fields(type(method))[name].carries == "model"):
        return
    for what, value, looks in (("aggregation_weights", weigher, weigher.probes), ("sampler", sampler, sampler.learns)):
        if looks:
            name = type(method).__name__
            raise Refused(
                f"{what} {value.kind!r} reads the clients' models, but clients of {name} do not upload complete models",
                rule="part-needs-models",
                fix=f"omit {{{what}}}",
            )


def check_together(
    algorithm: Algorithm,
    local: LocalSGD,
    weigher: Weigher,
    aggregator: Aggregator | None = None,
    channel: Channel | None = None,
) -> None:
    """Raise an error if the parts of a run cannot be combined.

    The kinds of the method's upload fields determine which parts can be combined.

    Raises:
        ConfigError: the parts cannot be combined. The message states the reason.
    """
    name = type(algorithm).__name__
    kinds = upload_fields(type(algorithm)).values()
    if algorithm.plain_sgd and local.momentum:
        raise Refused(
            f"{name} does not work with momentum: {algorithm.plain_sgd}",
            rule="method-momentum",
            fix="set {local.momentum = 0}",
        )
    why = algorithm.plain_sgd or algorithm.needs_sgd
    if why and local.optimizer != "sgd":
        raise Refused(
            f"{name} does not work with optimizer {local.optimizer!r}: {why}",
            rule="method-optimizer",
            fix="set {local.optimizer = 'sgd'}",
        )
    if algorithm.full_gradients and (local.momentum or local.clip is not None or local.optimizer != "sgd"):
        raise Refused(
            f"{algorithm.full_gradients} uses plain full gradients, so momentum, other optimizers and clipping would "
            f"have no effect",
            rule="full-gradients",
            fix="set {local.momentum = 0} and {local.optimizer = 'sgd'}, and omit {local.clip}",
        )
    if not isinstance(weigher, SharesWeigher | UniformWeigher) and not any(k.is_weighable for k in kinds):
        if not kinds:
            why = "it does not upload anything"
        elif any(k.keeps for k in kinds):
            why = "its server stores every client's last upload"
        elif any(k.accumulates for k in kinds):
            why = "its server accumulates uploads over rounds"
        else:
            why = "its server averages individual models itself"
        cure = "omit {aggregation_weights}"
        if isinstance(weigher, SamplesWeigher):
            cure += " (with {client_weights = 'samples'}, all methods weight clients by their samples)"
        elif weigher.describes and kinds and not algorithm.mixes:
            cure += " (with {client_weights = 'clusters'}, clusters have equal weight in the method's own shares)"
        raise Refused(
            f"aggregation_weights {weigher.kind!r} has no effect with {name}: {why}",
            rule="weigher-without-effect",
            fix=cure,
        )
    if weigher.signed and aggregator is not None and aggregator.weighted and not aggregator.linear:
        raise Refused(
            f"aggregation_weights {weigher.kind!r} without its floor allows negative weights, which aggregator "
            f"{get_kind(aggregator)!r} does not support",
            rule="signed-weights-in-a-rule",
            fix="omit {aggregation_weights} or {aggregator}",
        )
    for what, table, value in (("aggregator", "aggregator", aggregator), ("channel", "upload_transform", channel)):
        if value is not None and not kinds:
            raise Refused(
                f"{table} {get_kind(value)!r} has no effect with {name}, which does not upload anything",
                rule=f"{what}-without-upload",
                fix=f"omit {{{table}}}",
            )
    if aggregator is not None and not aggregator.linear:
        rule = f"aggregator {get_kind(aggregator)!r}"
        if isinstance(aggregator, PrivateMean) and any(k.accumulates for k in kinds):
            raise Refused(
                f"{rule} cannot be used with {name}: its server accumulates uploads over rounds, including the noise "
                f"of every round",
                rule="noise-adds-up",
                fix="omit {aggregator} and set {upload_transform = 'gaussian-noise'}",
            )
        brings = type(algorithm).mixer is not Algorithm.mixer
        if algorithm.mixes and (not brings or isinstance(aggregator, PrivateMean)):
            raise Refused(
                f"{rule} has no effect with {name}: its server mixes individual models for every client",
                rule="aggregator-on-mixing",
                fix="omit {aggregator}",
            )
        if any(k.primary and not k.averaged for k in kinds):
            raise Refused(
                f"{rule} has no effect with {name}: its server averages individual models with its own weights",
                rule="aggregator-on-single-models",
                fix="omit {aggregator}",
            )
    if channel is not None and algorithm.needs_exact:
        raise Refused(
            f"upload_transform {get_kind(channel)!r} cannot be used with {name}: {algorithm.needs_exact}",
            rule="channel-on-exact-sums",
            fix="omit {upload_transform}",
        )


def check_mixer(algorithm: Algorithm, mixer: Mixer, aggregator: Aggregator | None) -> None:
    """Raise an error if the method's clients cannot use mixed models in place of the server's model.

    Raises:
        ConfigError: the parts cannot be combined. The message states the reason.
    """
    name, what = type(algorithm).__name__, f"personalized_aggregation {mixer.kind!r}"
    kinds = upload_fields(type(algorithm))
    if not kinds:
        raise Refused(
            f"{what} has no effect with {name}, which does not upload anything",
            rule="mixer-without-upload",
            fix="omit {personalized_aggregation}",
        )
    carried = kinds[primary_field(type(algorithm))].carries
    if carried != "model":
        raise Refused(
            f"{what} mixes models, but clients of {name} send {carried} instead of models",
            rule="mixer-without-models",
            fix="omit {personalized_aggregation}",
        )
    if algorithm.mixes:
        raise Refused(
            f"{what} cannot be used with {name}: its server already mixes individual models for every client",
            rule="mixer-on-mixing",
            fix="omit {personalized_aggregation}",
        )
    if isinstance(aggregator, PrivateMean):
        raise Refused(
            f"{what} sends mixtures of individual models, but noise added to a mean does not protect individual models",
            rule="mixer-under-central-noise",
            fix="omit {personalized_aggregation}, or omit {aggregator} and set {upload_transform = 'gaussian-noise'}",
        )
    if algorithm.family == "clustered":
        raise Refused(
            f"{what} cannot be used with {name}: its server already has a model for each cluster of clients",
            rule="mixer-on-clusters",
            fix="omit {personalized_aggregation}",
        )
    personal = type(algorithm).personal is not Algorithm.personal
    if not personal and any(k.keeps or k.accumulates for k in kinds.values()):
        raise Refused(
            f"{what} cannot be used with {name}: its clients keep dual or control variables for a single consensus "
            f"model, which personalized models would contradict",
            rule="mixer-on-consensus",
            fix="omit {personalized_aggregation} ('flame' and 'fedslr' have both a consensus model and personal "
            "models)",
        )
    if not personal and algorithm.family == "composite":
        raise Refused(
            f"{what} cannot be used with {name}: its server applies a prox to the model, and mixtures of clients' "
            f"models would bypass the prox",
            rule="mixer-on-server-prox",
            fix="omit {personalized_aggregation} ('fedslr' and 'lpgd' have regularized personal models)",
        )


def check_mixed_width(method: Algorithm, down: Fields, d: int) -> None:
    """Raise an error if a mixer is used and the server's download ``down`` is not a single model.

    Raises:
        ConfigError: the parts cannot be combined. The message states the reason.
    """
    if down[0].shape != (d,):
        width = down[0].shape[-1]
        sent = f"something {'smaller' if width < d else 'larger'}" if width != d else "a separate model for each client"
        raise Refused(
            "personalized aggregation sends mixed models instead of the server's model, but the "
            f"server of {type(method).__name__} sends {sent}",
            rule="mixer-needs-one-model",
            fix="omit {personalized_aggregation}",
        )


def check_sampler(algorithm: Algorithm, sampler: Sampler, weigher: Weigher) -> None:
    """Raise an error if the method lacks what a sampler needs, or if a sampler makes the weigher's weights invalid.

    Raises:
        ConfigError: the parts cannot be combined. The message states the reason.
    """
    name = type(algorithm).__name__
    if sampler.learns and not upload_fields(type(algorithm)):
        raise Refused(
            f"sampler {sampler.kind!r} reads uploads, but {name} does not upload anything",
            rule="sampler-without-upload",
            fix="omit {sampler}",
        )
    if sampler.repeats and weigher.signed:
        raise Refused(
            f"sampler {sampler.kind!r} may draw a client twice, so the weights of {weigher.kind!r} "
            "without its floor may sum to zero or less",
            rule="signed-weights-of-repeats",
            fix="omit {aggregation_weights} or {sampler}",
        )


def check_attack(setting: Setting) -> None:
    """Raise an error if an attack forges activations but no part of the run describes clients by activations.

    Raises:
        ConfigError: the parts cannot be combined. The message states the reason.
    """
    attack = setting.attack
    if (
        attack is not None
        and attack.disguises
        and not (setting.aggregation_weights.describes or uses_clusters(setting.client_weights))
    ):
        raise Refused(
            f"attack {get_kind(attack)!r} has nothing to forge: only client_weights = 'clusters' and "
            "aggregation_weights 'equitable' describe clients by activations",
            rule="attack-without-target",
            fix="set {client_weights = 'clusters'}, or omit {attack}",
        )


def check_root(aggregator: Aggregator | None, n: int) -> None:
    """Raise an error if an aggregation rule trusts a client that does not exist.

    Raises:
        ConfigError: the trusted client does not exist. The message states the reason.
    """
    if isinstance(aggregator, FLTrust) and aggregator.root >= n:
        raise Refused(
            f"aggregator 'fltrust' trusts client {aggregator.root}, but the clients are numbered 0 to {n - 1}",
            rule="trusted-client-missing",
            fix="set {aggregator.root = 0}, or use the number of a different client",
        )


def check_tested(setting: Setting, fed: Federation) -> list[str]:
    """Raise an error if a run would evaluate nothing, unless this is the user's choice.

    In this case, return a note.

    An empty test set is the user's choice if the partition has ``test = 0`` or clients were passed without test rows.

    Raises:
        ConfigError: no client has a test row.
    """
    tested = len(fed.parts["test"].index) + (0 if fed.test is None else len(fed.test))
    if tested or "test" not in setting.evaluate.parts:
        return []
    if fed.partition and fed.partition.get("test", 1.0) != 0:
        marked = fed.data.design is not None and fed.data.design.held_out is not None
        cure = (
            "mark the last row of some subjects as a test row (a subject's last row determines its part)"
            if marked
            else ("use fewer clients or a larger test fraction")
        )
        raise Refused(
            f"no client has a test row (the training sets have {int(fed.sizes('train').sum())} rows), so nothing "
            f"would be evaluated",
            rule="test-part-empty",
            fix=f"set {{partition.test = 0}} to train without a test set, or {cure}",
        )
    return [NOT_EVALUATED]


def check_initial_states(method: Algorithm, x0: Tensor, ctx: Ctx) -> tuple[Fields, Fields, Fields | None]:
    """Check the types and shapes of the states that `Algorithm.init` returns, and return these states.

    This check is necessary because user code may return anything.
    """
    name = type(method).__name__
    states: Any = method.init(x0, ctx)
    if type(states) is not tuple or len(states) != 3:
        size = f" of {len(states)}" if isinstance(states, tuple) else ""
        raise CodeError(
            f"{name}.init must return three values (server, client, kept), where kept is None if no upload is stored, "
            f"got {type(states).__name__}{size}"
        )
    if states[1] is None:
        raise CodeError(f"{name}.init: the client's state is None. If clients keep no state, return Nothing()")
    for key, value in states[1]._asdict().items() if hasattr(states[1], "_asdict") else ():
        if isinstance(value, Tensor) and not value.ndim:
            raise CodeError(
                f"{name}.init: the client's {key!r} must have shape [k] (the row of one client). Return a scalar as "
                f"shape [1]"
            )
    server, client, kept = states
    return server, client, kept
