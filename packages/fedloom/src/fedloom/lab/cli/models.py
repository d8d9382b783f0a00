"""Commands for trained models: ``fedloom models``, ``evaluate``, ``predict``, ``adapt`` and ``export``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.errors import ConfigError
from fedloom.lab.cli import _complete as offer
from fedloom.lab.cli._app import DataDir, Trust, app, print_errors, say

if TYPE_CHECKING:
    from fedloom.lab.experiment import RecordedRun, RunDirectory
    from fedloom.trained.predictions import Predictions

RunArgument = Annotated[Path, typer.Argument(help="run directory that 'fedloom run' wrote", show_default=False)]
DataOption = Annotated[
    str, typer.Option("--data", help="new data: a file, a folder, or the name of a data set", show_default=False)
]
MethodOption = Annotated[
    str | None, typer.Option("--method", help="label of one of the run's methods", autocompletion=offer.methods)
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="seed of the run", autocompletion=offer.seeds)]
ClientOption = Annotated[
    str | None, typer.Option("--client", help="name or number of a client in the run", autocompletion=offer.clients)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="global, personal or hybrid, or the path to an adapted model's file",
        autocompletion=offer.complete_one_of("global", "personal", "hybrid"),
    ),
]


IdColumnOption = Annotated[
    list[str] | None,
    typer.Option("--id-column", help="column to copy to the predictions, such as an ID (may be repeated)"),
]
ThresholdOption = Annotated[
    float | None,
    typer.Option("--threshold", help="minimum probability for predicting the second class (default: 0.5)"),
]
SetThresholdOption = Annotated[
    float | None,
    typer.Option(
        "--set-threshold",
        help="threshold from the conformal analysis, used to also write class sets or intervals (default: neither)",
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="replace an existing file, even if it contains no predictions")
]


@app.command(name="models", rich_help_panel="Use models")
def models_command(run: RunArgument) -> None:
    """List the models in a run directory with their scores.

    Example: fedloom models runs/patients
    """
    with print_errors():
        from fedloom.lab.experiment import list_model_rows, open_run
        from fedloom.lab.printing import print_rows

        print_rows(list_model_rows(open_run(run)), ("method", "seed", "model"))


@app.command(rich_help_panel="Use models")
def evaluate(
    run: RunArgument,
    data: DataOption,
    method: MethodOption = None,
    seed: SeedOption = None,
    client: ClientOption = None,
    model: ModelOption = None,
    data_dir: DataDir = None,
    trust: Trust = False,
) -> None:
    """Score models on new labeled data.

    Models are chosen in the same way as in predict: the model of each row's site or of --client, or else the global
    model.

    Example: fedloom evaluate runs/patients --data new.csv --method ditto --client south
    """
    with print_errors():
        from fedloom.lab.experiment import open_run
        from fedloom.lab.printing import print_rows

        opened = open_run(run, trust=trust)
        fresh = opened.read(data, data_dir)
        lines = list(opened.evaluate(fresh, method, seed, client, model))
        print_rows([line.row() for line in lines])
        notes = [note for line in lines for note in line.choice.note_outliers(line.rows.x)]
        say(*dict.fromkeys((*fresh.notes, *lines[0].rows.notes, *notes)))


@app.command(rich_help_panel="Use models")
def predict(
    run: RunArgument,
    data: Annotated[str, typer.Argument(help="unlabeled rows: a file, or the name of a data set", show_default=False)],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="label of one of the run's methods (default: the best method on validation data)",
            autocompletion=offer.methods,
        ),
    ] = None,
    seed: SeedOption = None,
    client: Annotated[
        str | None,
        typer.Option(
            "--client", help="client whose model is used (default: the site of each row)", autocompletion=offer.clients
        ),
    ] = None,
    model: ModelOption = None,
    out: Annotated[Path, typer.Option(help="CSV file to write")] = Path("predictions.csv"),
    id_column: IdColumnOption = None,
    threshold: ThresholdOption = None,
    set_threshold: SetThresholdOption = None,
    force: ForceOption = False,
    data_dir: DataDir = None,
    trust: Trust = False,
) -> None:
    """Predict classes or values for unlabeled rows. For classification, probabilities are also written.

    Example: fedloom predict runs/patients patients.csv --out predictions.csv
    """
    with print_errors():
        from fedloom.lab.experiment import open_run

        file = PredictionsFile(out, (data, model), force=force)
        predictions = open_run(run, trust=trust).predict(
            data, method, seed, client, model, data_dir, tuple(id_column or ())
        )
        file.write(predictions, threshold, set_threshold=set_threshold)


FAR_ROWS_EXIT_CODE = 3
"""Exit code if some rows are far outside the range of the training data."""


class PredictionsFile:
    """CSV file with a command's predictions.

    Without ``force``, an existing file is replaced only if it has the same columns as the new file. This protects
    labeled tables, and prediction files to which someone has added a column.

    Args:
        path: path of the file.
        inputs: files that the command reads.
        force: True to replace any existing file.

    Raises:
        ConfigError: predictions must not be written to this path.
    """

    def __init__(self, path: Path, inputs: Sequence[object], *, force: bool) -> None:
        self._path, self._inputs, self._force = path, inputs, force
        self._check(_are_columns_of_predictions)

    def write(
        self, predictions: Predictions, threshold: float | None, by: str = "", set_threshold: float | None = None
    ) -> None:
        """Write predictions and print notes about them. Classes are chosen by a threshold on the probability.

        If rows lie far outside the range of the training data, the command exits with `FAR_ROWS_EXIT_CODE`.

        Raises:
            ConfigError: the existing file has different columns.
        """
        from fedloom.lab.report.csv_files import render_table_csv
        from fedloom.storage.files import make_folder, write_atomic

        predictions = predictions.apply_threshold(threshold, set_threshold)
        content = render_table_csv(predictions.table())
        columns, _, _ = content.partition(b"\n")
        self._check(lambda line: line == columns)
        make_folder(self._path.parent)
        write_atomic(self._path, content)
        say(*predictions.notes, f"{len(predictions.scores)} predictions{by}: {self._path}")
        if predictions.far:
            far = ", ".join(map(repr, predictions.far))
            what = (
                "most numbers are far outside the range of the training data, for example because of a different unit. "
                "The predictions were written"
            )
            say(f"{far}: {what}, so the exit code is {FAR_ROWS_EXIT_CODE}", err=True)
            raise typer.Exit(FAR_ROWS_EXIT_CODE)

    def _check(self, are_columns: Callable[[bytes], bool]) -> None:
        from fedloom.outputs import FileKind, check_output_file

        def is_own(path: Path) -> bool:
            with path.open("rb") as file:
                return are_columns(file.readline().rstrip(b"\n"))

        kind = FileKind("CSV", "a CSV file of predictions with the same columns", is_own)
        check_output_file(self._path, kind, self._inputs, force=self._force)


def _are_columns_of_predictions(line: bytes) -> bool:
    """Return True if a file's first line may be the header of a predictions file.

    Only some columns are compared, because the exact columns of the new file are not yet known.
    """
    cells = line.decode(errors="replace").replace('"', "").split(",")
    return cells[0] == "row" and "model" in cells and any(cell.startswith("prediction") for cell in cells)


@app.command(rich_help_panel="Use models")
def adapt(
    run: RunArgument,
    data: DataOption,
    method: MethodOption = None,
    seed: SeedOption = None,
    rounds: Annotated[
        int, typer.Option(help="number of client rounds to train. The server's state does not change")
    ] = 1,
    epochs: Annotated[int | None, typer.Option(help="number of epochs per round (default: as in the run)")] = None,
    steps: Annotated[int | None, typer.Option(help="number of steps per round, instead of epochs")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate instead of the run's schedule")] = None,
    holdout: Annotated[float, typer.Option(help="fraction of the data to hold out for scoring")] = 0.2,
    out: Annotated[Path | None, typer.Option(help="safetensors file to write (default: RUN/adapted/...)")] = None,
    force: ForceOption = False,
    data_dir: DataDir = None,
    trust: Trust = False,
) -> None:
    """Train a personal model for a new client.

    Example: fedloom adapt runs/patients --data new.csv --method ditto --rounds 5
    """
    with print_errors():
        from fedloom.lab.experiment import open_run
        from fedloom.lab.printing import print_rows
        from fedloom.rundir import file_name
        from fedloom.trained.files import check_model_file

        opened = open_run(run, trust=trust)
        chosen = _requested_run(opened, method, seed)
        if out is None and (run / "adapted").is_symlink():
            raise ConfigError(
                f"{run / 'adapted'} is a link, so writing to it could overwrite other files. Add --out to "
                "write to a different folder"
            )
        name = f"{file_name(chosen.method)}-{chosen.seed}-{Path(data).stem}"
        place = out or run / "adapted" / f"{name}.safetensors"
        check_model_file(place, inputs=(data,), force=force)
        if "personal" not in chosen.models.kinds():
            able = [r.method for r in opened.runs(seed=chosen.seed) if "personal" in r.models.kinds()]
            raise ConfigError(
                f"{chosen.method} has no personal models: every client uses the global model. Methods "
                f"with personal models: {', '.join(able) or 'none'}"
            )
        adapted_model = chosen.models.adapt(
            opened.read(data, data_dir), rounds=rounds, epochs=epochs, steps=steps, lr=lr, holdout=holdout
        )
        path = adapted_model.save(place, force=force)
        samples = adapted_model.about["samples"]
        who = {"method": chosen.method, "seed": chosen.seed}
        scores = adapted_model.about.get("scores", {})
        if scores:
            say(f"trained on {samples['train']} samples; scores on the {samples['test']} samples held out:")
            print_rows([{**who, "model": kind, **values} for kind, values in scores.items()])
        else:
            say(f"trained on {samples['train']} samples. No samples were held out to score the model")
        say(f"model: {path}")


@app.command(rich_help_panel="Use models")
def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(help="file to write", show_default=False)],
    method: MethodOption = None,
    seed: SeedOption = None,
    client: ClientOption = None,
    model: ModelOption = None,
    format: Annotated[
        str,
        typer.Option(
            help="safetensors, torch or onnx", autocompletion=offer.complete_one_of("safetensors", "torch", "onnx")
        ),
    ] = "safetensors",
    factorise: Annotated[
        bool | None,
        typer.Option(
            help=(
                "replace each low-rank layer with two smaller layers (default: only for low-rank "
                "methods, such as FedSLR)"
            )
        ),
    ] = None,
    threshold: ThresholdOption = None,
    force: ForceOption = False,
    trust: Trust = False,
) -> None:
    """Export a model for use in other programs.

    The file contains an ONNX or torch graph that accepts raw rows, or only the parameters.

    Example: fedloom export runs/patients --method ditto --client south --format onnx --out south.onnx
    """
    with print_errors():
        from fedloom.lab.experiment import open_run
        from fedloom.trained.export import decision_sentence, unit_sentence
        from fedloom.trained.export import export_model as write
        from fedloom.trained.files import check_model_file

        check_model_file(out, format, inputs=(model,), force=force)
        opened = open_run(run, trust=trust)
        if model in (None, "global", "personal", "hybrid"):
            chosen = _requested_run(opened, method, seed).models.ready(model, client)
        else:
            chosen = opened.adapted(model, method, seed)
        thin = opened.low_rank(chosen.about["method"]) if factorise is None else factorise
        ranks = write(chosen, out, format, factorised=thin, threshold=threshold, force=force)
        if ranks:
            say(f"low-rank layers: {', '.join(f'{name} has rank {rank}' for name, rank in ranks.items())}")
            if format == "safetensors":
                say("load the file into fedloom.models.make_thin_copy(module, ranks), or export with --no-factorise")
        say(
            *filter(
                None, (decision_sentence(chosen, format, threshold), unit_sentence(chosen, opened.new_data.factors))
            )
        )
        say(f"{chosen.about['kind']} model of {chosen.about['method']}: {out}")


def _requested_run(opened: RunDirectory, method: str | None, seed: int | None) -> RecordedRun:
    """Return the requested run. By default, this is the first seed of the only method."""
    runs = opened.runs(method, seed)
    methods = list(dict.fromkeys(r.method for r in runs))
    if len(methods) > 1:
        raise ConfigError(f"the run has several methods. Add --method: {', '.join(methods)}")
    return runs[0]
