"""Ridge regression of numbers or classes over all clients, computed from Gram matrices with three questions.

References: A. E. Hoerl and R. W. Kennard, Technometrics 1970. Sums over sites as in V. Nikolaenko et al., S&P 2013.

The inputs are a model's inputs for the training rows. Clients first send their means, then sums of squares around the
overall means, and finally the Gram matrix of standardized inputs and targets. The coefficients therefore lose no digits
because of a column's scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from fedloom.analyses import AnalysisTerms, Bounds, ClientRows, ModelAnalysis, Question, Schema, ScriptedAnalysis, Total
from fedloom.analyses.tables import NUMBER_TYPE, TEXT_TYPE, make_table
from fedloom.errors import DataError, Refused
from fedloom_clinic.columns import LinearPredictor, missing_target_range_error

if TYPE_CHECKING:
    import pyarrow as pa


MIN_RELATIVE_SPREAD = 1e-13
"""Deviation, relative to the mean, below which an input is considered constant."""

MEAN_STEP, SQUARE_STEP, GRAM_STEP = 2.0**-60, 2.0**-90, 2.0**-36
"""Rounding steps with masking: for means and squares, relative to the largest input; for products, at unit deviation.
Even if an input varies by only a millionth of the agreed-upon range, its deviation is accurate to six digits."""


class RidgeRows(NamedTuple):
    """Inputs ``[N, p]`` and targets ``[N, c]`` of a client's complete training rows, and the rows' indices."""

    x: Tensor
    y: Tensor
    rows: Tensor


class RidgeRegression(ModelAnalysis, ScriptedAnalysis):
    """Ridge regression over the training rows of all clients, computed from sums.

    For classes, the targets are one-hot vectors.
    """

    kind: ClassVar[str] = "ridge"
    tasks: ClassVar = ("regression", "binary", "classification")
    needs_independent: ClassVar[bool] = False
    questions: ClassVar = {"means": {}, "spreads": {"centre": 1}, "gram": {"centre": 1, "spread": 1}}

    wider: ClassVar[str] = "Set a larger max_input, or agree on a wider target_range"

    strength: float = Field(
        0.01,
        ge=0,
        description="penalty per row for inputs with unit standard deviation, like scikit-learn's Ridge alpha divided "
        "by the number of rows",
    )
    max_input: float = Field(1000.0, gt=0, description="maximum absolute value of an input, which all sites agree on")

    def check_sites(self, schema: Schema, *, masked: bool) -> None:
        super().check_sites(schema, masked=masked)
        if schema.task == "regression" and None in schema.target_ranges:
            raise missing_target_range_error("ridge")

    def check_question(self, question: Question, terms: AnalysisTerms) -> None:
        numbers = len(input_names(terms.schema)) + self._outputs(terms.schema)
        for name, value in question.values.items():
            if len(value) != numbers or (name == "spread" and not bool((value > 0).all())):
                raise Refused(f"{name} of a question must have {numbers} numbers, and spreads must be greater than 0")

    def used(self, client: ClientRows, terms: AnalysisTerms) -> ClientRows:
        return client.select(self._samples(client, terms.schema).rows)

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        most, p, c = float(terms.most_rows), len(input_names(terms.schema)), self._outputs(terms.schema)
        reach = torch.full((p,), self.max_input, dtype=torch.float64)
        low, high = self._target_range(terms.schema)
        target = torch.full((c,), max(abs(low), abs(high)), dtype=torch.float64)
        both = torch.cat([reach, target])
        if question.name == "means":
            return Bounds.join([Bounds.counts(1, most), _row_sum_bounds(both, most, both * MEAN_STEP)])
        if question.name == "spreads":
            return _row_sum_bounds(4 * both**2, most, both**2 * SQUARE_STEP)
        standard = (both + question.values["centre"].abs()) / question.values["spread"]
        products = torch.outer(standard[:p], standard)
        upper = torch.triu_indices(p, p)
        gram = torch.cat([products[:, :p][upper[0], upper[1]], products[:, p:].flatten()])
        return _row_sum_bounds(gram, most, torch.full_like(gram, GRAM_STEP))

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        x, y, _ = self._samples(client, terms.schema)
        both = torch.cat([x, y], 1)
        if question.name == "means":
            return torch.cat([torch.tensor([len(x)], dtype=torch.float64), both.sum(0)])
        gap = both - question.values["centre"]
        if question.name == "spreads":
            return (gap**2).sum(0)
        z = gap / question.values["spread"]
        p = x.shape[1]
        upper, gram = torch.triu_indices(p, p), z[:, :p].T @ z
        return torch.cat([gram[:, :p][upper[0], upper[1]], gram[:, p:].flatten()])

    def conclude(self, ask: Callable[[Question], Total], terms: AnalysisTerms) -> tuple[pa.Table, nn.Module]:
        inputs = input_names(terms.schema)
        p, c = len(inputs), self._outputs(terms.schema)
        total, _ = ask(Question("means"))
        rows = int(total[0])
        if not rows:
            raise DataError("no training row is complete. Impute missing cells, or add training rows")
        centre = total[1:] / rows
        spread = (ask(Question("spreads", {"centre": centre}))[0] / rows).sqrt()
        still = spread[:p] <= MIN_RELATIVE_SPREAD * centre[:p].abs()  # constant inputs
        spread = torch.where(torch.cat([still, spread[p:] <= 0]), torch.ones_like(spread), spread)
        gram, _ = ask(Question("gram", {"centre": centre, "spread": spread}))
        upper, half = torch.triu_indices(p, p), p * (p + 1) // 2
        system = gram.new_zeros(p, p)
        system[upper[0], upper[1]] = system[upper[1], upper[0]] = gram[:half]
        system += torch.diag(rows * self.strength + still.double())  # the coefficient of a constant input is 0
        beta = torch.linalg.pinv(system, hermitian=True) @ gram[half:].view(p, c)
        weight = (beta * spread[p:] / spread[:p, None]).T
        bias = centre[p:] - weight @ centre[:p]
        errors = [self.bounds(Question(name, {"centre": centre, "spread": spread}), terms).step * len(terms.sizes) / 2
                  for name in ("means", "spreads", "gram")]  # fmt: skip
        penalty = rows * self.strength * errors[1][:p] / (rows * spread[:p] ** 2)
        reach = _solution_error(system, beta, errors[2], penalty)
        away = reach[:, None] * spread[p:, None] / spread[:p]
        shift = (errors[0][1:][p:] + weight.abs() @ errors[0][1:][:p]) / rows + away @ centre[:p].abs()
        names = terms.schema.classes if c > 1 else ("target",)
        lines = [
            (
                names[k],
                inputs[j] if j < p else "intercept",
                float(weight[k, j] if j < p else bias[k]),
                float(away[k, j] if j < p else shift[k]),
                rows,
            )
            for k in range(c)
            for j in range(p + 1)
        ]
        return make_table(
            lines, output=TEXT_TYPE, input=TEXT_TYPE, coefficient=NUMBER_TYPE, bound=NUMBER_TYPE, rows=NUMBER_TYPE
        ), LinearPredictor(weight, bias)

    @staticmethod
    def _outputs(schema: Schema) -> int:
        return len(schema.classes) if schema.task == "classification" else len(schema.target_ranges)

    @staticmethod
    def _target_range(schema: Schema) -> tuple[float, float]:
        if schema.task != "regression":
            return -1.0, 1.0
        low, high = zip(*(pair or (0.0, 1.0) for pair in schema.target_ranges), strict=True)
        return min(low), max(high)

    def _samples(self, client: ClientRows, schema: Schema) -> RidgeRows:
        train = client.select(client.part == 0)
        x = raw_inputs(train.x, schema) if client.fetch is None else train.inputs.double().flatten(1)
        x = x.reshape(len(x), len(input_names(schema)))
        whole = ~x.isnan().any(1)
        y = train.y[whole]
        if schema.task == "classification":
            y = nn.functional.one_hot(y[:, 0].long(), self._outputs(schema)).double()
        elif schema.task == "binary":
            y = 2 * y - 1
        return RidgeRows(x[whole], y, (client.part == 0).nonzero().flatten()[whole])


def _solution_error(system: Tensor, beta: Tensor, error: Tensor, penalty: Tensor) -> Tensor:
    """Return the largest effect of rounding on the solution of a linear system, as a distance per output, ``[c]``.

    Args:
        system: matrix of the system, including the ridge, ``[p, p]``.
        beta: solution of the system, ``[p, c]``.
        error: error of each number in the Gram matrix: its upper triangle, followed by the products with the targets.
        penalty: rounding errors of the penalties, ``[p]``.
    """
    p, c = beta.shape
    half = p * (p + 1) // 2
    upper, matrix = torch.triu_indices(p, p), system.new_zeros(p, p)
    matrix[upper[0], upper[1]] = matrix[upper[1], upper[0]] = error[:half]
    values = torch.linalg.eigvalsh(system)
    kept = values[values > torch.finfo(values.dtype).eps * p * values.max()]
    least = float(kept.min()) - float(matrix.norm()) - float(penalty.max())
    if least <= 0:
        return beta.new_full((c,), math.inf)
    wrong = error[half:].view(p, c).norm(dim=0) + (matrix.norm() + penalty.max()) * beta.norm(dim=0)
    moved: Tensor = wrong / least
    return moved


def _row_sum_bounds(largest: Tensor, most: float, step: Tensor) -> Bounds:
    """Return the bounds of sums over rows whose numbers are at most ``largest [k]``, with the step of each sum."""
    return Bounds(-most * largest, most * largest, step.clamp(min=torch.finfo(torch.float64).tiny))


def input_names(schema: Schema) -> list[str]:
    """Return a name for each number in an input.

    A coded column has a number for each level. A column with a flag has an additional number that marks missing cells.
    """
    names = list[str]()
    for column in schema.columns:
        names += [f"{column.name} {level}" for level in column.names] if column.levels else [column.name]
        names += [f"{column.name} missing"] if column.flag else []
    return names


def raw_inputs(x: Tensor, schema: Schema) -> Tensor:
    """Return inputs ``[N, p]`` from raw columns that no federation has prepared. Missing cells remain NaN."""
    blocks = list[Tensor]()
    for column, values in zip(schema.columns, x.T, strict=True):
        levels = torch.arange(column.levels or 1).double()
        coded = torch.where(values.isnan()[:, None], values[:, None], (values[:, None] == levels).double())
        blocks += [coded if column.levels else values[:, None]]
        blocks += [values.isnan().double()[:, None]] if column.flag else []
    return torch.cat(blocks, 1)
