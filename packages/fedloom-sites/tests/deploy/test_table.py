"""The table of sites, and the models on their disks, from files alone."""

import math
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedloom.errors import CheckpointError, ConfigError, LayoutError
from fedloom.lab.cli import app
from fedloom.lab.experiment import read
from fedloom.rows.layout import Layout
from fedloom_sites.deploy.ops.table import mean_table, site_table
from fedloom_sites.deploy.setting_files import read_site
from fedloom_sites.deploy.site.local_data import site_federation
from fedloom_sites.deploy.site.models import (
    export_state_dict,
    find_owned_models,
    load_raw_model,
    module_of,
    score_site_model,
)
from fedloom_sites.deploy.site.state import SiteState


def test_last_figures_of_every_site_and_model(tmp_path):
    columns = ("round", "client", "model", "part", "metric", "value")
    rows = [
        (0, 0, "global", "test", "accuracy", 0.1),
        (5, 0, "global", "test", "accuracy", 0.5),
        (5, 1, "global", "test", "accuracy", 0.6),
        (5, 1, "personal", "test", "accuracy", 0.9),
        (5, 1, "personal", "test", "loss", 0.3),
        (5, 1, "personal", "train", "accuracy", 1.0),
        (5, -1, "global", "test", "accuracy", 0.55),
        (5, 0, "", "", "bytes_up", 100.0),
        (7, 0, "global", "test", "accuracy", 0.7),
        (7, 0, "global", "test", "auroc", math.nan),
        (7, 0, "global", "test", "loss", 0.2),
        (7, 1, "global", "test", "accuracy", math.nan),  # it was not there
        (7, 1, "global", "test", "loss", math.nan),
        (7, -1, "global", "test", "accuracy/mean", 0.7),
    ]
    pq.write_table(
        pa.table(dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))), tmp_path / "m.parquet"
    )
    assert site_table(tmp_path / "m.parquet", {0: "north", 1: "south"}) == [
        {
            "site": "north",
            "model": "global",
            "round": 7,
            "accuracy": 0.7,
            "auroc": pytest.approx(math.nan, nan_ok=True),
            "loss": 0.2,
        },
        {"site": "south", "model": "global", "round": 5, "accuracy": 0.6},
        {"site": "south", "model": "personal", "round": 5, "accuracy": 0.9, "loss": 0.3},
    ]
    assert mean_table(tmp_path / "m.parquet") == [{"model": "global", "round": 7, "accuracy": 0.7, "sites": 1}]
    south = site_table(tmp_path / "m.parquet", {1: "south"})
    assert [row["accuracy"] for row in south] == [0.6, 0.9], "a site that was taken out leaves the others their own"


@pytest.fixture
def kept(ready):
    """A deployment whose site-1 has a model after round 7."""
    site = read_site(ready / "sites" / "site-1" / "site.toml")
    module = read(site.experiment).common.model.build(site.samples.shape, site.samples.outputs, 3)
    layout = Layout.create(module)
    row = torch.arange(layout.d, dtype=torch.float32) / layout.d
    SiteState(site.state, site.fingerprint, site.client).keep_model(row, layout.header(), 7, "personal")
    return ready, row, module


def test_a_sites_model_is_found_loaded_and_exported(kept, tmp_path):
    folder, row, module = kept
    (one,) = find_owned_models(folder)
    assert find_owned_models(folder / "sites" / "site-1") == [one]
    assert find_owned_models(folder / "sites" / "site-2") == []
    assert (one.site.site, one.model.round, one.model.kind) == ("site-1", 7, "personal")
    assert torch.equal(Layout.create(module).vector(module_of(one)), row)
    module.load_state_dict(load_file(export_state_dict(one, tmp_path / "out")))
    assert torch.equal(Layout.create(module).vector(module), row)


def test_a_sites_model_is_scored_on_its_own_test_part(kept):
    folder, _, _ = kept
    (one,) = find_owned_models(folder)
    fed = site_federation(read(one.site.experiment), one.site)
    index = fed.indices("test", 1)
    hits = module_of(one)(fed.fetch(index)).argmax(1) == fed.targets(index)
    assert len(index) > 5
    assert score_site_model(one)["accuracy"] == pytest.approx(hits.double().mean().item())


def test_a_model_of_another_experiment_is_not_shown(kept):
    folder, _, _ = kept
    file = folder / "sites" / "site-1" / "site.toml"
    site = read_site(file)
    file.write_text(file.read_text().replace(site.fingerprint, "0" * 64))
    assert find_owned_models(folder) == []


def test_a_damaged_model_is_a_sentence(kept):
    folder, _, _ = kept
    (one,) = find_owned_models(folder)
    one.model.path.write_bytes(one.model.path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match="damaged"):
        find_owned_models(folder)


def test_the_command(kept, tmp_path):
    folder, _, _ = kept
    listed = CliRunner().invoke(app, ["deploy", "models", str(folder), "--test"])
    assert listed.exit_code == 0
    assert "accuracy 0." in listed.output
    assert listed.output.split()[:4] == ["site-1", "personal", "round", "7"]
    done = CliRunner().invoke(app, ["deploy", "models", str(folder), "--out", str(tmp_path / "out")])
    assert done.output.strip().endswith("site-1.safetensors")
    none = CliRunner().invoke(app, ["deploy", "models", str(folder / "sites" / "site-0")])
    assert "no model yet" in none.output
    wrong = CliRunner().invoke(app, ["deploy", "models", str(tmp_path)])
    assert wrong.exit_code == 2
    with pytest.raises(ConfigError, match="neither a site's folder"):
        find_owned_models(tmp_path)


USES = {
    "figures": lambda one: score_site_model(one),
    "module_of": module_of,
    "used": lambda one: load_raw_model(one.site.state.parent),
}


@pytest.mark.parametrize("use", USES)
def test_a_damaged_model_of_a_site_is_refused_at_every_door(use, kept):
    (one,) = find_owned_models(kept[0])
    content = bytearray(one.model.path.read_bytes())
    content[-3] ^= 64
    one.model.path.write_bytes(content)
    with pytest.raises(LayoutError, match="is damaged"):
        USES[use](one)


def test_the_model_of_another_site_is_not_this_ones(kept):
    folder, *_ = kept
    (one,) = find_owned_models(folder)
    other = folder / "sites" / "site-2" / one.model.path.relative_to(one.site.state.parent)
    other.parent.mkdir(parents=True)
    shutil.copy(one.model.path, other)
    assert [found.site.site for found in find_owned_models(folder)] == ["site-1"]


def test_a_pipe_in_the_place_of_a_model_is_not_waited_for(kept):
    (one,) = find_owned_models(kept[0])
    one.model.path.unlink()
    os.mkfifo(one.model.path)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        find_owned_models(kept[0])
    with pytest.raises(LayoutError):
        module_of(one)
