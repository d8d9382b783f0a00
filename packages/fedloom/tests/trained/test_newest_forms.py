"""Rows in the forms of other libraries, by every entrance and in exported programs: the same figures, or an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import fedloom as fl
from fedloom.errors import ConfigError, DataError, FedloomError
from fedloom.trained.export import Program, export_model, load
from fedloom.trained.model import Model
from tests.cures import applied

RNG = np.random.default_rng(0)
COUNT = 60
ROWS = pd.DataFrame(
    {
        "age": RNG.integers(20, 80, COUNT).astype(float),
        "hb": RNG.normal(12, 2, COUNT).round(1),
        "ward": RNG.choice(["A", "B", "C"], COUNT),
        "smoker": RNG.random(COUNT) < 0.4,
        "grade": RNG.integers(1, 4, COUNT),
    }
)
Y = ((ROWS.age / 20 + ROWS.hb + 3 * (ROWS.ward == "A") + RNG.normal(0, 1, COUNT)) > 15.5).astype(int)
GAPS = ROWS.assign(hb=ROWS.hb.where(ROWS.index != 3), ward=ROWS.ward.where(ROWS.index != 5))
LEVELS = ("ward", "grade")


def trained(rows: pd.DataFrame, **options: Any) -> Model:
    data = fl.Dataset.create(rows.assign(y=Y), "y", categorical=LEVELS, **options)
    fed = fl.partitions.iid(clients=2)(data, seed=0)
    return fl.simulate("fedavg", fed, "softmax", rounds=2, local={"lr": 0.2}).models.ready("global", "0")


@pytest.fixture(scope="module")
def filling() -> Model:
    return trained(GAPS, impute=True)


@pytest.fixture(scope="module")
def strict() -> Model:
    return trained(ROWS)


@pytest.fixture(scope="module")
def program(filling: Model, tmp_path_factory: pytest.TempPathFactory) -> Program:
    path = tmp_path_factory.mktemp("program") / "m.pt2"
    export_model(filling, path, "torch")
    return load(path)


@pytest.fixture(scope="module")
def graph(strict: Model, tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    path = tmp_path_factory.mktemp("graph") / "m.onnx"
    export_model(strict, path, "onnx")
    return onnxruntime.InferenceSession(path)


def arrow(rows: pd.DataFrame, name: str = "", kind: Callable[[Any], Any] = lambda column: column) -> pa.Table:
    table = pa.Table.from_pandas(rows, preserve_index=False)
    place = table.column_names.index(name or "age")
    return table.set_column(place, name or "age", kind(table.column(place)))


def as_type(name: str, kind: Any) -> Callable[[pd.DataFrame], Any]:
    return lambda rows: rows.assign(**{name: rows[name].astype(kind)})


FORMS: dict[str, Callable[[pd.DataFrame], Any]] = {
    "Arrow types of pandas": lambda rows: rows.convert_dtypes(dtype_backend="pyarrow"),
    "nullable types": lambda rows: rows.convert_dtypes(),
    "categorical": as_type("ward", "category"),
    "categorical in another order": lambda rows: rows.assign(ward=pd.Categorical(rows.ward, [*"CBAZ"], ordered=True)),
    "nullable booleans": as_type("smoker", "boolean"),
    "booleans as text": as_type("smoker", str),
    "float16": as_type("age", np.float16),
    "big-endian": lambda rows: rows.assign(age=rows.age.to_numpy().astype(">f8")),
    "sparse column": as_type("age", "Sparse[float64]"),
    "levels as floats": as_type("grade", float),
    "levels as text": as_type("grade", str),
    "text as bytes": lambda rows: rows.assign(ward=[w.encode() if isinstance(w, str) else None for w in rows.ward]),
    "numbers as bytes": lambda rows: rows.assign(age=[str(int(a)).encode() for a in rows.age]),
    "other order": lambda rows: rows.iloc[:, ::-1],
    "Arrow": arrow,
    "Arrow dictionary": lambda rows: arrow(rows, "ward", lambda c: c.combine_chunks().dictionary_encode()),
    "Arrow binary": lambda rows: arrow(rows, "ward", lambda c: c.cast(pa.binary())),
    "Arrow string view": lambda rows: arrow(rows, "ward", lambda c: c.cast(pa.string_view())),
    "Arrow run-end encoded": lambda rows: arrow(rows, "ward", pc.run_end_encode),
    "Arrow decimal": lambda rows: arrow(rows, "age", lambda c: c.cast(pa.decimal128(12, 2))),
    "Arrow float16": lambda rows: arrow(rows, "age", lambda c: c.cast(pa.float16())),
    "Arrow batch": lambda rows: arrow(rows).combine_chunks().to_batches()[0],
    "polars": lambda rows: pytest.importorskip("polars").from_arrow(arrow(rows)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_table_is_predicted_and_exported_alike(form: str, filling: Model, program: Program) -> None:
    want, given = filling.predict_proba(GAPS), FORMS[form](GAPS)
    np.testing.assert_array_equal(filling.predict_proba(given), want)
    np.testing.assert_allclose(program.scores(given), want, atol=1e-6)


def columns_of(graph: onnxruntime.InferenceSession, rows: pd.DataFrame) -> dict[str, Any]:
    names = json.loads(graph.get_modelmeta().custom_metadata_map["columns"])
    return {
        "numbers": np.array([rows[name] for name in names["numbers"]], float).T,
        "texts": np.array([rows[name].astype(object) for name in names["texts"]], object).T,
    }


@pytest.mark.parametrize("kind", [int, str, float])
def test_a_graph_reads_the_spellings_of_a_level_that_predict_reads(
    kind: Any, strict: Model, graph: onnxruntime.InferenceSession
) -> None:
    """Pandas writes whole numbers as 1.0 in a column that had a gap."""
    rows = ROWS.assign(grade=ROWS.grade.astype(kind).astype(str))
    want = strict.predict_proba(rows)
    np.testing.assert_allclose(graph.run(["probabilities"], columns_of(graph, rows))[0], want, atol=1e-6)


UNREADABLE: dict[str, dict[str, Any]] = {
    "number": {"hb": np.nan},
    "text": {"ward": ""},
    "unknown level": {"ward": "Q"},
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_graph_gives_no_figure_for_a_row_that_predict_refuses(
    case: str, strict: Model, graph: onnxruntime.InferenceSession
) -> None:
    """Before, it filled the cell, although the model was trained without imputation."""
    rows = ROWS.astype({"grade": str, "ward": object})
    for name, cell in UNREADABLE[case].items():
        rows.loc[7, name] = cell
    with pytest.raises(DataError, match="row 7"):
        strict.predict(rows)
    found, classes = graph.run(["probabilities", "class"], columns_of(graph, rows))
    others = np.arange(COUNT) != 7
    assert np.isnan(found[7]).all()
    assert classes[7] == ""
    np.testing.assert_allclose(found[others], strict.predict_proba(ROWS)[others], atol=1e-6)
    assert classes[others].tolist() == strict.predict(ROWS)[others].tolist()


def test_a_level_that_training_did_not_have_has_a_warning(filling: Model) -> None:
    sentence = "column 'ward': 60 cells contain levels that the training data do not contain: 'Q'; agreed are A"
    with pytest.warns(UserWarning, match=sentence):
        filling.predict(GAPS.assign(ward="Q"))


UNREAD: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "stream": (lambda: arrow(ROWS).to_reader(), lambda cure, rows: getattr(rows, cure.split()[-1].strip("()."))()),
    "batches": (lambda: arrow(ROWS).to_batches(), lambda _, rows: pa.Table.from_batches(rows)),
    "rows": (lambda: ROWS.to_dict("records"), lambda cure, rows: applied(cure, rows=rows, pandas=pd)),
    "structured array": (lambda: ROWS.to_records(index=False), lambda cure, rows: applied(cure, x=rows, pandas=pd)),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_table_in_a_form_that_is_not_read_is_refused_with_a_cure_that_works(case: str, filling: Model) -> None:
    make, convert = UNREAD[case]
    with pytest.raises(ConfigError, match="Pass") as error:
        filling.predict(make())
    named = str(error.value).split("Pass ")[1]
    np.testing.assert_array_equal(filling.predict(convert(named, make())), filling.predict(ROWS))
    with pytest.raises(ConfigError, match=re.escape(named)):
        fl.Dataset.create(make(), "ward", impute=True)


def test_only_a_dictionary_of_columns_is_called_one() -> None:
    with pytest.raises(ConfigError, match=re.escape("Pass pandas.DataFrame(columns)")):
        fl.Dataset.create(ROWS.to_dict("list"), "ward")
    for clients in ({"a": ROWS, "b": ROWS}, {"a": (ROWS.to_numpy(), Y), "b": (ROWS.to_numpy(), Y)}):
        with pytest.raises(ConfigError, match="dict is not a known form of data"):
            fl.Dataset.create(clients, "ward")


def test_masked_values_are_refused_at_every_entrance() -> None:
    """Numpy uses the number behind the mask."""
    x = RNG.normal(size=(COUNT, 3)).astype(np.float32)
    y = Y.to_numpy()
    masked = np.ma.masked_array(x, mask=x > 1)
    models = fl.simulate("fedavg", fl.partitions.iid(clients=2)((x, y), seed=0), "softmax", rounds=1).models
    ff = pytest.importorskip("fedloom_sites.flower")
    fitted = fl.sklearn.FederatedClassifier(rounds=1).fit(x, y)
    entrances: list[Callable[[Any], object]] = [
        models.predict,
        lambda rows: fl.Dataset.create((rows, y)),
        lambda rows: fl.Dataset.create([*zip(rows, y.tolist(), strict=True)]),
        lambda rows: models.adapt((rows, y)),  # type: ignore[arg-type]
        lambda rows: ff.Local(torch.nn.Linear(3, 2), [*zip(rows, y.tolist(), strict=True)]).read(),
    ]
    for entrance in entrances:
        for rows in (masked, [*masked]):
            with pytest.raises(FedloomError, match="some values are masked. Fill these values"):
                entrance(rows)
    for estimator in (fitted.predict, lambda rows: fl.sklearn.FederatedClassifier(rounds=1).fit(rows, y)):
        with pytest.raises(DataError, match="some values are masked"):
            estimator(masked)
    with pytest.raises(DataError, match="some values are masked"):
        ff.Local(torch.nn.Linear(3, 2), (masked, y)).read()


def test_arrays_that_may_not_be_written_have_no_warning_and_are_not_changed() -> None:
    x = RNG.normal(size=(COUNT, 3)).astype(np.float32)
    models = fl.simulate("fedavg", fl.partitions.iid(clients=2)((x, Y.to_numpy()), seed=0), "softmax", rounds=1).models
    want, kept = models.predict_proba(x), x.copy()
    for given in (np.asfortranarray(x), x[::-1][::-1], x.astype(">f4")):
        given.flags.writeable = False
        np.testing.assert_array_equal(models.predict_proba(given), want)
    assert (x == kept).all()


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_pictures_of_more_than_8_bits_are_not_sent_to_a_conversion_that_clips(mode: str) -> None:
    pixels = RNG.integers(0, 256, (COUNT, 3, 4, 4)).astype(np.uint8)
    models = fl.simulate("fedavg", fl.partitions.iid(clients=2)((pixels, Y.to_numpy()), seed=0), "softmax", rounds=1)
    kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
    gray = [Image.fromarray(one[0].astype(kind) * kind(257)) for one in pixels]
    with pytest.raises(DataError, match=r"Scale the pixels to bytes, because Pillow clips \w+, and then convert"):
        models.models.predict(gray)
    small = [Image.fromarray(one[0]) for one in pixels]
    with pytest.raises(DataError, match=r"picture.convert\('RGB'\)"):
        models.models.predict(small)


def test_a_node_of_a_flower_app_names_the_form_that_it_cannot_read() -> None:
    ff = pytest.importorskip("fedloom_sites.flower")
    x = RNG.normal(size=(COUNT, 3)).astype(np.float32)
    data = fl.Dataset.create((x, Y.to_numpy()))
    given: list[tuple[Any, str]] = [
        (ROWS, "is a table or a fedloom Dataset"),
        (data, "is a table or a fedloom Dataset"),
        ((arrow(ROWS), Y.to_numpy()), "is a table or a fedloom Dataset"),
        ((x.astype(object), Y.to_numpy()), "must contain real numbers, got an array of object"),
        ((x.astype(complex), Y.to_numpy()), "must contain real numbers, got an array of complex128"),
        (TensorDataset(torch.from_numpy(x).to(torch.complex64), torch.tensor(Y.tolist())), "contains complex numbers"),
    ]
    for samples, words in given:
        with pytest.raises(ConfigError, match=words):
            ff.Local(torch.nn.Linear(3, 2), samples).read()


def test_times_with_and_without_a_zone_are_not_subtracted() -> None:
    """Those without a zone were read as UTC, which shifted the days by hours."""
    start = pd.date_range("2024-03-01 22:00", periods=COUNT, freq="36h", tz="Europe/Berlin")
    rows = pd.DataFrame({"start": start, "end": start + pd.Timedelta(days=2), "age": ROWS.age, "y": Y})
    options: dict[str, Any] = {"days_since": {"end": "start"}, "drop": ("start",)}
    want = fl.Dataset.create(rows, "y", **options).x
    assert (want[:, 0] == 2).all()
    for same in (rows.assign(start=start.tz_convert("UTC")), rows.assign(end=rows.end.map(pd.Timestamp.isoformat))):
        assert torch.equal(fl.Dataset.create(same, "y", **options).x, want)
    with pytest.raises(DataError, match="'start' have a time zone, others do not; use one time zone for all"):
        fl.Dataset.create(rows.assign(start=start.tz_localize(None)), "y", **options)
    dates = start.tz_localize(None).normalize()
    texts = dates.strftime("%Y-%m-%d")
    of_dates, of_texts = (fl.Dataset.create(rows.assign(start=some), "y", **options).x for some in (dates, texts))
    assert torch.equal(of_dates, of_texts), "a pandas column of dates was refused, and dates as text were not"
