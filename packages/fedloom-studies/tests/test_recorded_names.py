"""Records and held-out federations have the first names of keys, and are read and matched as before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import ConfigError
from fedloom.lab.experiment import parse, read, restore_document, update_document
from fedloom.storage import read_toml
from fedloom_studies.map.records import read_records
from fedloom_studies.map.setups import Cell, read_setups
from fedloom_studies.reproduce.recipe import read_recipes

STUDIES = Path(__file__).parents[3] / "studies"
HELD_OUT = sorted((STUDIES / "held-out").glob("*.toml"))


@pytest.mark.parametrize("protocol", ["rounds", "gradients"])
def test_every_record_of_the_map_is_of_its_setup_as_it_is_written_now(protocol: Any) -> None:
    """The digest of a record is of a document with the first names."""
    found, of_scale = read_records(STUDIES / "results" / "map-full.jsonl", protocol), read_setups("full")
    assert len(found) > 300
    for (setup, method), record in found.items():
        if record.status not in ("not applicable", "not run"):
            assert Cell(of_scale[setup], method, record.space, protocol).digest == record.digest, (setup, method)


def lines() -> Iterator[dict[str, Any]]:
    for name in ("papers.jsonl", "system.jsonl"):
        yield from map(json.loads, (STUDIES / "results" / name).read_text().splitlines())


def test_records_of_papers_are_of_their_recipes_as_they_are_written_now() -> None:
    """A few records are of an earlier protocol, for other reasons than names."""
    known = [line for line in lines() if line["recipe"] in read_recipes()]
    fresh = [line for line in known if read_recipes()[line["recipe"]].protocol(line["scale"]) == line["protocol"]]
    assert len(fresh) >= 0.9 * len(known) > 50


@pytest.mark.parametrize("file", HELD_OUT, ids=lambda file: file.stem)
def test_a_held_out_federation_is_read_unedited(file: Path) -> None:
    recorded = read_toml(file, "held-out federation")
    experiment = read(file, recorded=True)
    assert parse(update_document(recorded)).settings() == experiment.settings()
    assert restore_document(update_document(recorded)) == recorded
    assert parse(experiment.settings()).settings() == experiment.settings()


def test_a_held_out_federation_is_no_new_file() -> None:
    refused = []
    for file in HELD_OUT:
        try:
            read(file)
        except ConfigError as error:
            refused.append(str(error))
    assert refused
    assert all("its name is now" in sentence for sentence in refused)
