"""Evaluation of models for a chunk of clients on their own data and the common test set, and model sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm
from fedloom.data.federation import Federation
from fedloom.engine.clients.poisoning import TRIGGERED_PARTS
from fedloom.engine.job import Job
from fedloom.engine.state import State
from fedloom.errors import ClientError, FedloomError, FunctionError, attribute_error, describe_cause
from fedloom.local.oracles import Network
from fedloom.local.rows import Fields, rows_of, to_device
from fedloom.metrics import METRICS, leading
from fedloom.processes.clients import CLIENT_COUNTS, Scores, ScoreTask
from fedloom.rows.attacks import Backdoor
from fedloom.rows.layout import Layout
from fedloom.rows.proxes import find_form
from fedloom.tasks.calibration import recalibrate

WORK_KEY = ("", "")
"""Key in `Scores` for the number of backward and forward samples used for each client's personal model."""
MAX_RANK_OPERATIONS = 2e9
"""Maximum number of multiply-adds for singular values in one evaluation. If more were needed, ranks are not
reported."""


def choose_model(scores: Scores, select_on: str) -> Tensor:
    """Return a mask ``[n]`` of the clients whose hybrid model is the global model.

    A client uses its personal model unless the global model is strictly better on the client's part ``select_on``
    (FLAME, model selection). If this part is empty, the client uses its personal model. If the personal model's outputs
    are not finite, the client uses the global model. `fedloom.metrics.TASK_ROLES` defines the metric that is compared.
    """
    personal, shared = scores["personal", select_on], scores["global", select_on]
    name = leading(personal, "client")
    sign = 1.0 if METRICS[name].higher_is_better else -1.0
    return (sign * shared[name] > sign * personal[name]) | (personal[name].isnan() & shared[name].isfinite())


def hybrid_scores(scores: Scores, select_on: str) -> Scores:
    """Return the hybrid model's scores on each part, taken from the scores of the global and personal models.

    The result is empty if at least one of these models has no scores.
    """
    if not {("global", select_on), ("personal", select_on)} <= scores.keys():
        return {}
    takes_global = choose_model(scores, select_on)
    both = [part for model, part in scores if model == "personal" and ("global", part) in scores]
    parts = [part for part in both if part not in ("common", "")]
    return {
        ("hybrid", part): {
            name: torch.where(takes_global, scores["global", part][name], values)
            for name, values in scores["personal", part].items()
        }
        for part in parts
    }


def score_chunk(job: Job, down: Fields | None, global_model: Tensor | None, task: ScoreTask) -> Scores:
    """Scores of the global model and the personal models for a chunk of clients."""
    with attribute_error("model", job.oracle.module, f"round {task.round}"):
        try:
            return _score_models(job, down, global_model, task)
        except FunctionError as error:
            raise ClientError("scoring", task.round, task.ids.tolist(), f"{error}") from error


def _score_models(job: Job, down: Fields | None, global_model: Tensor | None, task: ScoreTask) -> Scores:
    scores: Scores = {}
    if global_model is not None:
        row = global_model.to(job.oracle.device)
        scores |= _score_parts(job, "global", row, task)
        if task.common:
            if _uses_own_statistics(job):
                job.oracle.set_statistics(row, task.cohort)
            scores["global", "common"] = _score_common(job, row)
            scores["global", ""] = measure_sizes(job.algorithm, job.oracle.layout, row[None])
    if job.has_personal:
        assert down is not None
        models, cost = _personal_models(job, down, task.round, task.ids)
        scores[WORK_KEY] = dict(zip(CLIENT_COUNTS[:2], cost.double().T.contiguous(), strict=True))
        scores |= _score_parts(job, "personal", models, task)
        scores["personal", ""] = measure_sizes(job.algorithm, job.oracle.layout, models)
        if job.setting.evaluate.personal_on_common:
            common = [_score_common(job, row) for row in models]
            scores["personal", "common"] = {name: torch.cat([f[name] for f in common]) for name in common[0]}
    return scores


def personal_models(job: Job, down: Fields, round: int, ids: Tensor) -> Tensor:
    """Return the clients' personal models ``[m, d]``.

    A client that has never participated is first trained once from the initial client state. Before round 1, such a
    client trains only if `Evaluate.personal_at_start` is True.

    Raises:
        ClientError: the method's code failed.
    """
    return _personal_models(job, down, round, ids)[0]


def _personal_models(job: Job, down: Fields, round: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the models from `personal_models`, and the numbers of backward and forward samples used ``[m, 2]``."""
    fresh = ~job.clients.occupied[ids]
    if not ((round > 0 or job.setting.evaluate.personal_at_start) and job.clients.template):
        fresh = torch.zeros_like(fresh)
    if bool(fresh.all()) or not bool(fresh.any()):
        return _compute_personal_models(job, down, round, ids, trains=bool(fresh.any()))
    models = torch.empty(len(ids), job.oracle.layout.d, dtype=job.oracle.dtype, device=job.oracle.device)
    cost = torch.zeros(len(ids), 2, dtype=torch.long)
    for trains in (False, True):
        places = (fresh == trains).nonzero()[:, 0]
        some, cost[places] = _compute_personal_models(job, down, round, ids[places], trains=trains)
        models.index_copy_(0, places.to(models.device), some)
    return models, cost


def _compute_personal_models(job: Job, down: Fields, round: int, ids: Tensor, *, trains: bool) -> tuple[Tensor, Tensor]:
    device = job.oracle.device
    rows = to_device(job.clients.read(ids), device)
    download = to_device(rows_of(down, ids), device)
    work = job.work(round, ids)
    try:
        if trains:
            _, rows = job.algorithm.client(download, rows, work)
        models = job.personal(download, rows, work.with_(fixed_batches=job.replay.evaluation_batches(round, ids)))
        if models is None or models.shape != (len(ids), job.oracle.layout.d):
            got = None if models is None else [*models.shape]
            raise ValueError(f"`personal` must return a tensor of shape [{len(ids)}, {job.oracle.layout.d}], got {got}")
    except FedloomError:
        raise
    except Exception as error:
        raise ClientError("personal model", round, ids.tolist(), describe_cause(error)) from error
    return models, torch.stack([work.counts.backward, work.counts.forward], 1)


Pass = tuple[Tensor, Tensor, Tensor]
"""Outputs ``[N, k]``, indices ``[N]`` of the evaluated samples, and each client's number of samples ``[m]``."""


def pass_shared(job: Job, row: Tensor, ids: Tensor, part: str) -> Pass:
    """Evaluate a model on the same data part of many clients."""
    index, sizes = job.eval_fed.gather(part, ids)
    return torch.cat([*_evaluate_outputs(job.oracle, row, index)]), index, sizes


def pass_own(job: Job, models: Tensor, ids: Tensor, part: str) -> Pass:
    """Evaluate each client's own model on its own data part."""
    oracle = job.oracle
    index, sizes = job.eval_fed.gather(part, ids)
    if not oracle.normalisers:
        return oracle.outputs_of(models, index, sizes), index, sizes
    pieces: list[Tensor] = []
    for row, i, piece in zip(models, ids, index.split(sizes.tolist()), strict=True):
        oracle.set_statistics(row, i[None])
        pieces += _evaluate_outputs(oracle, row, piece)
    return torch.cat(pieces), index, sizes


def make_part_evaluator(job: Job, models: Tensor, ids: Tensor, cohort: Tensor) -> Callable[[str], Pass]:
    """Return a function that evaluates ``models`` (one ``[d]``, or one per client ``[m, d]``) on a part of the clients.

    In normalization layers, a global model uses the cohort's statistics or each client's own (see
    `Evaluate.batchnorm_stats`). Outputs are recalibrated if the objective defines a recalibration (`Objective.line`).
    """
    if models.ndim == 1:
        job.oracle.set_statistics(models, cohort)
        if _uses_own_statistics(job):
            models = models.expand(len(ids), -1)
    pass_of, fitted = pass_shared if models.ndim == 1 else pass_own, job.setting.task.line_part
    line = None if fitted is None else recalibration_lines(job, pass_of(job, models, ids, fitted))

    def outputs(part: str) -> Pass:
        predictions, index, sizes = pass_of(job, models, ids, part)
        if line is not None:
            predictions = recalibrate(predictions, line.repeat_interleave(sizes.cpu(), 0))
        return predictions, index, sizes

    return outputs


def _uses_own_statistics(job: Job) -> bool:
    """Return True if each client evaluates the global model with its own normalization statistics."""
    return bool(job.oracle.normalisers) and job.setting.evaluate.batchnorm_stats == "own"


def _score_parts(job: Job, kind: str, models: Tensor, task: ScoreTask) -> Scores:
    """Return the scores of a model kind on each evaluated part for a chunk of clients."""
    outputs = make_part_evaluator(job, models, task.ids, task.cohort)
    scores: Scores = {(kind, part): _metrics_by_client(job, *outputs(part)) for part in job.setting.evaluate.parts}
    if isinstance(job.setting.attack, Backdoor):
        for part in scores.keys() & {(kind, part) for part in TRIGGERED_PARTS}:
            scores[part]["attack_success"] = _metrics_by_client(job, *outputs(TRIGGERED_PARTS[part[1]]))["accuracy"]
    return scores


def final_outputs(job: Job, state: State, kind: str) -> Pass:
    """Compute the outputs of "global" or "personal" models on the evaluated clients' test sets.

    These are the same outputs that `fedloom.engine.scoring.score_models` evaluates.
    """
    if kind == "personal":
        t = max(state.round, 1)
        models = personal_models(job, job.down(state.server, t), t, job.scored_ids)
    else:
        row = job.algorithm.global_model(state.server)
        assert row is not None
        models = row.to(job.oracle.device)
    return make_part_evaluator(job, models, job.scored_ids, state.cohort)("test")


def recalibration_lines(job: Job, fitted: Pass) -> Tensor:
    """Return the slope and intercept ``[m, 2]`` that recalibrate each client's outputs (see `Objective.line`)."""
    outputs, index, sizes = fitted
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    return job.setting.task.line(outputs, job.eval_fed.targets(index), owner, len(sizes))


def _score_common(job: Job, row: Tensor) -> dict[str, Tensor]:
    index = common_test(job.eval_fed, job.scored_ids)
    return _metrics_by_client(
        job, torch.cat([*_evaluate_outputs(job.oracle, row, index)]), index, torch.tensor([len(index)])
    )


def common_test(fed: Federation, scored: Tensor) -> Tensor:
    """Return the indices of the source's test set or, if it has none, of all test samples of the ``scored`` clients."""
    return fed.gather("test", scored)[0] if fed.test is None else fed.test


def _metrics_by_client(job: Job, outputs: Tensor, index: Tensor, sizes: Tensor) -> dict[str, Tensor]:
    """Return each client's metrics, computed from samples that are ordered by client."""
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    return job.oracle.task.metrics(outputs, job.eval_fed.targets(index), owner, len(sizes))


def _evaluate_outputs(oracle: Network, row: Tensor, index: Tensor) -> Iterator[Tensor]:
    yield torch.empty(0, oracle.task.outputs, dtype=oracle.dtype, device=oracle.device)
    if len(index):
        yield from oracle.outputs(row, index)


def measure_sizes(algorithm: Algorithm, layout: Layout, rows: Tensor) -> dict[str, Tensor]:
    """Return size measures of a composite method's models ``rows [m, d]``, each as float64 ``[m]``.

    For other methods, the result is empty.

    ``nonzeros`` is the number of nonzero parameters. If a prox creates low ranks and the ranks are cheap to compute,
    two more measures follow: ``rank`` is the sum of the numerical ranks of a model's matrices, and ``factorised`` is
    the number of parameters if matrices are stored as two thin factors wherever this saves space.
    """
    forms = {find_form(value) for value in algorithm.proxes().values()}
    if not forms:
        return {}
    figures = {"nonzeros": rows.count_nonzero(1).double().cpu()}
    shapes = torch.tensor(list(layout.matrix_shapes.values())).reshape(-1, 2)
    cost = 10 * len(rows) * float((shapes.prod(1) * shapes.amin(1)).sum())
    if "lowrank" in forms and cost <= MAX_RANK_OPERATIONS:
        ranks = torch.stack([layout.ranks(row) for row in rows]).cpu()
        dense = shapes.prod(1)
        figures["rank"] = ranks.sum(1).double()
        figures["factorised"] = (layout.d - dense.sum() + (ranks * shapes.sum(1)).minimum(dense).sum(1)).double()
    return figures
