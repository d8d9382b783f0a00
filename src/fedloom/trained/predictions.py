"""Predictions for rows without labels: every row by the model of its client, where one is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from fedloom.data.input_spec import InputSpec
from fedloom.data.new_rows import NewRows
from fedloom.errors import ConfigError
from fedloom.trained.models import OWN, Models
from fedloom.trained.raw import said


@dataclass(frozen=True, eq=False)
class Predictions:
    """What models say of N rows.

    Attributes:
        facts: of the data that the models were trained on.
        scores: ``[N, C]`` probabilities of the classes (``[N, L, C]`` with a label per position), or ``[N, k]`` values
            of a regression, float64.
        models: of every row, whose model said so: a client, or ``"global"``.
        notes: sentences on what was filled in, and which models were taken.
        there: ``[N, L]`` the positions that are no padding, where every one has a prediction.
        files: the file of every row, where each has its own.
    """

    facts: InputSpec
    scores: NDArray[np.float64]
    models: Sequence[str]
    notes: tuple[str, ...] = ()
    there: NDArray[np.bool_] | None = None
    files: Sequence[str] | None = None

    def __repr__(self) -> str:
        return f"Predictions({len(self.scores):,} rows, {self.facts.task}: {'; '.join(self.notes)})"

    @property
    def labels(self) -> NDArray[Any]:
        """Names of the most probable classes ``[N]``, or values ``[N]`` (``[N, k]`` of several targets)."""
        return said(self.facts, self.scores)

    def table(self) -> pa.Table:
        """``row`` (from 1), ``file`` of images, ``model``, ``prediction [<k>]``, ``probability of <c>``.

        With a label per position, a row for each, ``position`` from 1, and padding left out.
        """
        scores = self.scores
        rows, owners = np.arange(1, len(scores) + 1), np.array(self.models, object)
        files = {} if self.files is None else {"file": list(self.files)}
        columns: dict[str, Any] = {"row": rows, **files, "model": owners.tolist()}
        if self.there is not None:
            row, position = np.nonzero(self.there)
            scores = scores[row, position]
            columns = {"row": rows[row], "position": position + 1, "model": owners[row].tolist()}
        if self.facts.task == "regression":
            names = ["prediction"] if scores.shape[1] == 1 else [f"prediction {k}" for k in range(scores.shape[1])]
            return pa.table(columns | dict(zip(names, scores.T, strict=True)))
        each = {f"probability of {c}": p for c, p in zip(self.facts.classes, scores.T, strict=True)}
        return pa.table({**columns, "prediction": said(self.facts, scores).tolist(), **each})


def predicted(models: Models, rows: NewRows, kind: str | None = None, client: int | str | None = None) -> Predictions:
    """Predictions of a run's models.

    Args:
        models: of a run.
        rows: what `new_rows` gave.
        kind: "global", "personal" or "hybrid"; None: a client's best, without a client the global one.
        client: whose model predicts all rows; None: each row that of its site, where a column names the sites.

    Raises:
        ConfigError: no such model or client, or a site that is no client where there is no global model.
    """
    facts, names = models.recipe.facts, set(models.names)
    there = (rows.x != 0).numpy() if facts.each else None
    if client is not None or rows.sites is None:
        model = models.ready(kind, client)
        who = str(model.about.get("client", "global"))
        what = f"the {model.about['kind']} model" + (f" of {who}" if client is not None else "")
        if client is None and facts.table is not None:
            what += ", columns scaled as at the clients on average: neither a client is given nor does a column name it"
        return Predictions(facts, model.scores(rows.x), [who] * len(rows.x), (*rows.notes, what), there, rows.files)
    own = kind or next(k for k in OWN if k in models.kinds())
    groups: dict[str, list[int]] = {}
    strange: dict[str, int] = {}
    for k, site in enumerate(rows.sites):
        known = site in names
        groups.setdefault(site if known else "", []).append(k)
        if not known:
            strange[site] = strange.get(site, 0) + 1
    others = ", ".join(f"{site!r} ({count} rows)" for site, count in list(strange.items())[:8])
    if strange and "global" not in models.kinds():
        raise ConfigError(
            f"no client of the run: {others}; {models.about['method']} has no global model, give a client"
        )
    scores: NDArray[np.float64] | None = None
    owners = np.full(len(rows.x), "global", object)
    for site, places in groups.items():
        model = models.ready(own if site else "global", site or None)
        part = model.scores(rows.x[torch.tensor(places)])
        scores = np.empty((len(rows.x), *part.shape[1:])) if scores is None else scores
        scores[places] = part
        if site:
            owners[places] = site
    assert scores is not None
    notes = [
        f"each row by the {own} model of its site" if own != "global" else "the global model, scaled as each site's"
    ]
    notes += [f"no client of the run, so the global model: {others}"] if strange else []
    return Predictions(facts, scores, owners.tolist(), (*rows.notes, *notes), there, rows.files)
