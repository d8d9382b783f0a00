"""Models on a site's disk: listing them, loading one as a plain module, and exporting one for other programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom.analyses.importance import MIN_IMPORTANCE_SAMPLES, Scored, measure_permutations
from fedloom.data import Federation
from fedloom.data.new_data import NewData
from fedloom.errors import ConfigError
from fedloom.hints import unknown_name_error
from fedloom.lab.experiment import Experiment
from fedloom.local.oracles import make_oracle
from fedloom.outputs import check_output_folder
from fedloom.storage import make_folder
from fedloom.storage.checkpoint import check_file_digest, save_tensors
from fedloom.tasks import make_task
from fedloom.trained.files import check_model_file
from fedloom.trained.model import Model as TrainedModel
from fedloom.trained.model import ModelRecipe, running_statistics
from fedloom_sites.deploy.code import read_agreed
from fedloom_sites.deploy.setting_files import check_site_folder, describe_folder, read_site
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.local_data import site_federation
from fedloom_sites.deploy.site.state import SiteModel, latest_models

PREFERRED_KINDS = ("hybrid", "personal", "global")
"""Kinds of a site's models, in order of preference."""


class OwnedModel(NamedTuple):
    """A site and its latest model in its experiment."""

    site: Site
    model: SiteModel


def find_owned_models(folder: Path) -> list[OwnedModel]:
    """Return the models in a site's folder, or in the folders of all sites of a deployment.

    Sites without a model are omitted.

    Raises:
        ConfigError: the folder does not contain a site.
        CheckpointError: a file is damaged.
    """
    files = [folder / "site.toml"] if (folder / "site.toml").exists() else sorted(folder.glob("sites/*/site.toml"))
    if not files:
        raise ConfigError(
            f"{folder} is neither a site's folder nor a deployment's directory with the folder sites/: it "
            f"{describe_folder(folder)}. Models are only in the folders of sites, so run the command at a site"
        )
    sites = sorted((read_site(file) for file in files), key=lambda site: site.client)
    return [
        OwnedModel(s, m)
        for s in sites
        for m in latest_models(s.state)
        if (m.experiment, m.client) == (s.fingerprint, s.client)
    ]


def load_raw_model(folder: Path, kind: str | None = None) -> TrainedModel:
    """Return a site's model for raw (unscaled) rows, with the scaling from the site's training split.

    Args:
        folder: folder of the site.
        kind: "global", "personal" or "hybrid". If None, this is the first available kind in `PREFERRED_KINDS`.

    Raises:
        ConfigError: no such model exists.
        DataError: the site's data, which determine how columns are scaled, cannot be read.
    """
    one = _choose_model(folder, kind)
    site, experiment = one.site, read_agreed(one.site)
    facts, scaling = site.samples, None
    if facts.table is not None:  # the site's own markers of missing cells, in addition to the agreed ones
        markers = tuple(dict.fromkeys((*facts.table.missing, *site.data.get("missing", ()))))
        facts = facts.with_(table=facts.table.with_(missing=markers))
    trained = _load_trained(one, experiment)
    trained = replace(trained, recipe=replace(trained.recipe, facts=facts))
    if facts.table is None and trained.recipe.objective.line_part is None:
        return trained
    fed = _load_site_samples(one, experiment, trained)
    if fed.data.fitted is not None:
        scaling = fed.data.fitted.values[site.client if site.share == "partition" else 0]
    return _add_recalibration(replace(trained, fitted=scaling), fed, site.client)


def _load_trained(one: OwnedModel, experiment: Experiment) -> TrainedModel:
    """Return a site's model for scaled samples, with batch statistics from the site's training split.

    The site's scores in a round are computed in the same way, so no statistics are sent.

    Raises:
        ConfigError: the model uses batch statistics, but the site has no samples.
        DataError: the data for these statistics cannot be read.
    """
    site, setting, row = one.site, experiment.methods[0].setting, _read_model_row(one)
    recipe = ModelRecipe(setting.model, site.samples, experiment.head.seeds[0], row.dtype, setting.task)
    about = {
        "method": experiment.methods[0].label,
        "seed": experiment.head.seeds[0],
        "kind": one.model.kind,
        "client": site.site,
        "round": one.model.round,
    }
    trained, module = TrainedModel(recipe, row, row[:0], None, about), recipe.build()
    if not running_statistics(module):
        return trained
    fed = _load_site_samples(one, experiment, trained)
    if fed.data.name == "blank":
        raise ConfigError(
            f"{site.site} has no samples, but the model's normalization layers need statistics of "
            "training samples. Use the model at a site with samples"
        )
    oracle = make_oracle(module, make_task(fed.data, setting.task), fed)
    oracle.set_statistics(row, torch.tensor([site.client]))
    return replace(trained, statistics=torch.cat([s.flatten() for s in running_statistics(oracle.module)]))


def _load_site_samples(one: OwnedModel, experiment: Experiment, trained: TrainedModel) -> Federation:
    """Return the site's samples in the floating-point type of its model."""
    return site_federation(experiment, one.site).to(torch.device("cpu"), trained.row.dtype)


def _add_recalibration(trained: TrainedModel, fed: Federation, client: int) -> TrainedModel:
    """Return the site's model, including the site's recalibration line if the experiment uses recalibration."""
    part = trained.recipe.objective.line_part
    if part is None or fed.data.name == "blank":
        return trained
    return replace(trained, calibration=trained.line(fed, part, client))


def _choose_model(folder: Path, kind: str | None) -> OwnedModel:
    """Return a site's model of the given kind, or of the first available kind in `PREFERRED_KINDS`.

    Raises:
        ConfigError: no such model exists.
    """
    check_site_folder(folder)
    models_there = {one.model.kind: one for one in find_owned_models(folder)}
    if not models_there:
        raise ConfigError(f"{folder} contains no model yet: a site has a model after its first round")
    chosen = kind or min(
        models_there, key=lambda name: PREFERRED_KINDS.index(name) if name in PREFERRED_KINDS else len(PREFERRED_KINDS)
    )
    if chosen not in models_there:
        raise unknown_name_error("model", chosen, models_there, str(folder))
    return models_there[chosen]


def _read_model_row(one: OwnedModel) -> Tensor:
    """Return a site's model ``[d]``, read from disk.

    Raises:
        LayoutError: the file is damaged, or the path is not a regular file.
    """
    check_file_digest(one.model.path)
    return load_file(one.model.path)["rows"][0]


def new_row_options(folder: Path) -> NewData:
    """Return a site's options for reading new rows, which are the same as for the site's data."""
    return NewData(read_site(folder / "site.toml").data)


def statistics_note(folder: Path, kind: str | None = None) -> list[str]:
    """If a simulation would compute different batch statistics for a model, return a list with a note, otherwise [].

    Args:
        folder: folder of the site.
        kind: see `load_raw_model`.
    """
    one = _choose_model(folder, kind)
    setting, samples = read_agreed(one.site).methods[0].setting, one.site.samples
    if one.model.kind != "global" or setting.evaluate.batchnorm_stats == "own":
        return []
    module = setting.model.build(samples.shape, samples.outputs, 0, samples.tokens)
    return [
        "normalization layers use the statistics of this site's own training part, as in the scores of the deployment. "
        "A simulation averages them over its clients, unless evaluate.batchnorm_stats = 'own'"
    ] * bool(running_statistics(module))


def module_of(one: OwnedModel) -> nn.Module:
    """Return a site's model as a plain module in evaluation mode. It raises the same errors as `_load_trained`."""
    return _load_trained(one, read_agreed(one.site)).module()


@torch.no_grad()
def column_importances(folder: Path, kind: str | None = None) -> list[tuple[str, str, float, float]]:
    """Compute the importance of every column for a site's model on the site's test split (see `measure_permutations`).

    Args:
        folder: folder of the site.
        kind: see `load_raw_model`.

    Raises:
        ConfigError: no such model exists, the site has too few test samples, or the samples are not rows of a table.
        DataError: the data cannot be read.
    """
    one = _choose_model(folder, kind)
    experiment, site = read_agreed(one.site), one.site
    trained = _load_trained(one, experiment)
    fed = _load_site_samples(one, experiment, trained)
    index = fed.indices("test", site.client)
    if len(index) < MIN_IMPORTANCE_SAMPLES:
        raise ConfigError(
            f"{site.site} has {len(index)} test samples, but importance needs at least "
            f"{MIN_IMPORTANCE_SAMPLES} test samples"
        )
    module, task = trained.module(), make_task(fed.data, trained.recipe.objective)
    scored = Scored(lambda x: module(x).flatten(0, -2), task, fed, index)
    return measure_permutations(scored, experiment.head.seeds[0], site.client)


def score_site_model(one: OwnedModel) -> dict[str, float]:
    """Compute the metrics of a site's stored model on its test split. Return {} if there are no test samples.

    Raises:
        ConfigError: see `_load_trained`.
        DataError: the data cannot be read.
    """
    experiment, client = read_agreed(one.site), one.site.client
    trained = _load_trained(one, experiment)
    fed = _load_site_samples(one, experiment, trained)
    return _add_recalibration(trained, fed, client).score_part(fed, "test", client)


def export_state_dict(one: OwnedModel, out: Path, *, force: bool = False) -> Path:
    """Write a site's model as a state dict to ``<site>.safetensors``, and return the path.

    The plain module can load this file.

    Args:
        one: a site and its model.
        out: folder for the file. A model that fedloom wrote to the same path earlier is replaced.
        force: True to replace even a file of a different kind.

    Returns:
        The file.

    Raises:
        ConfigError: the folder belongs to a run or a deployment, or the existing file is of a different kind.
        CheckpointError: the disk cannot be written to.
    """
    check_output_folder(out)
    path = check_model_file(out / f"{one.site.site}.safetensors", force=force)
    make_folder(out)
    about = {"site": one.site.site, "experiment": one.site.name, "round": str(one.model.round), "kind": one.model.kind}
    save_tensors(path, {k: v.contiguous() for k, v in module_of(one).state_dict().items()}, about)
    return path
