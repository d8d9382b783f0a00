"""Processing of a chunk of a cohort: download, local training, upload, and storage of accepted client states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from fedloom.algorithms._messages import base_of
from fedloom.choose.shares import describing_activations
from fedloom.engine.clients.uploads import chunk_contributions
from fedloom.engine.job import Job
from fedloom.errors import ClientError, FedloomError, Refused, attribute_error, describe_cause
from fedloom.local import Nothing, Work
from fedloom.local.rows import Fields, rebuild_rows, rows_of, select_rows, to_device
from fedloom.processes.clients import Answers, AskTask, ChunkResult, TrainTask


class ClientState(NamedTuple):
    """New state of a chunk's clients. It is stored only if their uploads are accepted.

    Attributes:
        rows: the method's client states ``[m, .]``.
        residue: part of the updates that the channel has not sent yet. None if there is no channel.
        optimizer: states of the clients' local optimizers. None if they are not stored.
    """

    rows: Fields
    residue: Fields | None = None
    optimizer: Fields | None = None

    def write(self, job: Job, ids: Tensor) -> None:
        """Store the state for the clients ``ids [m]``."""
        for name, store in job.state_stores.items():
            rows = getattr(self, name)
            if rows is not None:
                store.write(ids, rows)


class ClientOutput(NamedTuple):
    """Messages from a chunk's clients, and the new state that is stored if the messages are accepted.

    Attributes:
        upload: upload after the channel has transformed it.
        state: the clients' new state. It contains only what this party (server or client) stores.
        work: number of each client's samples in backward passes, samples in forward passes, and steps ``[m, 3]``.
        weigher_answer: answers ``[m, k]`` to the weigher's query, or None if the weigher sends no query.
        sampler_report: reports ``[m, k]`` to the sampler, or None if clients report nothing.
        model: uploaded models ``[m, d]``, converted to absolute models. None if the server does not need them.
        trained: local models ``[m, .]`` in the upload, or None if no attacker reads them.
        sent: encoded upload, if the message contains the change from the received model instead of an absolute model.
    """

    upload: Fields
    state: ClientState
    work: Tensor
    weigher_answer: Tensor | None = None
    sampler_report: Tensor | None = None
    model: Tensor | None = None
    sent: Fields | None = None
    trained: Tensor | None = None


class ChunkInputs(NamedTuple):
    """Inputs of a chunk's clients: their download, their stored states, and their training work."""

    down: Fields
    rows: Fields
    work: Work


def train_chunk(job: Job, down: Fields, server: Fields, task: TrainTask) -> ChunkResult:
    """Train the honest clients of a chunk, and store the states of the clients whose uploads are accepted.

    Raises:
        ClientError: the method's code failed.
    """
    received = to_device(rows_of(down, task.place), job.oracle.device)
    return accept_uploads(job, server, task, received, run_clients(job, received, task))


class ComputedChunk(NamedTuple):
    """A chunk's results before the server processes them.

    Attributes:
        down: download of the clients.
        output: messages and new states that the clients produced.
        counts: work and traffic ``[m, 7]`` (see `CLIENT_COUNTS`).
    """

    down: Fields
    output: ClientOutput
    counts: Tensor


def compute_chunk(job: Job, down: Fields, server: Fields, task: TrainTask) -> ComputedChunk:
    """Train a chunk of honest clients without storing anything. The server processes the results later.

    Raises:
        ClientError: the method's code failed.
    """
    received = to_device(rows_of(down, task.place), job.oracle.device)
    return count_chunk_output(job, server, task.ids, received, run_clients(job, received, task))


def count_chunk_output(
    job: Job, server: Fields | None, ids: Tensor, down: Fields, output: ClientOutput
) -> ComputedChunk:
    """Count the work and traffic of a chunk's output. Return the download, the output and the counts together.

    ``server`` contains the ranks of low-rank matrices.
    """
    rows = (output.weigher_answer, output.sampler_report)
    width = sum(answer.shape[1] for answer in rows if answer is not None)
    sent = output.sent or output.upload
    if output.sent is None and job.messages.sends_change:
        sent = job.messages.change(output.upload, job.changed_from(down, output.upload, ids))
    return ComputedChunk(down, output, _client_counts(job, server, output.work, down, sent, width))


def run_clients(job: Job, down: Fields, task: TrainTask) -> ClientOutput:
    """Train clients, collect their answers to queries, and pass their uploads through the channel. Store nothing.

    Args:
        job: the run.
        down: download of the clients.
        task: clients to train.

    Raises:
        ClientError: the method's code failed.
    """
    inputs = get_chunk_inputs(job, down, task)
    upload, rows = run_client_step(job, inputs, inputs.work)
    return make_client_output(job, inputs, upload, rows)


def get_chunk_inputs(job: Job, down: Fields, task: TrainTask) -> ChunkInputs:
    """Return the inputs of a chunk's clients."""
    rows = to_device(job.clients.read(task.ids), job.oracle.device)
    return ChunkInputs(down, rows, job.work(task.round, task.ids, trains=True, steps=task.steps))


def run_client_step(job: Job, inputs: ChunkInputs, work: Work) -> tuple[Fields, Fields]:
    """Run the method's client step, and return the upload and the new client states.

    Raises:
        ClientError: the method's code failed, or its result does not have the declared structure.
    """
    try:
        returned = job.algorithm.client(inputs.down, inputs.rows, work)
        fault = _describe_malformed_result(job, inputs, returned)
    except FedloomError:
        raise
    except Exception as error:
        raise ClientError("client step", work.round, work.ids.tolist(), describe_cause(error)) from error
    if fault:
        raise ClientError("client step", work.round, work.ids.tolist(), fault)
    return returned


def _describe_malformed_result(job: Job, inputs: ChunkInputs, returned: object) -> str:
    """Return a sentence that explains why a client step's result is malformed, or "" if it is valid."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and all(hasattr(part, "_fields") for part in returned)):
        return f"it must return (upload, rows), got {type(returned).__name__}"
    up, new = returned
    if up._fields != tuple(job.fields) or new._fields != inputs.rows._fields:
        return f"it must return the fields {(*job.fields, *inputs.rows._fields)}, got {(*up._fields, *new._fields)}"
    for name, kind in job.fields.items():
        value, base = getattr(up, name), base_of(kind, inputs.down, inputs.rows)
        width = value.shape[-1] if isinstance(base, float) else base.shape[-1]
        if value.shape != (inputs.work.m, width):
            return f"its upload field {name!r} must be [{inputs.work.m}, {width}], got {[*value.shape]}"
    for name, value, old in zip(new._fields, new, inputs.rows, strict=True):
        if value.shape != old.shape:
            return f"its rows {name!r} must be {[*old.shape]}, got {[*value.shape]}"
    return ""


def make_client_output(job: Job, inputs: ChunkInputs, upload: Fields, rows: Fields) -> ClientOutput:
    """Collect the clients' answers that the weigher and the sampler read, and apply the channel to the upload."""
    work, name = inputs.work, job.model_field
    upload = upload._replace(**{part: getattr(upload, part) * mask for part, mask in job.messages.masks.items()})
    answer = report = model = residue = sent = None
    if job.asks:
        model = getattr(upload, name) + base_of(job.fields[name], inputs.down, inputs.rows)
        with attribute_error("weigher", job.setting.aggregation_weights, f"round {work.round}"):
            answer = (
                job.setting.aggregation_weights.probe(inputs.down, model, work)
                if job.setting.aggregation_weights.probes
                else None
            )
            if answer is not None and job.setting.aggregation_weights.describes and job.setting.attack is not None:
                answer = job.setting.attack.disguised(answer, work.ids, job.attackers)
        with attribute_error("sampler", job.setting.sampler, f"round {work.round}"):
            report = job.setting.sampler.report(model, work) if job.setting.sampler.learns else None
    if job.setting.upload_transform is not None:
        with attribute_error("channel", job.setting.upload_transform, f"round {work.round}"):
            messages, residue = job.messages, job.residue.read(work.ids)
            base = residue[0].to(upload[0]) if messages.tracks else job.algorithm.received(inputs.down, upload)
            upload = messages.change(upload, base)
            upload, left = apply_channel(job, upload, Nothing() if messages.tracks else residue, work.rng("channel"))
            sent = upload if messages.sends_change else None
            upload = messages.absolute(upload, base)
            residue = rebuild_rows(residue, [getattr(upload, job.primary)]) if messages.tracks else left
    if name:
        model = getattr(upload, name) + base_of(job.fields[name], inputs.down, inputs.rows)
    trained = decode_local_models(job, inputs, upload) if job.sees_honest else None
    state = ClientState(rows, residue, _optimizer_states(job, work))
    return ClientOutput(upload, state, work_counts(work), answer, report, model, sent, trained)


def decode_local_models(job: Job, inputs: ChunkInputs, upload: Fields) -> Tensor:
    """Decode the local models ``[m, .]`` from uploads, as attackers see them."""
    down, rows, work = inputs
    with attribute_error("method", job.algorithm, f"round {work.round}"):
        return job.algorithm.decode(down, rows, upload, work.uncounted())


def _optimizer_states(job: Job, work: Work) -> Fields | None:
    """Return the clients' optimizer states after training, or None if these states are not stored.

    Raises:
        ConfigError: the method calls `descend` with a stream that it did not use in its first round.
    """
    if work.memory is None or job.memory is None:
        return None
    unknown = [name for name in work.memory.streams if name not in job.memory.streams]
    if unknown:
        raise Refused(
            f"{type(job.algorithm).__name__} trains with the stream {unknown[0]!r} in round "
            f"{work.round}, but the first round did not use this stream, so no optimizer state is stored for it. Set "
            f"local.optimizer_state = 'fresh'"
        )
    return rebuild_rows(job.optimizer.template, [work.memory.rows])


def accept_uploads(
    job: Job,
    server: Fields,
    task: TrainTask,
    down: Fields,
    output: ClientOutput,
    counts: Tensor | None = None,
    applied: Fields | None = None,
) -> ChunkResult:
    """Check the uploads of a chunk at the server, sum them, and store the states of accepted clients.

    Args:
        job: the run.
        server: state of the server.
        task: task whose clients were trained.
        down: download of the clients.
        output: messages and new states that the clients produced.
        counts: work and traffic of the clients ``[m, 7]``. None to count them here.
        applied: uploads adapted to the server's current state. None to use the uploads as they were sent.
    """
    upload = output.upload
    counts = count_chunk_output(job, server, task.ids, down, output).counts if counts is None else counts
    bound = job.setting.engine.norm_bound
    accepted = usable_uploads_mask((*upload, *output.state.rows), len(task.ids), bound, job.weights(upload))
    ids, share = task.ids, task.share
    if not bool(accepted.all()):
        output, applied, ids, share = select_rows((output, applied, ids, share), accepted)
        down = rows_of(down, accepted)
    upload, state, _, answer, report, model, _, trained = output
    answers = {} if answer is None else {"weigher": answer}
    if trained is not None:
        answers["models"] = trained
    if job.setting.sampler.learns and model is not None:
        answers["sampler"] = model - down[0] if report is None else report
    parts = chunk_contributions(job, upload if applied is None else applied, ids, share)
    if len(ids):
        state.write(job, ids)
        if job.kept_fields:
            job.kept.write(ids, rebuild_rows(job.kept.template, [getattr(upload, name) for name in job.kept_fields]))
        if job.summed_fields:
            before = job.summed.read(ids)
            changes = [getattr(upload, name).to(old) for name, old in zip(before._fields, before, strict=True)]
            sums = [old + change for old, change in zip(before, changes, strict=True)]
            job.summed.write(ids, rebuild_rows(before, sums))
        if job.models.template:
            row = getattr(upload, job.primary)
            is_change = job.fields[job.primary].base != "zero"
            job.models.write(ids, rebuild_rows(job.models.template, [row + down[0] if is_change else row]))
    return ChunkResult(task.ids, task.share, accepted, parts, answers, float(share.sum()), counts)


def apply_channel(job: Job, upload: Fields, residue: Fields, noise: Sequence[Generator]) -> tuple[Fields, Fields]:
    """Apply the channel to the uploads, and return the result and the new residue."""
    assert job.setting.upload_transform is not None
    update = job.messages.update(upload)
    state = to_device(residue, upload[0].device)[0] if residue else None
    sent, state = job.setting.upload_transform.apply(state, update, noise)
    return job.messages.replace_update(upload, sent), rebuild_rows(residue, [] if state is None else [state])


def ask_chunk(job: Job, model: Tensor, task: AskTask) -> Answers:
    """Query a chunk of clients about the global model, and return their answers."""
    work, model = job.work(task.round, task.ids), model.to(job.oracle.device)
    if task.asks_activations:
        answer = describing_activations(model, work, job.setting.attack, job.attackers)
    else:
        with attribute_error("sampler", job.setting.sampler, f"round {task.round}"):
            answer = job.setting.sampler.probe(model, work).cpu()
    return Answers(answer, question_counts(job, answer, work_counts(work)))


def question_counts(job: Job, answer: Tensor, work: Tensor) -> Tensor:
    """Return the costs of a query ``[m, 7]``, with columns in the order of `CLIENT_COUNTS`.

    The cost consists of the download of the model, the upload of the answer ``[m, k]``, and the ``work [m, 3]``.
    """
    k, d, item = answer.shape[1], job.oracle.layout.d, job.oracle.dtype.itemsize
    return torch.cat([work, torch.tensor([k * item, d * item, 4 * k, 4 * d]).expand(len(work), -1)], 1)


def work_counts(work: Work) -> Tensor:
    """Return each client's number of backward samples, forward samples and steps ``[m, 3]``."""
    return torch.stack([work.counts.backward, work.counts.forward, work.counts.steps], 1)


def usable_uploads_mask(
    fields: tuple[Tensor, ...], m: int, bound: float | None, weights: Sequence[Tensor] = ()
) -> Tensor:
    """Return a mask ``[m]`` of the clients with finite values, norms up to ``bound`` and nonnegative weights."""
    norms = [torch.linalg.vector_norm(f, dim=1) for f in fields]
    if not norms:
        return torch.ones(m, dtype=torch.bool)
    largest = torch.stack(norms).amax(0).cpu()
    accepted = largest.isfinite() if bound is None else largest <= bound
    for weight in weights:
        accepted &= (weight >= 0).all(1).cpu()
    return accepted


def _client_counts(job: Job, server: Fields | None, work: Tensor, down: Fields, up: Fields, answer: int) -> Tensor:
    up_bytes, up_paper = job.messages.up(up).lengths()
    down_bytes, down_paper = job.messages.down(down, server).lengths()
    traffic = (up_bytes + answer * job.oracle.dtype.itemsize, down_bytes, up_paper + 4 * answer, down_paper)
    return torch.cat([work, torch.stack([c.expand(len(work)) for c in traffic], 1)], 1)
