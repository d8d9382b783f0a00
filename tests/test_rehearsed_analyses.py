"""Rehearsals of studies with clinical analyses: cells of few patients, and crafted questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom_sites.deploy.rehearsal import messages
from fedloom_sites.deploy.rehearsal.copies import RehearsedSite
from tests.test_analyses_at_sites import deployed

pytestmark = pytest.mark.attack("a rehearsal")


@pytest.mark.parametrize("masked", [True, False])
def test_a_least_count_of_two_turns_its_row_red(tmp_path: Path, masked: bool) -> None:
    verdicts = {}
    for least in (None, 2):
        rules = {} if least is None else {"rules": {"min_subjects": least}}
        here = deployed(tmp_path / str(least), "binary", {"kind": "table-1", **rules}, masked=masked)
        (tmp_path / f"copies-{least}").mkdir()
        site = RehearsedSite(here.sites[1], tmp_path / f"copies-{least}")
        verdicts[least] = messages.ask_small_cells(site).verdict
    questions = messages.ask_crafted_questions(site)
    assert verdicts == {None: "stopped", 2: "OPEN"}
    assert questions.verdict == "stopped"
    assert int(questions.learned.split()[0]) > 0
