"""Analyses by sums in a Flower app: the pooled fit, and what a node refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from statsmodels.genmod import families
from statsmodels.genmod.generalized_linear_model import GLM
from torch import nn

import fedloom_sites.flower as ff
from fedloom.analyses import Question
from fedloom.data.survey.agreement import Agreement
from fedloom.errors import ConfigError, DataError, Refused
from fedloom_sites.flower.records import VALUES_RECORD, head_of, write_values
from tests.flower.app import App

NODES = 3
AGREED = Agreement(task="regression", target_range=(-50.0, 50.0), column=(
    {"name": "age", "range": (-10.0, 10.0)}, {"name": "dose", "range": (-10.0, 10.0)}))  # fmt: skip
GLM_CHOICE = {"kind": "glm", "rules": {"min_subjects": 3}}


def samples(node: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(node)
    x = rng.normal(0, 1, (30 + 10 * node, 2)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy((1 + x @ [2, -1] + rng.normal(0, 0.3, len(x))).astype(np.float32))


def app(
    analyses: Any = (GLM_CHOICE, {"kind": "table-1", "rules": {"min_subjects": 3}}), rows: int | None = None
) -> App:
    def local(context: Context) -> ff.Local:
        x, y = samples(k := int(context.node_config["partition-id"]))
        some = slice(rows if k == 0 else None)
        given = None if analyses is None else ff.Analyses(AGREED, tuple(analyses))
        return ff.Local(nn.Linear(2, 1), (x[some], y[some][:, None]), nn.MSELoss(), analyses=given)

    return App(local, NODES)


def test_an_app_finds_the_pooled_fit() -> None:
    table = ff.analyze(app().grid, GLM_CHOICE, AGREED).table.to_pandas()
    x, y = (torch.cat(parts).double().numpy() for parts in zip(*map(samples, range(NODES)), strict=True))
    pooled = GLM(y, np.column_stack([np.ones(len(x)), x]), families.Gaussian()).fit()
    np.testing.assert_allclose(table.coefficient, pooled.params, atol=1e-7)
    np.testing.assert_allclose(table.standard_error, pooled.bse, atol=1e-6)


def test_an_app_finds_table_one_and_resumes(tmp_path: Any) -> None:
    here = app()
    result = ff.analyze(here.grid, {"kind": "table-1", "rules": {"min_subjects": 3}}, AGREED, folder=tmp_path)
    ages = torch.cat([samples(k)[0][:, 0] for k in range(NODES)])
    assert result.table["mean"][0].as_py() == pytest.approx(float(ages.double().mean()), abs=1e-9)
    sent = len(here.grid.sent)
    again = ff.analyze(here.grid, {"kind": "table-1", "rules": {"min_subjects": 3}}, AGREED, folder=tmp_path)
    assert again.table.equals(result.table)
    assert len(here.grid.sent) == sent + NODES  # the greeting alone


def test_a_node_with_too_few_samples_ends_the_analysis() -> None:
    with pytest.raises(DataError, match="1 of 3 nodes did not answer step 1"):
        ff.analyze(
            app([{"kind": "ridge", "rules": {"min_subjects": 3}}], rows=2).grid,
            {"kind": "ridge", "rules": {"min_subjects": 3}},
            AGREED,
        )
    with pytest.raises(Refused, match="no column has 3 subjects with a rare value at .* clients or more"):
        ff.analyze(app(rows=2).grid, {"kind": "glm", "rules": {"min_subjects": 3}}, AGREED)


def test_a_node_answers_what_its_own_people_have_agreed_on() -> None:
    for analyses, sentence in ((None, "no analyses enabled"), ((), "does not allow the analysis 'glm'")):
        with pytest.raises(DataError, match=sentence):
            ff.analyze(app(analyses).grid, GLM_CHOICE, AGREED)
    with pytest.raises(ConfigError, match="'age' has no range in the agreement. Set range"):
        ff.analyze(app().grid, GLM_CHOICE, AGREED.with_(column=(AGREED.column[0].with_(range=None),)))


def test_a_step_is_answered_for_one_question_by_terms_that_stay() -> None:
    here = app()
    node, seat = 100, {"analysis": "glm", "clients": NODES, "client": 0}

    def send(**values: Any) -> dict[str, Any]:
        content = RecordDict({VALUES_RECORD: write_values(**seat, **values)})
        [reply] = here.grid.send_and_receive([Message(content, dst_node_id=node, message_type="query.analyze")])
        return head_of(reply.content)

    flags = send(step=-1)["flags"]
    good = {"step": 0, "question": Question("means").encode(), "sizes": [30, 40, 50], "flags": [flags] * NODES}
    assert send(**good)["silent"] is False
    assert send(**good)["silent"] is False
    centre = torch.zeros(3, dtype=torch.float64)
    spreads = [Question("spreads", {"centre": centre + shift}).encode() for shift in (0.0, 1e-6)]
    assert "asks 'means'" in send(**{**good, "question": spreads[0]})["error"]
    assert "sample or cell counts" in send(**{**good, "sizes": [29, 40, 50]})["error"]
    assert "different terms" in send(**{**good, "sizes": [30, 41, 50]})["error"]
    assert send(**{**good, "step": 1, "question": spreads[0]})["silent"] is False
    assert "for a different question" in send(**{**good, "step": 1, "question": spreads[1]})["error"]
    assert "at most" in send(**{**good, "step": 24, "question": spreads[1]})["error"]
