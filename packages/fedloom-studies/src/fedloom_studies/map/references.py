"""Reference models: scikit-learn models for tables, trained and scored on the same splits as the map's methods."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data import Federation
from fedloom.formats import format_fixed, format_pair
from fedloom.lab.experiment import parse
from fedloom.lab.report import Estimate, seed_differences
from fedloom.metrics import leading
from fedloom.tasks import make_task
from fedloom_studies.map.judge import SetupVerdict, last_means
from fedloom_studies.map.records import DONE_STATUS, CellRecord, Series, new_record
from fedloom_studies.map.setups import Cell, Setup

REFERENCE_MODELS = {"logistic": "logistic regression", "forest": "random forest"}
CLIENT_SCOPE, POOLED_SCOPE = "per client", "pooled"
References = Mapping[tuple[str, str], CellRecord]


def reference_names() -> Iterator[tuple[str, str, str]]:
    """Yield every reference's name and kind of model, and whether it is trained per client or on pooled data."""
    for kind, words in REFERENCE_MODELS.items():
        for protocol in (CLIENT_SCOPE, POOLED_SCOPE):
            yield f"{words}, {protocol}", kind, protocol


def measure_references(setup: Setup, data_dir: Path | None) -> Iterator[CellRecord]:
    """Fit and score all references, and yield a record of each.

    For every seed, a reference is fitted to the training splits with scikit-learn's default settings and scored on the
    test splits.

    Raises:
        DataError: the data are missing.
    """
    plan = parse({**setup.document, "method": [{"algorithm": "fedavg"}]}, setup.name)
    data, setting = plan.source.read(data_dir), plan.methods[0].setting
    feds = {seed: plan.partition(data, seed) for seed in setup.seeds}
    for name, kind, protocol in reference_names():
        begin, seeds, metric = time.process_time(), dict[str, Series](), ""
        for seed, fed in feds.items():
            scores = make_task(fed.data, setting.task).metrics(*_reference_outputs(fed, kind, protocol, seed), fed.n)
            metric = metric or leading(scores)
            clients = scores[metric].tolist()
            seeds[str(seed)] = Series(clients, [0], [float(np.nanmean(clients))], [0.0], [0.0])
        minutes, model = (time.process_time() - begin) / 60, "personal" if protocol == CLIENT_SCOPE else "global"
        record = new_record(Cell(setup, "local"), DONE_STATUS, "", minutes, metric=metric, model=model, seeds=seeds)
        yield CellRecord(**{**record.__dict__, "method": name, "source": kind, "digest": protocol})


def _reference_outputs(fed: Federation, kind: str, protocol: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the models' outputs on the clients' test splits, the targets, and each output's client."""
    parts = {part: [fed.indices(part, i) for i in range(fed.n)] for part in ("train", "test")}
    trained = parts["train"] if protocol == CLIENT_SCOPE else [torch.cat(parts["train"])] * fed.n
    outputs = []
    fitted = None
    for train, test in zip(trained, parts["test"], strict=True):
        fitted = _fit_reference(fed, kind, train, seed) if fitted is None or protocol == CLIENT_SCOPE else fitted
        outputs.append(_reference_logits(fed, fitted, test))
    owner = torch.repeat_interleave(torch.arange(fed.n), torch.tensor([len(test) for test in parts["test"]]))
    return torch.cat(outputs), fed.targets(torch.cat(parts["test"])), owner


def _fit_reference(fed: Federation, kind: str, index: Tensor, seed: int) -> Any:
    from sklearn.dummy import DummyClassifier
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    x, y = fed.fetch(index).flatten(1).numpy(), fed.targets(index).flatten().numpy().astype(int)
    if len(set(y.tolist())) == 1:
        return DummyClassifier().fit(x, y)
    model = LogisticRegression() if kind == "logistic" else RandomForestClassifier(random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # because its default of 100 iterations does not converge
        return model.fit(x, y)


def _reference_logits(fed: Federation, fitted: Any, index: Tensor) -> Tensor:
    """Return the log probabilities of all classes or, if there are two classes, the log odds of the second."""
    probabilities = fitted.predict_proba(fed.fetch(index).flatten(1).numpy())
    shares = np.full((len(probabilities), max(2, len(fed.data.classes))), 1e-9)
    shares[:, fitted.classes_] = probabilities.clip(1e-9)
    logs = torch.from_numpy(np.log(shares))
    return logs[:, 1:] - logs[:, :1] if fed.data.task == "binary" else logs


def reference_lines(j: SetupVerdict, references: References) -> Iterator[str]:
    """Yield the lines of a setup's page about references, with gains over the best model that a client trains alone."""
    rows, local = _reference_rows(j, references), j.find("local")
    if not j.setup.references:
        return
    if not rows or local is None:
        command = f"`fedloom map --references --setup {j.setup.name}`"
        yield from ("", f"The reference models have not been run yet. To run them, use {command}.")
        return
    alone = models_alone(j, references)
    best = max(alone, key=lambda name: alone[name].mean)
    yield from (
        "",
        f"The best model that a client can train alone is {best}. The table compares it with scikit-learn models with "
        "default settings on the same data, and with the best methods. All values are in percent, with a 95 % "
        "confidence interval across seeds.",
    )
    yield from ("", f"| model | {j.standings[0].record.metric} | gain over {best} |", "|---|---|---|")
    methods = [s for s in (*j.rivals[:3], j.find("fedavg")) if s is not None and s.method != "local"]
    shown = rows | {s.method: s.figures["mean"] for s in methods} | {"local": alone["local"]}
    for name, figure in sorted(shown.items(), key=lambda item: -item[1].mean):
        gain = "-" if name == best else _points_text(Estimate(seed_differences(figure, alone[best])), sign="+")
        yield f"| {name} | {_points_text(figure)} | {gain} |"


def models_alone(j: SetupVerdict, references: References) -> dict[str, Estimate]:
    """Return the values of all models that a client trains alone: local training, and any references per client."""
    rows, local = _reference_rows(j, references), j.find("local")
    per_client = {
        name: rows[name] for name, _, protocol in reference_names() if protocol == CLIENT_SCOPE and name in rows
    }
    return per_client | ({"local": local.figures["mean"]} if local is not None else {})


def _reference_rows(j: SetupVerdict, references: References) -> dict[str, Estimate]:
    keys = [(j.setup.name, name) for name, *_ in reference_names()]
    return {key[1]: last_means(references[key].seeds) for key in keys if key in references}


def _points_text(figure: Estimate, sign: str = "") -> str:
    return (sign if figure.mean > 0 else "") + format_pair(
        format_fixed(100 * figure.mean, 1), format_fixed(100 * figure.half, 1)
    )
