"""`fedloom init` chooses an outcome where the evidence is clear and asks where it is not, on public tables."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedloom.errors import ConfigError, FedloomError
from fedloom.lab.cli import app
from fedloom.lab.experiment import parse
from fedloom_clinic.drafts.columns import TableSurvey
from fedloom_clinic.drafts.draft import ExperimentDraft
from tests.outcome_key import KEY, WITHOUT_ONE, Key, frame_of

RUNNER = CliRunner()


@cache
def found(name: str, folder: Path) -> Key | str:
    """What a table is drafted for without options, or what is asked."""
    path = folder / f"{name.partition('.')[2]}.csv"
    frame_of(name).to_csv(path, index=False)
    try:
        draft = ExperimentDraft(TableSurvey(path), None, None)
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
        ("age,time,cens", lambda k: (20 + k % 50, 1 + k % 90, (k // 3) % 2), "not if 1 means censored"),
        ("start,stop,event,age", lambda k: (k % 9, 10 + k % 90, (k // 7) % 2, k % 60), "looks like a late entry"),
        ("age,exposure_time,event", lambda k: (20 + k % 50, 1 + k % 90, (k // 7) % 2), "a time to an event, or one"),
        ("age,screen_time,status", lambda k: (20 + k % 50, 1 + k % 90, (k // 7) % 2), "a time to an event, or one"),
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


def test_a_question_proposes_no_option_without_a_value(tmp_path: Path) -> None:
    """The command line refuses an empty word, so a column without a name cannot be an answer."""
    path = tmp_path / "t.csv"
    rows = [f"{20 + k % 50},{k % 17 + 0.5},{(k * 7) % 11 % 2}" for k in range(200)]
    path.write_text("\n".join(["age,bmi,", *rows]) + "\n")
    asked = RUNNER.invoke(app, ["init", str(path)]).output
    assert "--target ''" not in asked
    assert "write a name for it in the header" in asked
    path.write_text("\n".join(["age,bmi,ill", *rows]) + "\n")
    assert RUNNER.invoke(app, ["init", str(path), "--force", "--target", "ill"]).exit_code == 0


@pytest.mark.parametrize("name", ["age_months", "los_days", "length_of_stay_days", "gestation_weeks"])
def test_a_time_that_is_over_before_the_outcome_is_no_time_to_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{20 + k % 50},{1 + k % 90},{(k // 7) % 2}" for k in range(200)]
    path.write_text("\n".join([f"bmi,{name},died", *rows]) + "\n")
    draft = ExperimentDraft(TableSurvey(path), None, None)
    assert not draft.questions
    assert draft.chosen[:2] == ("died", None)


@pytest.mark.parametrize("first", [0, -1])
def test_times_of_zero_and_a_typing_error_are_times(first: int, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{20 + k % 50},{k % 90 if k else first},{(k // 7) % 2}" for k in range(200)]
    path.write_text("\n".join(["age,time,died", *rows]) + "\n")
    draft = ExperimentDraft(TableSurvey(path), None, None)
    assert not draft.questions
    assert "time" in "\n".join(line for line in draft.report if line.startswith("target"))


def test_an_outcome_is_not_taken_for_the_site(tmp_path: Path) -> None:
    path = tmp_path / "admissions.csv"
    rows = [f"{k % 5},{20 + k % 61},{(k * 7) % 11 % 2},{int(k % 29 > 0)}" for k in range(200)]
    path.write_text("\n".join(["kind,age,hospital_expire_flag,has_chart", *rows]) + "\n")
    draft = ExperimentDraft(TableSurvey(path), None, None)
    assert draft.chosen[:2] == ("hospital_expire_flag", None)
    assert "site: no column names a site" in "\n".join(draft.report)


def synthetic(path: Path, columns: str, rows: int = 240) -> ExperimentDraft:
    """The draft of a table with columns of these kinds, as ``"age:n sex:b"``."""
    rng = np.random.default_rng(len(columns))
    made: dict[str, Callable[[], object]] = {
        "n": lambda: np.round(rng.normal(50, 9, rows), 2),
        "z": lambda: np.round(rng.random(rows), 3),
        "c": lambda: rng.integers(0, 9, rows),
        "y": lambda: rng.integers(6, 18, rows),
        "b": lambda: rng.integers(0, 2, rows),
        "w": lambda: rng.choice(["no", "yes"], rows),
        "t": lambda: rng.choice(["red", "blue", "green"], rows),
        "k": lambda: rng.integers(1, rows // 3, rows),
        "i": lambda: np.arange(1, rows + 1),
        "p": lambda: [f"Jo{chr(97 + k % 26)}n Do{chr(97 + k // 26)}e" for k in range(rows)],
        "q": lambda: rng.choice([f"B{k}" for k in range(40)], rows),
        "8": lambda: rng.choice([0, 0, 0, 1, 1, 2, 5, 8, 8], rows),
        "9": lambda: np.where(rng.random(rows) < 0.05, 999, rng.integers(20, 60, rows)),
        "m": lambda: rng.integers(900, 1100, rows),
    }
    pd.DataFrame({name: made[kind]() for name, _, kind in (c.rpartition(":") for c in columns.split())}).to_csv(
        path, index=False
    )
    return ExperimentDraft(TableSurvey(path), None, None)


@pytest.mark.parametrize(
    ("file", "columns"),
    [
        ("solder", "Opening:t Solder:t Mask:t skips:c"),  # the file is called as a feature
        ("OME", "Age:y OME:t Loud:c Noise:t Correct:c"),
        ("RootStock", "rootstock:c girth:n weight:n"),
        ("Gestation", "plurality:c gestation:n sex:t wt:n age:y"),
        ("mpg", "displ:n cyl:c cty:n hwy:n class:t"),  # the last is called as classes are, and is a feature
        ("Empl", "firm:k wage:n capital:n output:n"),
        ("credit", "Status:t Seniority:c Income:n Price:n"),
        ("deaths", "case:i x:n y:n"),  # a place
        ("money", "m:n p:n y:n r:n"),  # an income
        ("tinting", "age:n target:t tint:t csoa:n sex:t"),  # what is looked at
        ("medpar", "los:c hmo:b died:b age:n type:t"),
        ("azt", "ageentry:z age:n death:b"),  # a time to an event, with a late entry
        ("drug", "t1:c t2:c relapse:b"),
        ("smoking", "ttr:c relapse:b grp:t age:n"),
        ("cricketer", "left:b year:i life:c dead:b"),
        ("factory", "exposure_time:z status:b age:n"),  # a time that is over before
        ("graft", "ischemia_time:z status:b age:n"),
        ("murders", "forename:p age:y borough:q"),  # the only one that is left
        ("survie", "age:n duree_suivi:z deces:b"),  # a time to an event, in other languages
        ("studie", "alter:n nachbeobachtung_monate:z verstorben:b"),
        ("cohorte", "edad:n dias_seguimiento:z fallecido:b"),
        ("registre", "age:n délai:z décès:b"),
        ("register", "alter:n tage:z ereignis:b rezidiv:b"),
        ("trial", "age:9 weight:m outcome:b"),  # 999 is far in one column, and a weight in another
    ],
)
def test_names_that_mislead_are_asked_about(file: str, columns: str, tmp_path: Path) -> None:
    draft = synthetic(tmp_path / f"{file}.csv", columns)
    assert draft.questions, draft.chosen


@pytest.mark.parametrize(
    ("file", "columns", "key"),
    [
        ("sunspot.month", "time:z sunspot.month:n", Key("sunspot.month")),
        ("uci", "edad:n dias_uci:z fallecido:b", Key("fallecido")),  # a stay that is over before
        ("klinik", "alter:n liegedauer:z verstorben:b", Key("verstorben")),
        (
            "icu",
            "hospital_id:c age:n los_days:z hospital_expire_flag:b",
            Key("hospital_expire_flag", site="hospital_id"),
        ),
        ("kreditausfall", "Filiale:t Alter:n Ausfall:b", Key("Ausfall", site="Filiale")),
        ("diagnosen", "Krankenhaus:t Alter:n Diagnose:t", Key("Diagnose", site="Krankenhaus")),
        ("diabetes", "glucosa:n edad:n resultado:b", Key("resultado")),
        ("turbofan", "s2:n s3:n RUL:m", Key("RUL")),
        ("machines", "torque:n Machine_failure:b", Key("Machine_failure")),
        ("vertraege", "Alter:n Schadenfall:b Beitrag:n", Key("Schadenfall")),
        ("prices", "rooms:c kind:t price:n", Key("price")),
        ("Kyphosis", "Kyphosis:w Age:n Number:c", Key("Kyphosis")),
        ("visits", "school:y age:n target:b", Key("target")),  # years at school
        ("visits", "school12:w age:n target:b", Key("target")),
        ("visits", "hospital:b age:n target:b", Key("target")),  # whether in hospital
        ("frogs", "NoOfSites:c altitude:n target:b", Key("target")),
        ("visits", "school_id:c age:n target:b", Key("target", site="school_id")),
        ("visits", "hospital:t age:n target:b", Key("target", site="hospital")),
        ("titanic", "age:n sibsp:8 target:b", Key("target")),
        ("stocks", "mobil:z gas:n target:b", Key("target")),
        ("brca", "age:n OS_months:z OS_status:b", Key("OS_months", "OS_status")),
        ("heart", "age:n stop:z event:b", Key("stop", "event")),
        ("lung", "months:z status:b age:n", Key("months", "status")),
        ("rossi", "weeks:z arrest:b age:n", Key("weeks", "arrest")),
    ],
)
def test_other_names_keep_their_meaning(file: str, columns: str, key: Key, tmp_path: Path) -> None:
    draft = synthetic(tmp_path / f"{file}.csv", columns)
    assert not draft.questions
    assert Key(*draft.chosen) == key
    data = tomllib.loads(draft.text(tmp_path / "t.toml"))["data"]
    assert not {"missing", "drop"} & {*data}


WRITTEN: dict[str, tuple[str, Key]] = {
    "heart_failure_clinical_records": ("age:n anaemia:b sex:b time:c DEATH_EVENT:b", Key("time", "DEATH_EVENT")),
    "hospital_readmissions": ("encounter_id:i race:t time_in_hospital:c readmitted:t", Key("readmitted")),
    "insurance": ("age:y sex:w bmi:n children:c smoker:w region:t charges:n", Key("charges")),
    "schadenfaelle": ("Versicherungsnr:i Alter:y Fahrzeugklasse:t Region:t Schadenfall:w", Key("Schadenfall")),
    "kreditausfall": ("Filiale:t Alter:n Kreditsumme:m Ausfall:b", Key("Ausfall", site="Filiale")),
    "diagnosen": ("Krankenhaus:t Alter:n Blutdruck:n Diagnose:t", Key("Diagnose", site="Krankenhaus")),
    "estudiantes": ("colegio:t edad:y horas_estudio:n ausencias:c nota_final:n", Key("nota_final")),
    "pacientes_uci": ("id_paciente:i hospital:t edad:n dias_uci:c fallecido:b", Key("fallecido", site="hospital")),
    "sinistres": ("agence:t age_conducteur:n exposition:z nb_sinistres:c", Key("nb_sinistres", site="agence")),
    "survie_cancer": ("centre:t age:n stade:t duree_suivi:n deces:b", Key("duree_suivi", "deces", "centre")),
    "predictive_maintenance": ("UDI:i Type:t Torque_[Nm]:n Machine_failure:b", Key("Machine_failure")),
    "turbofan": ("unit:c cycle:c s2:n s3:n RUL:m", Key("RUL")),
    "student_performance": ("school:t age:y studytime:c failures:c absences:c G1:c G3:c", Key("G3", site="school")),
    "churn": ("gender:w SeniorCitizen:b tenure:m MonthlyCharges:n Contract:t Churn:w", Key("Churn")),
    "air_quality": ("station:t temp:n humidity:n NO2:n PM25:n", Key("PM25", site="station")),
    "stroke": ("id:i gender:w age:n hypertension:b bmi:n stroke:b", Key("stroke")),
    "titanic": ("PassengerId:i Survived:b Pclass:c Sex:w Age:n Fare:n Embarked:t", Key("Survived")),
    "tips": ("total_bill:n tip:n sex:w smoker:w day:t time:t size:c", Key("tip")),
    "house_prices": ("Id:i LotArea:m OverallQual:c GrLivArea:m SalePrice:m", Key("SalePrice")),
    "icu_stays": (
        "hadm_id:i hospital_id:c admit_age:n lactate:n los_days:n hospital_expire_flag:b",
        Key("hospital_expire_flag", site="hospital_id"),
    ),
    "mietspiegel": ("Flaeche:n Zimmer:c Baujahr:m Bezirk:t Miete:n", Key("Miete")),
    "diabetes_es": ("embarazos:c glucosa:n imc:n edad:y resultado:b", Key("resultado")),
    "stroke_fr": ("hopital:t age:n tension:n tabac:w AVC:w", Key("AVC", site="hopital")),
}  # fmt: skip
"""Tables like public ones, whose key was written before they were tried."""


def test_written_tables_are_never_drafted_wrongly(tmp_path: Path) -> None:
    drafts = {name: synthetic(tmp_path / f"{name}.csv", columns) for name, (columns, _) in WRITTEN.items()}
    clear = {name: Key(*draft.chosen) for name, draft in drafts.items() if not draft.questions}
    assert {name: got for name, got in clear.items() if got != WRITTEN[name][1]} == {}
    assert len(clear) >= 13


@pytest.mark.parametrize("name", ["Individuals.Affected", "stays_in_week_nights", "subject_abbr"])
def test_words_of_people_name_no_subject_beside_others(name: str, tmp_path: Path) -> None:
    draft = synthetic(tmp_path / "t.csv", f"{name}:k age:n target:b")
    assert "subject" not in tomllib.loads(draft.text(tmp_path / "t.toml"))["data"]
    assert (
        "subject"
        in tomllib.loads(synthetic(tmp_path / "u.csv", "patientId:k age:n target:b").text(tmp_path / "u.toml"))["data"]
    )


DOUBTFUL: dict[str, tuple[Callable[[int], str], str]] = {
    "a class that means missing": (lambda k: "9" if k % 20 == 0 else str(k % 3 % 2), "does the class '9' mean missing"),
    "a row of totals": (lambda k: "24" if k == 59 else str(k % 3 % 2), "the class '24' has one row"),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_doubtful_class_of_the_target_is_asked_about(name: str, tmp_path: Path) -> None:
    cell, words = DOUBTFUL[name]
    lines = [f"{20 + k % 50},{k * 37 % 101 / 7:.2f},{cell(k)}" for k in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["age,crp,died", *lines, ""]))
    assert any(
        words in question for question in ExperimentDraft(TableSurvey(tmp_path / "rows.csv"), None, "died").questions
    )


def test_a_time_that_holds_dates_is_asked_about(tmp_path: Path) -> None:
    lines = [f"{20 + k % 50},{1_700_000_000 + 86400 * (k * 7 % 60)},{k % 2}" for k in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["age,time,event", *lines, ""]))
    questions = ExperimentDraft(TableSurvey(tmp_path / "rows.csv"), None, "time", "event").questions
    assert any("may hold dates as seconds since 1970" in question for question in questions)


def test_errors_of_a_spreadsheet_are_missing_cells(tmp_path: Path) -> None:
    errors = ("#N/A", "#DIV/0!", "#REF!", "#VALUE!", "#NUM!", "#NAME?", "#NULL!")
    lines = [f"{20 + k % 50},{errors[k // 5 % 7] if k % 5 == 0 else k / 7},{k % 3 % 2}" for k in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["age,crp,died", *lines, ""]))
    draft = ExperimentDraft(TableSurvey(tmp_path / "rows.csv"), "", "died")
    assert not draft.questions
    assert "which are treated as missing" in "\n".join(draft.report)
