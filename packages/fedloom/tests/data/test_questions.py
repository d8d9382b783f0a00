"""`fedloom init` chooses an outcome where the evidence is clear and asks where it is not, on public tables."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.data.survey.columns import Survey
from fedloom.data.survey.draft import Draft
from fedloom.errors import ConfigError, FedloomError
from fedloom.lab.cli import app
from fedloom.lab.experiment import parse
from tests.data.outcome_key import KEY, WITHOUT_ONE, Key, frame_of

RUNNER = CliRunner()


@cache
def found(name: str, folder: Path) -> Key | str:
    """What a table is drafted for without options, or what is asked."""
    path = folder / f"{name.partition('.')[2]}.csv"
    frame_of(name).to_csv(path, index=False)
    try:
        draft = Draft(Survey(path), None, None)
    except FedloomError as error:
        return str(error)
    return draft.questions[0] if draft.questions else Key(*draft.chosen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lifelines")
    return tmp_path_factory.mktemp("public")


def test_public_tables_are_drafted_rightly_or_asked_about(folder: Path) -> None:
    drafts = {name: found(name, folder) for name in KEY}
    wrong = {name: got for name, got in drafts.items() if isinstance(got, Key) and got != KEY[name]}
    right = [name for name, got in drafts.items() if got == KEY[name]]
    assert len(KEY) == 31
    assert wrong == {}
    assert len(right) >= 0.6 * len(KEY), sorted(set(KEY) - set(right))


@pytest.mark.parametrize("name", WITHOUT_ONE)
def test_a_table_without_one_outcome_is_never_drafted(name: str, folder: Path) -> None:
    assert isinstance(found(name, folder), str)


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        ("age,bmi,smoker", lambda k: (20 + k % 50, k % 17 + 0.5, k % 2), "is predicted? It may be 'smoker'"),
        ("age,time,status,stage", lambda k: (20 + k % 50, 1 + k % 90, k % 3, k % 4), "coded 0, 1, 2: write 1 for the"),
        ("age,time,cens", lambda k: (20 + k % 50, 1 + k % 90, (k // 3) % 2), "not where 1 is censored"),
        ("start,stop,event,age", lambda k: (k % 9, 10 + k % 90, (k // 7) % 2, k % 60), "looks like a late entry"),
        ("age,target,label", lambda k: (20 + k % 50, k % 2, (k // 2) % 2), "'label', 'target'"),
        ("x,y,zinc,lead", lambda k: (k % 40, k % 31, k % 23 + 0.5, k % 19), "which column is predicted"),
        ("clinic,device,age,target", lambda k: (k % 4, k % 3, 20 + k % 50, (k // 3) % 2), "names the site of a row"),
        ("hb,target", lambda k: ({7: "12,4", 9: "again"}.get(k, 10 + k % 7), (k // 3) % 2), "mean missing"),
    ],
)  # fmt: skip
def test_a_draft_that_asks_does_not_run_and_names_the_question(
    header: str, row: Callable[[int], tuple[object, ...]], words: str, tmp_path: Path
) -> None:
    path, file = tmp_path / "t.csv", tmp_path / "t.toml"
    lines = [header, *(";".join(map(str, row(k))) for k in range(200))]
    path.write_text("\n".join([header.replace(",", ";"), *lines[1:]]) + "\n")
    done = RUNNER.invoke(app, ["init", str(path)])
    assert done.exit_code == 0, done.output
    assert words in done.output
    assert words in tomllib.loads(file.read_text())["questions"][0]
    ran = RUNNER.invoke(app, ["run", str(file), "--out", str(tmp_path / "out")])
    assert ran.exit_code == 2
    assert ran.output.count("error:") == 1
    assert words in ran.output
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="is a draft with an open question"):
        parse(tomllib.loads(file.read_text()), "t.toml")
    asked = RUNNER.invoke(app, ["init", str(path), "--agree", "--force"])
    assert asked.exit_code == 2
    assert not (tmp_path / "t.agreement.toml").exists()


def test_the_answer_that_a_question_names_works(tmp_path: Path) -> None:
    path = tmp_path / "my table.csv"
    rows = [f"{20 + k % 50},{k % 17 + 0.5},{(k * 7) % 11 % 2}" for k in range(200)]
    path.write_text("\n".join(["age,bmi,smoker", *rows]) + "\n")
    assert "--target smoker" in RUNNER.invoke(app, ["init", str(path)]).output
    done = RUNNER.invoke(app, ["init", str(path), "--force", "--target", "smoker"])
    assert done.exit_code == 0
    assert "questions" not in tomllib.loads((tmp_path / "my table.toml").read_text())


def test_times_of_zero_are_times(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{20 + k % 50},{k % 90},{(k // 7) % 2}" for k in range(200)]
    path.write_text("\n".join(["age,time,died", *rows]) + "\n")
    draft = Draft(Survey(path), None, None)
    assert not draft.questions
    assert "time" in "\n".join(line for line in draft.report if line.startswith("target"))


def test_an_outcome_is_not_taken_for_the_site(tmp_path: Path) -> None:
    path = tmp_path / "admissions.csv"
    rows = [f"{k % 5},{20 + k % 61},{(k * 7) % 11 % 2},{int(k % 29 > 0)}" for k in range(200)]
    path.write_text("\n".join(["kind,age,hospital_expire_flag,has_chart", *rows]) + "\n")
    draft = Draft(Survey(path), None, None)
    assert draft.questions
    assert "site: no column names one" in "\n".join(draft.report)
