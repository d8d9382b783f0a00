"""``fedloom deploy`` commands for the models of sites: ``models``, ``predict``, ``evaluate`` and ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.formats import format_significant
from fedloom.lab.cli import (
    ForceOption,
    IdColumnOption,
    PredictionsFile,
    SetThresholdOption,
    ThresholdOption,
    print_errors,
    say,
)
from fedloom_sites.cli.deploy import SiteFolder, deploy

FileKind = Annotated[
    str | None, typer.Option("--model", help="global, personal or hybrid (default: the model used by the site)")
]


@deploy.command()
def models(
    folder: Annotated[Path, typer.Argument(help="a site's folder, or a deployment's directory", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="folder for exported state dicts, one per site")] = None,
    test: Annotated[bool, typer.Option("--test", help="score each model on its own site's test data")] = False,
    force: ForceOption = False,
) -> None:
    """List, score and export the sites' models.

    Exports are state dicts for the plain PyTorch module.

    Example: fedloom deploy models /srv/fedloom/site --out models
    """
    with print_errors():
        from fedloom.outputs import check_output_folder
        from fedloom_sites.deploy.site.models import export_state_dict, find_owned_models, score_site_model

        if out is not None:
            check_output_folder(out)
        models_there = find_owned_models(folder)
        if not models_there:
            say("there is no model yet. A site has a model after its first round")
        for one in models_there:
            path = one.model.path if out is None else export_state_dict(one, out, force=force)
            say(f"{one.site.site:<16}{one.model.kind:<10}round {one.model.round:<6}{path}")
            if test:
                scores = ", ".join(
                    f"{name} {format_significant(value)}" for name, value in score_site_model(one).items()
                )
                say(f"  {scores or 'no test samples'}")


@deploy.command()
def predict(
    site: SiteFolder,
    rows: Annotated[Path, typer.Argument(help="file of unlabeled rows", show_default=False)],
    model: FileKind = None,
    out: Annotated[Path, typer.Option(help="CSV file to write")] = Path("predictions.csv"),
    id_column: IdColumnOption = None,
    threshold: ThresholdOption = None,
    set_threshold: SetThresholdOption = None,
    force: ForceOption = False,
) -> None:
    """Predict raw rows with the site's own model. The rows are scaled like the site's own data.

    Example: fedloom deploy predict /srv/fedloom/site new.csv
    """
    with print_errors():
        from fedloom.trained.predictions import predict_assigned_rows, predict_with_one
        from fedloom_sites.deploy.site.models import load_raw_model, new_row_options

        file = PredictionsFile(out, (rows,), force=force)
        trained = load_raw_model(site, model)
        inputs = new_row_options(site).rows(trained.recipe.facts, rows, None, tuple(id_column or ()))
        predictions = predict_assigned_rows(inputs, predict_with_one(trained, inputs))
        file.write(
            predictions, threshold, f" by the {trained.about['kind']} model of {predictions.models[0]}", set_threshold
        )


@deploy.command()
def evaluate(
    site: SiteFolder,
    rows: Annotated[Path | None, typer.Argument(help="file of labeled rows", show_default=False)] = None,
    model: FileKind = None,
    importance: Annotated[
        bool,
        typer.Option("--importance", help="permute each column of the site's own test set instead of scoring a file"),
    ] = False,
) -> None:
    """Score a site's model, or show which columns matter to it. Rows are scaled and predicted like the site's own data.

    Example: fedloom deploy evaluate /srv/fedloom/site last-month.csv
    """
    with print_errors():
        from fedloom.data.new_rows import new_rows as taken
        from fedloom.errors import ConfigError
        from fedloom.lab.printing import print_rows
        from fedloom.trained.predictions import OWN_SCALE, ModelEvaluation, predict_with_one
        from fedloom_sites.deploy.site.models import (
            column_importances,
            load_raw_model,
            new_row_options,
            statistics_note,
        )

        if importance is (rows is not None):
            raise ConfigError("pass a file of labeled rows, or use --importance, which uses the site's own test set")
        notes = statistics_note(site, model)
        if rows is None:
            heads = ("column", "metric", "loss by permutation", "standard deviation")
            print_rows([dict(zip(heads, line, strict=True)) for line in column_importances(site, model)])
            say(*notes)
            return
        trained = load_raw_model(site, model)
        data = new_row_options(site).labelled(trained.recipe.facts, rows)
        inputs = taken(trained.recipe.facts, data)
        scored = ModelEvaluation(
            trained.about, trained.about["kind"], OWN_SCALE, predict_with_one(trained, inputs), inputs, data
        )
        print_rows([scored.row()])
        say(*inputs.notes, *scored.choice.note_outliers(inputs.x), *notes)


@deploy.command()
def export(
    site: SiteFolder,
    out: Annotated[Path, typer.Option(help="file to write", show_default=False)],
    model: FileKind = None,
    format: Annotated[str, typer.Option(help="onnx, torch or safetensors")] = "onnx",
    threshold: ThresholdOption = None,
    force: ForceOption = False,
) -> None:
    """Export a site's model for other programs.

    The file contains an ONNX or torch graph that accepts raw rows and includes the site's scaling.

    Example: fedloom deploy export /srv/fedloom/site --out model.onnx
    """
    with print_errors():
        from fedloom.trained.export import decision_sentence, unit_sentence
        from fedloom.trained.export import export_model as write
        from fedloom.trained.files import check_model_file
        from fedloom_sites.deploy.site.models import load_raw_model, new_row_options

        check_model_file(out, format, force=force)
        trained = load_raw_model(site, model)
        write(trained, out, format, threshold=threshold, force=force)
        say(
            *filter(
                None,
                (decision_sentence(trained, format, threshold), unit_sentence(trained, new_row_options(site).factors)),
            )
        )
        say(f"{trained.about['kind']} model of {trained.about['client']}: {out}")
