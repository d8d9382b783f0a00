"""Models on single clients after the last round: confusion counts, and representations in the plane."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa
import torch
from torch import Tensor

from fedloom.analyses.models import models_of
from fedloom.engine.checks.inspection import MIN_TSNE_SAMPLES
from fedloom.engine.result import Result
from fedloom.seeds import generator, random_state

WHOLE, TEXT, NUMBER = pa.int64(), pa.string(), pa.float64()

PERPLEXITY = 30.0
"""Of t-SNE, as scikit-learn's default; less where a client has few samples."""


def confusion(result: Result) -> pa.Table:
    """Confusion counts on every scored client's test part, after the last round: client, model, true, predicted, count.

    Classes are their codes; cells without a sample are left out; rows are sorted.
    """
    oracle, fed = result.job.oracle, result.job.eval_fed
    classes = max(len(fed.data.classes), 2)
    counts_by_client: dict[tuple[int, str], Tensor] = {}
    for model in ("global", "personal"):
        for client, row in models_of(result, model, result.job.scored_ids):
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
    return table_of(rows, client=WHOLE, model=TEXT, true=WHOLE, predicted=WHOLE, count=WHOLE)


def tsne(result: Result, clients: tuple[int, ...]) -> tuple[pa.Table, list[str]]:
    """t-SNE of the head's inputs for clients' test samples: client, model, label, x, y; and notes on who is left out.

    The model is the client's personal one, the global one where there is none (FedSLR, Fig. 4). Every client has a
    plane of its own, a function of the run's seed; a label is a class's code, NaN without classes.
    """
    from sklearn.manifold import TSNE  # slow to import, needed where it is asked for

    oracle, fed, kinds = result.job.oracle, result.job.eval_fed, result.models.kinds()
    model = "personal" if "personal" in kinds else "global"

    sizes = fed.sizes("test")
    few = sorted({i for i in clients if sizes[i] < MIN_TSNE_SAMPLES})
    notes = (
        [f"t-SNE leaves out clients with fewer than {MIN_TSNE_SAMPLES} test samples: {', '.join(map(str, few))}"]
        if few
        else []
    )
    shown = torch.tensor(sorted(set(clients) - set(few)), dtype=torch.long)
    rows: list[tuple[int, str, float, float, float]] = []
    for client, row in models_of(result, model, shown):
        index = fed.indices("test", client)
        representations = oracle.representations(row, index).double().cpu().numpy()
        y = fed.targets(index)
        labels = [math.nan] * len(index) if not fed.data.classed else y[y >= 0].tolist()
        rng = random_state(generator(result.job.setting.seed, client=client, purpose="tsne"))
        plane = TSNE(perplexity=min(PERPLEXITY, (len(index) - 1) / 3), init="random", random_state=rng, n_jobs=1)
        places = plane.fit_transform(representations).tolist()
        rows += [(client, model, float(label), *place) for label, place in zip(labels, places, strict=True)]
    return table_of(rows, client=WHOLE, model=TEXT, label=NUMBER, x=NUMBER, y=NUMBER), notes


def table_of(rows: Sequence[tuple[object, ...]], **kinds: pa.DataType) -> pa.Table:
    """Rows as a table whose columns have these names and types."""
    return pa.table({n: pa.array([r[k] for r in rows], kind) for k, (n, kind) in enumerate(kinds.items())})
