"""The models that lie on a site's own disk: which there are, as a plain module, and as a file for other programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom.data.new_data import NewData
from fedloom.deploy.code import read_agreed
from fedloom.deploy.settings import Site, read_site
from fedloom.deploy.site.local_data import site_federation
from fedloom.deploy.site.state import SiteModel, models
from fedloom.errors import ConfigError, unknown
from fedloom.experiment.analyses.importance import FEWEST, Scored, permuted
from fedloom.rows.layout import Layout
from fedloom.storage.checkpoint import check_digest, save_tensors
from fedloom.storage.files import make_folder
from fedloom.tasks import task_of
from fedloom.trained.model import Model as TrainedModel
from fedloom.trained.model import ModelRecipe, outputs_of

PREFERRED = ("hybrid", "personal", "global")
"""Kinds of a site's models, the one that it uses first."""


class Owned(NamedTuple):
    """The newest model of a site in its experiment."""

    site: Site
    model: SiteModel


def owned(folder: Path) -> list[Owned]:
    """The models of a site's folder, or of all sites of a deployment's directory; sites without one are left out.

    Raises:
        ConfigError: there is no site.
        CheckpointError: a file is damaged.
    """
    files = [folder / "site.toml"] if (folder / "site.toml").exists() else sorted(folder.glob("sites/*/site.toml"))
    if not files:
        raise ConfigError(f"{folder} is neither a site's folder (site.toml) nor a deployment's directory (sites/)")
    sites = sorted((read_site(file) for file in files), key=lambda site: site.client)
    return [
        Owned(s, m) for s in sites for m in models(s.state) if (m.experiment, m.client) == (s.fingerprint, s.client)
    ]


def used(folder: Path, kind: str | None = None) -> TrainedModel:
    """A site's model as the site uses it: on raw rows, with the scaling of its own training part.

    Args:
        folder: of the site.
        kind: "global", "personal" or "hybrid"; None: the first of `PREFERRED` that is there.

    Raises:
        ConfigError: there is no such model.
        DataError: the site's data, which its columns are scaled by, cannot be read.
    """
    one = _chosen(folder, kind)
    site, experiment = one.site, read_agreed(one.site)
    row = _row(one)
    facts, scaling = site.samples, None
    if facts.table is not None:  # the site's own markers of gaps beside those that were agreed on
        markers = tuple(dict.fromkeys((*facts.table.missing, *site.data.get("missing", ()))))
        facts = facts.with_(table=facts.table.with_(missing=markers))
    recipe = ModelRecipe(experiment.common.model, facts, experiment.head.seeds[0], row.dtype, experiment.common.task)
    fed = None if facts.table is None and recipe.objective.line_part is None else site_federation(experiment, site)
    if fed is not None and (fitted := fed.data.fitted) is not None:
        scaling = fitted.values[site.client if site.share == "partition" else 0]
    about = {
        "method": experiment.methods[0].label,
        "seed": experiment.head.seeds[0],
        "kind": one.model.kind,
        "client": site.site,
        "round": one.model.round,
    }
    trained = TrainedModel(recipe, row, row[:0], scaling, about)
    part = recipe.objective.line_part
    if fed is None or part is None or fed.data.name == "blank":
        return trained
    index = fed.indices(part, site.client)
    outputs = outputs_of(trained.module(), fed, index) if len(index) else torch.zeros(0, 1)
    owner = torch.zeros(len(index), dtype=torch.long)
    return replace(trained, calibration=recipe.objective.line(outputs, fed.targets(index), owner, 1)[0])


def _chosen(folder: Path, kind: str | None) -> Owned:
    """The model of a kind in a site's folder, or the first of `PREFERRED`.

    Raises:
        ConfigError: there is no such model.
    """
    if not (folder / "site.toml").exists():
        raise ConfigError(f"{folder} is no site's folder: it has no site.toml")
    models_there = {one.model.kind: one for one in owned(folder)}
    if not models_there:
        raise ConfigError(f"{folder} has no model yet: a site has one after the first round that it took part in")
    chosen = kind or min(models_there, key=lambda name: PREFERRED.index(name) if name in PREFERRED else len(PREFERRED))
    if chosen not in models_there:
        raise unknown("model", chosen, models_there, str(folder))
    return models_there[chosen]


def _row(one: Owned) -> Tensor:
    """A site's model ``[d]``, from its disk.

    Raises:
        LayoutError: the file is damaged, or no regular file.
    """
    check_digest(one.model.path)
    return load_file(one.model.path)["rows"][0]


def new_rows(folder: Path) -> NewData:
    """How new rows at a site are read: as its own data are."""
    return NewData(read_site(folder / "site.toml").data)


def module_of(one: Owned) -> nn.Module:
    """A site's model as a plain module in evaluation mode."""
    samples, experiment = one.site.samples, read_agreed(one.site)
    module = experiment.methods[0].setting.model.build(
        samples.shape, samples.outputs, experiment.head.seeds[0], samples.tokens
    )
    Layout.of(module).load(module, _row(one))
    return module.eval()


@torch.no_grad()
def importances(folder: Path, kind: str | None = None) -> list[tuple[str, str, float, float]]:
    """Importance of every column for a site's model on its own test part; see `permuted`.

    Args:
        folder: of the site.
        kind: as in `used`.

    Raises:
        ConfigError: there is no such model, or the site has too few test samples.
        Refused: the samples are no rows of a table.
        DataError: the data cannot be read.
    """
    one = _chosen(folder, kind)
    experiment, site = read_agreed(one.site), one.site
    setting = experiment.methods[0].setting
    dtype: torch.dtype = getattr(torch, setting.engine.dtype)
    fed = site_federation(experiment, site).to(torch.device("cpu"), dtype)
    index = fed.indices("test", site.client)
    if len(index) < FEWEST:
        raise ConfigError(f"{site.site} has {len(index)} test samples, importance needs at least {FEWEST}")
    module = module_of(one).to(dtype)
    scored = Scored(lambda x: module(x).flatten(0, -2), task_of(fed.data, setting.task), fed, index)
    return permuted(scored, experiment.head.seeds[0], site.client)


@torch.no_grad()
def figures(one: Owned) -> dict[str, float]:
    """Metrics of a site's model, from its disk, on the site's own test part; nan where there is no test sample.

    Raises:
        DataError: the data cannot be read.
    """
    experiment = read_agreed(one.site)
    fed = site_federation(experiment, one.site)
    index = fed.indices("test", one.site.client)
    scores = task_of(fed.data, experiment.methods[0].setting.task).metrics(
        module_of(one)(fed.fetch(index)).flatten(0, -2),
        fed.targets(index),
        torch.zeros(len(index), dtype=torch.long),
        1,
    )
    return {name: float(value) for name, value in scores.items()}


def export(one: Owned, out: Path) -> Path:
    """Write a site's model as a state dict, ``<site>.safetensors``; the plain module loads it.

    Returns:
        The file.

    Raises:
        CheckpointError: the disk refuses.
    """
    make_folder(out)
    path = out / f"{one.site.site}.safetensors"
    about = {"site": one.site.site, "experiment": one.site.name, "round": str(one.model.round), "kind": one.model.kind}
    save_tensors(path, {k: v.contiguous() for k, v in module_of(one).state_dict().items()}, about)
    return path
