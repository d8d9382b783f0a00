"""Models that analyses fit from sums. Each model is a row of a comparison, with the same test rows and metrics.

A linear model is fitted to the training rows of all clients, in the representation that trained models use, and then
takes the place of a trained model. There are no rounds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms import FedAvg
from fedloom.analyses.form import Analysis, ModelAnalysis, Rules
from fedloom.analyses.registry import get_analysis_name
from fedloom.analyses.rows import ClientRows, client_rows, fill_ranges, make_schema
from fedloom.analyses.run import analyze_rows, resolve_analysis
from fedloom.data.federation import DATA_PARTS, Federation
from fedloom.data.tables import TableColumn
from fedloom.engine.checkpoints import RunCheckpoints
from fedloom.engine.replay import Replay
from fedloom.engine.result import Result
from fedloom.engine.scoring import score_round
from fedloom.engine.setting import Setting
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import Progress, clients_of, fix_arithmetic, simulate
from fedloom.engine.state import initial_state
from fedloom.errors import CodeError, DataError, Refused, RunStopped, Stop
from fedloom.processes.clients import CLIENT_COUNTS
from fedloom.processes.ranks import SINGLE_RANK, Ranks
from fedloom.values import dump_value

DEPENDENCE_TOLERANCE = 1e-8
"""Threshold for the fraction of an input's deviation that other inputs do not explain. Below it, the input is treated
as linearly dependent."""


class Fitted(FedAvg):
    """Linear model that an analysis fits from sums. It is never trained."""

    analysis: str = Field(description="the analysis as JSON: its kind and its options")

    @property
    def value(self) -> ModelAnalysis:
        """The analysis."""
        value = resolve_analysis(json.loads(self.analysis), {})
        assert isinstance(value, ModelAnalysis)
        return value

    @classmethod
    def setting(cls, analysis: Analysis, common: Setting) -> Setting:
        """Return the setting of the row that an analysis adds to a comparison.

        Args:
            analysis: analysis that fits a model.
            common: setting that all methods share. Its task, evaluation and engine apply.
        """
        method = cls(analysis=json.dumps(dump_value(analysis, kind=get_analysis_name(analysis)), sort_keys=True))
        engine = common.engine.with_(dtype="float64", device="cpu", gradient_engine="auto")
        choices: dict[str, Any] = {"task": common.task, "evaluate": common.evaluate, "engine": engine}
        return Setting(algorithm=method, rounds=1, seed=common.seed, **choices)


def run_setting(
    setting: Setting,
    fed: Federation,
    *,
    folder: Path | None,
    callbacks: Sequence[Progress] = (),
    advance: bool = True,
    ranks: Ranks = SINGLE_RANK,
) -> Result:
    """Run a method as `fedloom.simulate` does or, for a setting of `Fitted`, fit and score its model.

    Args:
        setting: setting of the run.
        fed: the clients.
        folder: folder for checkpoints and client states, or None.
        callbacks: functions that are called after every round of a method.
        advance: False to only read what the folder contains.
        ranks: processes that run a method together. Each process fits a model.

    Raises:
        RunStopped: the analysis has no result.
    """
    method = setting.algorithm
    if not isinstance(method, Fitted):
        return simulate(setting, fed, folder=folder, callbacks=callbacks, advance=advance, ranks=ranks)
    try:
        model = fit_model(method.value, fed)
    except (DataError, Refused) as error:
        raise RunStopped(Stop.FAILED, str(error)) from None
    job, server = make_job(setting, fed, folder=folder, ranks=ranks, replay=Replay(model.weights))
    checkpoints = RunCheckpoints(job, folder)
    resumed = checkpoints.resume(initial_state(job, server))
    state = resumed.state
    if resumed.stop is None and not advance:
        return Result(job, state, Stop.INTERRUPTED, "")
    if resumed.stop is None:
        with fix_arithmetic(job), clients_of(job) as clients:
            totals, counts = state.totals.clone(), {"bytes_up": model.sent, "bytes_down": model.received}
            for name, count in counts.items():
                totals[[CLIENT_COUNTS.index(name), CLIENT_COUNTS.index(f"{name}_paper")]] += count
            state, _ = score_round(job, clients, state.with_(notes=(*state.notes, *model.notes), totals=totals))
        checkpoints.save(state, Stop.DONE)
    return Result(job, state, Stop.DONE, "")


class FittedModel(NamedTuple):
    """Linear model fitted by an analysis.

    Attributes:
        weights: float64 weights by name, for the outputs that models of the task have.
        notes: notes about the fit.
        sent: number of bytes that all clients have sent, at 8 bytes per number.
        received: number of bytes that all clients have received.
    """

    weights: dict[str, Tensor]
    notes: list[str]
    sent: int
    received: int


def fit_model(analysis: ModelAnalysis, fed: Federation) -> FittedModel:
    """Fit a linear model to the training rows of all clients, as functions of the inputs that trained models use.

    Args:
        analysis: analysis that fits a model.
        fed: the clients.

    Raises:
        DataError: the analysis has no result.
        Refused: the analysis is unsuitable for the data.
        CodeError: the analysis returns another kind of model.
    """
    data, rows = fed.data, dict[str, ClientRows]()
    for k, name in enumerate(fed.names):
        some = client_rows(fed, k)
        some = some.select(some.part == DATA_PARTS.index("train"))
        inputs = some.inputs.double().cpu().flatten(1) if len(some) else some.x.new_zeros(0, 0)
        rows[name] = replace(some, x=inputs, columns={}, fetch=None)
    whole = [some for some in rows.values() if len(some)]
    if not whole:
        raise DataError("no client has training rows. Increase the fraction of training rows in the partition")
    x = torch.cat([some.x for some in whole])
    width = x.shape[1]
    used = find_independent(x) if analysis.needs_independent else torch.ones(width, dtype=torch.bool)
    if not used.any():
        raise DataError("every input of the models has the same value in all training rows, so nothing can be fitted")
    rows = {name: replace(some, x=some.x.reshape(len(some), width)[:, used]) for name, some in rows.items()}
    names = tuple(TableColumn(name=f"input {k}") for k in used.nonzero()[:, 0].tolist())
    schema = replace(make_schema(data), columns=names, levels={}, is_table=True, columns_are_inputs=True)
    schema, _ = fill_ranges(schema, rows)
    result = analyze_rows(analysis, schema, rows, analysis.rules or Rules())
    values = [getattr(result.model, name, None) for name in ("weight", "bias")]
    shapes, outputs = [list(getattr(value, "shape", ())) for value in values], data.outputs
    if shapes != [[outputs, int(used.sum())], [outputs]]:
        raise CodeError(
            f"the model of {get_analysis_name(analysis)} must have a weight [{outputs}, {int(used.sum())}] and a bias "
            f"[{outputs}], got shapes {shapes}"
        )
    model: Any = result.model
    weight, bias = torch.zeros(outputs, width, dtype=torch.float64), model.bias.detach().double()
    weight[:, used] = model.weight.detach().double()
    if data.task == "regression":
        weight, bias = weight / data.unit, (bias - data.centre) / data.unit
    notes = [f"fitted by {len(result.log)} sums over {len(x)} training rows, without rounds", *result.notes]
    if dependent := int((~used).sum()):
        notes.append(f"{dependent} of {width} inputs are constant or linearly dependent, so their coefficients are 0")
    sent, received = (len(rows) * sum(sizes) for sizes in (
        (8 * len(record.total) for record in result.log), (len(record.question.encode()) for record in result.log),
    ))  # fmt: skip
    return FittedModel({"head.weight": weight, "head.bias": bias}, notes, sent, received)


def find_independent(x: Tensor) -> Tensor:
    """Return a mask ``[p]`` of the inputs ``x [N, p]`` that do not depend linearly on earlier inputs and a constant."""
    rest = x - x.mean(0)
    size, used = rest.norm(dim=0), torch.zeros(x.shape[1], dtype=torch.bool)
    for k in range(x.shape[1]):
        length = rest[:, k].norm()
        if length > DEPENDENCE_TOLERANCE * size[k] and size[k] > DEPENDENCE_TOLERANCE * x[:, k].norm():
            used[k] = True
            direction = rest[:, k] / length
            rest = rest - direction[:, None] * (direction @ rest)
    return used
