"""The models that lie on a site's own disk: which there are, as a plain module, and as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn

from fedloom.deploy.code import read_agreed
from fedloom.deploy.settings import Site, read_site
from fedloom.deploy.site.local_data import site_federation
from fedloom.deploy.site.state import Model, models
from fedloom.errors import ConfigError
from fedloom.rows.layout import Layout
from fedloom.storage.checkpoint import check_digest, save_tensors
from fedloom.storage.files import make_folder
from fedloom.tasks import task_of


class Owned(NamedTuple):
    """The newest model of a site in its experiment."""

    site: Site
    model: Model


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
    return [Owned(s, m) for s in sites for m in models(s.state) if m.experiment == s.fingerprint]


def module_of(one: Owned) -> nn.Module:
    """A site's model as a plain module in evaluation mode."""
    samples, experiment = one.site.samples, read_agreed(one.site)
    module = experiment.methods[0].setting.model.build(
        samples.shape, samples.outputs, experiment.head.seeds[0], samples.tokens
    )
    check_digest(one.model.path)
    Layout.of(module).load(module, load_file(one.model.path)["rows"][0])
    return module.eval()


@torch.no_grad()
def figures(one: Owned) -> dict[str, float]:
    """Metrics of a site's model, from its disk, on the site's own test part; nan where there is no test sample.

    Raises:
        DataError: the data cannot be read.
    """
    experiment = read_agreed(one.site)
    fed = site_federation(experiment, one.site)
    index = fed.indices("test", one.site.client)
    found = task_of(fed.data, experiment.methods[0].setting.task).metrics(
        module_of(one)(fed.fetch(index)).flatten(0, -2),
        fed.targets(index),
        torch.zeros(len(index), dtype=torch.long),
        1,
    )
    return {name: float(value) for name, value in found.items()}


def export(one: Owned, out: Path) -> Path:
    """Write a site's model as a state dict, ``<site>.safetensors``; the plain module loads it.

    Raises:
        CheckpointError: the disk refuses.
    """
    make_folder(out)
    path = out / f"{one.site.site}.safetensors"
    about = {"site": one.site.site, "experiment": one.site.name, "round": str(one.model.round), "kind": one.model.kind}
    save_tensors(path, {k: v.contiguous() for k, v in module_of(one).state_dict().items()}, about)
    return path
