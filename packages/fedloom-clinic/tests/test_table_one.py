"""Table 1 by sums is that of tableone's formulas and SciPy's tests on the pooled rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lifelines.statistics import multivariate_logrank_test
from scipy import stats
from typer.testing import CliRunner

import fedloom as fl
from fedloom.analyses import AnalysisTerms, Question, Rules, make_schema
from fedloom.analyses.rows import dataset_rows
from fedloom.errors import ConfigError, Refused
from fedloom.lab.cli import app
from fedloom_clinic.table_one import TableOne

SIZES = (150, 90, 60, 40)


def patients(seed: int = 0, unit: float = 1.0) -> tuple[fl.Dataset, pd.DataFrame]:
    """Four clients: a number with gaps, a code with a rare level, two arms; the last client may have another unit."""
    rng = np.random.default_rng(seed)
    rows = sum(SIZES)
    site = np.repeat(list("abcd"), SIZES)
    arm = rng.choice(["new", "old"], rows)
    glucose = rng.normal(6, 1, rows) + 0.5 * (arm == "new")
    glucose[rng.random(rows) < 0.1] = np.nan
    frame = pd.DataFrame({
        "site": site, "glucose": np.where(site == "d", unit, 1.0) * glucose, "age": rng.normal(60, 9, rows).round(),
        "ward": rng.choice(["GEN", "ICU", "REHAB"], rows, p=[0.7, 0.28, 0.02]), "arm": arm,
        "died": rng.integers(0, 2, rows),
    })  # fmt: skip
    data = fl.Dataset.create(
        frame, "died", client_column="site", categorical=("ward", "arm"), impute=True, group_columns=("arm",)
    )
    return data, frame


def row(table: pd.DataFrame, column: str, group: str, level: str | None = None) -> pd.Series:
    some = table[(table.column == column) & (table.group == group)]
    return (some if level is None else some[some.level == level]).iloc[0]


def test_figures_are_those_of_the_pooled_rows() -> None:
    data, frame = patients()
    table = fl.analyze("table-1", data, group="arm").table.to_pandas()
    arms = [frame[frame.arm == arm] for arm in ("new", "old")]
    for column in ("glucose", "age"):
        values = [arm[column].dropna() for arm in arms]
        for arm, some, whole in zip(("new", "old"), values, arms, strict=True):
            found = row(table, column, arm)
            assert found["rows"] == len(some)
            assert found.missing == whole[column].isna().sum()
            assert found["mean"] == pytest.approx(some.mean(), abs=1e-9)
            assert found.deviation == pytest.approx(some.std(), abs=1e-9)
            for name, level in (("q25", 0.25), ("median", 0.5), ("q75", 0.75)):
                assert abs(found[name] - some.quantile(level)) <= found.bin + 1e-9
            assert sum(found.counts) == len(some)
        one, two = values
        gap = abs(one.mean() - two.mean()) / np.sqrt((one.var() + two.var()) / 2)
        found = row(table, column, "new")
        assert found.standardized_difference == pytest.approx(gap, abs=1e-9)
        assert found.p_groups == pytest.approx(stats.ttest_ind(one, two, equal_var=False).pvalue, abs=1e-9)
        by_site = [some.dropna() for _, some in frame.groupby("site")[column]]
        assert found.p_clients == pytest.approx(stats.f_oneway(*by_site).pvalue, abs=1e-9)
    crossed = pd.crosstab(frame.arm, frame.ward)
    for arm in ("new", "old"):
        for ward in crossed.columns:
            found = row(table, "ward", arm, ward)
            assert found["rows"] == crossed.loc[arm, ward]
            assert found.share == pytest.approx(crossed.loc[arm, ward] / crossed.loc[arm].sum())
    found = row(table, "ward", "new", "GEN")
    assert found.p_groups == pytest.approx(stats.chi2_contingency(crossed).pvalue, abs=1e-10)
    sites = pd.crosstab(frame.site, frame.ward)
    assert found.p_clients == pytest.approx(stats.chi2_contingency(sites).pvalue, abs=1e-10)
    one, two = crossed.to_numpy() / crossed.to_numpy().sum(1, keepdims=True)
    spread = [np.diag(p) - np.outer(p, p) for p in (one, two)]
    gap = (one - two)[1:]
    wanted = np.sqrt(gap @ np.linalg.inv(((spread[0] + spread[1]) / 2)[1:, 1:]) @ gap)
    assert found.standardized_difference == pytest.approx(wanted, abs=1e-10)


def test_three_groups_have_an_analysis_of_variance() -> None:
    data, frame = patients()
    found = row(fl.analyze("table-1", data, group="ward").table.to_pandas(), "age", "ICU")
    wanted = stats.f_oneway(*(some for _, some in frame.groupby("ward").age)).pvalue
    assert found.p_groups == pytest.approx(wanted, abs=1e-9)


def test_a_group_of_one_row_counts_in_an_analysis_of_variance() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(size=30), "ward": ["a"] * 20 + ["b"] * 9 + ["c"], "y": [0, 1] * 15})
    frame["site"] = frame.ward
    data = fl.Dataset.create(frame, "y", client_column="site", categorical=["ward"], group_columns=["ward"])
    found = row(fl.analyze("table-1", data, group="ward").table.to_pandas(), "age", "a")
    expected = stats.f_oneway(*(values for _, values in frame.groupby("ward").age)).pvalue
    assert (found.p_groups, found.p_clients) == (pytest.approx(expected), pytest.approx(expected))


@pytest.mark.filterwarnings("ignore")  # of lifelines, on pandas
@pytest.mark.parametrize("arms", [2, 3])
def test_rows_without_a_group_are_shown_but_not_tested(arms: int) -> None:
    rng = np.random.default_rng(arms)
    frame = pd.DataFrame({
        "site": rng.choice(list("ab"), 120), "age": rng.normal(60, 9, 120), "sex": rng.choice(["f", "m"], 120),
        "ward": rng.choice(["a", "b", "c"][:arms], 120), "days": rng.integers(1, 9, 120), "died": [0, 1, 1] * 40,
    })  # fmt: skip
    frame.loc[::7, "ward"], frame.loc[::7, "age"] = None, 99.0
    read = partial(
        fl.Dataset.create, client_column="site", categorical=["ward", "sex"], group_columns=["ward"], impute=True
    )
    table = fl.analyze("table-1", read(frame.drop(columns="days"), "died"), group="ward").table.to_pandas()
    ages = [some.age for _, some in frame.groupby("ward")]
    wanted = stats.f_oneway(*ages) if arms > 2 else stats.ttest_ind(*ages, equal_var=False)
    assert row(table, "age", "a").p_groups == pytest.approx(wanted.pvalue)
    crossed = pd.crosstab(frame.ward, frame.sex)
    assert row(table, "sex", "a", "f").p_groups == pytest.approx(stats.chi2_contingency(crossed).pvalue)
    sites = stats.f_oneway(*(some.age for _, some in frame.groupby("site")))
    assert row(table, "age", "a").p_clients == pytest.approx(sites.pvalue), "of all rows"
    assert table[table.column == "age"]["rows"].sum() == len(frame)
    survival = read(frame, "days", event="died", task="survival")
    curves = fl.analyze("kaplan-meier", survival, width=1, until=8, group="ward").table.to_pandas()
    known = frame.dropna(subset="ward")
    assert curves.p[0] == pytest.approx(multivariate_logrank_test(known.days, known.ward, known.died).p_value)
    assert curves.group.nunique() == arms + 1


def test_a_client_in_another_unit_is_noted_and_changed_nowhere() -> None:
    data, frame = patients(unit=18.02)
    table = fl.analyze("table-1", data, group="client").table.to_pandas()
    noted = table[table.note.notna()]
    assert noted[["column", "group"]].to_numpy().tolist() == [["glucose", "d"]]
    assert "glucose in mmol/l and mg/dl" in noted.note.iloc[0]
    wanted = frame[frame.site == "d"].glucose.mean()
    assert noted["mean"].iloc[0] == pytest.approx(wanted, rel=1e-9)
    same = fl.analyze("table-1", patients()[0], group="client").table.to_pandas()
    assert not same.note.notna().any()


def test_small_cells_are_merged_and_totals_are_of_all_rows() -> None:
    data, frame = patients()
    table = fl.analyze("table-1", data, rules={"min_subjects": 3, "min_clients": 3}).table.to_pandas()
    ward = table[table.column == "ward"]
    assert "REHAB" not in set(ward.level)
    assert "other" in set(ward.level)
    assert ward["rows"].sum() == len(frame)
    glucose = row(table, "glucose", "all")
    assert len(glucose.counts) < 50
    assert sum(glucose.counts) == frame.glucose.notna().sum()
    assert glucose["mean"] == pytest.approx(frame.glucose.mean(), abs=1e-9)


@pytest.mark.parametrize("size", [5, 12, 20, 60, 300])
def test_few_rows_get_fewer_bins(size: int) -> None:
    """No bin counts fewer than the minimum at too few clients, and figures other than quantiles are exact."""
    rng = np.random.default_rng(size)
    frame = pd.DataFrame({
        "site": np.repeat(list("abcde"), size), "crp": rng.lognormal(1, 1.2, 5 * size), "y": [0, 1, 1, 0, 1] * size,
    })  # fmt: skip
    data = fl.Dataset.create(frame, "y", client_column="site")
    found = row(
        fl.analyze("table-1", data, rules={"min_subjects": 5, "min_clients": 3}).table.to_pandas(), "crp", "all"
    )
    assert (found["mean"], found.deviation) == (pytest.approx(frame.crp.mean()), pytest.approx(frame.crp.std()))
    assert sum(found.counts) == 5 * size
    by_site = [np.histogram(some, found.edges)[0] for _, some in frame.groupby("site").crp]
    assert ((np.stack(by_site) >= 5).sum(0) >= 3).all()
    assert (len(found.counts) == 1) == np.isnan(found["median"]), "one bin says nothing about a quantile"
    assert len(found.counts) > size / 60


def test_the_fix_for_too_few_subjects_works() -> None:
    frame = patients()[1].assign(crp=np.nan)
    frame.loc[frame.index[:4], "crp"] = 1.0
    rules = {"min_subjects": 5, "min_clients": 3}
    read = partial(fl.Dataset.create, target="died", client_column="site", categorical=("ward", "arm"), impute=True)
    with pytest.raises(Refused, match="have 5 subjects with a number in 'crp'.*Agree on columns without 'crp'"):
        fl.analyze("table-1", read(frame), rules=rules)
    assert len(fl.analyze("table-1", read(frame.drop(columns="crp")), rules=rules).table)


@pytest.mark.parametrize("gaps", [0, 1, 4, 5, 30])
@pytest.mark.parametrize("group", [None, "arm"])
def test_no_figure_shows_gaps_of_fewer_subjects_than_the_minimum(gaps: int, group: str | None) -> None:
    """Counts of missing cells and of cells beyond the range, and everything that they could be derived from."""
    frame = patients()[1]
    frame["glucose"] = np.random.default_rng(1).normal(6, 1, len(frame))
    at = frame[(frame.site == "b") & (frame.arm == "new")].index
    frame.loc[at[:gaps], ["glucose", "ward"]] = [np.nan, None]
    data = fl.Dataset.create(
        frame, "died", client_column="site", categorical=("ward", "arm"), impute=True, group_columns=("arm",)
    )
    rules = {"min_subjects": 5, "min_clients": 2}
    table = fl.analyze("table-1", data, rules=rules, group=group, bins=20).table.to_pandas()
    arm, rows = ("new", frame[frame.arm == "new"]) if group else ("all", frame)
    found, wards = row(table, "glucose", arm), table[(table.column == "ward") & (table.group == arm)]
    hidden = 0 if gaps < 5 else gaps
    assert (found.missing, found["rows"], sum(found.counts)) == (hidden, *2 * [len(rows) - hidden])
    assert wards["rows"].sum() == len(rows)
    assert "missing" not in set(wards.level)
    assert wards.missing.isna().all() if hidden else (wards.missing == 0).all(), "beside few clients: part of other"
    assert found["mean"] == pytest.approx(rows.glucose.mean(), abs=1e-9 if gaps in (0, 5, 30) else 0.05)
    assert "fewer than 5 of a client's subjects" in table.note[0]


def test_a_column_without_gaps_keeps_its_levels_under_a_minimum() -> None:
    frame = patients()[1][["site", "arm", "age", "died"]]
    data = fl.Dataset.create(frame, "died", client_column="site", categorical=("arm",))
    table = fl.analyze("table-1", data, rules={"min_subjects": 5, "min_clients": 3}).table.to_pandas()
    assert table[table.column == "arm"].level.tolist() == ["new", "old"]


def test_numbers_beyond_the_agreed_range_are_counted_from_the_minimum_on() -> None:
    frame = patients()[1][["site", "age", "died"]]
    frame.loc[frame[frame.site == "a"].index[:3], "age"] = 400.0
    frame.loc[frame[frame.site == "b"].index[:7], "age"] = 400.0
    data = fl.Dataset.create(frame, "died", client_column="site")
    schema = make_schema(data)
    schema = replace(schema, columns=(schema.columns[0].with_(range=(20.0, 110.0)),))
    clients = [*dataset_rows(data).values()]
    terms = AnalysisTerms(schema, torch.tensor(SIZES), Rules(min_subjects=5, min_clients=2))
    one = TableOne(bins=9)
    terms = replace(terms, published=tuple(one.publish(client, terms) for client in clients))
    answers = torch.stack([one.answer(Question("counts"), client, terms) for client in clients])
    beyond = answers[:, -2]
    assert beyond.tolist() == [0, 7, 0, 0]


def test_the_command_prints_it_without_histograms(tmp_path: Path) -> None:
    _, frame = patients()
    frame.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "t.toml").write_text(
        f'[data]\nsource = "{tmp_path}/t.csv"\ntarget = "died"\nclient_column = "site"\ncategorical = ["ward", "arm"]\n'
        '[partition]\nkind = "natural"\n'  # no method: nothing is trained
    )
    said = CliRunner().invoke(app, ["analyze", "table-1", str(tmp_path / "t.toml"), "--set", "group=arm"])
    assert said.exit_code == 0, said.output
    line = next(line for line in said.output.splitlines() if {"age", "new"} <= {*line.split()})
    assert f"{frame[frame.arm == 'new'].age.mean():.4g}" in line
    assert "3 questions to 4 clients" in said.output


def test_it_obeys_the_laws() -> None:
    """Homogeneity over clients is a sum of squares of clients, not of rows, so that law is left out."""
    for group in (None, "arm", "client"):
        fl.testing.check_analysis(TableOne(group=group, bins=10), patients()[0], without=["union"])


def test_what_it_cannot_be_of_is_a_sentence() -> None:
    with pytest.raises(Refused, match="columns of a table"):
        fl.analyze("table-1", fl.load("digits"))
    with pytest.raises(ConfigError, match="group"):
        fl.analyze("table-1", patients()[0], group="age")
    assert torch.is_tensor(patients()[0].x)


@pytest.mark.parametrize("clients", [3, 5])
def test_a_statistic_over_clients_leaves_their_counts_open(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer of total and statistic tries all counts of a level at clients of known sizes.

    At three clients, a fine step leaves the true counts only, so no statistic is computed. At five clients, many counts
    fit the statistic in its coarse step.
    """
    steps, bounds = [], TableOne.bounds

    def recorded(self: TableOne, question: Any, terms: Any) -> Any:
        found = bounds(self, question, terms)
        if question.name == "differences":
            steps.append((question.values["shares"], found.step))
        return found

    monkeypatch.setattr(TableOne, "bounds", recorded)
    rng, sizes = np.random.default_rng(3), (30, 25, 20, 22, 27)[:clients]
    frame = pd.DataFrame({
        "site": np.repeat(list("abcde")[:clients], sizes), "sex": rng.choice(["f", "m"], sum(sizes), p=[0.3, 0.7]),
        "died": rng.integers(0, 2, sum(sizes)),
    })  # fmt: skip
    data = fl.Dataset.create(frame, "died", client_column="site", categorical=("sex",))
    table = fl.analyze(TableOne(rules={"min_subjects": 2, "min_clients": 2}), data).table.to_pandas()
    assert table.p_clients.isna().all() == (clients == 3) == (not steps)
    female = (frame[frame.sex == "f"].groupby("site").size().to_numpy()).astype(int)
    n, share = np.array(sizes), female.sum() / sum(sizes)
    grids = np.meshgrid(*(np.arange(size + 1) for size in sizes[:-1]), indexing="ij")
    last = female.sum() - sum(grids)
    possible = np.stack([*grids, last], -1)[(last >= 0) & (last <= sizes[-1])]

    def left(step: float) -> int:
        """Return how many counts agree with the rounded statistic."""
        chi = [(counts - n * share) ** 2 * (1 / (n * share) + 1 / (n * (1 - share))) for counts in (possible, female)]
        sums = [np.rint(values / step).sum(-1) for values in chi]
        return int((sums[0] == sums[1]).sum())

    if clients == 3:
        assert left(2.0**-36) == 1
    else:
        (shares, step) = steps[-1]
        assert float(shares.sum()) == pytest.approx(1)
        assert left(2.0 ** np.floor(np.log2(float(step[-2])))) > 20


@pytest.mark.parametrize(
    ("kind", "options", "column"),
    [
        ("table-1", {"group": "client"}, "group"),
        ("kaplan-meier", {"group": "client", "width": 10.0}, "group"),
    ],
)
def test_groups_of_clients_have_the_names_of_the_clients(kind: str, options: dict[str, Any], column: str) -> None:
    rng = np.random.default_rng(0)

    def rows() -> Any:
        return rng.normal(size=(40, 2)).astype("float32"), np.stack([rng.integers(1, 50, 40), np.ones(40)], 1)

    named = fl.analyze(kind, fl.Federation.create({"north": rows(), "south": rows()}, task="survival"), **options)
    assert {*named.table[column].to_pylist()} - {"all"} == {"north", "south"}
    numbered = fl.analyze(kind, fl.Federation.create([rows(), rows()], task="survival"), **options)
    assert {*numbered.table[column].to_pylist()} - {"all"} == {"client 0", "client 1"}
