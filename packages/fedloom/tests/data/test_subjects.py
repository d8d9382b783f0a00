"""Laws of splits: a subject is in one part, later rows are tested, and strata keep their shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedloom as fl
from fedloom.data.federation import DATA_PARTS, Federation, Split
from fedloom.data.partitions import PARTITIONS, Draw, Partition, Pool, group_by_owner
from fedloom.data.subjects.cut import PartSizes, SubjectUnits, codes_at_random, codes_in_order
from fedloom.data.subjects.design import Design
from fedloom.data.survey.agreement import Agreement
from fedloom.errors import ConfigError, DataError, PartitionError, Refused

CLASSES, SITES = 10, 6
BASES: dict[str, dict[str, Any]] = {
    "clusters": {"classes": (4, 6), "sizes": (2, 2)},
    "by-column": {"column": "site"},
    "label-swap": {"clients": 4},
    "dirichlet": {"clients": 4, "beta": 1.0},
    "femnist-fedprox": {"clients": 6, "mean": 1.0},
    "mixed": {"clients": 6},
    "iid": {"clients": 4},
    "feature-noise": {"clients": 4},
    "quantity-skew": {"clients": 4, "alpha": 2.0},
    "rotated": {"clients": 4},
    "shards": {"clients": 5},
    "natural": {},
}
OVERLAPPING = {
    "quantity-skew": {"clients": 4, "alpha": 2.0, "overlap": True},
    "dirichlet": {"clients": 4, "overlap": True},
}
SPLITS: dict[str, dict[str, Any]] = {
    "shares": {}, "wide": {"test": 0.4, "validation": 0.3}, "folds": {"folds": 3}, "keep": {"max_train_per_client": 5},
    "no test": {"test": 0.0}, "no validation": {"validation": 0.0}, "pool": {"pool": True},
}  # fmt: skip


def samples(seed: int = 0, images: bool = False, several_sites: bool = True, **roles: bool) -> fl.Dataset:
    """Samples of 1 to 5 rows per subject; a subject may be at several sites, and of several classes."""
    rng = np.random.default_rng(seed)
    each = rng.integers(1, 6, 260)
    subject = np.repeat(np.arange(260), each)
    mixed = rng.permutation(len(subject))
    subject = subject[mixed]
    rows = len(subject)
    site = subject % SITES
    if several_sites:
        site = np.where(rng.random(rows) < 0.1, rng.integers(SITES, size=rows), site)
    own = rng.integers(CLASSES, size=260)
    y = np.where(rng.random(rows) < 0.2, rng.integers(CLASSES, size=rows), own[subject])
    x = rng.random((rows, 1, 8, 8) if images else (rows, 3)).astype(np.float32)
    order = torch.from_numpy(rng.integers(0, 50, rows).astype(np.float64)) if roles.get("order") else None
    strata = torch.from_numpy(rng.integers(3, size=260)[subject]) if roles.get("strata") else None
    marks = torch.from_numpy(rng.random(260)[subject] < 0.3) if roles.get("held_out") else None
    users = torch.from_numpy(site)
    names = tuple(f"site {k}" for k in range(SITES))
    return fl.Dataset(
        "rows", torch.from_numpy(x), torch.from_numpy(y), classes=tuple(map(str, range(CLASSES))),
        columns={"site": users}, levels={"site": names}, users=users, user_names=names,
        design=Design(torch.from_numpy(subject), order, strata, marks),
    )  # fmt: skip


def subjects_by_part(fed: Federation) -> dict[str, set[int]]:
    design = fed.data.design
    parts = {part: {*design.units[fed.parts[part].index.numpy()].tolist()} for part in DATA_PARTS}
    if fed.test is not None:
        parts["test"] |= {*design.units[fed.test.numpy()].tolist()}
    return parts


ROLES: dict[str, dict[str, bool]] = {
    "subject": {}, "order": {"order": True}, "strata": {"strata": True}, "marked": {"held_out": True},
    "all": {"order": True, "strata": True},
}  # fmt: skip


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", [*BASES, *(f"{name} overlapping" for name in OVERLAPPING)])
def test_no_subject_is_in_two_parts(kind: str, split: str, roles: str) -> None:
    """Law: of every partition and every way to split, over all clients together."""
    name, _, overlapping = kind.partition(" ")
    options = OVERLAPPING[name] if overlapping else BASES[name]
    data = samples(images=name == "rotated", **ROLES[roles])
    cut = PARTITIONS[name](**options, **SPLITS[split])
    if roles == "marked" and split == "folds":
        with pytest.raises(PartitionError, match=r"folds = 3 cannot choose other test rows\. Omit one of the two"):
            cut(data, seed=1)
        return
    for seed in range(2):
        fed = cut(data, seed=seed)
        parts = subjects_by_part(fed)
        assert not parts["train"] & parts["test"], seed
        assert not parts["train"] & parts["validation"], seed
        assert not parts["validation"] & parts["test"], seed
        assert parts["train"]
        assert bool(parts["test"]) is (split != "no test")
        dealt = torch.cat([fed.parts[part].index for part in DATA_PARTS]).numpy()
        if name not in ("by-column", "natural") and not overlapping:
            owner = torch.cat([fed.owner(part) for part in DATA_PARTS]).numpy()
            pairs = {*zip(data.design.units[dealt].tolist(), owner.tolist(), strict=True)}
            assert len(pairs) == len({subject for subject, _ in pairs}), "a subject is at one client"
            if split != "keep" and not (split == "folds" and "order" in ROLES[roles]):
                whole = np.bincount(data.design.units)
                assert all(np.bincount(data.design.units[dealt])[s] == whole[s] for s, _ in pairs), "with all its rows"


def test_a_seed_gives_the_same_parts_again_and_others_differ() -> None:
    first, again, other = (fl.partitions.iid(clients=4)(samples(), seed) for seed in (3, 3, 4))
    assert torch.equal(first.parts["test"].index, again.parts["test"].index)
    assert not torch.equal(first.parts["test"].index, other.parts["test"].index)


@pytest.mark.parametrize("folds", [None, 4])
@pytest.mark.parametrize("kind", ["iid", "natural"])
def test_earlier_subjects_are_trained_on_and_later_ones_tested(kind: str, folds: int | None) -> None:
    """Law: at each client the last rows of training subjects come before those of validation, these before the test."""
    data = samples(order=True, several_sites=False)
    design = data.design
    last = np.zeros(len(design.units))
    ends = design.last_rows(np.arange(len(data)))
    last[design.units[ends]] = design.order.numpy()[ends]
    for seed in range(folds or 1):
        fed = PARTITIONS[kind](**BASES[kind], folds=folds)(data, seed)
        for client in range(fed.n):
            times = [last[design.units[fed.indices(part, client).numpy()]] for part in DATA_PARTS]
            train, validation, test = times
            assert train.max() <= validation.min()
            assert validation.max() <= test.min()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=30, max_size=90),
    st.floats(0.1, 0.4), st.sampled_from([None, 3, 5]), st.integers(0, 9),
)  # fmt: skip
def test_splits_and_folds_keep_the_shares_of_strata(
    rows: list[tuple[int, int]], share: float, folds: int | None, seed: int
) -> None:
    """Law: a stratum's part of the test differs from its share by less than a subject, and the classes kept aside."""
    stratum, label = (np.array(values) for values in zip(*rows, strict=True))
    rng = np.random.default_rng(seed)
    cells = SubjectUnits(np.zeros(len(rows), np.int64), label, stratum, 1)
    code = codes_at_random(cells, PartSizes(share, 0.1, folds=folds, fold=None if folds is None else seed % folds),
                           rng.random(len(rows)))  # fmt: skip
    tested = int((code == 2).sum())
    wanted = 1 / folds if folds is not None else tested / len(rows)
    for level in range(4):
        here = stratum == level
        slack = 1 + len({*label.tolist()})  # one of each class stays in training, or is too rare to be tested
        assert abs(int((code[here] == 2).sum()) - wanted * int(here.sum())) <= slack
    assert {*label[code == 0].tolist()} == {*label.tolist()}


def test_without_strata_shares_vary_more() -> None:
    """The law above is about strata: many random splits without them differ by more."""
    stratum = np.repeat([0, 1], 40)
    worst = {}
    for known in (True, False):
        cells = SubjectUnits(np.zeros(80, np.int64), np.zeros(80, np.int64), stratum if known else None, 1)
        tests = [
            codes_at_random(cells, PartSizes(0.25, 0.0), np.random.default_rng(k).random(80)) == 2 for k in range(60)
        ]
        worst[known] = max(abs(int(test[:40].sum()) - 10) for test in tests)
    assert worst[True] <= 1 < 3 <= worst[False]


def test_every_subject_is_tested_once_by_the_folds() -> None:
    data = samples()
    feds = [fl.partitions.natural(folds=5)(data, seed) for seed in range(5)]
    tested = np.concatenate([np.unique(data.design.units[fed.parts["test"].index.numpy()]) for fed in feds])
    subjects, counts = np.unique(tested, return_counts=True)
    assert counts.max() == 1
    assert len(subjects) > 0.9 * len(np.unique(data.design.units))  # but for classes of one subject at a client


def test_folds_in_order_test_on_the_block_after_those_trained_on() -> None:
    cells = SubjectUnits(np.zeros(12, np.int64), np.zeros(12, np.int64), None, 1)
    times = np.arange(12.0)
    blocks = [codes_in_order(cells, times, PartSizes(0.2, 0.0, folds=3, fold=k), times).tolist() for k in range(3)]
    assert blocks == [[0] * 3 + [2] * 3 + [3] * 6, [0] * 6 + [2] * 3 + [3] * 3, [0] * 9 + [2] * 3]


# -------------------------------------------------------------------------------------------------- reading of tables


def stays(rows: int = 240, seed: int = 0) -> pd.DataFrame:
    """A table of stays of patients at hospitals."""
    rng = np.random.default_rng(seed)
    patient = np.sort(rng.integers(80, size=rows))
    days = rng.integers(0, 700, rows)
    return pd.DataFrame({
        "patient_id": [f"p{k}" for k in patient], "hospital": np.array(["a", "b", "c"])[patient % 3],
        "admitted": (pd.Timestamp("2022-01-01") + pd.to_timedelta(days, "D")).strftime("%Y-%m-%d"),
        "cohort": np.where(patient % 5 == 0, "test", "train"), "sex": np.array(["f", "m"])[patient % 2],
        "age": rng.normal(60, 9, rows).round(1), "crp": rng.exponential(9, rows).round(2),
        "died": rng.integers(2, size=rows),
    })  # fmt: skip


ROW: dict[str, Any] = {"target": "died", "client_column": "hospital", "categorical": ["sex"]}
OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "subject": ({"subject": "patient_id"}, ["admitted", "cohort"]),
    "order": ({"subject": "patient_id", "order": "admitted"}, ["cohort"]),
    "strata": ({"subject": "patient_id", "strata": ["sex", "died"]}, ["admitted", "cohort"]),
    "column": ({"subject": "patient_id", "test_column": "cohort"}, ["admitted"]),
    "since": ({"order": "admitted", "test_since": "2023-06-01"}, ["patient_id", "cohort"]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_every_entrance_reads_the_same_design_and_makes_no_feature_of_it(case: str, tmp_path: Path) -> None:
    options, drop = OPTIONS[case]
    frame, whole = stays(), {**ROW, **options, "drop": drop}
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet", index=False)
    dated = frame.assign(admitted=pd.to_datetime(frame["admitted"]))
    read = {
        "csv": fl.load(tmp_path / "t.csv", **whole), "parquet": fl.load(tmp_path / "t.parquet", **whole),
        "pandas": fl.Dataset.create(frame, **whole), "dates": fl.Dataset.create(dated, **whole),
        "arrow": fl.Dataset.create(pa.Table.from_pandas(frame, preserve_index=False), **whole),
    }  # fmt: skip
    first = read["csv"]
    assert [column.name for column in first.prepare.columns] == ["sex", "age", "crp"]
    feds = {name: fl.partitions.natural()(data, 0) for name, data in read.items()}
    for name, fed in feds.items():
        for part in DATA_PARTS:
            assert torch.equal(fed.parts[part].index, feds["csv"].parts[part].index), name
    if "subject" in options:
        want = frame["patient_id"].to_numpy()
        units = first.design.units
        assert all(len({*want[units == k].tolist()}) == 1 for k in np.unique(units))
        assert len(np.unique(units)) == len({*want.tolist()})


def test_a_row_without_a_mark_is_named_with_a_cure_that_keeps_it() -> None:
    """The advice was to drop such rows, although they may be training rows."""
    frame = stays()
    whole: dict[str, Any] = {**ROW, "subject": "patient_id", "test_column": "cohort", "drop": ["admitted"]}
    with pytest.raises(DataError, match=r"missing value \(2 such\); write the level of .* \(rows 4, 7\)") as error:
        fl.Dataset.create(frame.assign(cohort=frame["cohort"].where(~frame.index.isin([4, 7]))), **whole)
    assert "drop" not in str(error.value)


def test_marked_rows_and_later_rows_are_the_test_part() -> None:
    frame = stays()
    by_column = fl.partitions.natural()(
        fl.Dataset.create(frame, **ROW, subject="patient_id", test_column="cohort", drop=["admitted"]), 0
    )
    assert {*frame["cohort"].to_numpy()[by_column.parts["test"].index].tolist()} == {"test"}
    assert {*frame["cohort"].to_numpy()[by_column.parts["train"].index].tolist()} == {"train"}
    plain = ["patient_id", "cohort"]
    since = fl.partitions.natural()(
        fl.Dataset.create(frame, **ROW, order="admitted", test_since="2023-06-01", drop=plain), 0
    )
    days = frame["admitted"].to_numpy()
    assert days[since.parts["test"].index].min() >= "2023-06-01" > days[since.parts["train"].index].max()
    numbers = frame.assign(year=frame["admitted"].str[:4].astype(int)).drop(columns="admitted")
    year = fl.partitions.iid(clients=3)(
        fl.Dataset.create(numbers, target="died", categorical=["sex"], order="year", test_since=2023,
                      drop=[*plain, "hospital"]), 0
    )  # fmt: skip
    assert {*numbers["year"].to_numpy()[year.parts["test"].index].tolist()} == {2023}


def test_a_hospital_of_test_rows_alone_is_the_common_test_set() -> None:
    """External validation: it trains on nothing, and its columns are scaled as a new client's."""
    frame = stays()
    split = frame.assign(unit=frame["hospital"])
    data = fl.Dataset.create(split, **ROW, subject="patient_id", test_column="unit", test_levels=["c"],
                         drop=["admitted", "cohort"])  # fmt: skip
    fed = fl.partitions.natural()(data, 0)
    assert fed.names == ("a", "b")
    assert {*frame["hospital"].to_numpy()[fed.test].tolist()} == {"c"}
    assert not len(fed.parts["test"].index)
    assert any("1 of 3 clients have only test rows (c)" in note for note in fed.notes)
    result = fl.simulate("fedavg", fed, rounds=1)
    assert {row["part"] for row in result.table().to_pylist()} >= {"common"}


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "absent": ({"subject": "patient"}, ConfigError, "no column 'patient'"),
    "site too": ({"subject": "hospital"}, ConfigError, "a column can have only one role"),
    "two roles": ({"subject": "patient_id", "order": "patient_id"}, ConfigError, "subject and order are both"),
    "target": ({"subject": "died"}, ConfigError, "the target cannot also be subject"),
    "text": ({"order": "sex"}, DataError, "row 0, column 'sex': expected a number or a date, got 'f'"),
    "since alone": ({"test_since": 3}, ConfigError, "`test_since` needs `order`"),
    "levels alone": ({"test_levels": ["x"]}, ConfigError, "test_levels lists levels of test_column"),
    "no mark": ({"test_column": "sex"}, ConfigError, "neither yes nor no. List the levels"),
    "no level": ({"test_column": "cohort", "test_levels": ["z"]}, ConfigError, "has no level 'z'"),
    "none later": ({"order": "admitted", "test_since": "2040"}, DataError, "no row is a test row"),
    "all later": ({"order": "admitted", "test_since": "2000"}, DataError, "every row is a test row"),
    "no date": ({"order": "admitted", "test_since": "soon"}, ConfigError, "test_since must be a date"),
    "both": (
        {"order": "admitted", "test_since": "2023", "test_column": "cohort"}, ConfigError, "both choose the test set",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_role_that_cannot_be_is_refused_with_a_cure(case: str) -> None:
    options, error, words = WRONG[case]
    used = {value for value in options.values() if isinstance(value, str)}
    drop = [c for c in ("patient_id", "admitted", "cohort") if c not in used]
    with pytest.raises(error, match=words):
        fl.Dataset.create(stays(), **ROW, **options, drop=drop)


def test_rows_without_a_subject_or_a_date_are_refused_or_left_out(tmp_path: Path) -> None:
    frame = stays()
    frame.loc[[3, 8], "patient_id"] = None
    frame.loc[5, "admitted"] = None
    options = {**ROW, "subject": "patient_id", "order": "admitted", "drop": ["cohort"]}
    frame.to_csv(tmp_path / "t.csv", index=False)
    for table in (frame, tmp_path / "t.csv"):
        read = fl.load if isinstance(table, Path) else fl.Dataset.create
        with pytest.raises(DataError, match=r"column 'patient_id': missing value.*(\n.*)*column 'admitted': missing"):
            read(table, **options)
        data = read(table, **options, unlabelled="drop")
        assert len(data) == len(data.design.units) == len(frame) - 3


def test_samples_in_memory_have_subjects_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y, who = rng.random((90, 4)), rng.integers(2, size=90), np.arange(90) // 3
    np.savez(tmp_path / "t.npz", x=x, y=y, subject=who)
    for data in (fl.Dataset.create((x, y), subject=who), fl.Dataset.create({"x": x, "y": y, "subject": who}),
                 fl.load(tmp_path / "t.npz")):  # fmt: skip
        parts = subjects_by_part(fl.partitions.iid(clients=3)(data, 0))
        assert not parts["train"] & parts["test"]
    clients = {k: {"x": x[k::2], "y": y[k::2], "subject": who[k::2]} for k in range(2)}
    parts = subjects_by_part(fl.Federation.create(clients))
    assert not parts["train"] & parts["test"]
    with pytest.raises(DataError, match="one value per sample"):
        fl.Dataset.create((x, y), subject=who[:5])
    with pytest.raises(DataError, match="`order` must contain finite numbers or dates"):
        fl.Dataset.create((x, y), order=[str(k) for k in range(90)])


def test_a_federation_with_a_subject_in_two_parts_cannot_be_made() -> None:
    data = samples()
    whole = fl.partitions.iid(clients=2)(data, 0)
    moved = whole.parts["test"].index.clone()
    moved[0] = whole.parts["train"].index[0]
    with pytest.raises(DataError, match="is in both the train set and the test set"):
        replace(whole, parts={**whole.parts, "test": Split(moved, whole.parts["test"].offsets)})
    with pytest.raises(DataError, match="put the client's name before"):
        replace(whole, test=whole.parts["train"].index[:1])


def test_a_subject_on_both_sides_of_an_official_test_set_is_refused_and_the_cure_works() -> None:
    rng = np.random.default_rng(0)
    x, y, who = rng.random((80, 4)), rng.integers(2, size=80), np.arange(80) % 20
    data = fl.Dataset.create({"x": x[:60], "y": y[:60]}, test={"x": x[60:], "y": y[60:]}, subject=who)
    with pytest.raises(DataError, match="pool = true"):
        fl.partitions.iid(clients=2)(data, 0)
    parts = subjects_by_part(fl.partitions.iid(clients=2, pool=True)(data, 0))
    assert not parts["train"] & parts["test"]


# ------------------------------------------------------------------------------------------------- a user's partition


class Halves(Partition):
    """Every other entry of the pool to a client."""

    kind: ClassVar[str] = "halves"

    def draw(self, pool: Pool, seed: int) -> Draw:
        return Draw(group_by_owner(pool.index, np.arange(len(pool)) % 2, 2))


class Rows(Halves):
    """Every other row of the data."""

    def draw(self, pool: Pool, seed: int) -> Draw:
        return Draw(group_by_owner(np.arange(len(pool.data)), np.arange(len(pool.data)) % 2, 2))


class RowsAsTheyAre(Rows):
    by_row: ClassVar[bool] = True


class Common(Halves):
    """The last tenth of the pool is tested on by all clients."""

    shared: bool = False

    def draw(self, pool: Pool, seed: int) -> Draw:
        last = pool.index[-len(pool) // 10 :]
        dealt = group_by_owner(pool.index[: -len(last)], np.arange(len(pool) - len(last)) % 2, 2)
        if self.shared:
            return Draw(dealt, test=group_by_owner(np.tile(last, 2), np.repeat([0, 1], len(last)), 2))
        return Draw(dealt, common=last)


def test_a_partition_of_a_user_deals_whole_subjects_or_says_that_it_deals_rows() -> None:
    for cut in (Halves(), RowsAsTheyAre()):
        parts = subjects_by_part(cut(samples(), 0))
        assert not parts["train"] & parts["test"]
    with pytest.raises(PartitionError, match=r"Assign entries of pool\.index, or set by_row = True"):
        Rows()(samples(), 0)
    fl.testing.check_partition(Halves())


def test_a_common_test_set_of_a_table_works_and_a_shared_test_part_names_it() -> None:
    frame = stays().drop(columns=["patient_id", "admitted", "cohort", "hospital"])
    data = fl.Dataset.create(frame, target="died", categorical=["sex"])
    fed = Common(test=0.0)(data, 0)
    assert len(fed.test) == 24
    assert fed.fetch(fed.test).isfinite().all()
    rows = fl.simulate("fedavg", fed, rounds=1).table().to_pylist()
    (auroc,) = [r["value"] for r in rows if (r["part"], r["metric"], r["round"]) == ("common", "auroc", 1)]
    assert 0 <= auroc <= 1
    with pytest.raises(Refused, match="Put a test set for all clients into Draw.common"):
        Common(shared=True)(data, 0)


# ---------------------------------------------------------------------------------------------- notes, minimum counts


def test_equal_rows_in_two_parts_are_noted_and_chance_is_not() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((200, 4)), rng.integers(2, size=200)
    twice = fl.Dataset.create((np.concatenate([x, x[:60]]), np.concatenate([y, y[:60]])))
    cut = fl.partitions.iid(clients=3, test=0.4)
    assert any("are exact copies of rows of the training set," in note for note in cut(twice, 0).notes)
    together = fl.Dataset.create(
        (np.concatenate([x, x[:60]]), np.concatenate([y, y[:60]])), subject=np.r_[np.arange(200), np.arange(60)]
    )
    assert not any("are equal" in note for note in cut(together, 0).notes)
    coarse = fl.Dataset.create((rng.integers(3, size=(200, 3)).astype(float), y))
    assert not any("are equal" in note for note in cut(coarse, 0).notes)
    pixels = rng.integers(256, size=(90, 1, 8, 8), dtype=np.uint8)
    images = fl.Dataset.create((np.concatenate([pixels, pixels]), np.r_[y[:90], y[:90]]))
    assert any("are exact copies of rows" in note for note in cut(images, 0).notes)


def test_least_numbers_count_subjects() -> None:
    frame = stays().assign(hospital="a")
    frame.loc[frame.index[-6:], "hospital"] = "b"  # six rows
    frame.loc[frame.index[-6:], "patient_id"] = "last"  # of one patient
    options = {**ROW, "drop": ["admitted", "cohort"]}
    by_row = fl.partitions.natural(min_size=5)(fl.Dataset.create(frame.drop(columns="patient_id"), **options), 0)
    assert by_row.names == ("a", "b")
    by_subject = fl.partitions.natural(min_size=5)(fl.Dataset.create(frame, **options, subject="patient_id"), 0)
    assert by_subject.names == ("a",)
    agreement = Agreement.create(
        fl.Dataset.create(frame.drop(columns="patient_id"), **options).prepare, "binary", ("0", "1"), "died"
    )
    (line,) = agreement.with_(patients=2, subject="patient_id").shortcomings({}, 1)
    assert line == "1 subjects ('patient_id'), but the agreement requires at least 2"


def test_an_agreement_carries_the_subject_to_every_site(tmp_path: Path) -> None:
    frame = stays()
    drop = {**ROW, "drop": ["admitted", "cohort"]}
    agreed = Agreement.create(
        fl.Dataset.create(frame, **drop, subject="patient_id").prepare, "binary", ("0", "1"), "died"
    )
    (tmp_path / "a.toml").write_text(agreed.with_(subject="patient_id", strata=("sex",)).text())
    data = fl.Dataset.create(frame, agreement=str(tmp_path / "a.toml"), client_column="hospital")
    assert len(np.unique(data.design.units)) == frame["patient_id"].nunique()
    assert data.design.strata is not None
    with pytest.raises(ConfigError, match="no column 'patient_id'"):
        fl.Dataset.create(
            frame.drop(columns="patient_id"), agreement=str(tmp_path / "a.toml"), client_column="hospital"
        )


def test_a_run_without_a_test_row_is_refused_unless_it_was_asked_for() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((6, 3)), np.arange(6) % 2
    one_each = fl.partitions.iid(clients=6)(fl.Dataset.create((x, y)), 0)
    with pytest.raises(Refused, match="(?i)set test ?= ?0 in the partition"):
        fl.simulate("fedavg", one_each, rounds=1)
    asked = fl.partitions.iid(clients=6, test=0.0)(fl.Dataset.create((x, y)), 0)
    result = fl.simulate("fedavg", asked, rounds=1)
    assert result.status == "done"
    assert "trained but not evaluated, because there are no test rows" in result.notes


def test_marks_that_the_last_row_of_each_subject_undoes_are_refused_with_a_fix_that_works() -> None:
    frame = days(120).assign(patient=np.arange(120) // 3, test=(np.arange(120) % 12 == 0).astype(int))
    options = {"target": "y", "subject": "patient", "test_column": "test", "drop": ["when"]}
    fed = fl.partitions.iid(clients=3)(fl.Dataset.create(frame, **options), 0)
    with pytest.raises(Refused, match="or mark the last row of some subjects as a test row") as caught:
        fl.simulate("fedavg", fed, rounds=1)
    assert caught.value.rule == "test-part-empty"
    marked = frame.assign(test=(np.arange(120) % 12 == 2).astype(int))
    fed = fl.partitions.iid(clients=3)(fl.Dataset.create(marked, **options), 0)
    assert fl.simulate("fedavg", fed, rounds=1).status == "done"


@pytest.mark.parametrize("parts", [("test",), ("validation", "test"), ("train", "test")])
def test_a_run_that_measures_no_loss_is_not_taken_for_one_that_trained_nothing(parts: tuple[str, ...]) -> None:
    x, y = np.sin(np.arange(60.0)).reshape(30, 2), np.arange(30) % 2
    fed = fl.partitions.iid(clients=3, test=0.0, validation=0.0)(fl.Dataset.create((x, y)), 0)
    assert fl.simulate("fedavg", fed, rounds=2, evaluate={"parts": parts}).status == "done"


def test_a_simulation_writes_into_no_run_directory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fed = fl.partitions.iid(clients=2)((rng.random((40, 3)), np.arange(40) % 2), 0)
    fl.compare(["fedavg"], fed, seeds=[0, 1], rounds=1, folder=tmp_path / "run", progress_bar=False)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for folder in (tmp_path / "run", tmp_path / "run" / "models", tmp_path / "run" / "new"):
        with pytest.raises(ConfigError, match="is in the run directory"):
            fl.simulate("fedavg", fed, rounds=1, folder=folder)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    fl.simulate("fedavg", fed, rounds=1, folder=tmp_path / "own")
    assert fl.simulate("fedavg", fed, rounds=1, folder=tmp_path / "own").rounds == 1


@pytest.mark.parametrize(
    "subjects",
    [[1, 1.0, "1", " 1"] * 3, ["a ", "a", " a", "a"] * 3, np.array([1, "1"] * 6, object)],
    ids=["types", "spaces", "objects"],
)
def test_one_subject_in_several_spellings_of_an_array_is_one_as_in_a_table(subjects: Any) -> None:
    x, y = np.sin(np.arange(24.0)).reshape(12, 2), [0, 1] * 6
    data = fl.Dataset.create((x, y), subject=subjects)
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "s": pd.Series(subjects, dtype=object), "y": y})
    table = fl.Dataset.create(frame, target="y", subject="s")
    assert len(data.design.subject.unique()) == len(table.design.subject.unique()) == 1


@pytest.mark.parametrize(
    ("role", "values"),
    [
        ("subject", [1.0, float("nan")] * 6), ("subject", pd.array([1, None] * 6, dtype="Int64")),
        ("subject", pd.to_datetime(["2020-01-01", None] * 6)), ("subject", ["a", None] * 6),
        ("order", pd.to_datetime(["2020-01-01", None] * 6)), ("strata", np.array([0.0, np.nan] * 6)),
    ],
)  # fmt: skip
def test_a_sample_without_a_subject_or_a_time_is_refused(role: str, values: Any) -> None:
    x, y = np.sin(np.arange(24.0)).reshape(12, 2), [0, 1] * 6
    with pytest.raises(DataError, match=f"{role} is missing for some samples"):
        fl.Dataset.create((x, y), **{role: values})


def days(count: int) -> pd.DataFrame:
    when = pd.Timestamp("2021-01-01") + pd.to_timedelta(np.arange(count), unit="D")
    return pd.DataFrame({"a": np.sin(np.arange(count)), "when": when, "y": np.arange(count) // 2 % 2})


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (lambda t: ["2021-01-01"] * len(t), "'when' is the same in every row"),
        (lambda t: [int(v.timestamp()) * (1, 1000)[k % 2] for k, v in enumerate(t)], "both seconds and milliseconds"),
        (lambda t: [v.isoformat() + ("", "+09:00")[k % 2] for k, v in enumerate(t)], "without a time zone are read"),
        (lambda t: [v.isoformat() + ("Z", "+09:00")[k % 2] for k, v in enumerate(t)], None),
        (lambda t: [int(v.timestamp()) for v in t], None),
        (lambda t: [v.date().isoformat() for v in t], None),
        (lambda t: [f"{v:%d%m%Y}" for v in t], "begin with the day or the month"),
        (lambda t: [1.2 + k % 9 for k in range(len(t))], None),
        (lambda t: [f"{k % 12 + 1:02d}.{2020 + k // 40}" for k in range(len(t))], "begin with the day or the month"),
        (lambda t: [int(f"{v:%Y%m%d}") for v in t], None),
        (lambda t: [10_000_000 + 7 * k for k in range(len(t))], None),
        (lambda t: ["9999-12-31" if k % 9 == 5 else v.date().isoformat() for k, v in enumerate(t)], "far after all"),
        (lambda t: [v.replace(year=1900, month=1, day=1) if k % 9 == 5 else v for k, v in enumerate(t)], "far before"),
        (lambda t: [-1 if k % 9 == 5 else int(v.timestamp()) for k, v in enumerate(t)], "is -1 in 13 rows, far before"),
        (lambda t: [2001 if k < 3 else 2018 + k % 6 for k in range(len(t))], None),
        (lambda t: [k % 2 for k in range(len(t))], None),
    ],
)
def test_times_that_hardly_order_rows_are_noted(times: Callable[[pd.Series], Any], said: str | None) -> None:
    frame = days(120)
    notes = fl.Dataset.create(frame.assign(when=times(frame["when"])), target="y", order="when").notes
    assert [said is not None and said in note for note in notes] == ([] if said is None else [True])


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y", "%Y%m%d", "%Y-%m-%dT%H:%M:%S+09:00"])
def test_every_accepted_form_of_a_date_gives_the_same_order(form: str) -> None:
    frame = days(120).sample(frac=1, random_state=0)
    expected = frame["when"].argsort().tolist()
    data = fl.Dataset.create(frame.assign(when=frame["when"].dt.strftime(form)), target="y", order="when")
    assert data.design.order.numpy().argsort().tolist() == expected
    assert not data.notes


def test_a_time_that_is_no_date_is_left_out_as_the_error_says() -> None:
    frame = days(120).astype({"when": str})
    frame.loc[[5, 8], "when"] = "unknown"
    with pytest.raises(DataError, match="add their cells to missing and set unlabelled = 'drop'"):
        fl.Dataset.create(frame, target="y", order="when")
    data = fl.Dataset.create(frame, target="y", order="when", missing=["unknown"], unlabelled="drop")
    assert len(data) == 118


def test_levels_of_test_rows_may_be_numbers_and_a_mark_of_training_rows_is_refused() -> None:
    frame = days(120).drop(columns="when").assign(year=2020 + np.arange(120) % 3)
    held_out = frame["year"].to_numpy() == 2022
    for levels in ([2022], 2022, "2022"):
        data = fl.Dataset.create(frame, target="y", test_column="year", test_levels=levels)
        assert data.design.held_out.numpy().tolist() == held_out.tolist()
    for name in ("is_train", "Training", "train"):
        marked = frame.drop(columns="year").assign(**{name: (~held_out).astype(int)})
        with pytest.raises(ConfigError, match="has a name that suggests training rows"):
            fl.Dataset.create(marked, target="y", test_column=name)
        data = fl.Dataset.create(marked, target="y", test_column=name, test_levels=["0"])
        assert data.design.held_out.numpy().tolist() == held_out.tolist()


def test_copies_with_noise_are_noted_for_arrays_and_sequences_as_for_tables() -> None:
    rng = np.random.default_rng(0)
    for shape in ((60, 5), (60, 7, 3)):
        x, y = rng.normal(size=shape).astype(np.float32), rng.integers(0, 2, 60)
        near = x + rng.normal(size=shape).astype(np.float32) * 1e-6
        layout = {"layout": "sequence"} if len(shape) == 3 else {}
        for data in (
            fl.Dataset.create({"train": (x, y), "test": (near, y)}, **layout),
            fl.Dataset.create((np.concatenate([x, near]), np.tile(y, 2)), **layout),
        ):
            (note,) = data.notes
            assert note.startswith("120 of 120 rows have a neighbor that is much closer than all others")
        assert fl.Dataset.create((x, y), **layout).notes == ()
        several = {"subject": np.tile(np.arange(60), 2)}
        assert fl.Dataset.create((np.concatenate([x, near]), np.tile(y, 2)), **layout, **several).notes == ()
