"""Analyses of models at individual clients after the last round: confusion matrices and representations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import pyarrow as pa
import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from fedloom.analyses.form import Analysis
from fedloom.analyses.models import iterate_models
from fedloom.analyses.rows import Schema
from fedloom.analyses.tables import INTEGER_TYPE, NUMBER_TYPE, TEXT_TYPE, make_table
from fedloom.data.dataset import CLASS_TASKS
from fedloom.data.federation import Federation
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError, Refused
from fedloom.seeds import generator, random_state

MIN_TSNE_SAMPLES = 5
"""Minimum number of test samples that a client needs for t-SNE."""
TSNE_PERPLEXITY = 30.0
"""Perplexity of t-SNE, the default of scikit-learn. Clients with few samples use a smaller perplexity."""


class Confusion(Analysis):
    """Number of samples by true and predicted class in each client's test set after the last round."""

    kind: ClassVar[str] = "confusion"

    def check(self, schema: Schema, setting: Setting | None = None) -> None:
        super().check(schema, setting)
        if schema.task not in CLASS_TASKS:
            raise Refused(
                f"the analysis 'confusion' requires predicted classes, but the task of {schema.name} is {schema.task}",
                rule="confusion-needs-classes",
                fix="omit this analysis",
            )

    def measure(self, result: Result) -> tuple[pa.Table, Sequence[str]]:
        return confusion(result), ()


class Tsne(Analysis):
    """Two-dimensional t-SNE projections of some clients' test samples after the last round (FedSLR, Fig. 4)."""

    kind: ClassVar[str] = "tsne"
    clients: tuple[NonNegativeInt, ...] = Field(min_length=1, description="indices of the clients to plot")

    def check_run(self, fed: Federation, setting: Setting | None = None) -> None:
        unknown = [i for i in self.clients if i >= fed.n]
        if unknown:
            raise ConfigError(
                f"tsne: there is no client {unknown[0]}; the clients are numbered 0 to {fed.n - 1}",
                rule="tsne-client-missing",
                fix="name existing clients, or omit the option `clients`",
            )
        sizes = fed.sizes("test")
        if all(int(sizes[i]) < MIN_TSNE_SAMPLES for i in self.clients):
            raise Refused(
                f"tsne needs at least {MIN_TSNE_SAMPLES} test samples per client, but these clients have fewer",
                rule="tsne-too-few-samples",
                fix="choose clients with more test samples, or omit the option `clients`",
            )

    def measure(self, result: Result) -> tuple[pa.Table, Sequence[str]]:
        return tsne(result, self.clients)


def confusion(result: Result) -> pa.Table:
    """Return confusion counts on each client's test set, in the columns client, model, true, predicted, count.

    Classes are given by their codes. Empty cells are omitted. Rows are sorted.
    """
    oracle, fed = result.job.oracle, result.job.eval_fed
    classes = max(len(fed.data.classes), 2)
    counts_by_client: dict[tuple[int, str], Tensor] = {}
    for model in ("global", "personal"):
        for client, row in iterate_models(result, model, result.job.scored_ids):
            index = fed.indices("test", client)
            if len(index):
                guess = torch.cat([oracle.task.predict(out) for out in oracle.outputs(row, index)])
                y = fed.targets(index)
                cells = (y * classes + guess)[y >= 0]
                counts_by_client[client, model] = torch.bincount(cells.cpu(), minlength=classes**2)
    if "hybrid" in result.models.kinds():
        takes = result.models.takes_global().tolist()
        chosen = {c: "global" if takes[c] else "personal" for c, _ in counts_by_client}
        counts_by_client |= {(c, "hybrid"): counts_by_client[c, model] for c, model in chosen.items()}
    rows = [
        (client, model, *divmod(cell, classes), count)
        for (client, model), counts in sorted(counts_by_client.items())
        for cell, count in enumerate(counts.tolist())
        if count
    ]
    return make_table(
        rows, client=INTEGER_TYPE, model=TEXT_TYPE, true=INTEGER_TYPE, predicted=INTEGER_TYPE, count=INTEGER_TYPE
    )


def tsne(result: Result, clients: tuple[int, ...]) -> tuple[pa.Table, list[str]]:
    """Return t-SNE coordinates of the head's inputs for clients' test samples: client, model, label, x, y.

    Also return notes about omitted clients.

    The model is the personal model of the client, or the global model if there are no personal models (FedSLR, Fig. 4).
    Each client has its own projection, which is determined by the seed of the run. A label is a class code, or NaN if
    there are no classes.
    """
    from sklearn.manifold import TSNE  # slow to import, so imported only where it is used

    oracle, fed, kinds = result.job.oracle, result.job.eval_fed, result.models.kinds()
    model = "personal" if "personal" in kinds else "global"

    sizes = fed.sizes("test")
    few = sorted({i for i in clients if sizes[i] < MIN_TSNE_SAMPLES})
    notes = (
        [f"t-SNE omits clients with fewer than {MIN_TSNE_SAMPLES} test samples: {', '.join(map(str, few))}"]
        if few
        else []
    )
    shown = torch.tensor(sorted(set(clients) - set(few)), dtype=torch.long)
    rows: list[tuple[int, str, float, float, float]] = []
    for client, row in iterate_models(result, model, shown):
        index = fed.indices("test", client)
        representations = oracle.representations(row, index).double().cpu().numpy()
        y = fed.targets(index)
        labels = [math.nan] * len(index) if not fed.data.classed else y[y >= 0].tolist()
        rng = random_state(generator(result.job.setting.seed, client=client, purpose="tsne"))
        plane = TSNE(perplexity=min(TSNE_PERPLEXITY, (len(index) - 1) / 3), init="random", random_state=rng, n_jobs=1)
        places = plane.fit_transform(representations).tolist()
        rows += [(client, model, float(label), *place) for label, place in zip(labels, places, strict=True)]
    return make_table(
        rows, client=INTEGER_TYPE, model=TEXT_TYPE, label=NUMBER_TYPE, x=NUMBER_TYPE, y=NUMBER_TYPE
    ), notes
