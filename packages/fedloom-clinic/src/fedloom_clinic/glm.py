"""Linear, logistic and Poisson regression over the rows of all clients, computed from sums.

The results include confidence intervals.

References: P. McCullagh and J. A. Nelder, "Generalized Linear Models", 2nd ed., Chapter 2. Y. Wu et al., "GLORE", JAMIA
2012.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.analyses import AnalysisTerms, Bounds, ClientRows, Question, Schema, Total, Transcript
from fedloom.errors import DataError, Refused
from fedloom_clinic.cells import count_subjects, forbids_small_cells
from fedloom_clinic.columns import (
    LinearPredictor,
    columns_of,
    design_of,
    flag_columns,
    get_ranges,
    has_dominant_row,
    linear_model,
    list_omitted_columns,
    missing_target_range_error,
    require_columns,
    symmetric_from_triangles,
    to_vector,
    upper_triangles,
)
from fedloom_clinic.fits.cox import maximize_likelihood
from fedloom_clinic.fits.glm import GLM_FAMILIES, GlmFit, GlmSite, firth_slope, glm_sums
from fedloom_clinic.fits.penalty import (
    CV_FOLDS,
    Floats,
    FoldSums,
    Likelihood,
    Mask,
    Ridge,
    add_firth_penalty,
    add_ridge_penalty,
    find_ridge_by_sums,
    impossible_likelihood,
    tilt_error,
)
from fedloom_clinic.penalties import (
    FIT_COUNT,
    Penalized,
    assign_folds,
    find_divided_clients,
    flag_folds,
    fold_sums,
    read_fold_sums,
    require_shapes,
)

if TYPE_CHECKING:
    from fedloom.engine import Setting

FAMILY_OF_TASK = {"binary": "logistic", "count": "poisson", "regression": "linear"}
MIN_COLUMN_SPREAD = 1e-9
"""Minimum standard deviation of a varying column, relative to its agreed-upon range."""
ANSWER_STEP = 2.0**-36
"""Rounding step with masking: numbers in an answer are rounded to multiples of this step."""
MAX_EXPONENT = 700.0
"""Largest linear predictor with a bound. For larger linear predictors, exp exceeds the range of float64."""


class Glm(Penalized):
    """Generalized linear regression over the rows of all clients, computed from sums.

    The regression is logistic for a binary task, Poisson for counts, and linear for other targets.
    """

    kind: ClassVar[str] = "glm"
    assumes_independence: ClassVar[bool] = True
    tasks: ClassVar = tuple(FAMILY_OF_TASK)
    needs_table: ClassVar[bool] = True
    questions: ClassVar = {
        "means": {},
        "spreads": {"centre": 1},
        "step": {"beta": 1, "centre": 1, "spread": 1},
        "tilted": {"beta": 1, "metric": 2, "centre": 1, "spread": 1},
        "paths": {"betas": 2, "centre": 1, "spread": 1},
    }

    retried: ClassVar = ("step", "tilted", "paths")

    by_client: bool = Field(
        False,
        description="use a separate intercept for each client. Clients then reveal individual sums over their rows",
    )

    @model_validator(mode="after")
    def _compares_one_model(self) -> Glm:
        if self.compare and self.by_client:
            raise ValueError(
                "with by_client, no model is shared by all clients and could be compared. Omit `by_client` or `compare`"
            )
        return self

    @property
    def shows_rows(self) -> bool:
        return self.by_client

    @property
    def order(self) -> tuple[str, ...]:
        return ("means", "spreads", self.last_question)

    def check(self, schema: Schema, setting: Setting | None = None) -> None:
        super().check(schema, setting)
        if len(schema.target_ranges) != 1:
            raise Refused(
                f"the analysis glm fits one target, but {schema.name} has {len(schema.target_ranges)} targets",
                rule="analysis-one-target",
                fix="set {data.target} to a single column, or omit the analysis",
            )
        require_columns(schema, "a regression")

    def check_sites(self, schema: Schema, *, masked: bool) -> None:
        super().check_sites(schema, masked=masked)
        if schema.task != "binary" and schema.target_ranges[0] is None:
            raise missing_target_range_error("glm")

    def check_question(self, question: Question, terms: AnalysisTerms) -> None:
        numbers = len(get_ranges(terms)[0]) + 1
        size = self._count_intercepts(terms) + numbers - 1
        wanted = {"beta": (size,), "centre": (numbers,), "spread": (numbers,)}
        require_shapes(question, {**wanted, "metric": (size, size), "betas": (FIT_COUNT, size)})
        if "spread" in question.values and not bool((question.values["spread"] > 0).all()):
            raise Refused("the spreads of a question must be greater than 0")

    def publish(self, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        if not forbids_small_cells(terms.rules):
            return torch.zeros(0, dtype=torch.float64)
        design = design_of(client, terms, flagged=False)
        outcomes = count_subjects(torch.from_numpy(design.y[:, 0] > 0).long(), client.subjects[design.rows], 2)
        folds = [flag_folds(client, terms, self._events, terms.rules.min_subjects)] if self.strength == "cv" else []
        return torch.cat([(outcomes >= terms.rules.min_subjects).double(), *folds, flag_columns(client, terms)])

    def start(self, terms: AnalysisTerms) -> Transcript:
        if terms.schema.task == "binary" and forbids_small_cells(terms.rules):
            support = torch.stack([flags[:2] for flags in terms.published]).sum(0)
            if float(support.min()) - terms.rules.missing < terms.rules.min_clients:
                raise Refused(
                    f"only {int(support.min())} clients have at least {terms.rules.min_subjects} "
                    f"subjects of each outcome, but {terms.rules.min_clients + terms.rules.missing} are required. "
                    f"Agree on a smaller minimum count"
                )
        return super().start(terms)

    def used(self, client: ClientRows, terms: AnalysisTerms) -> ClientRows:
        return client.select(design_of(client, terms).rows)

    def conclude(
        self, ask: Callable[[Question], Total], terms: AnalysisTerms
    ) -> tuple[pa.Table, LinearPredictor | None]:
        fit, bound = self._fit(ask, terms)
        low, high = fit.interval()
        figures = {"coefficient": fit.beta, "standard_error": fit.se, "low": low, "high": high, "p": fit.p_values}
        figures |= {"bound": bound}
        table = pa.table({"column": pa.array(fit.names, pa.string()), **{k: pa.array(v) for k, v in figures.items()}})
        facts = {"family": FAMILY_OF_TASK[terms.schema.task], "rows": fit.row_count}
        facts |= {} if fit.ridge is None else {"ridge": fit.ridge.strength}
        facts["merged"] = list_omitted_columns(terms)
        facts["left_out"] = int(terms.sizes.sum()) - fit.row_count
        for name, fact in facts.items():
            table = table.append_column(name, pa.array([fact] * len(table)))
        return table, linear_model(terms, fit.beta[self._count_intercepts(terms) :], float(fit.beta[0]))

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        most, values = float(terms.most_rows), question.values
        numbers = len(get_ranges(terms)[0]) + 1  # one per column, and one for the target
        if question.name == "means":
            return Bounds.join([Bounds.counts(1, most), _symmetric_bounds(torch.full((numbers,), most))])
        if question.name == "spreads":
            return _symmetric_bounds(torch.full((numbers,), 4 * most))
        if question.name == "paths":
            parts = [self._step_bounds(beta, values["centre"], values["spread"], terms) for beta in values["betas"]]
            fits = [Bounds(*(side[[0, 0, *range(2, len(side))]] for side in one)) for one in parts]
            squares = Bounds(*(side[1:2] for side in parts[0]))
            return Bounds.join([squares, Bounds.counts(CV_FOLDS + 1, most), *fits])
        step = self._step_bounds(values["beta"], values["centre"], values["spread"], terms)
        if question.name == "step":
            return step
        first = self._count_intercepts(terms)
        reach = torch.cat([torch.ones(first), ((1 + values["centre"].abs()) / values["spread"])[:-1]])
        variance = float(step.high[-1]) / float(reach[-1]) ** 2  # the third moment is at most the variance
        return Bounds.join([step, _symmetric_bounds(variance * reach * float(reach @ values["metric"].abs() @ reach))])

    def _step_bounds(self, beta: Tensor, centre: Tensor, spread: Tensor, terms: AnalysisTerms) -> Bounds:
        most, first = float(terms.most_rows), self._count_intercepts(terms)
        values = {"centre": centre, "spread": spread}
        reach = torch.cat([torch.ones(first), ((1 + values["centre"].abs()) / values["spread"])[:-1]])
        eta = min(float(beta.abs() @ reach), MAX_EXPONENT)
        family = FAMILY_OF_TASK[terms.schema.task]
        cumulant, mean, variance = (float(abs(link(np.array([eta]))[0])) for link in GLM_FAMILIES[family][:3])
        low, high = self._target_range(terms)
        target = (
            max(abs(low), abs(high))
            if family != "linear"
            else float(((1 + values["centre"].abs()) / values["spread"])[-1])
        )
        variance = 0.25 if family == "logistic" else variance
        value = torch.tensor([most * (target * eta + max(cumulant, 1.0)), most * target**2])
        gradient = most * (target + max(mean, 1.0)) * reach
        information = most * variance * torch.from_numpy(upper_triangles(torch.outer(reach, reach).numpy()))
        return _symmetric_bounds(torch.cat([value, gradient, information]))

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor | None:
        values = {name: value.numpy() for name, value in question.values.items()}
        design, (low, high) = design_of(client, terms), get_ranges(terms)
        bottom, top = self._target_range(terms)
        half = np.append((high - low) / 2, (top - bottom) / 2)
        columns = np.column_stack([design.x, design.y])
        scaled = (columns - np.append((high + low) / 2, (top + bottom) / 2)) / half
        if question.name == "means":
            return to_vector(float(len(scaled)), scaled.sum(0))
        if question.name == "spreads":
            return to_vector(((scaled - values["centre"]) ** 2).sum(0))
        standard = (scaled - values["centre"]) / values["spread"]
        linear = terms.schema.task == "regression"
        y = standard[:, -1] if linear else design.y[:, 0]
        ones = np.zeros((len(y), self._count_intercepts(terms)))
        ones[:, client.place if self.by_client else 0] = 1
        site, family = GlmSite(np.hstack([ones, standard[:, :-1]]), y), FAMILY_OF_TASK[terms.schema.task]
        with np.errstate(over="ignore", invalid="ignore"):
            if question.name == "paths":
                divided = find_divided_clients(terms)[client.place]
                fold = assign_folds(design, client, self._events(design.y)) if divided else np.full(len(y), -1)
                parts = [y @ y, *fold_sums(lambda beta, rows: glm_sums(GlmSite(site.x[rows], y[rows]), beta, family),
                                           values["betas"], fold)]  # fmt: skip
                betas, sets = values["betas"], [fold != k for k in range(CV_FOLDS)] if divided else []
            else:
                here = glm_sums(site, values["beta"], family)
                parts = [here.value, y @ y, here.gradient, upper_triangles(here.information)]
                betas, sets = values["beta"][None], []
            if question.name == "tilted":
                parts.append(firth_slope(site, values["beta"], family, values["metric"]))
            whole = np.ones(len(y), bool)
            if forbids_small_cells(terms.rules) and any(
                self._is_dominated(GlmSite(site.x[rows], y[rows]), beta, family, values.get("metric"))
                for beta in betas
                for rows in (whole, *sets)
            ):
                return None
            answer = to_vector(*parts)
        return answer if bool(answer.isfinite().all()) else None

    @staticmethod
    def _events(y: Floats) -> Mask:
        return y[:, 0] > 0

    @staticmethod
    def _is_dominated(site: GlmSite, beta: Floats, family: str, metric: Floats | None) -> bool:
        """Return True if a single row has most of the information, of the residuals, or of the lengths in a metric.

        In a linear regression, coefficients cannot single out a row.
        """
        _, mean, variance, _ = GLM_FAMILIES[family]
        eta = site.x @ beta
        if family == "linear":
            return False
        shares = [variance(eta)]
        if family == "logistic":
            shares.append(np.abs(site.y - mean(eta)))
        if metric is not None and metric.any():
            shares.append(variance(eta) * np.abs(((site.x @ metric) * site.x).sum(1)))
        return has_dominant_row(*shares)

    def _fit(self, ask: Callable[[Question], Total], terms: AnalysisTerms) -> tuple[GlmFit, Floats]:
        """Return the fit, and the largest effect of rounding on each coefficient."""
        names, first, family = columns_of(terms), self._count_intercepts(terms), FAMILY_OF_TASK[terms.schema.task]
        total, info = ask(Question("means"))
        count = int(total[0])
        if not count:
            raise DataError(
                "no row is complete and within the agreed-upon ranges. Drop columns with missing cells, or agree on "
                "wider ranges"
            )
        centre = total.numpy()[1:] / count
        squares = ask(Question("spreads", {"centre": torch.from_numpy(centre)}))[0].numpy()
        spread = np.sqrt(squares / count)
        for name, varies in zip(names, spread > MIN_COLUMN_SPREAD, strict=False):
            if not varies:
                raise DataError(f"{name} has the same value in every row. Omit this column")
        low, high = get_ranges(terms)
        bottom, top = self._target_range(terms)
        half, mid = np.append((high - low) / 2, (top - bottom) / 2), np.append((high + low) / 2, (top + bottom) / 2)
        if not spread[-1] > MIN_COLUMN_SPREAD:
            raise DataError(f"the target is {mid[-1] + half[-1] * centre[-1]:g} in every row, so nothing can be fitted")
        public = {"centre": torch.from_numpy(centre), "spread": torch.from_numpy(spread)}
        labels = [f"intercept {k}" for k in range(first)] if self.by_client else ["intercept"]
        size, of_targets, family_weights = first + len(names), 0.0, np.append(np.zeros(first), np.ones(len(names)))

        def ask_sum(name: str, **numbers: Floats) -> Floats | None:
            values = {key: torch.from_numpy(value) for key, value in numbers.items()}
            vector, now = ask(Question(name, {**values, **public}))
            return None if now.neutral > info.neutral else vector.numpy()

        def step(beta: Floats, metric: Floats) -> Floats | None:
            nonlocal of_targets
            more = {"metric": metric} if self.penalty == "firth" else {}
            numbers = ask_sum(self.last_question, beta=beta, **more)
            of_targets = of_targets if numbers is None else float(numbers[1])
            return numbers

        def evaluate(beta: Floats) -> Likelihood:
            numbers = step(beta, np.zeros((size, size)))
            if numbers is None:
                return impossible_likelihood(size)
            half = 2 + size + size * (size + 1) // 2
            return Likelihood(
                float(numbers[0]), numbers[2 : 2 + size], symmetric_from_triangles(numbers[2 + size : half], size)
            )

        def slope(beta: Floats, inverse: Floats) -> Floats | None:
            numbers = step(beta, inverse)
            return None if numbers is None else numbers[-size:]

        def paths(betas: Floats) -> FoldSums | None:
            nonlocal of_targets
            numbers = ask_sum("paths", betas=betas)
            if numbers is None:
                return None
            of_targets = float(numbers[0])
            return read_fold_sums(numbers[1:], size)

        exact: Likelihood | None = None
        ridge = Ridge(self.strength) if isinstance(self.strength, float) else None
        weights = count * (0.0 if ridge is None else ridge.strength) * family_weights
        if self.strength == "cv":
            ridge, beta, here, exact = find_ridge_by_sums(paths, family_weights)
            weights = count * ridge.strength * family_weights
        else:
            start = evaluate if ridge is None else add_ridge_penalty(evaluate, weights)
            start = add_firth_penalty(evaluate, slope) if self.penalty == "firth" else start
            beta, here = maximize_likelihood(start, [*labels, *names], intercepts=first, penalty=self.penalty)
        inverse = np.linalg.inv(here.information)
        unit, middle = (spread[-1] * half[-1], mid[-1] + half[-1] * centre[-1]) if family == "linear" else (1.0, 0.0)
        scale, degrees = 1.0, None
        if family == "linear":  # squared residuals: y'y - 2 value, with value = y'eta - eta^2/2
            exact = exact or evaluate(beta)
            spent = size if ridge is None else float(np.trace(inverse @ exact.information))
            if count <= spent:
                raise DataError(
                    f"{count} rows for {size} coefficients leave no degrees of freedom for the residuals. Omit columns"
                )
            degrees = count - spent
            scale = max(of_targets - 2 * exact.value, 0.0) / degrees  # rounding may put a perfect fit below 0
        unit_of, centre_of = (spread * half)[:-1], (mid + half * centre)[:-1]
        back = np.eye(size)  # matrix that converts beta to the original units
        back[first:, first:] = np.diag(1 / unit_of)
        back[:first, first:] = -(centre_of / unit_of)
        scaled_beta = beta
        covariance = back @ inverse @ back.T * scale * unit**2
        beta = back @ beta * unit
        beta[:first] += middle
        sites = len(terms.sizes)
        relative = (
            sites * ANSWER_STEP / (2 * count * float(spread.min()) ** 2)
        )  # relative error of a spread, which affects the ridge
        reach = np.concatenate([np.ones(first), ((1 + np.abs(centre)) / spread)[:-1]])
        error = sites * ANSWER_STEP / 2
        moved = self._bound_rounding_error(here, weights * scaled_beta * 2 * relative, error, reach, family)
        if self.penalty == "firth":
            moved = tilt_error(here, np.full(size, error), size * error, reach)
        bound = np.abs(back).sum(1) * moved * unit
        return GlmFit([*labels, *names], beta, np.sqrt(covariance.diagonal()), count, ridge, degrees), bound

    @staticmethod
    def _bound_rounding_error(here: Likelihood, penalty: Floats, error: float, reach: Floats, family: str) -> float:
        """Return the largest error of the coefficients, compared with exact sums, for a given error in each sum.

        The third derivative of the likelihood is at most R times the second, where R is the length of a row, or 0 in a
        linear regression: F. Bach, Electron. J. Stat. 2010, Proposition 1, as for secure sums of Cox's likelihood.
        """
        size = len(here.gradient)
        least = float(np.linalg.eigvalsh(here.information)[0]) - size * error - float(np.abs(penalty).max())
        gradient = float(np.linalg.norm(np.abs(here.gradient) + error + np.abs(penalty)))
        longest = 0.0 if family == "linear" else float(np.linalg.norm(reach))
        if least <= 0 or longest * gradient >= least:
            return float("inf")
        return gradient / least if not longest else float(-np.log1p(-longest * gradient / least) / longest)

    def _count_intercepts(self, terms: AnalysisTerms) -> int:
        return len(terms.sizes) if self.by_client else 1

    @staticmethod
    def _target_range(terms: AnalysisTerms) -> tuple[float, float]:
        low, high = terms.schema.target_ranges[0] or (0.0, 1.0)
        return low, max(high, low + 1e-9)


def _symmetric_bounds(most: Tensor) -> Bounds:
    """Return bounds for numbers that may be positive or negative."""
    return Bounds.between(-most.double(), most.double(), ANSWER_STEP)
