"""One chunk of a cohort: download, local training, upload, commit of the accepted rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from fedloom.algorithms._messages import base_of, primary_field
from fedloom.engine.job import Job
from fedloom.engine.uploads import partials
from fedloom.errors import ClientError, FedloomError, Refused, blamed, cause_of
from fedloom.local import Work
from fedloom.local.rows import rows_of, to_device
from fedloom.processes.chunks import AskTask, Trained, TrainTask
from fedloom.rows.attacks import Forgery


class Made(NamedTuple):
    """What the clients of a chunk send, and what they keep once it is accepted.

    Attributes:
        up: the upload, after the channel.
        info: answers ``[m, k]`` to the weigher, if it asks.
        told: what a sampler learns from the clients' reports ``[m, k]``, if they report.
        model: the primary field as it is sent, absolute ``[m, d]``, if the server's side looks at it.
        new: the clients' new rows.
        residue: what the channel has not sent.
        work: ``[m, 3]`` samples backward and forward, and steps.
        optimizer: new states of the clients' optimisers, where they are kept.
    """

    up: Any
    info: Tensor | None
    told: Tensor | None
    model: Tensor | None
    new: Any
    residue: Any
    work: Tensor
    optimizer: Any = None


class _Sides(NamedTuple):
    """A chunk's clients: what they received, their rows, and the work."""

    down: Any
    rows: Any
    work: Work


def train(job: Job, down: Any, server: Any, task: TrainTask) -> Trained:
    """Train a chunk of honest clients and store the state of those whose upload is accepted.

    Raises:
        ClientError: code of the method failed.
    """
    received = to_device(rows_of(down, task.place), job.oracle.device)
    return receive(job, server, task, received, make(job, received, task))


def make(job: Job, down: Any, task: TrainTask) -> Made:
    """What clients do: train, answer, and pass the channel. Nothing is stored.

    Args:
        job: the run.
        down: what these clients received.
        task: who they are.

    Raises:
        ClientError: code of the method failed.
    """
    sides = _sides(job, down, task)
    up, new = _client(job, sides, sides.work)
    return _made(job, sides, up, new)


def attack(job: Job, down: Any, server: Any, task: TrainTask, honest: Tensor | None, m: int) -> Trained:
    """Forge the uploads of a cohort's attackers.

    The primary field is forged in absolute form; all else is what a client sends and keeps that takes no step. If the
    primary field is a difference to a state field, that field takes the forged value.

    Args:
        job: the run.
        down: the cohort's download.
        server: the server's state.
        task: the attackers.
        honest: ``[h, d]`` models of the honest clients, for attackers that see them; none when h is 0.
        m: clients of the cohort.
    """
    assert isinstance(job.setting.attack, Forgery)
    sides = _sides(job, to_device(rows_of(down, task.place), job.oracle.device), task)
    up, new = _client(job, sides, sides.work.idle())
    own = _client(job, sides, sides.work)[0] if job.setting.attack.reads_own else up
    name = primary_field(type(job.algorithm))
    base = base_of(job.fields[name], sides.down, sides.rows)
    absolute = getattr(own, name) + base
    received = sides.down[0].expand_as(absolute)
    honest = honest if honest is not None and len(honest) else None
    with blamed("attack", job.setting.attack, f"round {task.round}"):
        forged = job.setting.attack.forge(honest, received, absolute, m, sides.work.rng("attack"))
        if forged.shape != absolute.shape:
            raise ValueError(f"forge must return models {[*absolute.shape]}, got {[*forged.shape]}")
    source, _, state = job.fields[name].base.partition(".")
    if source == "rows":
        new = new._replace(**{state: forged})
    made = _made(job, sides, up._replace(**{name: forged - base}), new)
    return receive(job, server, task, sides.down, made)


def _sides(job: Job, down: Any, task: TrainTask) -> _Sides:
    rows = to_device(job.clients.read(task.ids), job.oracle.device)
    return _Sides(down, rows, job.work(task.round, task.ids, trains=True))


def _client(job: Job, sides: _Sides, work: Work) -> tuple[Any, Any]:
    try:
        made = job.algorithm.client(sides.down, sides.rows, work)
        wrong = _wrong(job, sides, made)
    except FedloomError:
        raise
    except Exception as error:
        raise ClientError("client step", work.round, work.ids.tolist(), cause_of(error)) from error
    if wrong:
        raise ClientError("client step", work.round, work.ids.tolist(), wrong)
    return made


def _wrong(job: Job, sides: _Sides, made: Any) -> str:
    """What is not as declared in what a client's step returned; empty if all is well."""
    if not (isinstance(made, tuple) and len(made) == 2 and all(hasattr(part, "_fields") for part in made)):
        return f"it must return (upload, rows), got {type(made).__name__}"
    up, new = made
    if up._fields != tuple(job.fields) or new._fields != sides.rows._fields:
        return f"it must return the fields {(*job.fields, *sides.rows._fields)}, got {(*up._fields, *new._fields)}"
    for name, kind in job.fields.items():
        value, base = getattr(up, name), base_of(kind, sides.down, sides.rows)
        width = value.shape[-1] if isinstance(base, float) else base.shape[-1]
        if value.shape != (sides.work.m, width):
            return f"its upload field {name!r} must be [{sides.work.m}, {width}], got {[*value.shape]}"
    for name, value, old in zip(new._fields, new, sides.rows, strict=True):
        if value.shape != old.shape:
            return f"its rows {name!r} must be {[*old.shape]}, got {[*value.shape]}"
    return ""


def _made(job: Job, sides: _Sides, up: Any, new: Any) -> Made:
    """Answer the weigher and the sampler, and pass the channel."""
    work = sides.work
    up = up._replace(**{name: getattr(up, name) * mask for name, mask in job.messages.masks.items()})
    name = job.watched
    info = told = model = residue = None
    if job.asks:
        model = getattr(up, name) + base_of(job.fields[name], sides.down, sides.rows)
        with blamed("weigher", job.setting.weigher, f"round {work.round}"):
            info = job.setting.weigher.probe(sides.down, model, work) if job.setting.weigher.probes else None
        with blamed("sampler", job.setting.sampler, f"round {work.round}"):
            told = job.setting.sampler.report(model, work) if job.setting.sampler.learns else None
    if job.setting.channel is not None:
        with blamed("channel", job.setting.channel, f"round {work.round}"):
            up = job.messages.change(up, sides.down[0])
            up, residue = _through(job, up, job.residue.read(work.ids), work.rng("channel"))
            up = job.messages.absolute(up, sides.down[0])
    if name:
        model = getattr(up, name) + base_of(job.fields[name], sides.down, sides.rows)
    return Made(up, info, told, model, new, residue, _done(work), _states(job, work))


def _states(job: Job, work: Work) -> Any:
    """The states of the clients' optimisers after their training; None where they are not kept.

    Raises:
        Refused: the method has a call of `descend` that its first round had not.
    """
    if work.memory is None or job.memory is None:
        return None
    new = [name for name in work.memory.streams if name not in job.memory.streams]
    if new:
        raise Refused(
            f"{type(job.algorithm).__name__} trains by the stream {new[0]!r} in round {work.round}, which its first "
            "round had not, so there is no room for its optimiser; set local.optimizer_state = 'fresh'"
        )
    return type(job.optimizer.template)(work.memory.rows)


def receive(job: Job, server: Any, task: TrainTask, down: Any, made: Made) -> Trained:
    """What the server's side does with a chunk's uploads: check, sum up, and commit what is accepted.

    Args:
        job: the run.
        server: the server's state.
        task: whose uploads they are.
        down: what these clients received.
        made: what they sent; of ``new``, ``residue`` and ``optimizer`` what is kept on this side.
    """
    up, info, told, model, new, residue, work, optimizer = made
    ids = task.ids
    counts = _counts(job, server, work, down, up, sum(a.shape[1] for a in (info, told) if a is not None))
    accepted = usable((*up, *new), len(ids), job.setting.engine.norm_bound, job.weights(up))
    everyone = bool(accepted.all())
    if not everyone:
        every = (up, new, info, told, model, residue, optimizer)
        up, new, info, told, model, residue, optimizer = (_some(p, accepted) for p in every)
        ids, task = ids[accepted], task._replace(share=task.share[accepted])
    answers = {} if info is None else {"info": info}
    if job.sees_honest and model is not None:
        answers["models"] = model
    if job.setting.sampler.learns and model is not None:
        received = down[0] if everyone else _received(down[0], accepted)
        answers["told"] = model - received if told is None else told
    parts = partials(job, up, ids, task.share)
    if len(ids):
        job.clients.write(ids, new)
        if job.kept_fields:
            job.kept.write(ids, type(job.kept.template)(*[getattr(up, name) for name in job.kept_fields]))
        if residue is not None:
            job.residue.write(ids, residue)
        if optimizer is not None:
            job.optimizer.write(ids, optimizer)
    return Trained(accepted, parts, answers, float(task.share.sum()), counts)


def _through(job: Job, up: Any, residue: Any, noise: Sequence[Generator]) -> tuple[Any, Any]:
    """The upload after the channel, which acts on what a client sends, side by side, and the new residue."""
    assert job.setting.channel is not None
    update = job.messages.update(up)
    state = to_device(residue, up[0].device)[0] if residue else None
    sent, state = job.setting.channel.apply(state, update, noise)
    return job.messages.with_update(up, sent), type(residue)(*([] if state is None else [state]))


def ask(job: Job, model: Tensor, task: AskTask) -> tuple[Tensor, Tensor]:
    """Answers ``[m, k]`` of candidates about the global model, and what they cost, ``[m, 7]`` (`COUNTS`)."""
    work = job.work(task.round, task.ids)
    with blamed("sampler", job.setting.sampler, f"round {task.round}"):
        answer = job.setting.sampler.probe(model.to(job.oracle.device), work).cpu()
    return answer, asked_counts(job, answer, _done(work))


def asked_counts(job: Job, answer: Tensor, work: Tensor) -> Tensor:
    """What asking cost ``[m, 7]`` (`COUNTS`): the model down, the answer ``[m, k]`` up, and the ``work [m, 3]``."""
    k, d, item = answer.shape[1], job.oracle.layout.d, job.oracle.dtype.itemsize
    return torch.cat([work, torch.tensor([k * item, d * item, 4 * k, 4 * d]).expand(len(work), -1)], 1)


def _done(work: Work) -> Tensor:
    return torch.stack([work.counts.backward, work.counts.forward, work.counts.steps], 1)


def usable(fields: tuple[Tensor, ...], m: int, bound: float | None, weights: Sequence[Tensor] = ()) -> Tensor:
    """Rows ``[m]`` that are finite in every field, with norms at most ``bound``, and no weight below zero."""
    norms = [torch.linalg.vector_norm(f, dim=1) for f in fields]
    if not norms:
        return torch.ones(m, dtype=torch.bool)
    largest = torch.stack(norms).amax(0).cpu()
    found = largest.isfinite() if bound is None else largest <= bound
    for weight in weights:
        found &= (weight >= 0).all(1).cpu()
    return found


def _received(x: Tensor, which: Tensor) -> Tensor:
    return x[which] if x.dim() > 1 else x


def _some(part: Any, which: Tensor) -> Any:
    if part is None or isinstance(part, Tensor):
        return None if part is None else part[which]
    return type(part)(*[f[which] for f in part])


def _counts(job: Job, server: Any, work: Tensor, down: Any, up: Any, answer: int) -> Tensor:
    up_bytes, up_paper = job.messages.up(up).lengths()
    down_bytes, down_paper = job.messages.down(down, server).lengths()
    traffic = (up_bytes + answer * job.oracle.dtype.itemsize, down_bytes, up_paper + 4 * answer, down_paper)
    return torch.cat([work, torch.stack([c.expand(len(work)) for c in traffic], 1)], 1)
