"""A run's models as functions of inputs, for one client at a time. Analyses of models use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import Refused

if TYPE_CHECKING:
    from fedloom.analyses.rows import ClientRows
    from fedloom.engine.result import Result

ModelKind = Literal["global", "personal"] | None
"""Kind of the model that an analysis uses. None: the global model, or personal models if there is no global model."""
MODELS_PER_PASS = 32
"""Number of personal models that are created at a time."""


def iterate_models(result: Result, model: str, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield clients together with their models, after setting the models' normalization statistics.

    If the run does not have such models, nothing is yielded.

    The global model's statistics come from the cohort or from the client itself (see `Evaluate.batchnorm_stats`).
    """
    oracle, separately = result.job.oracle, result.job.setting.evaluate.batchnorm_stats == "own"
    if model not in result.models.kinds():
        return
    if model == "global":
        row = result.models.rows("global").to(oracle.device)
        oracle.set_statistics(row, result.state.cohort)
        for client in ids.tolist():
            if separately:
                oracle.set_statistics(row, torch.tensor([client]))
            yield client, row
        return
    for some in ids.split(MODELS_PER_PASS):
        rows = result.models.rows(model, some).to(oracle.device)
        for client, row in zip(some, rows, strict=True):
            oracle.set_statistics(row, client[None])
            yield int(client), row


def models_by_client(result: Result) -> Callable[[int], dict[str, Callable[[Tensor], Tensor]]]:
    """Return a function that maps a client number to the client's models, keyed by kind.

    Each model maps inputs to outputs.
    """
    kinds = [kind for kind in ("global", "personal") if kind in result.models.kinds()]

    def function_of(kind: str, client: int) -> Callable[[Tensor], Tensor]:
        def run(inputs: Tensor) -> Tensor:
            ((_, row),) = iterate_models(result, kind, torch.tensor([client]))
            return result.job.oracle.run(row, inputs)

        return run

    return lambda client: {kind: function_of(kind, client) for kind in kinds}


def missing_model_error(kind: str, present: str) -> Refused:
    """Return the error for an analysis that uses a kind of model that the run does not have.

    Args:
        kind: kind that the analysis uses.
        present: kind that the run has.
    """
    return Refused(
        f"the run has no {kind} model", rule="analysis-model", fix=f"omit model_kind, or set model_kind = {present!r}"
    )


def compute_outputs(client: ClientRows, kind: ModelKind, inputs: Tensor) -> Tensor:
    """Return a model's outputs ``[N, k]`` for inputs ``[N, *shape]`` of a client's rows, as float64.

    Rows are sorted by their cells before the outputs are computed. Otherwise, float32 sums over a batch would depend on
    the order of the rows.

    Args:
        client: client whose rows are used.
        kind: kind of the model.
        inputs: the rows' inputs, for instance with a permuted column.

    Raises:
        Refused: the run has no model of this kind.
    """
    present: str = next(iter(client.models))
    if kind is not None and kind not in client.models:
        raise missing_model_error(kind, present)
    order = torch.from_numpy(np.lexsort(torch.cat([client.x, client.y], 1).numpy().T))
    outputs = client.models[kind or present](inputs[order.to(inputs.device)]).double().cpu()
    return outputs[torch.argsort(order)]
