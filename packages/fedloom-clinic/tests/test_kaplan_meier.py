"""Survival curves by sums are those of lifelines on the same binned times, and state what binning costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from lifelines import KaplanMeierFitter
from lifelines.statistics import multivariate_logrank_test
from lifelines.utils import restricted_mean_survival_time

import fedloom as fl
from fedloom.errors import ConfigError, Refused
from fedloom_clinic.kaplan_meier import KaplanMeier

pytestmark = pytest.mark.filterwarnings("ignore")  # of lifelines, on pandas
WIDTH, UNTIL = 4.0, 60.0


def patients(sizes: tuple[int, ...] = (150, 80, 40), seed: int = 0) -> fl.Dataset:
    """Times that start at 0, two arms with another hazard, and a third arm of few."""
    rng = np.random.default_rng(seed)
    rows = sum(sizes)
    arm = rng.choice(3, rows, p=[0.5, 0.47, 0.03])
    time, end = rng.exponential(30 * np.array([1.0, 1.8, 1.0])[arm]), rng.exponential(45, rows)
    y = torch.from_numpy(np.stack([np.floor(np.minimum(time, end)), (time <= end) * 1.0], 1))
    users = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return fl.Dataset(
        "arms", torch.from_numpy(rng.normal(size=(rows, 1))), y, "survival", users=users,
        user_names=tuple("abc"[: len(sizes)]), columns={"arm": torch.from_numpy(arm)}, levels={"arm": ("A", "B", "C")},
    )  # fmt: skip


def binned(data: fl.Dataset) -> tuple[np.ndarray, np.ndarray]:
    time, event = data.y.numpy().T
    ends = np.arange(1, UNTIL / WIDTH + 1) * WIDTH
    place = np.searchsorted(ends, time)
    return ends[place.clip(max=len(ends) - 1)], event * (place < len(ends))


def test_curves_test_and_means_are_those_of_the_binned_times() -> None:
    data = patients()
    table = fl.analyze("kaplan-meier", data, width=WIDTH, until=UNTIL, group="arm").table.to_pandas()
    time, event = binned(data)
    arm = data.columns["arm"].numpy()
    for k, name in enumerate("ABC"):
        fit = KaplanMeierFitter().fit(time[arm == k], event[arm == k])
        rows = table[table.group == name]
        np.testing.assert_allclose(rows.survival, fit.survival_function_at_times(rows.time), atol=1e-12)
        wanted = fit.confidence_interval_.reindex(rows.time).to_numpy()
        here = np.isfinite(wanted).all(1)
        assert here.sum() >= 3
        np.testing.assert_allclose(rows[["low", "high"]].to_numpy()[here], wanted[here], atol=1e-8)
        mean = restricted_mean_survival_time(fit, t=UNTIL)
        assert rows.restricted_mean.iloc[0] == pytest.approx(mean, abs=1e-8)
    test = multivariate_logrank_test(time, arm, event)
    assert table.log_rank.iloc[0] == pytest.approx(test.test_statistic, abs=1e-8)
    assert table.p.iloc[0] == pytest.approx(test.p_value, abs=1e-10)
    assert table.groupby("group")[["events", "censored"]].sum().to_numpy().sum() == len(data)


def test_the_curve_of_exact_times_is_within_the_stated_error() -> None:
    data = patients((400,), seed=3)
    time, event = data.y.numpy().T
    table = fl.analyze("kaplan-meier", data, width=10.0, until=60.0).table.to_pandas()
    exact = KaplanMeierFitter().fit(time, event)
    gap = table.survival - exact.survival_function_at_times(table.time).to_numpy()
    assert (gap >= -1e-12).all()
    assert (gap <= table.binning_error + 1e-12).all()
    assert gap.max() > 1e-3
    mean = restricted_mean_survival_time(exact, t=60.0)
    assert 0 <= table.restricted_mean.iloc[0] - mean <= table.restricted_mean_error.iloc[0]


def test_without_events_the_curve_is_flat() -> None:
    """A table of censored times alone was refused when it was read, because no model can learn from it."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"time": rng.integers(1, 60, 80), "died": 0, "age": rng.normal(60, 9, 80)})
    data = fl.Dataset.create(frame, "time", event="died", task="survival")
    assert any("the event 'died' is 0 in every row" in note for note in data.notes)
    fed = fl.partitions.iid(clients=2)(data, seed=0)
    curve = fl.analyze("kaplan-meier", fed, width=WIDTH, until=UNTIL).table.to_pandas()
    assert (curve[["survival", "low", "high"]] == 1).all(axis=None)
    assert curve["censored"].sum() == 80
    assert (curve["restricted_mean"] == UNTIL).all()


def in_two_arms(times: dict[str, list[int]], events: dict[str, list[int]]) -> fl.Dataset:
    rows = [(t, e, arm) for arm in times for t, e in zip(times[arm], events[arm], strict=True)]
    frame = pd.DataFrame(rows, columns=["time", "died", "arm"]).assign(age=np.linspace(40, 80, len(rows)))
    return fl.Dataset.create(frame, "time", event="died", task="survival", categorical=["arm"])


def test_groups_without_events_have_no_log_rank_test() -> None:
    """The statistic was 0 and p was 1, as if the groups had been compared and found equal."""
    times = {"A": [5, 9, 20, 31, 44], "B": [6, 8, 25, 33, 41]}
    curve = fl.analyze(
        "kaplan-meier", in_two_arms(times, {"A": [0] * 5, "B": [0] * 5}), width=1.0, until=50.0, group="arm"
    ).table.to_pandas()
    assert (curve["survival"] == 1).all()
    assert set(curve["group"]) == {"A", "B"}
    assert curve["log_rank"].isna().all()
    assert curve["p"].isna().all()


def test_a_group_that_leaves_before_the_first_event_does_not_count_in_the_test() -> None:
    """As in R's survdiff: its expected number of events is 0, so the test has one degree of freedom less."""
    times = {"A": [20, 24, 31, 44, 47], "B": [22, 28, 30, 33, 41], "C": [1, 2, 3, 4, 5]}
    events = {"A": [1, 1, 0, 1, 1], "B": [1, 1, 1, 1, 0], "C": [0] * 5}
    with_c, without_c = (
        fl.analyze("kaplan-meier", in_two_arms({k: times[k] for k in arms}, events), width=1.0, until=50.0, group="arm")
        .table.to_pandas()[["log_rank", "p"]]
        .iloc[0]
        for arms in ("ABC", "AB")
    )
    assert without_c.notna().all()
    assert with_c.to_numpy() == pytest.approx(without_c.to_numpy())


def test_a_group_with_too_few_events_is_named_in_the_refusal() -> None:
    data = patients()
    event = data.y[:, 1].clone()
    event[data.columns["arm"] == data.levels["arm"].index("B")] = 0
    censored = replace(data, y=torch.stack([data.y[:, 0], event], 1))
    with pytest.raises(Refused, match="in group B.*groups that all have enough events"):
        fl.analyze("kaplan-meier", censored, width=30.0, group="arm", rules={"min_clients": 2, "min_subjects": 2})


def test_the_error_of_a_mean_is_greenwoods() -> None:
    """The spread of restricted means over 300 data sets."""
    means, errors = [], []
    for seed in range(300):
        table = fl.analyze("kaplan-meier", patients((120,), seed), width=4.0, until=40.0).table
        means.append(table["restricted_mean"][0].as_py())
        errors.append(table["restricted_mean_se"][0].as_py())
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.15)


def test_it_obeys_the_laws() -> None:
    for group in (None, "arm"):
        fl.testing.check_analysis(KaplanMeier(width=WIDTH, until=UNTIL, group=group), patients())
    fl.testing.check_analysis(KaplanMeier(width=WIDTH, group="client"), patients(), without=["union"])


def test_cells_of_too_few_clients_are_merged_and_none_is_lost() -> None:
    data = patients()
    free = fl.analyze("kaplan-meier", data, width=12.0, until=UNTIL, group="arm").table.to_pandas()
    kept = fl.analyze(
        "kaplan-meier", data, width=12.0, until=UNTIL, group="arm", rules={"min_clients": 3, "min_subjects": 3}
    ).table.to_pandas()
    assert set(free.group) == {"A", "B", "C"}
    assert set(kept.group) in ({"A", "other"}, {"B", "other"})  # C alone would be the difference to all
    assert kept.time.nunique() < free.time.nunique()
    for column in ("events", "censored"):
        assert kept[column].sum() == free[column].sum()
    assert kept[kept.time == kept.time.min()].at_risk.sum() == len(data)


def test_what_it_cannot_be_of_is_a_sentence() -> None:
    with pytest.raises(Refused, match="kaplan-meier works only for the task survival"):
        fl.analyze("kaplan-meier", fl.load("digits"), width=1.0)
    with pytest.raises(ConfigError, match="group"):
        fl.analyze("kaplan-meier", patients(), width=1.0, group="ward")
    with pytest.raises(Refused, match="have 50 subjects with an event in the same time bin"):
        fl.analyze("kaplan-meier", patients(), width=30.0, group="arm", rules={"min_clients": 3, "min_subjects": 50})
