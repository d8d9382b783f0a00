"""`fedloom init`: one message has every fault of a table, and the draft runs as it is."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.sources import source
from fedloom.data.survey.facts import ColumnProfile
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from tests import hospitals

RUNNER, N = CliRunner(), 240
RNG = np.random.default_rng(3)
AGE, BMI, SITE = RNG.normal(50, 10, N), RNG.normal(27, 4, N), RNG.integers(1, 5, N)
ILL = (AGE / 10 + BMI / 4 + RNG.normal(0, 1, N) > 11.75).astype(int)


def write(path: Path, rows: Sequence[Sequence[object]], separator: str = ",", before: bytes = b"") -> Path:
    path.write_bytes(before + "".join(separator.join(map(str, row)) + "\n" for row in rows).encode())
    return path


def init(path: Path, *options: str, code: int = 0) -> str:
    done = RUNNER.invoke(app, ["init", str(path), *options])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert (path.with_suffix(".toml").exists()) is (code == 0)
    return done.output


def drafted(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(path.with_suffix(".toml").read_text())
    return found


def runs(path: Path) -> Plan:
    """Runs a draft with one round and one seed."""
    plan = Plan(parse({**drafted(path), "rounds": 1, "seeds": [0]}), path.parent / "out")
    assert {o.status for o in plan.run(page=False)} == {"done"}
    return plan


def comma(value: float) -> str:
    return f"{value:.2f}".replace(".", ",")


def test_a_european_table(tmp_path: Path) -> None:
    rows = [
        ["Alter", "BMI", "Umsatz", "Klinik", "Datum", "Ergebnis"],
        *([comma(a), comma(b), f"1.{k + 100},5", f"K{s}", f"{k % 28 + 1}.03.2021", ("nein", "ja")[y]]
          for k, (a, b, s, y) in enumerate(zip(AGE, BMI, SITE, ILL, strict=True))),
    ]  # fmt: skip
    path = write(tmp_path / "eu.csv", rows, ";", b"\xef\xbb\xbf")
    said = init(path)
    assert "separator ';', decimal ','" in said
    assert "column 'Datum': dates" in said
    data = drafted(path)["data"]
    assert (data["target"], data["client_column"], data["task"]) == ("Ergebnis", "Klinik", "binary")
    assert data["drop"] == ["Datum"]
    federation = runs(path).federations[0]
    assert federation.names == ("K1", "K2", "K3", "K4")
    raw = fl.load(path, **{k: v for k, v in data.items() if k != "source"})
    np.testing.assert_allclose(raw.x[:, 0].numpy(), np.round(AGE, 2))
    np.testing.assert_allclose(raw.x[:, 2].numpy(), [1000 + k + 100 + 0.5 for k in range(N)])


def test_everything_is_said_at_once(tmp_path: Path) -> None:
    head = ["id", "name", "age", "copy", "code", "smoker", "visit", "const", "none", "town", "lab", "hospital", "died"]
    rows = [
        [k, f'"D, J{"".join("abcdefghij"[int(digit)] for digit in str(k))}"', f"{a:.1f}", f"{a:.1f}", ("a", "b")[y],
         ("yes", "no", "", "Yes")[k % 4],
         f"2021-0{k % 9 + 1}-11", "x", "", f"t{k % 120}", "k.A." if k % 50 == 0 else k % 17,
         1 + k % 3 if k > 8 else 7, "" if k == 20 else y]
        for k, (a, y) in enumerate(zip(AGE, ILL, strict=True))
    ]  # fmt: skip
    path = write(tmp_path / "messy.csv", [head, *rows])
    said = init(path, "--client-column", "hospital", "--target", "died")
    for sentence in (
        "target: 'died', binary",
        "column 'died': without a target, and therefore left out: 1 row",
        "site: 'hospital', 4 sites of 9 to 77 rows",
        "sites with fewer than 20 rows: '7' (9)",
        "column 'id': identifies rows; left out",
        "column 'name': names of people, which identify patients; left out",
        "column 'copy': the same as 'age'; left out",
        "column 'code': alone predicts the target almost perfectly (AUROC 1.000 alone)",
        "column 'smoker': text of 3 levels, a feature for each",
        "column 'smoker' has levels that are written differently but seem the same: 'Yes' (60) = 'yes' (60)",
        "column 'smoker': 60 of 240 cells are missing (25%)",
        "column 'visit': dates",
        "column 'const': the same in every row, 'x'; left out",
        "column 'none': empty; left out",
        "column 'town': text of 120 levels in 240 rows",
        "column 'lab': numbers, except for 'k.A.', which are treated as missing",
    ):
        assert sentence in said, sentence
    data = drafted(path)["data"]
    assert data["drop"] == ["id", "name", "copy", "code", "visit", "const", "none", "town"]
    assert data["categorical"] == ["smoker"]
    assert data["missing"][-1] == "k.A."
    assert (data["impute"], data["unlabelled"]) == (True, "drop")
    federation = runs(path).federations[0]
    assert sum(len(federation.indices(part, c)) for part in federation.parts for c in range(4)) == N - 1


def test_a_regression_is_learned_in_units_of_its_spread(tmp_path: Path) -> None:
    price = 4000 * AGE + 1000 * BMI + RNG.normal(0, 9000, N)
    kind = RNG.integers(2, size=N)
    rows = [[f"{a:.2f}", f"{b:.2f}", ("flat", "house")[k], f"{p + 50000 * k:.0f}"]
            for a, b, k, p in zip(AGE, BMI, kind, price, strict=True)]  # fmt: skip
    path = write(tmp_path / "prices.csv", [["area", "rooms", "kind", "price"], *rows])
    assert "site: no column names a site" in init(path)
    document = drafted(path)
    assert document["data"]["task"] == "regression"
    assert document["data"]["unit"] == pytest.approx((price + 50000 * kind).std(), rel=0.01)
    plan = Plan(parse({**document, "seeds": [0]}), tmp_path / "out")
    assert {o.status for o in plan.run(page=False)} == {"done"}
    opened = fl.open_run(tmp_path / "out")
    assert float(opened["fedavg", 0].final("global", "r2").mean()) > 0.8
    said = opened.predict(path, "fedavg").labels
    assert np.abs(said - price - 50000 * kind).mean() < 15000, "predictions are in the units of the label"


def test_numbers_as_people_write_them_are_told_apart(tmp_path: Path) -> None:
    """Commas between thousands are no decimal commas: 1,234 beside 23.69, or where commas part cells, is 1234."""
    rows = [(f"{a:.2f}", f'"{k},{(k * 7) % 1000:03d}"', f"{k % 90}%", "inf" if k % 9 else 1.5, "no" if y else "yes")
            for k, (a, y) in enumerate(zip(AGE, ILL, strict=True), 1)]  # fmt: skip
    said = init(path := write(tmp_path / "t.csv", [["age", "cost", "part", "z", "y"], *rows]))
    assert "decimal" not in drafted(path)["data"]
    assert "column 'cost': numbers with signs among the digits, as '1,007'. Plain numbers would be a feature" in said
    assert "column 'part': numbers with signs among the digits, as '1%'" in said
    assert "column 'z': the same in every row, '1.5'" in said
    units = [(f"{a:.1f} mg/dl", f"{b:.2f}", f"<{k}" if k % 9 else k, f"{k % 3} mg", f"{k}{'ABCDEF'[k % 6]}", y)
             for k, (a, b, y) in enumerate(zip(AGE, BMI, ILL, strict=True), 1)]  # fmt: skip
    said = init(write(tmp_path / "u.csv", [["glucose", "bmi", "crp", "dose", "bed", "y"], *units]))
    for column, cell in (("glucose", units[0][0]), ("crp", "<1")):
        assert f"column {column!r}: numbers with units or limits among the digits, as '" in said, cell
    assert "column 'dose': text of 3 levels" in said
    assert "column 'bed': identifies rows" in said
    for cells, sign in ((["1,234", "2,345"], ","), (["1,234", "23.69"], "."), (["1,2", "2,345"], ",")):
        table = [[cells[k % 2], cells[0], y] for k, y in enumerate(ILL)]
        path = write(tmp_path / f"{cells[1]}.semi.csv", [["a", "b", "y"], *table], ";")
        out = tmp_path / f"{cells[1]}.toml"
        said = RUNNER.invoke(app, ["init", str(path), "--force", "--out", str(out)]).output
        assert ("decimal ','" in said) is (sign == ","), said
    said = init(
        write(tmp_path / "bare.csv", [[f"{a:.2f}", f"{b:.2f}", y] for a, b, y in zip(AGE, BMI, ILL, strict=True)])
    )
    assert f"header: '{AGE[0]:.2f}', '{BMI[0]:.2f}', '{ILL[0]}': is this a row of data?" in said


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.csv", b"", "empty. A table needs a header row"),
        ("header.csv", b"a,b\n", "no rows below the header"),
        ("one.csv", b"a,b\n1,2\n", "1 row. A federation needs at least 10"),
        ("latin.csv", "größe,y\n1,2\n".encode("latin-1"), "is not encoded in UTF-8 (byte 0xF6 at offset 2, line 1)"),
        ("wide.csv", "größe,y\n1,2\n".encode("utf-16"), "iconv -f UTF-16 -t UTF-8 wide.csv"),
        ("twice.csv", b"a,a,y\n" + b"1,2,0\n" * 20, "more than one column is called 'a'"),
        ("ragged.csv", b"a,b,y\n" + b"1,2,0\n" * 20 + b"1,2\n1,2,3,4\n", "row 22 has 2 cells, expected 3 (2 such)"),
        ("single.csv", b"y\n" + b"1\n0\n" * 20, "no column is left as a feature"),
        (
            "same.csv",
            b"a,y\n" + b"1,2\n" * 20,
            "no column looks like the target. Name the column with --target; columns: a, y",
        ),
        ("a.xls", b"PK\x03\x04", "a.xls is a spreadsheet in an older format. Save the spreadsheet as .xlsx"),
    ],
)
def test_where_no_draft_is_possible_a_sentence_says_why(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert sentence in init(tmp_path / name, code=2)


def test_what_is_asked_for_must_fit(tmp_path: Path) -> None:
    rows = [[f"{a:.1f}", s, 5, f"n{k}", y] for k, (a, s, y) in enumerate(zip(AGE, SITE, ILL, strict=True))]
    path = write(tmp_path / "t.csv", [["age", "ward", "five", "name", "ill"], *rows])
    for options, sentence in (
        (("--target", "il"), "did you mean 'ill'"),
        (("--client-column", "wardd"), "did you mean 'ward'"),
        (("--client-column", "ill", "--target", "ill"), "cannot be both the target and the site"),
        (("--target", "five"), "is the same in every row"),
        (("--target", "name"), "differs in every row"),
        (("--client-column", "name"), "0 of the 240 sites of --client-column name have at least 5 rows"),
        (("--client-column", "five"), "1 of the 1 site"),
    ):
        assert sentence in init(path, *options, code=2), options
    for missing in (tmp_path / "none.csv", tmp_path):
        assert RUNNER.invoke(app, ["init", str(missing)]).output.startswith("error: ")


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [["a", "y"], *zip(np.round(AGE, 2), ILL, strict=True)])
    path.with_suffix(".toml").write_text("mine")
    init_again: Callable[..., Any] = lambda *more: RUNNER.invoke(app, ["init", str(path), *more])  # noqa: E731
    assert "already exists. Add --force" in init_again().output
    assert path.with_suffix(".toml").read_text() == "mine"
    assert init_again("--out", str(tmp_path / "deep" / "other.toml")).exit_code == 0
    assert init_again("--force").exit_code == 0
    assert "is a folder. Set --out to a path for the experiment file" in init_again("--out", str(tmp_path)).output
    assert parse(drafted(path)).head.name == "t"


def test_a_parquet_file_and_many_levels(tmp_path: Path) -> None:
    flags = [None if b > 33 else bool(b > 27) for b in BMI]
    table = {
        "age": AGE,
        "flag": flags,
        "when": [datetime.date(2020, 1, 1 + int(s)) for s in SITE],
        "town": [f"t{k % 22}" for k in range(N)],
        "hospital": SITE,
        "died": ILL.astype(bool),
    }
    parquet.write_table(pa.table(table), tmp_path / "t.parquet")
    said = init(tmp_path / "t.parquet")
    assert "column 'town': text of 22 levels, a feature for each" in said
    assert drafted(tmp_path / "t.parquet")["data"]["categorical"] == ["town"], "true and false are 1 and 0, as read"
    runs(tmp_path / "t.parquet")


def test_a_level_that_may_mean_missing_is_named(tmp_path: Path) -> None:
    rows = [
        ["age", "smoker", "ill"],
        *([a, ("yes", "no", "None")[k % 3], y] for k, (a, y) in enumerate(zip(AGE, ILL, strict=True))),
    ]
    said = init(write(tmp_path / "marks.csv", rows))
    assert "column 'smoker': 'None' may mean missing. Add such cells to missing and set impute = true" in said


def test_a_separator_is_found_by_what_cuts_rows_alike(tmp_path: Path) -> None:
    for sign, text in (
        (",", 'a,b\n"x;y;z",1\n"x;y;z",2\n'),
        (";", "a;b\n1,5;2,5\n1,5;2,5\n"),
        ("\t", "a\tb\n1 2\t3\n"),
        ("|", "a|b|c\n1|2|3\n"),
        (",", "a\n1\n"),
    ):
        (tmp_path / "t.csv").write_text(text)
        assert source(tmp_path / "t.csv").signs().separator == sign, text


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "2.5", "", "-3e4"], "number"),
        (["yes", "no"], "text"),
        (["2021-03-01", "2021-04-11 12:30"], "date"),
        (["3.4.2021", "12/11/21"], "date"),
        (["", ""], "empty"),
        (["1", "two"], "text"),
        (["7", "unknown", "-"], "number"),
        ([*["5.1"] * 40, "<5"], "number"),
    ],
)
def test_kinds_of_columns(cells: list[str], kind: str) -> None:
    assert ColumnProfile("c", np.array(cells, object)).kind == kind


def test_what_a_statistician_would_see_is_said(tmp_path: Path) -> None:
    """The five hospitals: a leak, gaps written as numbers, other units, a column of one site, few events."""
    path = hospitals.everyone(tmp_path / "all.csv")
    said = init(path)
    for sentence in (
        "'1' by site: 'Amsel' 44 of 1200, 'Birke' 26 of 600, 'Celle' 25 of 400, 'Dorn' 6 of 150, 'Esche' 1 of 20",
        "fewer than 10 rows of '1' at 'Dorn', 'Esche': too few to score a model there",
        "column 'systolic': -9 in ",
        "far from the rest",
        "column 'glucose': medians differ by a factor of 17",
        "column 'creatinine': medians differ by a factor of 8",
        "column 'troponin_hs': has values only at 'Amsel', so it identifies that site; left out",
        "column 'hours_to_death': alone predicts the target almost perfectly (AUROC 1.000 alone)",
    ):
        assert sentence in said, sentence
    assert "column 'age': medians" not in said
    assert "hours_to_death'" not in said.splitlines()[1]
    data = drafted(path)["data"]
    assert data["drop"] == ["patient_id", "troponin_hs", "hours_to_death"]
    assert data["missing"] == ["-9"]
    assert runs(path).federations[0].names == tuple(hospitals.SITES)


@pytest.mark.parametrize("rows", [60, 240, 2370, 20000])
def test_a_leak_is_found_at_any_number_of_rows_and_noise_is_none(rows: int, tmp_path: Path) -> None:
    """Six to hundreds of events, a leak of numbers and one of text; a column of noise, and one of modest use, stay."""
    rng = np.random.default_rng(rows)
    y = np.zeros(rows, int)
    y[rng.choice(rows, max(6, rows // 25), replace=False)] = 1
    risk = rng.normal(0, 1, rows) + 1.0 * y
    inverse = np.where(y == 1, rng.integers(-500, 0, rows), rng.integers(0, 400, rows))
    ward, noise = rng.choice(["a", "b", "c"], rows), rng.normal(0, 1, rows)
    note = np.where(y == 1, rng.choice(["dead", "gone"], rows), rng.choice(["well", "home"], rows))
    body = [[f"{a:.3f}", b, c, f"{d:.3f}", e, t] for a, b, c, d, e, t in
            zip(risk, inverse, ward, noise, note, y, strict=True)]  # fmt: skip
    path = write(tmp_path / "t.csv", [["risk", "rest", "ward", "noise", "note", "died"], *body])
    said = init(path, "--target", "died")
    assert drafted(path)["data"]["drop"] == ["rest", "note"], said
    assert said.count("alone predicts the target almost perfectly (AUROC") == 2


def test_a_number_that_only_looks_like_a_marker_stays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    base, score, late = rng.integers(-20, 20, 400), rng.integers(0, 10, 400), rng.normal(3, 1, 400)
    far = np.where(rng.random(400) < 0.1, 999, rng.integers(20, 60, 400))
    body = [list(row) for row in zip(base, score, far, late.round(2), y, strict=True)]
    path = write(tmp_path / "t.csv", [["base", "score", "far", "days_to_visit", "ill"], *body])
    said = init(path, "--target", "ill")
    assert "column 'base': " not in said
    assert "column 'score': " not in said
    assert "column 'far': 999 in " in said
    assert "column 'days_to_visit': is known only later, judging by its name" in said
    assert drafted(path)["data"]["missing"] == ["999"]


def test_gaps_that_differ_by_site_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    body = []
    for site, share in (("a", 0.0), ("b", 0.6), ("c", 0.05)):
        for k in range(100):
            lab = "" if k < 100 * share else round(rng.normal(5, 1), 2)
            body.append([lab, "" if site == "c" else rng.integers(5), site, rng.integers(2)])
    path = write(tmp_path / "t.csv", [["lab", "scan", "site", "ill"], *body])
    said = init(path)
    assert "column 'lab': missing in 0% of the rows at 'a', but in 60% at 'b'" in said
    assert "column 'scan': is missing at 'c'" in said


def outcomes(path: Path, event: str, time: str = "week", first: int = 0) -> Path:
    """A table of times, events and counts."""
    week, falls = RNG.integers(1, 53, N), RNG.poisson(0.7, N)
    rows = [[f"{a:.1f}", s, w, y + first, n] for a, s, w, y, n in zip(AGE, SITE, week, ILL, falls, strict=True)]
    return write(path, [["age", "hospital", time, event, "falls"], *rows])


def test_a_time_beside_an_event_is_drafted_as_survival(tmp_path: Path) -> None:
    path = outcomes(tmp_path / "t.csv", "arrest", "weeks_of_follow_up")
    said = init(path)
    assert "target: 'weeks_of_follow_up' (not given; it may also be 'falls'), survival: 1 to " in said
    assert f"column 'arrest': 1 for an event: {ILL.sum()} of {N} rows" in said
    assert "column 'arrest': '1' by site" in said
    data = drafted(path)["data"]
    assert (data["target"], data["event"], "task" in data) == ("weeks_of_follow_up", "arrest", False)
    assert drafted(path)["local"]["batch_size"] == "full"
    assert runs(path).federations[0].data.task == "survival"


def test_a_doubtful_event_and_a_late_entry_are_named(tmp_path: Path) -> None:
    for name, recode, words in (
        ("cens", int, f"--target week --event cens if 1 is an event ({ILL.sum()} of {N} rows), but not if 1 means"),
        ("status", lambda ill: int(ill) + 1, "coded 1 and 2: write 1 for an event and 0 for none"),
    ):
        path = outcomes(tmp_path / f"{name}.csv", name)
        head, *lines = path.read_text().splitlines()
        place = head.split(",").index(name)
        cells = [line.split(",") for line in lines]
        rows = [[*row[:place], str(recode(row[place])), *row[place + 1 :], "0.5"] for row in cells]
        path.write_text("\n".join([f"{head},entry", *map(",".join, rows)]) + "\n")
        assert words in init(path)
    said = init_again(tmp_path / "cens.csv", "--target", "week", "--event", "cens")
    assert "'entry' looks like a late entry, but rows count as at risk from time 0 on" in said


def test_a_class_beside_a_time_is_asked_about(tmp_path: Path) -> None:
    assert "target: 'time' (not given" in init(outcomes(tmp_path / "bare.csv", "died", "time"))
    path = outcomes(tmp_path / "t.csv", "died")
    assert "--target week --event died or --target died" in init(path)
    assert drafted(path)["questions"]
    assert "target: 'week', survival" in init_again(path, "--target", "week", "--agree")
    assert tomllib.loads((tmp_path / "t.agreement.toml").read_text())["event"] == "died"
    for none in (("--event", ""), ("--event=",)):
        assert "target: 'week', regression" in init_again(path, "--target", "week", *none)
    assert "target: 'week' (not given" in init_again(path, "--event", "died")
    assert "target: 'died', binary" in init_again(path, "--target", "died")


def init_again(path: Path, *options: str, code: int = 0) -> str:
    done = RUNNER.invoke(app, ["init", str(path), "--force", *options])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize(
    ("event", "time", "first", "options", "sentence"),
    [
        ("status", "week", 1, ("--event", "status"), "must contain 1 for an event and 0 for no event"),
        ("status", "span", 0, ("--event", "status"), "no column looks like the time of --event status"),
        ("status", "week", 0, ("--event", "state"), "no column 'state'"),
    ],
)
def test_an_event_that_is_none_is_refused(
    tmp_path: Path, event: str, time: str, first: int, options: tuple[str, ...], sentence: str
) -> None:
    path = outcomes(tmp_path / "t.csv", event, time, first)
    assert sentence in init_again(path, *options, code=2)


def test_a_count_is_drafted_as_one(tmp_path: Path) -> None:
    path = outcomes(tmp_path / "t.csv", "status", "span")
    assert "target: 'falls', count: 0 to" in init(path, "--target", "falls")
    assert drafted(path)["data"]["task"] == "count"
    assert runs(path).federations[0].data.task == "count"


def test_another_unit_at_a_site_is_proposed_in_a_comment(tmp_path: Path) -> None:
    """Nothing is converted before a person takes the sign from the line; new rows are converted alike then."""
    path = hospitals.everyone(tmp_path / "t.csv", sites=("Amsel", "Birke", "Celle"))
    data_at = lambda: {k: v for k, v in drafted(path)["data"].items() if k != "source"}  # noqa: E731
    said = init(path)
    assert "mmol/L to mg/dL of glucose" in said
    assert "factors" not in data_at()
    plain = fl.load(path, **data_at())
    text = path.with_suffix(".toml").read_text()
    path.with_suffix(".toml").write_text(text.replace("# factors =", "factors ="))
    factors = data_at()["factors"]
    assert factors == {"glucose": {"Celle": 18.016}, "creatinine": {"Celle": pytest.approx(1 / 88.42, rel=1e-5)}}
    read = fl.load(path, **data_at())
    names = [column.name for column in read.prepare.columns]
    for k, name in enumerate(names):
        by_site = [factors.get(name, {}).get(site, 1.0) for site in read.user_names]
        expected = plain.x[:, k].numpy() * np.array(by_site)[plain.users.numpy()]
        np.testing.assert_array_equal(read.x[:, k].numpy(), expected)
    with pytest.raises(
        fl.errors.ConfigError,
        match="factors of 'glucose' differ by client, but client_column is not set. Set client_column to",
    ):
        fl.load(path, **{k: v for k, v in data_at().items() if k != "client_column"})
    plan = Plan(parse({**drafted(path), "rounds": 1, "seeds": [0]}), tmp_path / "run")
    plan.run(page=False)
    opened, rows = fl.open_run(tmp_path / "run"), hospitals.write(tmp_path / "c.csv", hospitals.patients("Celle"))
    whole = opened.predict(path, "fedavg").scores
    here = slice(1800, 2200)
    np.testing.assert_array_equal(opened.predict(rows, "fedavg").scores, whole[here])


def test_several_targets_are_drafted_as_labels(tmp_path: Path) -> None:
    """Rows of the draft are those that some label and a site have, and a column equal to a label is out."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3))
    y = (x @ rng.normal(size=(3, 3)) > 0.2).astype(float)
    y[rng.random((300, 3)) < 0.1] = np.nan
    table = pd.DataFrame(x, columns=["age", "crp", "bmi"]).assign(sepsis=y[:, 0], stroke=y[:, 1], aki=y[:, 2])
    table["code"] = np.where(rng.random(300) < 0.5, 3.0, 7.0) + 10 * (x @ [1, 1, 1] > 0)
    table["code"] = table["code"].where(table.stroke.isna(), 10 * table.stroke + rng.random(300))
    table["hospital"] = pd.Series(rng.choice(["A", "B", "C"], 300)).mask(rng.random(300) < 0.02)
    table.to_csv(tmp_path / "t.csv", index=False)
    targets = ["--target", "sepsis", "--target", "stroke", "--target", "aki"]
    said = init(tmp_path / "t.csv", *targets, "--agree")
    assert "'sepsis', 'stroke', 'aki', multilabel" in said
    assert "column 'code': alone predicts the target almost perfectly" in said
    made = tomllib.loads((tmp_path / "t.toml").read_text())
    data = fl.load(tmp_path / "t.csv", **{key: value for key, value in made["data"].items() if key != "source"})
    kept = (~np.isnan(y)).any(1) & table.hospital.notna()
    assert (len(data), data.classes, data.task) == (int(kept.sum()), ("sepsis", "stroke", "aki"), "multilabel")
    assert np.array_equal(data.y.numpy(), np.nan_to_num(y[kept], nan=-1))
    assert tomllib.loads((tmp_path / "t.agreement.toml").read_text())["classes"] == ["sepsis", "stroke", "aki"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--target", "crp"], "--target crp contains .* Each of several targets is a label: 1"),
        (["--target", "died"], "--target died is given twice"),
        (["--target", "sick", "--event", "died"], "--event belongs to a single time"),
        (["--target", "sick", "--client-column", "sick"], "'sick' cannot be both the target and the site"),
    ],
)
def test_wrong_labels_of_a_draft_are_a_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"crp": rng.normal(size=60), "died": np.arange(60) % 2, "sick": np.arange(60) % 3 == 0})
    table.astype({"sick": int}).to_csv(tmp_path / "t.csv", index=False)
    said = init(tmp_path / "t.csv", "--target", "died", *words, code=2)
    assert re.search(sentence, " ".join(said.split()))
