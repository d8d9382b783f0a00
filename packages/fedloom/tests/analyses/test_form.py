"""The form of an analysis, its runner and its laws, on the toy of the page for authors."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.analyses import Bounds, Question, Rules, run
from fedloom.errors import CheckpointError, ConfigError, DataError, Refused, WireError
from fedloom.seeds import numpy_generator
from tests.analyses.toy import Quantiles

RNG = numpy_generator(0, purpose="toy analysis")
CLIENTS = {
    name: (RNG.normal(shift, 2, (rows, 2)), RNG.integers(0, 2, rows))
    for name, shift, rows in (("north", 0, 40), ("south", 3, 25), ("east", -2, 60))
}
POOLED = np.concatenate([x for x, _ in CLIENTS.values()])[:, 0].astype(np.float32).astype(float)
TOY = Quantiles(column="x0")


def test_the_mean_is_that_of_pooled_rows_and_quantiles_are_within_a_bin():
    table = fl.analyze(TOY, CLIENTS).table.to_pydict()
    assert table["value"][0] == pytest.approx(POOLED.mean(), abs=1e-9)
    width = np.ptp(POOLED) / TOY.bins
    assert np.abs(np.array(table["value"][1:]) - np.quantile(POOLED, TOY.levels)).max() <= 1.5 * width


def test_it_obeys_the_laws():
    fl.testing.check_analysis(TOY, CLIENTS)


class Centred(Quantiles):
    """Answers a mean in the place of a sum."""

    def answer(self, question, client, terms):
        found = super().answer(question, client, terms)
        return torch.cat([found[:-1], found[-1:] / max(len(client), 1)])


class First(Quantiles):
    """Reads the first row only."""

    def answer(self, question, client, terms):
        return super().answer(question, client.select(torch.arange(min(len(client), 1))), terms)


class Chatty(Quantiles):
    """Answers where there are no rows."""

    def answer(self, question, client, terms):
        return super().answer(question, client, terms) + 1 / 64


class Narrow(Quantiles):
    """States bounds that real answers leave."""

    def bounds(self, question, terms):
        return super().bounds(question, terms)._replace(high=torch.full((self.bins + 1,), 0.5, dtype=torch.float64))


class Undeclared(Quantiles):
    """Asks with a field that is not declared."""

    def question(self, state):
        question = super().question(state)
        return question and replace(question, values={**question.values, "more": state.ends})


class Writing(Quantiles):
    """Changes the rows that it reads."""

    def answer(self, question, client, terms):
        found = super().answer(question, client, terms)
        client.x[:1] += 1
        return found


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Centred, "union"),
        (First, "union"),
        (Chatty, "union"),
        (Narrow, "finishes"),
        (Undeclared, "finishes"),
        (Writing, "finishes|pure|union"),
    ],
)
def test_every_law_notices_its_fault(broken, law):
    clients = {name: (x.copy(), y) for name, (x, y) in CLIENTS.items()}
    with pytest.raises((AssertionError, DataError), match=f"law ({law})"):
        fl.testing.check_analysis(broken(column="x0"), clients)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_a_question_survives_the_way_over_bytes(numbers):
    question = Question("histogram", {"ends": torch.tensor(numbers, dtype=torch.float64)})
    assert Question.decode(question.encode(), TOY.questions) == question


@given(st.binary(max_size=80), st.integers(0, 40))
def test_other_bytes_are_no_question(content, cut):
    whole = Question("histogram", {"ends": torch.arange(3.0)}).encode()
    for damaged in (content, whole[: len(whole) - 1 - cut], whole + b"\0"):
        with pytest.raises(WireError, match="do not encode a question"):
            Question.decode(damaged, TOY.questions)


def test_a_question_of_another_analysis_is_refused():
    with pytest.raises(WireError):
        Question.decode(Question("newton", {"beta": torch.zeros(2)}).encode(), TOY.questions)


def test_no_result_has_a_clip():
    with pytest.raises(DataError, match="outside their bounds"):
        fl.analyze(Narrow(column="x0"), CLIENTS)


def test_projection_counts_what_it_moves():
    values, clipped = Bounds.counts(3, 5).project(torch.tensor([-1.0, 2.0, 9.0], dtype=torch.float64))
    assert (values.tolist(), clipped) == ([0.0, 2.0, 5.0], 2)


def test_a_sum_of_rows_at_their_limit_is_within_its_bound():
    """The largest client has only rows at the end of a range, whose scaled sum exceeds the bound by rounding."""
    low, high, rows = 0.2, 0.7, 30
    total = ((np.full(rows, high) - (high + low) / 2) / ((high - low) / 2)).sum()
    assert total > rows
    values, clipped = Bounds.counts(1, rows).project(torch.tensor([total], dtype=torch.float64))
    assert (values.tolist(), clipped) == ([rows], 0)
    assert Bounds.counts(1, rows).project(torch.tensor([rows + 1e-6], dtype=torch.float64))[1] == 1


def test_the_budget_of_questions_is_kept():
    class Endless(Quantiles):
        retried = ("histogram",)

        def step(self, state, total, info):
            return state

    with pytest.raises(Refused, match="more than the 3 questions that the rules allow"):
        fl.analyze(Endless(column="x0"), CLIENTS, rules={"questions": 3})


def test_an_analysis_that_does_not_converge_on_zeros_is_checked_without_warnings(recwarn):
    """Before a run, all sums are zeros, which also divides by a total of zero."""

    class Repeated(Quantiles):
        retried = ("histogram",)

        def step(self, state, total, info):
            mean = np.float64(total[-1]) / np.float64(total[:-1].sum())
            return state if np.isnan(mean) else state._replace(total=total)

    run.check_analysis(Repeated(column="x0"), fl.Federation.create(CLIENTS))
    assert not recwarn.list


def test_a_client_of_fewer_subjects_than_agreed_answers_zeros():
    found = fl.analyze(TOY, CLIENTS, rules=Rules(min_subjects=30))
    (log,) = found.log
    assert (log.info.neutral, log.info.rows, int(log.total[:-1].sum())) == (1, 100, 100)


def test_the_same_call_resumes_in_a_folder_and_another_analysis_is_refused(tmp_path):
    first = fl.analyze(TOY, CLIENTS, folder=tmp_path)
    assert fl.analyze(TOY, CLIENTS, folder=tmp_path).table.equals(first.table)
    with pytest.raises(CheckpointError, match="a different analysis"):
        fl.analyze(TOY.with_(bins=5), CLIENTS, folder=tmp_path)
    with pytest.raises(CheckpointError, match="different rows"):
        fl.analyze(TOY, {k: v for k, v in CLIENTS.items() if k != "east"}, folder=tmp_path)


def test_a_damaged_sum_is_refused(tmp_path):
    fl.analyze(TOY, CLIENTS, folder=tmp_path)
    path = tmp_path / "sum-0001.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        fl.analyze(TOY, CLIENTS, folder=tmp_path)


def test_data_sets_federations_and_clients_give_one_answer():
    x, y = (np.concatenate(parts) for parts in zip(*CLIENTS.values(), strict=True))
    users = np.repeat([*CLIENTS], [len(y) for _, y in CLIENTS.values()])
    data = fl.Dataset.create((x, y), clients=users)
    tables = [fl.analyze(TOY, given_as).table for given_as in (CLIENTS, data, fl.partitions.natural()(data, seed=1))]
    assert all(table.equals(tables[0]) for table in tables)


def test_rows_of_a_table_are_raw_in_a_federation():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {"age": [30.0, 40.0, None, 70.0, 55.0, 61.0], "site": list("aabbaa"), "ill": [0, 1, 0, 1, 0, 1]}
    )
    data = fl.Dataset.create(frame, "ill", client_column="site", impute=True)
    fed = fl.partitions.iid(clients=2, test=0.0, validation=0.0)(data, seed=0)
    found = fl.analyze(Quantiles(column="age"), fed)
    assert found.table["value"][0].as_py() == pytest.approx(np.mean([30, 40, 70, 55, 61]))


def test_an_unknown_column_or_name_is_refused_before_any_work(monkeypatch):
    with pytest.raises(ConfigError, match="no column of numbers 'x7'. It has: x0, x1"):
        fl.analyze(Quantiles(column="x7"), CLIENTS)
    with pytest.raises(ConfigError, match="unknown analysis kind 'quantile'"):
        fl.analyze("quantile", CLIENTS)
    with monkeypatch.context() as alone:  # as if only the library were installed
        alone.setattr(run, "find_spec", lambda _: None)
        with pytest.raises(ConfigError, match="More analyses come with the package fedloom-clinic"):
            fl.analyze("kaplan", CLIENTS)
    with pytest.raises(ConfigError, match="with_"):
        fl.analyze(TOY, CLIENTS, bins=3)


def test_an_analysis_of_user_code_is_found_by_its_path():
    found = fl.analyze("tests.analyses.toy:Quantiles", CLIENTS, column="x0")
    assert isinstance(found.table, pa.Table)
    assert found.table.equals(fl.analyze(TOY, CLIENTS).table)


def test_the_page_for_authors_shows_the_toy_as_it_is_tested():
    page = Path(__file__).parents[4] / "docs" / "analyses.md"
    if not page.exists():
        pytest.skip("the package alone")
    (code,) = re.findall(r'```python title="toy.py"\n(.*?)```', page.read_text(), re.DOTALL)
    tested = (Path(__file__).parent / "toy.py").read_text()
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(tested))  # the page has shorter lines
