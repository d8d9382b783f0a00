"""List of the models in a run directory, with their scores."""

from __future__ import annotations

from pathlib import Path

from fedloom.errors import LayoutError
from fedloom.lab.experiment.opened import RunDirectory
from fedloom.lab.experiment.recorded import RecordedRun
from fedloom.metrics import leading, metric, worst
from fedloom.rundir import ADAPTED_FOLDER, MODELS_FOLDER, run_folder
from fedloom.trained.model import open_tensors, read_facts
from fedloom.trained.model_source import MODEL_CHOICES

Row = dict[str, str | int | float | None]
"""Row that describes a model, keyed by column name."""


def list_model_rows(opened: RunDirectory) -> list[Row]:
    """Return a row for each model: method, seed, kind, number of models, primary metric, and file.

    The metric after the last evaluated round is averaged over the clients' test sets and over the worst 10 % of
    clients. An adapted model's metric is measured on samples held out from the adaptation.
    """
    lead = leading(opened.table()["metric"].unique().to_pylist())
    rows = [row for run in opened for row in _model_rows(opened, run, lead)]
    return rows + [
        _adapted_model_row(file, opened.path, lead)
        for file in sorted((opened.path / ADAPTED_FOLDER).glob("*.safetensors"))
    ]


def _model_rows(opened: RunDirectory, run: RecordedRun, lead: str) -> list[Row]:
    measured = run.measured()
    rows = list[Row]()
    for kind in MODEL_CHOICES:
        if (kind, "test", lead) not in measured:
            continue
        values = run.final(kind, lead)
        file = run_folder(opened.path, MODELS_FOLDER, run.method, run.seed) / f"{kind}.safetensors"
        rows.append(
            {
                "method": run.method,
                "seed": run.seed,
                "model": kind,
                "models": 1 if kind == "global" else len(values),
                f"test {lead}": float(values.nanmean()),
                "worst 10 %": worst(values.numpy(), low=metric(lead).higher_is_better),
                "file": str(file.relative_to(opened.path)) if file.is_file() else f"none: {run.status}",
            }
        )
    return rows


def _adapted_model_row(path: Path, folder: Path, lead: str) -> Row:
    try:
        with open_tensors(path) as file:
            about = read_facts(file, path)[1]
    except LayoutError:
        about = {}
    return {
        "method": about.get("method", "?"),
        "seed": about.get("seed", "?"),
        "model": f"adapted to {about.get('client', '?')}",
        "models": 1,
        f"test {lead}": about.get("scores", {}).get("adapted", {}).get(lead),
        "worst 10 %": None,
        "file": str(path.relative_to(folder)),
    }
