"""Results for a new client: each client is held out in turn, and each method is trained without it and scored at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pyarrow as pa
import torch
from torch import Tensor

from fedloom.analyses import Analysis, FurtherRun
from fedloom.analyses.tables import INTEGER_TYPE, NUMBER_TYPE, TEXT_TYPE, make_table
from fedloom.data import DATA_PARTS, Federation, Split
from fedloom.data.groups import get_subjects
from fedloom.engine import Setting
from fedloom.engine.result import Result
from fedloom.engine.setup import check, make_problem
from fedloom.errors import ConfigError, Refused
from fedloom.rows.aggregators import FLTrust
from fedloom.tasks import make_task
from fedloom.trained.model import Model
from fedloom.trained.predictions import NEW_SCALE, TYPICAL_SCALE

SAMPLES_FIGURE = "samples"
"""Recorded name of the held-out client's number of samples."""
MIN_CLIENTS = 3
"""Minimum number of clients for this analysis."""
OMIT_HINT = "omit this analysis"
"""Advice in errors that this analysis raises even though the methods could run without it."""


class LeftOut(Analysis):
    """Analysis that trains each method without each client in turn and scores the global model at this client."""

    kind: ClassVar[str] = "left-out"

    def check_run(self, fed: Federation, setting: Setting | None = None) -> None:
        if fed.n < MIN_CLIENTS:
            raise Refused(
                f"left-out needs at least {MIN_CLIENTS} clients, but there are only {fed.n}",
                rule="left-out-too-few-clients",
                fix=OMIT_HINT,
            )
        if setting is None:
            return
        problem, start = make_problem(setting, fed, finds=False)
        if "global" not in problem.model_kinds(start.server):  # no global model could be scored at a new client
            return
        for client in range(fed.n):
            try:
                check(_setting_without(setting, client), remove_client(fed, client))
            except ConfigError as error:
                if error.fix and OMIT_HINT not in error.fix:
                    error = error.replace_fix(f"{error.fix}, or {OMIT_HINT}")
                raise error.placed(f"left-out trains without client {fed.names[client]!r}") from None

    def units(self, setting: Setting, fed: Federation, result: Result) -> Iterator[FurtherRun]:
        for client in range(fed.n) if "global" in result.models.kinds() else ():
            score = partial(score_new_client, fed=fed, client=client)
            yield FurtherRun(_setting_without(setting, client), remove_client(fed, client), score)


def _setting_without(setting: Setting, client: int) -> Setting:
    """Return the setting of a run without the given client. The other clients keep their own values.

    Raises:
        Refused: the aggregation rule needs this client.
    """
    rule, stop, weights = setting.aggregator, setting.early_stop, setting.client_weights
    every, parts = (setting.rounds, ("test",)) if stop is None else (setting.evaluate.every, (stop.part, "test"))
    changes: dict[str, object] = {"evaluate": setting.evaluate.with_(every=every, parts=parts, select_on="test")}
    if isinstance(rule, FLTrust):
        if rule.root == client:
            raise Refused(
                f"aggregator 'fltrust' trusts this client ({client})",
                rule="left-out-trusted-client",
                fix=f"omit {{aggregator}}, or {OMIT_HINT}",
            )
        changes["aggregator"] = rule.with_(root=rule.root - (rule.root > client))
    if isinstance(weights, tuple):
        changes["client_weights"] = weights[:client] + weights[client + 1 :]
    return setting.with_(**changes)


def remove_client(fed: Federation, client: int) -> Federation:
    """Return the federation without the given client.

    This client's samples remain in the data set but do not belong to any client.
    """
    ids = torch.tensor([i for i in range(fed.n) if i != client])
    parts = {}
    for part in DATA_PARTS:
        index, sizes = fed.gather(part, ids)
        parts[part] = Split(index, torch.cat([torch.zeros(1, dtype=torch.long, device=sizes.device), sizes.cumsum(0)]))
    data = fed.data
    if data.fitted is not None:
        data = replace(data, fitted=data.fitted._replace(values=data.fitted.values[ids]))
    names = tuple(fed.names[i] for i in ids.tolist())
    groups = None if fed.groups is None else fed.groups[ids.to(fed.groups.device)]
    cut = {**fed.partition, "test": 0.0}  # the held-out client is the test set
    return replace(fed, data=data, parts=parts, names=names, groups=groups, test=None, partition=cut)


def score_new_client(result: Result, fed: Federation, client: int) -> pa.Table:
    """Return the scores, on all samples of a client, of a run's global model that was trained without this client.

    A table's columns are scaled by the other clients' medians, as when a new client uses the model, and also by the
    client's own rows, which is possible for a client with rows.

    Args:
        result: result of the run without the client.
        fed: federation that includes the client.
        client: held-out client.
    """
    rows: list[tuple[int, str, str, float]] = []
    index = torch.cat([fed.indices(part, client) for part in DATA_PARTS]).cpu()
    if (subjects := get_subjects(fed.data)) is not None:  # other clients may have trained on them
        trained = torch.cat([result.job.eval_fed.parts[part].index.cpu() for part in ("train", "validation")])
        index = index[~torch.isin(subjects[index], subjects[trained])]
    raw = fed.data.x.cpu() if fed.data.fitted is None else fed.data.fitted.raw
    if len(index):
        for scaling, model in _predict_with_models(result, raw[index]):
            y = fed.targets(index.to(fed.device)).cpu()
            outputs = model.outputs(raw[index])
            owner = torch.zeros(len(index), dtype=torch.long)
            values = make_task(fed.data, model.recipe.objective).metrics(outputs.flatten(0, -2), y, owner, 1)
            rows.append((client, scaling, SAMPLES_FIGURE, float(len(index))))
            rows += [(client, scaling, name, float(value)) for name, value in values.items()]
    return make_table(rows, client=INTEGER_TYPE, scaling=TEXT_TYPE, metric=TEXT_TYPE, value=NUMBER_TYPE)


def _predict_with_models(result: Result, x: Tensor) -> Iterator[tuple[str, Model]]:
    model = result.models.ready("global")
    yield TYPICAL_SCALE, model
    if (table := model.recipe.facts.table) is not None:
        owner = torch.zeros(len(x), dtype=torch.long)
        yield NEW_SCALE, replace(model, fitted=table.fit(x, owner, owner == 0)[0])
