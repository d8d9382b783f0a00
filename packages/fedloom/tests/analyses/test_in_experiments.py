"""Analyses of files, comparisons and the command line; old keys are errors, and records are read."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
import torch

import fedloom as fl
from fedloom.analyses import Analysis, Bounds, Question
from fedloom.engine.checks.moved import MOVED_KEYS, move_analyses
from fedloom.errors import ConfigError, Refused
from fedloom.lab.experiment import Plan, open_run, parse, read
from tests.commands import call

SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30, "test": 0.05},
    "method": [{"algorithm": "fedavg"}, {"algorithm": "local"}],
}
OLD = [
    ("evaluate", "confusion", True, {"kind": "confusion"}),
    ("evaluate", "tsne", [0, 2], {"kind": "tsne", "clients": [0, 2]}),
    ("evaluate", "groups", ["sex"], {"kind": "groups", "by": ["sex"]}),
    ("evaluate", "group_least", 5, {"kind": "groups", "min_rows": 5}),
    ("evaluate", "predictions", True, {"kind": "predictions"}),
    ("evaluate", "importance", True, {"kind": "importance"}),
    ("evaluate", "references", True, {"kind": "references"}),
    ("evaluate", "cox", {"stratify": True}, {"kind": "cox", "stratify": True}),
    ("partition", "leave", "each", {"kind": "left-out"}),
]


def test_every_moved_key_is_tried_here() -> None:
    assert {(table, key) for table, key, _, _ in OLD} == {*MOVED_KEYS}


@pytest.mark.parametrize(("table", "key", "value", "analysis"), OLD, ids=[key for _, key, _, _ in OLD])
def test_an_old_key_is_an_error_with_the_new_form_at_every_door(
    table: str, key: str, value: Any, analysis: dict[str, Any], tmp_path: Path
) -> None:
    fed = fl.partitions.iid(clients=2, max_train_per_client=20)(fl.load("digits"), seed=0)
    document = {**SMALL, table: {**SMALL.get(table, {}), key: value}}
    (tmp_path / "old.toml").write_text(tomli_w.dumps(document))
    doors: list[Any] = [lambda: parse(document), lambda: read(tmp_path / "old.toml")]
    if table == "evaluate":
        doors += [
            lambda: fl.Evaluate(**{key: value}),
            lambda: fl.simulate("fedavg", fed, rounds=1, evaluate={key: value}),
            lambda: fl.compare(["fedavg"], fed, rounds=1, seeds=[0], evaluate={key: value}, progress_bar=False),
        ]
    for door in doors:
        with pytest.raises(ConfigError) as caught:
            door()
        assert "[[analysis]]" in str(caught.value)
        assert repr(analysis["kind"]) in str(caught.value)
        assert "analyses=[" in str(caught.value)


@pytest.mark.parametrize(("table", "key", "value", "analysis"), OLD, ids=[key for _, key, _, _ in OLD])
def test_a_recorded_document_has_the_new_form(table: str, key: str, value: Any, analysis: dict[str, Any]) -> None:
    recorded = {table: {key: value, "every": 3}, "seeds": [0]}
    if key == "group_least":
        recorded[table]["groups"], analysis = ["sex"], {"kind": "groups", "by": ["sex"], "min_rows": value}
    normal = move_analyses(recorded)
    assert normal == {table: {"every": 3}, "seeds": [0], "analysis": [analysis]}
    assert move_analyses(normal) == normal
    off = {"group_least": value}.get(key, type(value)())
    assert "analysis" not in move_analyses({table: {key: off}})


def test_a_run_directory_of_before_opens_and_goes_on(tmp_path: Path) -> None:
    """Its settings have every old key, filled in with the defaults of then."""
    Plan(parse({**SMALL, "analysis": [{"kind": "confusion"}]}), tmp_path / "run").run(page=False)
    file, table = tmp_path / "run" / "experiment.toml", tmp_path / "run" / "confusion.parquet"
    settings, content = tomllib.loads(file.read_text()), table.read_bytes()
    del settings["analysis"]
    settings["evaluate"] |= {"confusion": True, "tsne": [], "groups": [], "group_least": 10, "predictions": False,
                             "importance": False, "references": False}  # fmt: skip
    file.write_text(tomli_w.dumps(settings))
    assert open_run(tmp_path / "run").experiment.common.evaluate.every == 5
    experiment = read(file)
    assert [type(analysis).__name__ for analysis in experiment.analyses] == ["Confusion"]
    Plan(experiment, tmp_path / "run").run(page=False)
    assert table.read_bytes() == content


def test_settings_name_analyses_and_another_choice_keeps_the_runs(tmp_path: Path) -> None:
    wanted = [{"kind": "confusion"}, {"kind": "tsne", "clients": [0]}]
    settings = parse({**SMALL, "analysis": wanted}).settings()
    assert settings["analysis"] == wanted
    assert parse(settings).settings() == settings
    Plan(parse({**SMALL, "analysis": wanted}), tmp_path / "run").run(page=False)
    metrics = (tmp_path / "run" / "metrics.parquet").read_bytes()
    Plan(parse({**SMALL, "analysis": [{"kind": "predictions"}]}), tmp_path / "run").run(page=False)
    assert (tmp_path / "run" / "metrics.parquet").read_bytes() == metrics
    assert {p.stem for p in (tmp_path / "run").glob("*.parquet")} >= {"predictions", "metrics"}
    assert not (tmp_path / "run" / "confusion.parquet").exists()


@pytest.mark.parametrize(
    ("analysis", "sentence"),
    [
        ([{"kind": "confusio"}], "did you mean 'confusion'"),
        ([{"clients": [1]}], "kind is missing. Allowed: .*confusion,"),
        ([{"kind": "tsne", "client": [1]}], "unknown key 'client'"),
        ([{"kind": "tsne"}], "clients"),
        ([{"kind": "confusion"}, {"kind": "confusion"}], "two analyses are of the kind 'confusion'"),
        ({"kind": "confusion"}, r"an analysis must be a table in a list. Write \[\[analysis\]\]"),
        (["confusion", 3], r"2: must be a table, got 3; write \[\[analysis\]\]"),
    ],
)
def test_a_bad_table_is_refused_before_any_work(analysis: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse({**SMALL, "analysis": analysis})


def test_a_comparison_has_analyses_and_its_folder_their_tables(tmp_path: Path) -> None:
    fed = fl.partitions.iid(clients=3, max_train_per_client=30)(fl.load("digits"), seed=0)
    fl.compare(
        ["fedavg"], fed, rounds=1, seeds=[0], progress_bar=False, folder=tmp_path / "run",
        analyses=["confusion", {"kind": "tsne", "clients": [1]}],
    )  # fmt: skip
    recorded = pq.read_table(tmp_path / "run" / "confusion.parquet")
    found = fl.analyze("confusion", fl.simulate("fedavg", fed, rounds=1)).table
    assert recorded.drop_columns(["method", "seed"]).equals(found)
    with pytest.raises(Refused, match="regression"):
        fl.compare(["fedavg"], fl.partitions.iid(clients=2)(fl.load("sklearn", set="diabetes"), seed=0), rounds=1,
                   seeds=[0], analyses=["confusion"], progress_bar=False)  # fmt: skip


class RightGuesses(Analysis):
    """Test rows that the client's global model predicts right, by a sum over all clients."""

    questions: ClassVar = {"count": {}}
    uses_models: ClassVar[bool] = True

    def start(self, terms):
        return None

    def question(self, state):
        return Question("count") if state is None else None

    def bounds(self, question, terms):
        return Bounds.counts(2, terms.most_rows)

    def answer(self, question, client, terms):
        tested = client.select(client.part == 2)
        right = (client.models["global"](tested.inputs).argmax(1) == tested.y[:, 0]).sum()
        return torch.tensor([float(right), float(len(tested))], dtype=torch.float64)

    def step(self, state, total, info):
        return total

    def result(self, state):
        return pa.table({"right": [float(state[0])], "tested": [float(state[1])]})


def test_a_sum_may_be_of_the_models_of_a_run(tmp_path: Path) -> None:
    fed = fl.partitions.iid(clients=3, max_train_per_client=60)(fl.load("digits"), seed=0)
    result = fl.simulate("fedavg", fed, rounds=3)
    sizes = fed.sizes("test").double()
    right, tested = (column[0].as_py() for column in fl.analyze(RightGuesses(), result).table)
    assert tested == sizes.sum()
    assert right == pytest.approx(float((result.final("global", "accuracy") * sizes).sum()))
    with pytest.raises(ConfigError, match="needs trained models, but no run was given"):
        fl.analyze(RightGuesses(), fed)
    with pytest.raises(ConfigError, match="the analysis confusion needs trained models, but no run was given"):
        fl.analyze("confusion", fed)


def test_the_command_prints_the_answer_and_takes_the_options_of_the_file(tmp_path: Path) -> None:
    rows = "".join(f"{'ab'[k % 2]},{k / 4},{k % 3 % 2}\n" for k in range(48))
    (tmp_path / "t.csv").write_text(f"site,dose,ill\n{rows}")
    file = tmp_path / "t.toml"
    file.write_text(
        f'[data]\nsource = "{tmp_path / "t.csv"}"\ntarget = "ill"\nclient_column = "site"\n'
        '[[method]]\nalgorithm = "fedavg"\n[[analysis]]\nkind = "tests.analyses.toy:Quantiles"\n'
        'column = "dose"\nbins = 4\n'
    )
    kind = "tests.analyses.toy:Quantiles"
    said = call("analyze", kind, file)
    assert "5.875" in said
    assert "sent 1 question to 2 clients and received only sums" in said
    clients = fl.experiment.read(file).source.read(None)
    for options, bins in (((), 4), (("--set", "bins=10"), 10)):
        (_, *_, last) = fl.analyze(kind, clients, column="dose", bins=bins).table["value"].to_pylist()
        assert f"{last:.4g}" in call("analyze", kind, file, *options)
    assert "no row has a number" in call("analyze", kind, file, "--rule", "min_subjects=30", code=2)
    assert "unknown key 'lest'" in call("analyze", kind, file, "--rule", "lest=3", code=2)
    assert "did you mean 'confusion'" in call("analyze", "confuson", file, code=2)


def test_names_of_analyses_need_no_torch() -> None:
    code = "from fedloom.analyses import ANALYSES; print([*ANALYSES]); import sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"confusion", "groups", "importance", "predictions", "tsne"} <= {*eval(done.stdout)}  # noqa: S307
