"""Refusals and notes: what does not work together, and what is given and changes nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedloom.algorithms import Algorithm, FedADMM, primary_field, upload_fields
from fedloom.choose import Mixer, Sampler, SamplesWeigher, SharesWeigher, UniformWeigher, Weigher
from fedloom.choose.shares import by_clusters
from fedloom.engine.setting import Setting
from fedloom.errors import CodeError, Refused
from fedloom.local import Ctx, LocalSGD
from fedloom.local.oracles import Network
from fedloom.local.rows import Fields
from fedloom.models.imported import by_the_batch
from fedloom.rows.aggregate import Aggregator, FLTrust, PrivateMean
from fedloom.rows.attacks import Forgery
from fedloom.rows.channel import Channel
from fedloom.tasks import Classification
from fedloom.values import kind_of


def check_width(method: Algorithm, upload: Fields, weigher: Weigher, sampler: Sampler, d: int) -> None:
    """Refuse plug-ins that look at models if what the method uploads is not one.

    Raises:
        Refused: the run makes no sense; the message has the reason.
    """
    if not upload or getattr(upload, primary_field(type(method))).shape[1] == d:
        return
    for what, value, looks in (("weigher", weigher, weigher.probes), ("sampler", sampler, sampler.learns)):
        if looks:
            name = type(method).__name__
            raise Refused(
                f"{what} {value.kind!r} looks at clients' models, but {name} uploads something smaller; take another"
            )


def check_together(
    algorithm: Algorithm,
    local: LocalSGD,
    weigher: Weigher,
    aggregator: Aggregator | None = None,
    channel: Channel | None = None,
) -> None:
    """Refuse combinations that make no sense; which do follows from the kinds of the upload's fields.

    Raises:
        Refused: the run makes no sense; the message has the reason.
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
        elif any(k.accumulates for k in kinds):
            why = "its server adds uploads up over rounds"
        else:
            why = "its server averages single models itself"
        cure = "leave the weigher out"
        if isinstance(weigher, SamplesWeigher):
            cure += "; weights = 'samples' weighs every method's clients by their samples"
        elif weigher.describes and kinds and not algorithm.mixes:
            cure += "; weights = 'clusters' has clusters count alike in the method's own shares"
        raise Refused(f"weigher {weigher.kind!r} has nothing to act on in {name}: {why}; {cure}")
    if weigher.signed and aggregator is not None and aggregator.weighted and not aggregator.linear:
        raise Refused(
            f"weigher {weigher.kind!r} without its floor gives negative weights, with which aggregator "
            f"{kind_of(aggregator)!r} has no meaning; keep the floor, or use aggregator 'mean'"
        )
    for what, value in (("aggregator", aggregator), ("channel", channel)):
        if value is not None and not kinds:
            raise Refused(
                f"{what} {kind_of(value)!r} has nothing to act on in {name}: it uploads nothing; leave it out"
            )
    if aggregator is not None and not aggregator.linear:
        rule = f"aggregator {kind_of(aggregator)!r}"
        if isinstance(aggregator, PrivateMean) and any(k.accumulates for k in kinds):
            raise Refused(
                f"{rule} cannot be used with {name}: its server adds uploads up over rounds, "
                "and with them the noise of every round; use channel 'gaussian-noise'"
            )
        brings = type(algorithm).mixer is not Algorithm.mixer
        if algorithm.mixes and (not brings or isinstance(aggregator, PrivateMean)):
            raise Refused(
                f"{rule} has nothing to act on in {name}: its server mixes single models for every client; leave it out"
            )
        if any(k.primary and not k.averaged for k in kinds):
            raise Refused(
                f"{rule} has nothing to act on in {name}: its server averages single models "
                "itself, by what they are; leave it out"
            )
    if channel is not None and algorithm.needs_exact:
        raise Refused(f"channel {kind_of(channel)!r} cannot be used with {name}: {algorithm.needs_exact}; leave it out")


def check_mixer(algorithm: Algorithm, mixer: Mixer, aggregator: Aggregator | None) -> None:
    """Refuse a mixer where a client cannot do with a model of its own in place of the server's.

    Raises:
        Refused: the run makes no sense; the message has the reason.
    """
    name, what = type(algorithm).__name__, f"mixer {mixer.kind!r}"
    kinds = upload_fields(type(algorithm))
    if not kinds:
        raise Refused(f"{what} has nothing to mix in {name}: it uploads nothing; leave it out")
    if algorithm.mixes:
        raise Refused(
            f"{what} has no place in {name}: its server mixes single models for every client itself; leave it out"
        )
    if isinstance(aggregator, PrivateMean):
        raise Refused(
            f"{what} sends mixtures of single models, which noise on a mean does not protect; leave it out, or use "
            "channel 'gaussian-noise' in place of aggregator 'private-mean'"
        )
    if algorithm.family == "clustered":
        raise Refused(
            f"{what} has no place in {name}: its server has a model for each cluster of clients already; leave it out"
        )
    personal = type(algorithm).personal is not Algorithm.personal
    if not personal and any(k.keeps or k.accumulates for k in kinds.values()):
        raise Refused(
            f"{what} has no meaning in {name}: its clients keep duals or controls towards one consensus, which models "
            "of their own would contradict; 'flame' and 'fedslr' have both a consensus and personal models"
        )
    if not personal and algorithm.family == "composite":
        raise Refused(
            f"{what} has no meaning in {name}: its model comes out of the server's prox, which a mixture of clients' "
            "models does not pass; 'fedslr' and 'lpgd' have regularised personal models"
        )


def check_mixed_width(method: Algorithm, down: Fields, d: int) -> None:
    """Refuse a mixer if what the server sends, the download ``down``, is not one model.

    Raises:
        Refused: the run makes no sense; the message has the reason.
    """
    if down[0].shape != (d,):
        width = down[0].shape[-1]
        sent = f"something {'smaller' if width < d else 'larger'}" if width != d else "each client a model of its own"
        raise Refused(
            f"a mixer sends models in place of the server's one, but the server of {type(method).__name__} sends "
            f"{sent}; leave it out"
        )


def check_mixture(setting: Setting, *, classed: bool, each: bool) -> None:
    """Refuse a mixture of networks, embeddings of classes or a memory of labels where the task has no use for them.

    Raises:
        Refused: the task has no classes, a label per position, or other losses than those of probabilities.
    """
    positions = "these sequences have a label per position"
    if setting.model.guided and each:
        raise Refused(
            f"model.guided compares one representation of a sample with classes, and {positions}; leave it out"
        )
    if setting.model.memory is not None and (each or not classed):
        what = positions if each else "this task has none"
        raise Refused(f"model.memory recalls the classes of samples, and {what}; leave it out")
    if not setting.model.mixture:
        return
    if not classed:
        raise Refused("model.mixture mixes probabilities of classes, and this task has none; leave it out")
    for key in ("class_weights", "loss"):
        if getattr(setting.task, key) is not None:
            raise Refused(f"model.mixture takes -log of probabilities as its loss; leave task.{key} out")


def check_sampler(algorithm: Algorithm, sampler: Sampler, weigher: Weigher) -> None:
    """Refuse a sampler that needs what the method does not have, or spoils the weigher's weights.

    Raises:
        Refused: the run makes no sense; the message has the reason.
    """
    name = type(algorithm).__name__
    if sampler.learns and not upload_fields(type(algorithm)):
        raise Refused(f"sampler {sampler.kind!r} looks at uploads, but {name} uploads nothing; take another")
    if sampler.repeats and weigher.signed:
        raise Refused(
            f"sampler {sampler.kind!r} may draw a client twice, so that the weights of {weigher.kind!r} without its "
            "floor need not have a positive sum; keep the floor"
        )


def check_attack(setting: Setting) -> None:
    """Refuse forged activations where no client is described by any.

    Raises:
        Refused: the run makes no sense; the message has the reason.
    """
    attack = setting.attack
    if attack is not None and attack.disguises and not (setting.weigher.describes or by_clusters(setting.weights)):
        raise Refused(
            f"attack {kind_of(attack)!r} has nothing to forge: clients are described by activations with weights = "
            "'clusters' or weigher 'equitable' only; take one of them, or another attack"
        )


def check_root(aggregator: Aggregator | None, n: int) -> None:
    """Refuse a rule that trusts a client who is not there.

    Raises:
        Refused: the run makes no sense; the message has the reason.
    """
    if isinstance(aggregator, FLTrust) and aggregator.root >= n:
        raise Refused(
            f"aggregator 'fltrust' trusts client {aggregator.root}, and the {n} clients are 0 to {n - 1}; set "
            "aggregator.root to one of them"
        )


def initial(method: Algorithm, x0: Tensor, ctx: Ctx) -> tuple[Fields, Fields, Fields | None]:
    """The states that `Algorithm.init` gives; user code may give others."""
    name = type(method).__name__
    states: Any = method.init(x0, ctx)
    if type(states) is not tuple or len(states) != 3:
        size = f" of {len(states)}" if isinstance(states, tuple) else ""
        raise CodeError(
            f"{name}.init must return three values, (server, client, kept) with None for no kept upload, got "
            f"{type(states).__name__}{size}"
        )
    for key, value in states[1]._asdict().items() if hasattr(states[1], "_asdict") else ():
        if isinstance(value, Tensor) and not value.ndim:
            raise CodeError(f"{name}.init: the client's {key!r} must be [k], a row of one client; of a number give [1]")
    server, client, kept = states
    return server, client, kept


def notes_of(
    setting: Setting, oracle: Network, server: Fields, ctx: Ctx, fewest: int | None, attackers: Tensor
) -> list[str]:
    """Collect what is known of a run before its first round.

    Args:
        setting: the run, presets resolved.
        oracle: the local problems.
        server: the server's state before the first round.
        ctx: of all clients, before the first round.
        fewest: fewest clients of a round; None where that depends on the draws.
        attackers: ``[b]`` their ids.
    """
    method, sampler = setting.method, setting.sampler
    notes = [*method.check(oracle.layout, ctx), *_counted_once(method, sampler), *sampler.remarks(ctx)]
    notes += [*setting.weigher.remarks(), *setting.task.remarks()]
    notes += [*_unweighed(setting, server, ctx), *_normalised(setting, oracle, server)]
    notes += [*_softmax_twice(oracle), *_moved(oracle)]
    notes += [*_attacked(setting, attackers, ctx.n), *_trusted(setting, attackers, fewest, ctx.n), *_idle(setting)]
    notes += _overstepped(setting, fewest, ctx.n)
    if method.global_model(server) is not None:
        notes += _slow_with(method, ctx.n if fewest is None else fewest, ctx.n)
    return notes


def _attacked(setting: Setting, attackers: Tensor, n: int) -> list[str]:
    """The notes on an attack without an attacker or without effect, and on one that leaves no client to be scored."""
    attack, name, notes = setting.attack, type(setting.method).__name__, list[str]()
    if attack is None or not attack.fraction:
        return notes
    if not len(attackers):
        few = f"a fraction of {attack.fraction:g} of {n} clients is no client; one is {1 / n:.2g}"
        notes.append(f"attack {kind_of(attack)!r} changes nothing: {few}")
    elif len(attackers) == n:
        notes.append(f"attack {kind_of(attack)!r} is of all {n} clients, and figures are of the others: there are none")
    if isinstance(attack, Forgery) and not upload_fields(type(setting.method)):
        notes.append(f"attack {kind_of(attack)!r} changes nothing in {name}, which uploads nothing to forge")
    return notes


def _trusted(setting: Setting, attackers: Tensor, fewest: int | None, n: int) -> list[str]:
    """The notes on a trusted client who attacks, or who may be absent."""
    rule = setting.aggregator
    if not isinstance(rule, FLTrust):
        return []
    attacks = f"aggregator 'fltrust' trusts client {rule.root}, who attacks; set aggregator.root to another"
    absent = f"aggregator 'fltrust' needs client {rule.root}, and a round may be without it, which ends the run"
    return [attacks] * (rule.root in attackers.tolist()) + [absent] * (fewest is None or fewest < n)


def _overstepped(setting: Setting, fewest: int | None, n: int) -> list[str]:
    """The note on a rule of all clients' sums, of whose change a server takes more than the cohort's part."""
    method, rule = setting.method, setting.aggregator
    steps_by_itself = isinstance(method, FedADMM) and not method.counts_absent
    if rule is None or rule.linear or not steps_by_itself or fewest == n:
        return []
    far = "n over m times" if fewest is None else f"up to {n / fewest:.3g} times"
    return [
        f"aggregator {kind_of(rule)!r} decides on the sums of all clients seen, and FedADMM with a number as server_lr "
        f"goes {far} as far as their value where clients are absent; set server_lr = 'fraction'"
    ]


def _unweighed(setting: Setting, server: Fields, ctx: Ctx) -> list[str]:
    """The notes on shares or a weigher that a mean does not read."""
    method, weigher, aggregator, weights = setting.method, setting.weigher, setting.aggregator, setting.weights
    name, kinds = type(method).__name__, upload_fields(type(method)).values()
    unequal, explicit = by_clusters(weights) or len(ctx.weight.unique()) > 1, weights not in ("samples", "uniform")
    if weights != "samples" and any(getattr(kind, "weight", None) for kind in kinds):
        return [f"weights = {weights!r} changes nothing in {name}, whose clients count by what they send"]
    if explicit and not kinds:
        return [f"weights = {weights!r} changes nothing in {name}, which uploads nothing"]
    if method.mixes and method.global_model(server) is None:
        why = "whose server mixes models by what they are"
        return [f"weights = {weights!r} changes nothing in {name}, {why}"] if explicit else []
    if aggregator is not None and not aggregator.weighted and kinds:
        if isinstance(weigher, SharesWeigher | UniformWeigher):
            reads = f"weights = {weights!r}" if unequal and isinstance(weigher, SharesWeigher) else ""
        else:
            reads = f"weigher {weigher.kind!r}"
        alike = f"aggregator {kind_of(aggregator)!r} counts all clients alike: {reads} changes nothing"
        return [f"{alike} in what it makes of uploads"] if reads else []
    if isinstance(weigher, SharesWeigher) or not unequal:
        return []
    everywhere = "set weights = 'uniform' for clients that count alike in every method"
    if not any(kind.weighable for kind in kinds):
        idle = isinstance(weigher, UniformWeigher) and not setting.sampler.by_samples and kinds
        return [f"weigher 'uniform' changes nothing in {name}, which reads shares alone; {everywhere}"] if idle else []
    place = f"takes the place of weights = {weights!r} in the mean of uploads"
    if isinstance(weigher, UniformWeigher) and setting.sampler.by_samples:
        draws = f"sampler {setting.sampler.kind!r} draws by samples, which {place}"
        return [f"{draws}: the clients of a round count alike"] if explicit else []
    if isinstance(weigher, UniformWeigher):
        return [f"weigher 'uniform' {place}; {everywhere}"]
    return [f"weigher {weigher.kind!r} {place}"] if explicit else []


def _normalised(setting: Setting, oracle: Network, server: Fields) -> list[str]:
    """The notes on the statistics of normalisation layers, which are no parameters."""
    notes, names = list[str](), by_the_batch(oracle.module)
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        notes.append(
            f"layers without running statistics ({some}): scores and predictions depend on which samples are taken "
            "together; make them with track_running_stats=True"
        )
    tracked = any(m.running_mean is not None for m in oracle.normalisers)
    if not tracked or setting.method.global_model(server) is None:
        return notes
    origin = {"averaged": "averaged over the round's clients", "own": "the client's own"}[setting.evaluate.statistics]
    return [
        *notes,
        "normalisation layers: statistics do not travel; a global model is scored with those of training samples under "
        f"this model, {origin} (evaluate.statistics)",
    ]


def _softmax_twice(oracle: Network) -> list[str]:
    """The note on a model that ends with a softmax, where the loss applies its own to the outputs."""
    last = [*oracle.module.modules()][-1]
    if not isinstance(last, nn.Softmax) or not isinstance(oracle.task, Classification):
        return []
    return ["the model ends with a softmax, and the loss applies another to its outputs: leave it out of the model"]


def _moved(oracle: Network) -> list[str]:
    """The note on buffers and attributes that training changes."""
    if not oracle.moved:
        return []
    names = ", ".join(oracle.moved[:3]) + (", ..." if len(oracle.moved) > 3 else "")
    return [
        f"training changes buffers or attributes of the model ({names}): every step, score and saved model has their "
        "initial values; make a parameter of what should last"
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
    keys = [f"local.{key}" for key in method.ignored if local.is_set(key)]
    name = method.full_gradients or type(method).__name__
    notes = [f"{name} takes steps of its own: {changes_nothing(keys)}"] if keys else []
    parts = (setting.sampler, setting.weigher, setting.aggregator, setting.attack, setting.channel, setting.augment)
    for value in (method, local, *(part for part in parts if part is not None)):
        for key, beside in value.needs.items():
            other, *values = beside.split()
            owner, field = (local, other.removeprefix("local.")) if other.startswith("local.") else (value, other)
            now = getattr(owner, field)
            if value.is_set(key) and not (now in values if values else owner.is_set(field)):
                where = " or ".join(map(repr, values)) or f"not {now!r}"
                sentence = (
                    f"{type(value).__name__}: {key} = {getattr(value, key)!r} changes nothing with {other} = {now!r}"
                )
                notes.append(f"{sentence}; it acts where {other} is {where}")
    return notes


def changes_nothing(keys: list[str]) -> str:
    """A sentence on keys that have no effect."""
    return f"{' and '.join(keys)} change{'s' * (len(keys) == 1)} nothing"


def _slow_with(algorithm: Algorithm, fewest: int, n: int) -> list[str]:
    """The note that a mean over all clients, absent ones as they last were, moves little where most are absent."""
    if 2 * fewest >= n or not algorithm.counts_absent:
        return []
    return [
        f"{type(algorithm).__name__} counts absent clients by what they last sent: with {fewest} of {n} in a round its "
        f"global model goes about {fewest / n:.0%} as far as with all; set sampler.fraction or rounds higher"
    ]
