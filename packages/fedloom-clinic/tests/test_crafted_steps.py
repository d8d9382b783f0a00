"""What two sums of a regression reveal where the server chooses the coefficients: a patient between two thresholds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.analyses import AnalysisTerms, Question, Rules, answer_question
from fedloom.analyses.run import clients_of
from fedloom_clinic.glm import Glm

SITES, ROWS, AGE = 5, 3000, 65
RULES = Rules(min_subjects=5, min_clients=3, questions=24)


def test_two_thresholds_isolate_the_patient_between_them() -> None:
    """Neither the shares of one row nor the bounds forbid it, as docs/deploy-analyses.md says under What remains."""
    draw = np.random.default_rng(0)
    age = draw.integers(50, 80, ROWS)
    table = pd.DataFrame({"site": np.arange(ROWS) % SITES, "age": np.where(age == AGE, AGE - 1, age).astype(float),
                          "dose": draw.normal(0, 1, ROWS), "ill": draw.integers(0, 2, ROWS)})  # fmt: skip
    table.loc[7, "age"] = AGE
    glm = Glm(rules=RULES)
    schema, rows, _ = clients_of(fl.Dataset.create(table, target="ill", client_column="site"), glm)
    terms = AnalysisTerms(schema, torch.tensor([*map(len, rows.values())]), RULES)
    terms = replace(terms, published=tuple(glm.publish(client, terms) for client in rows.values()))
    low, high = np.array([column.range for column in schema.columns]).T
    half, middle = (high - low) / 2, (high + low) / 2

    def gradient(threshold: float) -> Tensor:
        beta = torch.tensor([40.0 * (middle[0] - threshold), 40.0 * half[0], 0.0], dtype=torch.float64)
        plain = torch.zeros(3, dtype=torch.float64)
        question = Question("step", {"beta": beta, "centre": plain, "spread": plain + 1})
        bounds = glm.bounds(question, terms)
        answers = [answer_question(glm, question, client, terms, bounds, "site") for client in rows.values()]
        assert not any(answer.neutral or answer.clipped for answer in answers)
        return torch.stack([answer.values for answer in answers]).sum(0)[2:5]

    count, *values = (gradient(AGE - 0.6) - gradient(AGE + 0.6)).tolist()
    patient = table.loc[7, ["age", "dose"]].to_numpy(float)
    assert count == pytest.approx(-1, abs=1e-3)
    assert [-value for value in values] == pytest.approx([*(patient - middle) / half], abs=1e-3)
