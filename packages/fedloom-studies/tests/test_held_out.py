"""The federations that are held out: the files are those that were chosen, and no record is of one of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedloom.lab.experiment import read
from fedloom_studies.map.setups import read_setups

STUDIES = Path(__file__).parents[3] / "studies"
FOLDER = STUDIES / "held-out"
LISTED = dict(line.split()[::-1] for line in (FOLDER / "SHA256SUMS").read_text().splitlines())
DRAWS = ("data", "partition")


def test_the_list_is_the_one_that_was_chosen() -> None:
    assert hashlib.sha256((FOLDER / "SHA256SUMS").read_bytes()).hexdigest() in (FOLDER / "README.md").read_text()
    assert {file.name for file in FOLDER.glob("*.toml")} == LISTED.keys()
    assert len(LISTED) == 12


@pytest.mark.parametrize("name", LISTED)
def test_a_federation_is_as_it_was_chosen_and_is_not_on_the_map(name: str) -> None:
    content = (FOLDER / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == LISTED[name]
    settings = read(FOLDER / name, recorded=True).settings()
    assert settings["name"] == Path(name).stem
    for setup in read_setups("full").values():
        assert any(setup.document[table] != settings[table] for table in DRAWS)
        assert clients_of(setup.document) != clients_of(settings)


def clients_of(document: Mapping[str, Any]) -> tuple[str, str, str]:
    """The source of the data, the kind of the partition, and the column whose values are the clients."""
    return document["data"]["source"], document["partition"]["kind"], document["partition"].get("column", "")


def test_no_record_is_of_a_federation_held_out() -> None:
    for file in (STUDIES / "results").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            assert f"{record.get('setup', record.get('recipe'))}.toml" not in LISTED
