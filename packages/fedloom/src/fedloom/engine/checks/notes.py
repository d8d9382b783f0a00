"""Notes about settings without effect and about known weaknesses of a run."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from fedloom.algorithms import Algorithm, upload_fields
from fedloom.choose import Sampler, SharesWeigher, UniformWeigher
from fedloom.choose.shares import uses_clusters
from fedloom.engine.checks.learnable import note_single_row_batches
from fedloom.engine.setting import Setting
from fedloom.errors import attribute_error
from fedloom.local import Ctx
from fedloom.local.oracles import Network, loop_reason
from fedloom.local.rows import Fields
from fedloom.models.imported import batch_norm_layers
from fedloom.rows.aggregators import FLTrust
from fedloom.seeds import as_global, generator
from fedloom.tasks import Binary, ChosenTask, Classification, MultiLabel
from fedloom.values import get_kind

UNSEEDED_HINT = "Runs are not reproducible. Draw from ctx.rng(purpose), which depends on the seed"
GLOBAL_DRAWS_NOTE = f"server code draws from a global generator of torch, numpy or random. {UNSEEDED_HINT}"

UNSEEDED_DRAWS = 2
"""Number of identical calls for testing a user-defined sampler. Unseeded cohorts may still be equal by chance."""


def collect_notes(
    setting: Setting, oracle: Network, server: Fields, ctx: Ctx, fewest: int | None, attackers: Tensor
) -> list[str]:
    """Collect notes about a run before its first round.

    Args:
        setting: setting of the run, with presets resolved.
        oracle: local problems of the clients.
        server: the server's state before the first round.
        ctx: context of all clients, before the first round.
        fewest: smallest number of clients in any round. None if this number depends on random draws.
        attackers: ids of the attackers ``[b]``.
    """
    method, sampler = setting.method, setting.sampler
    notes = [*method.check(oracle.layout, ctx), *_note_repeated_client(method, sampler), *sampler.remarks(ctx)]
    notes += _note_unseeded_sampler(sampler, ctx)
    notes += [*setting.aggregation_weights.remarks(), *setting.task.remarks(oracle.fed.data.task)]
    notes += [*_note_unused_weights(setting, server, ctx), *_note_normalization(setting, oracle, server)]
    notes += note_single_row_batches(setting, oracle.fed.data.task)
    notes += [*_note_double_softmax(oracle), *_note_changed_values(oracle)]
    notes += [
        *_note_trusted_client(setting, attackers, fewest, ctx.n),
    ]
    notes += _note_overstepping(setting, fewest, ctx.n)
    if method.global_model(server) is not None:
        notes += _note_slow_average(method, ctx.n if fewest is None else fewest, ctx.n)
    return notes


def _note_unseeded_sampler(sampler: Sampler, ctx: Ctx) -> list[str]:
    """Return a note if a user-defined sampler draws different clients in two identical calls."""
    if sampler.probes or type(sampler).__module__.startswith("fedloom."):
        return []
    cohorts = list[list[int]]()
    for _ in range(UNSEEDED_DRAWS):
        one, seeded = deepcopy(sampler), as_global(generator(0, purpose="probe"), torch.device("cpu"))
        with attribute_error("sampler", sampler, "round 1"), seeded:
            cohorts.append(one.apply(one.init(ctx), None, ctx._replace(round=1))[0].tolist())
    if all(cohort == cohorts[0] for cohort in cohorts):
        return []
    return [
        f"sampler {type(sampler).__name__} draws different clients in two identical calls, for example because it uses "
        f"its own generator. {UNSEEDED_HINT}"
    ]


def _note_trusted_client(setting: Setting, attackers: Tensor, fewest: int | None, n: int) -> list[str]:
    """Return notes if the trusted client is an attacker or may be absent from some rounds."""
    rule = setting.aggregator
    if not isinstance(rule, FLTrust):
        return []
    attacks = (
        f"aggregator 'fltrust' trusts client {rule.root}, which is an attacker. Set aggregator.root to another client"
    )
    absent = (
        f"aggregator 'fltrust' requires client {rule.root} in every round. A round without this client ends the run"
    )
    return [attacks] * (rule.root in attackers.tolist()) + [absent] * (fewest is None or fewest < n)


def _note_overstepping(setting: Setting, fewest: int | None, n: int) -> list[str]:
    """Return a note if absent clients make the server step larger than the aggregate over all clients."""
    method, rule = setting.method, setting.aggregator
    steps_by_itself = method.counting_option and not method.counts_absent
    if rule is None or rule.linear or not steps_by_itself or fewest == n:
        return []
    far = "n/m times" if fewest is None else f"up to {n / fewest:.3g} times"
    return [
        f"aggregator {get_kind(rule)!r} is applied to sums over all clients so far. If clients are absent, "
        f"{type(method).__name__} moves {far} as far as the result of the rule. Set {method.counting_option}"
    ]


def _note_unused_weights(setting: Setting, server: Fields, ctx: Ctx) -> list[str]:
    """Return a note if client weights or aggregation weights do not affect the mean of the uploads."""
    method, weigher, aggregator, weights = (
        setting.method,
        setting.aggregation_weights,
        setting.aggregator,
        setting.client_weights,
    )
    name, kinds = type(method).__name__, upload_fields(type(method)).values()
    unequal, explicit = uses_clusters(weights) or len(ctx.weight.unique()) > 1, weights not in ("samples", "uniform")
    if weights != "samples" and any(kind.weight for kind in kinds):
        return [f"client_weights = {weights!r} has no effect with {name}, which derives the weights from the uploads"]
    if explicit and not kinds:
        return [f"client_weights = {weights!r} has no effect with {name}, which does not upload anything"]
    if method.mixes and method.global_model(server) is None:
        why = "whose server mixes models with its own weights"
        return [f"client_weights = {weights!r} has no effect with {name}, {why}"] if explicit else []
    if aggregator is not None and not aggregator.weighted and kinds:
        if isinstance(weigher, SharesWeigher | UniformWeigher):
            reads = f"client_weights = {weights!r}" if unequal and isinstance(weigher, SharesWeigher) else ""
        else:
            reads = f"aggregation_weights {weigher.kind!r}"
        alike = f"aggregator {get_kind(aggregator)!r} weights all clients equally, so {reads} has no effect"
        return [f"{alike} on its result"] if reads else []
    if isinstance(weigher, SharesWeigher) or not unequal:
        return []
    everywhere = "to weight clients equally in every method, set client_weights = 'uniform'"
    if not any(kind.is_weighable for kind in kinds):
        idle = isinstance(weigher, UniformWeigher) and not setting.sampler.by_samples and kinds
        return (
            [f"aggregation_weights 'uniform' has no effect with {name}, which uses only shares; {everywhere}"]
            if idle
            else []
        )
    place = f"replaces client_weights = {weights!r} in the mean of uploads"
    if isinstance(weigher, UniformWeigher) and setting.sampler.by_samples:
        draws = f"sampler {setting.sampler.kind!r} draws in proportion to samples, which {place}"
        return [f"{draws}: all clients of a round have equal weights"] if explicit else []
    if isinstance(weigher, UniformWeigher):
        return [f"aggregation_weights 'uniform' {place}; {everywhere}"]
    return [f"aggregation_weights {weigher.kind!r} {place}"] if explicit else []


def _note_normalization(setting: Setting, oracle: Network, server: Fields) -> list[str]:
    """Return notes about the statistics of normalization layers, which are not parameters."""
    notes, names = list[str](), batch_norm_layers(oracle.module)
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        notes.append(
            f"some layers have no running statistics ({some}), so scores and predictions depend on the other samples "
            f"in a batch. Set track_running_stats=True"
        )
    tracked = any(m.running_mean is not None for m in oracle.normalisers)
    if not tracked or setting.method.global_model(server) is None:
        return notes
    origin = {"averaged": "average over the round's clients", "own": "the client's own"}[
        setting.evaluate.batchnorm_stats
    ]
    return [
        *notes,
        "statistics of normalization layers are not sent. To score a global model, clients compute the statistics on "
        f"training samples with this model: {origin} (evaluate.batchnorm_stats)",
    ]


def _note_double_softmax(oracle: Network) -> list[str]:
    """Return a note if the model ends with a softmax although the loss already applies a softmax."""
    task = oracle.task
    if isinstance(task, ChosenTask):
        if task.objective.loss is not None:
            return []
        task = task.base
    if isinstance(task, Classification) and oracle.returns_probabilities:
        what = "softmax"
    elif isinstance(task, Binary | MultiLabel) and isinstance([*oracle.module.modules()][-1], nn.Sigmoid):
        what = "sigmoid"
    else:
        return []
    return [f"the model ends with a {what}, and the loss applies a second {what}. Remove the {what} from the model"]


def _note_changed_values(oracle: Network) -> list[str]:
    """Return notes if a forward pass changes buffers, attributes or parameters, or ignores the run's seed."""
    notes = []
    if oracle.moved:
        notes.append(
            f"training changes buffers or attributes of the model ({_shorten_names(oracle.moved)}), but every step, "
            f"score and saved model uses their initial values. Turn values that should change into parameters"
        )
    if oracle.hides_randomness:
        notes.append(
            "the model draws random numbers that do not depend on the seed, for example from its own "
            "torch.Generator. Results differ between identical runs and depend on the number of workers. Draw "
            "from the global generator of torch, numpy or random, which fedloom seeds before every step"
        )
    notes += [
        f"{function} returns different values in two identical calls, for example because it draws from its own "
        "generator or counts its calls. Results differ between identical runs and depend on the number of workers. "
        "Draw "
        "from the global generator of torch, numpy or random, which fedloom seeds before every step"
        for function in oracle.unseeded
    ]
    if oracle.mixes_samples:
        notes.append(
            "the model's outputs for a sample depend on the other samples in its batch, for example because an "
            "operation runs over the batch axis. Predictions then depend on the other samples in the same call. Use "
            "another axis, such as dim=1"
        )
    if oracle.unregistered:
        notes.append(
            f"the model stores layers or parameters in plain lists or dicts ({_shorten_names(oracle.unregistered)}), "
            "which are not trained, sent or saved. Use torch.nn.ModuleList, ModuleDict or ParameterList"
        )
    if reason := loop_reason(oracle.module, oracle.fed):
        notes.append(
            f"clients are computed one at a time with gradient engine 'loop', because vmap rejects the model ({reason})"
        )
    if oracle.overwritten:
        notes.append(
            f"a forward pass changes parameters of the model ({_shorten_names(oracle.overwritten)}), as max_norm of "
            "an embedding does. Training steps keep the change, but scores, saved models and means over clients do "
            "not. Compute bounded values in forward instead of changing the parameters"
        )
    return notes


def _shorten_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _note_repeated_client(algorithm: Algorithm, sampler: Sampler) -> list[str]:
    """Return a note if a client may be drawn twice but counts once in stored or accumulated fields."""
    once = [n for n, kind in upload_fields(type(algorithm)).items() if kind.keeps or kind.accumulates]
    if not sampler.repeats or not once:
        return []
    return [
        f"sampler {sampler.kind!r} may draw a client twice, but {type(algorithm).__name__} counts it once in the "
        f"values that it stores or accumulates over rounds ({', '.join(once)})"
    ]


def _note_slow_average(algorithm: Algorithm, fewest: int, n: int) -> list[str]:
    """Return a note if most clients are absent, so that their reused uploads slow down the global model."""
    if 2 * fewest >= n or not algorithm.counts_absent:
        return []
    return [
        f"{type(algorithm).__name__} counts absent clients by their last upload. With {fewest} of {n} in a round, its "
        f"global model moves only about {fewest / n:.0%} as far as with all clients. Increase sampler.fraction or "
        f"rounds"
    ]
