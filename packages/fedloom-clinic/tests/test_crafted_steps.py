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
from fedloom.analyses.run import prepare_clients
from fedloom_clinic.glm import Glm

SITES, ROWS, AGE = 5, 3000, 65
RULES = Rules(min_subjects=5, min_clients=3, questions=24)


class Study:
    """Patients of five sites, of whom one is 65 years old, and the sums of a logistic regression over them."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        age = draw.integers(50, 80, ROWS)
        self.table = pd.DataFrame({"site": np.arange(ROWS) % SITES,
                                   "age": np.where(age == AGE, AGE - 1, age).astype(float),
                                   "dose": draw.normal(0, 1, ROWS), "ill": draw.integers(0, 2, ROWS)})  # fmt: skip
        self.table.loc[7, "age"] = AGE
        self.glm = Glm(rules=RULES)
        data = fl.Dataset.create(self.table, target="ill", client_column="site")
        schema, self.rows, _ = prepare_clients(data, self.glm)
        terms = AnalysisTerms(schema, torch.tensor([*map(len, self.rows.values())]), RULES)
        published = tuple(self.glm.publish(client, terms) for client in self.rows.values())
        self.terms = replace(terms, published=published)
        low, high = np.array([column.range for column in schema.columns]).T
        self.half, self.middle = (high - low) / 2, (high + low) / 2

    @property
    def patient(self) -> list[float]:
        """Age and dose of the patient, as the sites scale them."""
        return [*(self.table.loc[7, ["age", "dose"]].to_numpy(float) - self.middle) / self.half]

    def sums(self, threshold: float, slope: float) -> Tensor:
        """Gradient and information of a step whose coefficients separate the ages at a threshold."""
        beta = torch.tensor([slope * (self.middle[0] - threshold), slope * self.half[0], 0.0], dtype=torch.float64)
        plain = torch.zeros(3, dtype=torch.float64)
        question = Question("step", {"beta": beta, "centre": plain, "spread": plain + 1})
        bounds = self.glm.bounds(question, self.terms)
        answers = [
            answer_question(self.glm, question, client, self.terms, bounds, "site") for client in self.rows.values()
        ]
        assert not any(answer.neutral or answer.clipped for answer in answers)
        return torch.stack([answer.values for answer in answers]).sum(0)[2:]


@pytest.fixture(scope="module")
def study() -> Study:
    return Study()


def test_two_thresholds_isolate_the_patient_between_them(study: Study) -> None:
    """Neither the shares of one row nor the bounds forbid it, as docs/deploy-analyses.md says under What remains."""
    count, *values = (study.sums(AGE - 0.6, 40.0) - study.sums(AGE + 0.6, 40.0))[:3].tolist()
    assert count == pytest.approx(-1, abs=1e-3)
    assert [-value for value in values] == pytest.approx(study.patient, abs=1e-3)


def test_smaller_coefficients_need_more_steps(study: Study) -> None:
    """So a limit on coefficients would be no repair: a fit has 24 steps, and their sums are exact."""
    ages, thresholds = np.arange(50, 80), np.linspace(49, 80, RULES.questions - 2)
    mean = 1 / (1 + np.exp(thresholds[:, None] - ages))
    variance, ones = mean * (1 - mean), np.ones((1, len(ages)))
    constant = np.repeat([[1.0], [0.0]], [len(mean), len(mean) + 1], axis=0)  # of targets, and of targets times doses
    functions = np.hstack([np.vstack([-mean, variance, ones]), constant])
    steps = torch.stack([study.sums(threshold, 1.0) for threshold in thresholds]).numpy()
    scaled_doses = float(((study.table["dose"] - study.middle[1]) / study.half[1]).sum())  # of the question "means"
    counts = np.concatenate([steps[:, 0], steps[:, 3], [ROWS]])
    doses = np.concatenate([steps[:, 2], steps[:, 5], [scaled_doses]])
    found = np.linalg.lstsq(functions, np.stack([counts, doses], axis=1))[0][AGE - ages[0]]
    assert found == pytest.approx([1, study.patient[1]], abs=1e-3)
