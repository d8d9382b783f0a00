"""A finished run directory, opened to read its metrics and models.

Nothing is recomputed, and the run's data are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedloom.algorithms import REGISTRY, encodings
from fedloom.data.dataset import Dataset
from fedloom.data.new_data import NewData
from fedloom.data.new_rows import new_rows
from fedloom.data.sources import Source
from fedloom.engine.checks.moved import update_document
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError, DataError, RunDirError
from fedloom.formats import format_option
from fedloom.hints import suggest_nearest
from fedloom.imports import is_path
from fedloom.lab.experiment.file import parse
from fedloom.lab.experiment.recorded import RecordedRun
from fedloom.lab.experiment.schema import Experiment
from fedloom.lab.report import result_table
from fedloom.lab.report.reading import read_table
from fedloom.metrics import leading, metric
from fedloom.models import Softmax
from fedloom.models.imported import InProcessModel, OwnModel, describe_model
from fedloom.rundir import (
    METRICS_FILE,
    MODELS_FOLDER,
    SETTINGS_FILE,
    SUMMARY_FILE,
    as_path,
    check_digest,
    compared_tables,
    read_summary,
    run_folder,
)
from fedloom.storage import read_toml
from fedloom.trained.model import Model, open_tensors, read_facts
from fedloom.trained.model_source import MODEL_CHOICES
from fedloom.trained.models import KIND_PREFERENCE
from fedloom.trained.predictions import (
    OWN_SCALE,
    ModelEvaluation,
    Predictions,
    assign_models,
    evaluate_models,
    predict_assigned_rows,
    predict_with_one,
)
from fedloom.trained.saved import SavedModels
from fedloom.trust import check_document

FIGURE_COLUMNS = ("method", "seed", "round", "client", "model", "part", "metric", "value")


class RecordedData(Source):
    """Placeholder for a finished run's data, which may have been moved."""

    def load(self, data_dir: object = None) -> Dataset:
        raise DataError("fedloom does not read a finished run's data. Read the data from their source")


class RunDirectory:
    """A run directory, opened for reading.

    Iterating over it yields its runs. ``opened["flame", 0]`` is the run of the method "flame" with seed 0.

    Args:
        path: path of the run directory.
        model: see `open_run`.
        trust: True to run code that the directory refers to by import path, even if a different user owns the
            directory.

    Raises:
        RunDirError: the path is not a run directory, or the directory is damaged.
        ConfigError: the given model cannot be used as a model, or the recorded settings already specify the models of
            the runs.
    """

    def __init__(self, path: Path | str, model: OwnModel | None = None, *, trust: bool = False) -> None:
        self.path, self._model, self._trust = as_path(path, "path"), model, trust
        settings = self.path / SETTINGS_FILE
        if deployed := _describe_deployment(self.path):
            raise RunDirError(f"{path} is {deployed}")
        if not self.path.is_dir() or not settings.is_file():
            what = "has no experiment.toml" if self.path.is_dir() else "is not a directory"
            raise RunDirError(f"{path} is not a run directory: it {what}. Name the --out directory of 'fedloom run'")
        try:
            self._document = update_document(read_toml(settings, "settings of the run"))
            check_digest(settings, settings.read_bytes())
            summary = read_summary(self.path / SUMMARY_FILE)
            self._runs = {(record.method, record.seed): record for record in summary.runs}
        except OSError:
            raise RunDirError(f"{path} contains no summary.json yet. Wait until 'fedloom run' has finished") from None
        except RunDirError:
            raise
        except ConfigError as error:
            raise RunDirError(f"{path} is damaged: {error}") from None
        if not self._runs:
            raise RunDirError(f"{path} contains no run yet. Wait until 'fedloom run' has finished")
        if model is None:
            return
        if describe_model(model) is None:
            raise ConfigError(f"open_run: model must be an nn.Module or a function that returns one, got {model!r:.80}")
        if not any(_has_unnamed_model(table) for table in (self._document, *self._methods)):
            raise ConfigError(f"{settings} already specifies the models of its runs. Omit `model`")

    def __iter__(self) -> Iterator[RecordedRun]:
        return (self[key] for key in self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, key: tuple[str, int]) -> RecordedRun:
        pair: Any = key
        if not isinstance(pair, tuple) or len(pair) != 2:
            label, seed = next(iter(self._runs))
            raise ConfigError(
                f"{self.path}: a run is identified by its method and seed, as in [{label!r}, {seed}], got {key!r:.80}"
            )
        if key not in self._runs:
            runs = ", ".join(f"{method!r} with seed {seed}" for method, seed in self._runs)
            raise ConfigError(f"{self.path} contains no run of {key[0]!r} with seed {key[1]}. Its runs: {runs}")
        run = self._runs[key]
        return RecordedRun(*key, run.status, run.reason, run.rounds, self.table, partial(self.saved_models, *key))

    def runs(self, method: str | None = None, seed: int | None = None) -> list[RecordedRun]:
        """Return all runs, or only the runs with the given method or seed.

        Raises:
            ConfigError: the directory contains no run of this method or seed.
        """
        methods, seeds = ({key[k] for key in self._runs} for k in (0, 1))
        if method is not None and method not in methods:
            raise ConfigError(
                f"{self.path} contains no method {method!r}; {suggest_nearest(method, map(str, methods))}"
            )
        if seed is not None and seed not in seeds:
            raise ConfigError(f"{self.path} contains no seed {seed}. Its seeds: {', '.join(map(str, sorted(seeds)))}")
        return [run for run in self if method in (None, run.method) and seed in (None, run.seed)]

    @cached_property
    def _table(self) -> pa.Table:
        return read_table(self.path / METRICS_FILE, FIGURE_COLUMNS)

    def table(self) -> pa.Table:
        """Return a table of all runs' metrics. Its first two columns are ``method`` and ``seed``.

        Raises:
            RunDirError: the file with the metrics is missing or damaged.
        """
        if not (self.path / METRICS_FILE).is_file():
            raise RunDirError(f"{self.path} contains no metrics.parquet. Run the experiment again to write it")
        return self._table

    @cached_property
    def experiment(self) -> Experiment:
        """Settings of the experiment. The data and the clients are not loaded, because the data may have been moved.

        Raises:
            ConfigError: some user code can no longer be imported, or a different user owns the directory.
        """
        return self._experiment(self._methods)

    def _experiment(self, methods: Sequence[Mapping[str, Any]]) -> Experiment:
        """Return the experiment's settings, restricted to the given methods.

        The other methods are omitted, because their code may no longer exist.
        """
        check_document(self._document, self.path / SETTINGS_FILE, trust=self._trust)
        apart = ("resolved", "partition", "analysis")  # a model does not need analyses
        document = {k: v for k, v in self._document.items() if k not in apart}
        tables = {"data": RecordedData(), "method": [self._insert_model(method) for method in methods]}
        return parse({**self._insert_model(document), **tables}, str(self.path / SETTINGS_FILE), trains=bool(methods))

    @property
    def _methods(self) -> list[Mapping[str, Any]]:
        """Tables that describe the experiment's methods."""
        methods = self._document.get("method")
        return [m for m in methods if isinstance(m, Mapping)] if isinstance(methods, list) else []

    def _insert_model(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return a table of settings. If it names no model, add the user's model."""
        held = self._model is not None and _has_unnamed_model(table)
        return {**table, **({"model": {**table["model"], "held": self._model}} if held else {})}

    def _setting(self, label: str) -> Setting:
        """Return the setting of a method."""
        tables = [m for m in self._methods if m.get("label") == label]
        if not tables and label in [table["label"] for table in compared_tables(self._document)]:
            return self._experiment([]).common.with_(model=Softmax())  # analyses fit linear models
        name = tables[0].get("algorithm") if tables else None
        if name not in REGISTRY and not is_path(name):
            raise ConfigError(
                f"{self.path / SETTINGS_FILE}: the method of {label!r} ({name}) has no name or import path. In "
                "Python, repeat the call to fl.compare with this folder to get its models without rerunning anything"
            )
        return self._experiment(tables).methods[0].setting

    def saved_models(self, method: str, seed: int) -> SavedModels:
        """Return the saved models of a run."""
        run, folder = self._setting(method), run_folder(self.path, MODELS_FOLDER, method, seed)
        return SavedModels(folder, run.method, run.model, run.local, seed, method, run.task)

    @cached_property
    def new_data(self) -> NewData:
        """Options for reading new data for the run's models."""
        return NewData(self._document.get("data", {}))

    def read(self, data: str | Path, data_dir: str | Path | None = None) -> Dataset:
        """Read labeled new data, specified as in ``[data] source``, and return them in the form that the models need.

        Raises:
            DataError: the data are missing or damaged.
            ConfigError: the name is unknown.
        """
        return self.new_data.labelled(next(iter(self)).models.recipe.facts, data, data_dir)

    def predict(
        self,
        data: object,
        method: str | None = None,
        seed: int | None = None,
        client: str | int | None = None,
        kind: str | None = None,
        data_dir: str | Path | None = None,
        id_columns: Sequence[str] = (),
    ) -> Predictions:
        """Return predictions for unlabeled rows.

        Args:
            data: file that contains rows (for texts, the lines of a .txt file), or any value that
                `fedloom.data.new_rows.new_rows` accepts. If a table contains the column that identified the clients in
                training, this column also selects each row's client.
            method: label of the method. If None, the method with the best validation result is used (see `best`).
            seed: seed of the run. If None, the first seed is used.
            client: client whose model makes the predictions for all rows. If None, each row uses the model of its site,
                and rows without a site use the global model.
            kind: "global", "personal" or "hybrid", or the path of an adapted model, which is then used for all rows. If
                None, each client's best kind is used.
            data_dir: folder of data sets.
            id_columns: columns to copy to the table of predictions.

        Raises:
            ConfigError: the method, seed, client or model does not exist.
            DataError: the columns or the shape differ from the training data, or a cell contains a value that is not
                accepted in training.
        """
        first = self.runs(method, seed)[0].models
        new_data = NewData({**first.about.get("conversion", {}), **self.new_data.options})
        rows = new_data.rows(first.recipe.facts, data, data_dir, id_columns)
        if kind is not None and kind not in MODEL_CHOICES:
            model = self.adapted(kind, method, seed)
            return predict_assigned_rows(
                rows, predict_with_one(model, rows)._replace(notes=(f"the model of {kind} for all rows",))
            )
        if method is None:
            sites = set(rows.sites or ()) if client is None else {first.names[0]}
            chosen = self.best(seed, personal=bool(sites), shared=not sites or not sites <= set(first.names))
        else:
            chosen = self.runs(method, seed)[0]
        predictions = predict_assigned_rows(rows, assign_models(chosen.models, rows, kind, client))
        by_validation = method is None and len({run.method for run in self.runs(seed=seed)}) > 1
        note = f"{chosen.method}, seed {chosen.seed}" + (", the best method on validation" if by_validation else "")
        return replace(predictions, notes=(note, *predictions.notes))

    def evaluate(
        self,
        data: Dataset,
        method: str | None = None,
        seed: int | None = None,
        client: str | int | None = None,
        kind: str | None = None,
    ) -> Iterator[ModelEvaluation]:
        """Yield the scores of models on new labeled data. The models are used as in `predict`.

        The arguments and errors are the same as for `predict`. If neither a client nor a kind is given, and each row's
        site is a client of the run, all models of the run are scored. Otherwise, only the global model is scored. If a
        tabular model would scale its inputs by the clients' average, a second result is yielded. Its inputs are scaled
        by the new rows, as for a client that trains on these rows.
        """
        runs = self.runs(method, seed)
        data = runs[0].models.recipe.facts.labelled(data)
        rows = new_rows(runs[0].models.recipe.facts, data)
        if kind is not None and kind not in MODEL_CHOICES:
            model = self.adapted(kind, method, seed)
            yield ModelEvaluation(
                model.about, model.about["kind"], OWN_SCALE, predict_with_one(model, rows), rows, data
            )
            return
        yield from evaluate_models([run.models for run in runs], data, rows, client, kind)

    def load(self, path: Path | str) -> Model:
        """Load and return a model that was adapted from one of the runs.

        Raises:
            LayoutError: the file does not contain a model, or its model has a different architecture.
        """
        with open_tensors(Path(path), check=False) as file:  # Model.load checks the file
            label = read_facts(file, Path(path))[1].get("method")
        of_run = label in {method for method, _ in self._runs}
        setting = self._setting(str(label)) if of_run else self._experiment([{"algorithm": "fedavg"}]).common
        return Model.load(path, setting.model, setting.task)

    def adapted(self, path: Path | str, method: str | None = None, seed: int | None = None) -> Model:
        """Load and return a model that was adapted from one of the selected runs.

        Raises:
            LayoutError: the file does not contain a model, or its model has a different architecture.
            ConfigError: the model was adapted from a run that was not selected.
        """
        model = self.load(path)
        run = (model.about.get("method"), model.about.get("seed"))
        if run not in {(one.method, one.seed) for one in self.runs(method, seed)}:
            raise ConfigError(f"{path} was adapted to {run[0]}, seed {run[1]}")
        return model

    def best(self, seed: int | None = None, personal: bool = True, shared: bool = False) -> RecordedRun:
        """Return the run of the method with the best final validation metric, averaged over clients and seeds.

        Args:
            seed: seed of the run. If None, the first finished seed of the method is used.
            personal: True to compare personal models if a method has them. False to compare only global models.
            shared: True if the method must produce a global model.

        Raises:
            ConfigError: no run has finished, or nothing was measured on validation data.
        """
        done = [run for run in self if run.status == "done"]
        methods = list(dict.fromkeys(run.method for run in done))
        if len(methods) == 1:
            return next(run for run in done if seed in (None, run.seed))
        figures: dict[str, float] = {}
        for name in methods:
            runs = [run for run in done if run.method == name]
            measured = runs[0].measured()
            metrics = {m for _, part, m in measured if part == "validation"}
            kinds = [k for k in (KIND_PREFERENCE if personal else ("global",)) if (k, "validation", "loss") in measured]
            if kinds and metrics and (not shared or ("global", "validation", "loss") in measured):
                lead = leading(metrics, "settings")
                values = [float(run.final(kinds[0], lead, "validation").nanmean()) for run in runs]
                figures[name] = sum(values) / len(values) * (1 if metric(lead).higher_is_better else -1)
        if not figures:
            what = "no run is finished" if not done else "there are no validation results for choosing a method"
            raise ConfigError(f"{self.path}: {what}. Choose a method: {', '.join(methods) or 'none'}")
        top = max(figures, key=lambda name: figures[name])
        return next(run for run in done if run.method == top and seed in (None, run.seed))

    def low_rank(self, method: str) -> bool:
        """Return True if a method's server sends a low-rank model."""
        return any(s.encoding == "lowrank" for s in encodings(self._setting(method).method, "down").values())

    def _repr_html_(self) -> str:
        """Return the results table as HTML, with one row per method and model. Values are averaged over seeds."""
        from fedloom.lab.report import notebook as display

        rows = result_table(self.path).to_pylist()
        lead = leading(rows[0])
        figures = {lead: f"test {lead}"} if lead in rows[0] else {}
        heads = {"method": "method", "model": "model", "seeds": "seeds", **figures, "status": "status"}
        shown = [[format_option(row[key]) for key in heads] for row in rows]
        return display.html_table(list(heads.values()), shown)

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r}, {len(self)} runs)"


def _describe_deployment(path: Path) -> str:
    """Return a folder's role in a deployment and the commands to use instead, or "" for any other folder."""
    if (path / "site.toml").is_file():
        return f"a site of a deployment. Use 'fedloom deploy predict {path} ROWS' (also evaluate and export)"
    if (path.parent / "site.toml").is_file():
        return (
            f"part of a site of a deployment. Use 'fedloom deploy predict {path.parent} ROWS' (also "
            "evaluate and export)"
        )
    if (path / "sites").is_dir() or (path / "server.toml").is_file() or (path.parent / "server.toml").is_file():
        return "a deployment. Its models are at the sites, so use 'fedloom deploy predict SITE ROWS'"
    return ""


def _has_unnamed_model(table: Mapping[str, Any]) -> bool:
    """Return True if a table of settings contains a model that has no import path."""
    model = table.get("model")
    return isinstance(model, Mapping) and model.get("kind") == InProcessModel.kind


def open_run(path: Path | str, model: OwnModel | None = None, *, trust: bool = False) -> RunDirectory:
    """Open a run directory written by `fedloom run`, with its table, runs and models.

    Nothing is recomputed. Only code that ``experiment.toml`` refers to by import path may be executed, and only when
    models are used. Model files never refer to code.

    Args:
        path: path of the run directory.
        model: module, class or function that was passed to `fedloom.compare` as the model, if it has no import path. A
            module's weights are ignored.
        trust: True to run the code that ``experiment.toml`` refers to, even if a different user owns the directory.

    Raises:
        RunDirError: the path is not a run directory, or the directory is damaged.
        ConfigError: the given model cannot be used as a model, or the recorded settings already specify the models of
            the runs.
    """
    return RunDirectory(path, model, trust=trust)
