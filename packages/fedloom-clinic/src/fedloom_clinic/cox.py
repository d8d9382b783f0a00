"""Cox regression over the rows of all clients, computed from sums.

The regression uses exact times, time bins, or a separate baseline hazard for each client.

References: D. R. Cox, "Regression models and life-tables", JRSS B 1972. C.-L. Lu et al., "WebDISCO", JAMIA 2015.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.analyses import AnalysisTerms, Bounds, ClientRows, Question, Schema, Total
from fedloom.errors import ConfigError, DataError, Refused
from fedloom_clinic.cells import forbids_small_cells
from fedloom_clinic.columns import (
    MAX_ROW_SHARE,
    Floats,
    LinearPredictor,
    columns_of,
    design_of,
    flag_columns,
    get_ranges,
    linear_model,
    list_omitted_columns,
    require_columns,
    symmetric_from_triangles,
    to_vector,
    upper_triangles,
)
from fedloom_clinic.fits.cox import (
    CoxFit,
    RiskSums,
    SurvivalSite,
    firth_slope,
    likelihood,
    maximize_likelihood,
    risk_sums,
)
from fedloom_clinic.fits.cox_vectors import (
    VECTOR_COUNTS,
    BinningLoss,
    CoxAgreement,
    Ring,
    SiteVectors,
    bin_ends,
    bins_with_events,
    merge_bin_ends,
)
from fedloom_clinic.fits.penalty import (
    CV_FOLDS,
    FoldSums,
    Likelihood,
    Mask,
    Ridge,
    add_firth_penalty,
    add_ridge_penalty,
    impossible_likelihood,
)
from fedloom_clinic.fits.secure_cox import SecureCoxFit, fit_from_sums
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

MAX_BINS = 1000
MIN_COLUMN_SPREAD = 1e-9
"""Minimum standard deviation of a varying column, relative to its agreed-upon range. The standard deviation of a
constant column is smaller, even with rounding errors."""
MAX_EXPONENT = 700.0
"""Largest exponent with a bound in the range of float64."""


class Cox(Penalized):
    """Cox regression over the rows of all clients, computed from sums.

    With ``width``, times are assigned to bins. With ``stratify``, each client has its own baseline hazard. With neither
    option, clients publish their event times, which is allowed only without masking.
    """

    kind: ClassVar[str] = "cox"
    assumes_independence: ClassVar[bool] = True
    tasks: ClassVar = ("survival",)
    needs_table: ClassVar[bool] = True
    questions: ClassVar = {
        "step": {"beta": 1, "ends": 1},
        "tilted": {"beta": 1, "ends": 1, "metric": 2},
        "paths": {"betas": 2, "ends": 1},
        "means": {},
        "spreads": {"centre": 1},
        "risk": {"beta": 1, "centre": 1, "spread": 1, "times": 1},
        "tilted-risk": {"beta": 1, "centre": 1, "spread": 1, "times": 1, "metric": 2},
    }

    retried: ClassVar = ("step", "tilted", "paths", "risk", "tilted-risk")
    suppresses: ClassVar[bool] = True

    width: float | None = Field(None, gt=0, description="width of the time bins, in the unit of the times")
    until: float | None = Field(
        None,
        gt=0,
        description="upper edge of the last bin. Rows with later events are treated as censored at this time (None: "
        "the largest time)",
    )
    stratify: bool = Field(
        False, description="use a separate baseline hazard for each client, with exact times instead of bins"
    )
    min_events: int = Field(
        5,
        ge=1,
        description="minimum number of a client's events, both in a bin and in total. A client with fewer events does "
        "not send them",
    )
    ties: Literal["efron", "breslow"] = Field(
        "efron", description="method for tied events, i.e., events in the same bin or at the same time"
    )

    @model_validator(mode="after")
    def _bins_or_strata(self) -> Cox:
        if self.strength == "cv" and not self.stratify:
            raise ValueError(
                "with a shared baseline hazard, clients would send every time bin for each fit of a cross-validation. "
                "Set stratify = true, or set strength to a number"
            )
        if self.stratify and (self.width is not None or self.until is not None):
            raise ValueError("stratify does not use time bins. Omit `width` and `until`")
        if self.width is None and self.until is not None:
            raise ValueError("`until` is the upper edge of the last bin. Set `width` as well")
        if self.width is not None and self.until is not None and self.until / self.width > MAX_BINS:
            raise ValueError(
                f"at most {MAX_BINS} bins are allowed, got {self.until / self.width:.0f}. Set a larger width"
            )
        return self

    @property
    def shows_rows(self) -> bool:
        return self.width is None and not self.stratify

    def check(self, schema: Schema, setting: Setting | None = None) -> None:
        super().check(schema, setting)
        require_columns(schema, "a Cox regression")

    def check_sites(self, schema: Schema, *, masked: bool) -> None:
        if self.shows_rows or (not self.stratify and self.until is None):
            raise ConfigError(
                "the analysis cox requires time bins, but no time bins are set",
                rule="analysis-time-bins",
                fix="set width and until in the analysis, or stratify = true",
            )
        super().check_sites(schema, masked=masked)

    @property
    def order(self) -> tuple[str, ...]:
        if self.shows_rows:
            return ("means", "spreads", "tilted-risk" if self.penalty == "firth" else "risk")
        return ("step", "paths") if self.strength == "cv" else (self.last_question,)

    def check_question(self, question: Question, terms: AnalysisTerms) -> None:
        columns = len(get_ranges(terms, flagged=not self.shows_rows)[0])
        shapes = {"beta": (columns,), "betas": (FIT_COUNT, columns), "metric": (columns, columns)}
        require_shapes(question, shapes)
        if "ends" in question.values and question.values["ends"].tolist() != self._merge_bins(terms).ends.tolist():
            raise Refused("the time bins of a question must match the agreed-upon bins after merging")

    def used(self, client: ClientRows, terms: AnalysisTerms) -> ClientRows:
        design = design_of(client, terms, flagged=not self.shows_rows)
        if self.shows_rows:
            return client.select(design.rows)
        vectors = SiteVectors(SurvivalSite(design.x, *design.y.T), self._merge_bins(terms), design.left_out)
        return client.select(design.rows if vectors.rows else design.rows[:0])

    def publish(self, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        site = self._site(client, terms)
        if self.shows_rows:
            return torch.from_numpy(np.unique(site.time[site.event == 1]))
        bins = torch.from_numpy(bins_with_events(site, self._agreement(terms)).astype(float))
        if not forbids_small_cells(terms.rules):
            return bins
        least = max(self.min_events, terms.rules.min_subjects)
        folds = [flag_folds(client, terms, self._events, least)] if self.strength == "cv" else []
        return torch.cat([bins, *folds, flag_columns(client, terms)])

    def conclude(
        self, ask: Callable[[Question], Total], terms: AnalysisTerms
    ) -> tuple[pa.Table, LinearPredictor | None]:
        names = columns_of(terms, flagged=not self.shows_rows)
        if self.shows_rows:
            exact = self._fit_exact_times(ask, terms, names)
            return cox_table(exact, names, self._agreement(terms)), linear_model(terms, exact.fit.beta, flagged=False)
        agreed = self._merge_bins(terms)
        start_silent: list[int] = []

        ends = torch.from_numpy(agreed.ends)

        def total(beta: Floats, metric: Floats | None) -> Ring | None:
            more = {} if metric is None else {"metric": torch.from_numpy(metric)}
            name = "step" if metric is None else "tilted"
            vector, info = ask(Question(name, {"beta": torch.from_numpy(beta), "ends": ends, **more}))
            start_silent[:] = start_silent or [info.neutral]
            if info.neutral > start_silent[0]:
                return None  # a client declines, for example because one of its rows dominates the sums
            multiples = np.rint(vector.numpy()[:-VECTOR_COUNTS] / agreed.step)
            return np.concatenate([multiples, vector.numpy()[-VECTOR_COUNTS:]]).astype(np.int64).view(np.uint64)

        def paths(betas: Floats) -> FoldSums | None:
            vector, info = ask(Question("paths", {"betas": torch.from_numpy(betas), "ends": ends}))
            return None if info.neutral > start_silent[0] else read_fold_sums(vector.numpy(), len(names))

        crossed = paths if self.strength == "cv" else None
        fit = fit_from_sums(total, agreed, names, len(terms.sizes), crossed)
        table = cox_table(fit, names, agreed)
        return table.append_column("merged", pa.array([list_omitted_columns(terms)] * len(table))), linear_model(
            terms, fit.fit.beta
        )

    def remarks(self, table: pa.Table) -> Sequence[str]:
        beyond, rare, events = (int(table[name][0].as_py()) for name in ("late_lost", "rare_lost", "events"))
        whole, notes = events + beyond + rare, list[str]()
        if beyond:
            notes.append(
                f"{beyond} of {whole} events are treated as censored, because they are after the last time bin"
            )
        if rare and self.stratify:
            why = f"their clients have fewer than {self.min_events} events. The rows of these clients are omitted"
            notes.append(f"{rare} of {whole} events are not used, because {why} (min_events)")
        elif rare:
            why = f"their clients have fewer than {self.min_events} events in the same time bin (min_events)"
            notes.append(f"{rare} of {whole} events are treated as censored, because {why}")
        return notes

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        most, values = float(terms.most_rows), question.values
        p = len(get_ranges(terms, flagged=not self.shows_rows)[0])
        moments = 1 + p + p * (p + 1) // 2
        if question.name == "means":
            return Bounds.join([Bounds.counts(1, most), _symmetric_bounds(p, most)])
        if question.name == "spreads":
            return Bounds.join([_symmetric_bounds(p, 4 * most), Bounds.counts(1, most)])
        if question.name in ("risk", "tilted-risk"):
            bins = len(values["times"])
            reach = (1 + values["centre"].abs()) / values["spread"]
            weight = most * float(torch.exp((values["beta"].abs() @ reach).clamp(max=MAX_EXPONENT)))
            largest = max(1.0, float(reach.max()))
            sums = _symmetric_bounds(bins * 2 * moments, weight * largest**2)
            risk = [sums, Bounds.counts(bins, most), _symmetric_bounds(bins * p, most * largest)]
            if "metric" in values:
                longest = float(reach @ values["metric"].abs() @ reach)
                risk.append(_symmetric_bounds(bins * 2 * (1 + p), weight * longest * largest))
            return Bounds.join(risk)
        agreed = self._merge_bins(terms)
        counts = Bounds.counts(VECTOR_COUNTS, most)
        if question.name == "paths":
            fits = list[Bounds]()
            for beta in values["betas"]:
                lowest = -most * (2 * float(beta.abs().sum()) + float(np.log(most + 1)))
                of_values = Bounds.between(torch.full((2,), lowest), torch.full((2,), agreed.step))
                fits += [of_values, _symmetric_bounds(moments - 1, 2 * most)]
            return Bounds.join([Bounds.counts(CV_FOLDS + 1, most), *fits])
        tilt = list[Bounds]()
        if "metric" in values:  # maximum length of a row in [-1, 1] in the metric
            longest = 8 * most * max(float(values["metric"].abs().sum()), agreed.step)
            tilt = [_symmetric_bounds(p if self.stratify else len(agreed.ends) * 2 * (1 + p), longest, agreed.step)]
        if self.stratify:
            lowest = most * (2 * float(values["beta"].abs().sum()) + float(np.log(most + 1)))
            value = Bounds.between(torch.tensor([-lowest]), torch.zeros(1) + agreed.step, agreed.step)
            plain = agreed._replace(firth=False).length - VECTOR_COUNTS
            return Bounds.join([value, _symmetric_bounds(plain - 1, 2 * most, agreed.step), *tilt, counts])
        plain = agreed._replace(firth=False).length - VECTOR_COUNTS
        return Bounds.join([_symmetric_bounds(plain, most, agreed.step), *tilt, counts])

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor | None:
        site, design = self._site(client, terms), design_of(client, terms, flagged=not self.shows_rows)
        values = {name: value.numpy() for name, value in question.values.items()}
        low, high = get_ranges(terms, flagged=not self.shows_rows)
        scaled = (site.x - (high + low) / 2) / ((high - low) / 2)
        if question.name == "means":
            return to_vector(float(len(scaled)), scaled.sum(0))
        if question.name == "spreads":
            return to_vector(((scaled - values["centre"]) ** 2).sum(0), site.event.sum())
        if question.name in ("risk", "tilted-risk"):
            standard = site._replace(x=(scaled - values["centre"]) / values["spread"])
            with np.errstate(over="ignore", invalid="ignore"):
                sums = risk_sums(standard, values["beta"], values["times"], metric=values.get("metric"))
                answer = to_vector(*(part for of in (sums.risk, sums.tied) for part
                                  in (of[0], of[1], upper_triangles(of[2]))),
                                sums.deaths, sums.total,
                                *(part for of in (sums.risk, sums.tied) for part in of[3:]))  # fmt: skip
            return answer if bool(answer.isfinite().all()) else None
        agreed = self._merge_bins(terms)
        vectors = SiteVectors(site, agreed, design.left_out)
        fold, betas = np.full(len(site.time), -1), values["betas"] if "betas" in values else values["beta"][None]
        if "betas" in values and find_divided_clients(terms)[client.place]:
            fold = assign_folds(design, client, self._events(design.y))
        if forbids_small_cells(terms.rules) and len(site.time) > 1:
            sets = [fold != k for k in range(-1, CV_FOLDS)] if "betas" in values else [fold == fold]
            sets[0] = fold == fold
            metric = values.get("metric")
            shares = (vectors.largest_share(beta, rows, metric) for beta in betas for rows in sets)
            if not all(share <= MAX_ROW_SHARE for share in shares):
                return None
        if "betas" in values:
            fold = fold if vectors.rows else fold[:0]
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                paths = to_vector(*fold_sums(vectors.compute_likelihood, betas, fold))
            return paths if bool(paths.isfinite().all()) else None
        try:
            vector = vectors.encode(values["beta"], values.get("metric")).view(np.int64)
        except DataError:  # a sum is too large, because Newton's step is too long
            return None
        return to_vector(vector[:-VECTOR_COUNTS] * agreed.step, vector[-VECTOR_COUNTS:].astype(float))

    @staticmethod
    def _events(y: Floats) -> Mask:
        events: Mask = y[:, 1] == 1
        return events

    def _site(self, client: ClientRows, terms: AnalysisTerms) -> SurvivalSite:
        design = design_of(client, terms, flagged=not self.shows_rows)
        return SurvivalSite(design.x, *design.y.T)

    def _agreement(self, terms: AnalysisTerms) -> CoxAgreement:
        low, high = get_ranges(terms, flagged=not self.shows_rows)
        last = self.until or (terms.schema.target_ranges[0] or (0.0, 1.0))[1]
        ends = np.zeros(0) if self.width is None else bin_ends(self.width, last)
        return CoxAgreement(
            ends, low, high, self.min_events, ties=self.ties, stratify=self.stratify,
            ridge=1.0 if self.strength == "cv" else self.strength, firth=self.penalty == "firth",
        )  # fmt: skip

    def _merge_bins(self, terms: AnalysisTerms) -> CoxAgreement:
        agreed = self._agreement(terms)
        if terms.rules.min_clients == 1:
            return agreed
        bins = 1 if self.stratify else len(agreed.ends)
        filled = np.stack([flags.numpy()[:bins] > 0 for flags in terms.published])
        return merge_bin_ends(agreed, filled, terms.rules.missing, terms.rules.min_clients)

    def _fit_exact_times(
        self, ask: Callable[[Question], Total], terms: AnalysisTerms, names: Sequence[str]
    ) -> SecureCoxFit:
        """Return the fit to all rows with their exact times."""
        low, high = get_ranges(terms, flagged=not self.shows_rows)
        total, first = ask(Question("means"))
        means = total.numpy()
        rows = means[0]
        if not rows:
            raise DataError(
                "no row is complete and within the agreed-upon ranges. Drop columns with missing cells, or agree on "
                "wider ranges"
            )
        centre = means[1:] / rows
        squares, (events,) = np.split(ask(Question("spreads", {"centre": torch.from_numpy(centre)}))[0].numpy(), [-1])
        spread = np.sqrt(squares / rows)
        if not events:
            raise DataError("no row contains an event, so nothing can be fitted")
        if not (spread > MIN_COLUMN_SPREAD).all():
            raise DataError(
                f"{names[int((spread <= MIN_COLUMN_SPREAD).argmax())]} has the same value in every "
                "row. Omit this column"
            )
        times = np.unique(np.concatenate([some.numpy() for some in terms.published]))
        public = {"centre": centre, "spread": spread, "times": times}

        def sums_at(beta: Floats, metric: Floats | None = None) -> RiskSums | None:
            more = {} if metric is None else {"metric": metric}
            values = {name: torch.from_numpy(value) for name, value in {"beta": beta, **public, **more}.items()}
            vector, info = ask(Question("risk" if metric is None else "tilted-risk", values))
            if info.neutral > first.neutral:
                return None
            return _open_sums(vector.numpy(), len(beta), tilted=metric is not None)

        none = np.zeros((len(names), len(names))) if self.penalty == "firth" else None

        def evaluate(beta: Floats) -> Likelihood:
            sums = sums_at(beta, none)
            if sums is None:
                return impossible_likelihood(len(beta))
            return likelihood(sums._replace(risk=sums.risk[:3], tied=sums.tied[:3]), beta, self.ties)

        def slope(beta: Floats, inverse: Floats) -> Floats | None:
            sums = sums_at(beta, inverse)
            return None if sums is None else firth_slope(sums, self.ties, inverse)

        penalized = add_firth_penalty(evaluate, slope) if self.penalty == "firth" else evaluate
        if isinstance(self.strength, float):
            penalized = add_ridge_penalty(evaluate, rows * self.strength * np.ones(len(names)))
        beta, here = maximize_likelihood(penalized, names, penalty=self.penalty)
        unit = spread * (high - low) / 2
        se = np.sqrt(np.linalg.inv(here.information).diagonal())
        value = here.value if self.penalty == "none" else evaluate(beta).value
        ridge = Ridge(self.strength) if isinstance(self.strength, float) else None
        fit = CoxFit(beta / unit, se / unit, value, int(events), int(rows), ridge)
        everyone = int(terms.sizes.sum())
        return SecureCoxFit(fit, np.zeros(len(beta)), BinningLoss(int(rows), int(events), 0, 0, everyone - int(rows)))


def _open_sums(vector: Floats, p: int, *, tilted: bool) -> RiskSums:
    """Decode the sums in the total of the answers to "risk" or "tilted-risk"."""
    half, tilts = p * (p + 1) // 2, 2 * (1 + p) if tilted else 0
    bins = len(vector) // (2 * (1 + p + half) + 1 + p + tilts)
    ends = np.cumsum([bins, bins * p, bins * half] * 2 + [bins, bins * p, bins, bins * p, bins])
    parts = np.split(vector, ends)
    moments: list[tuple[Floats, ...]] = [
        (zero, one.reshape(bins, p), symmetric_from_triangles(two.reshape(bins, half), p))
        for zero, one, two in (parts[:3], parts[3:6])
    ]
    if tilted:
        moments = [(*three, parts[k], parts[k + 1].reshape(bins, p)) for three, k in zip(moments, (8, 10), strict=True)]
    return RiskSums(moments[0], moments[1], parts[6], parts[7].reshape(bins, p))


def _symmetric_bounds(numbers: int, most: float, step: float = 2.0**-36) -> Bounds:
    """Return bounds for numbers that may be positive or negative."""
    ends = torch.full((numbers,), float(most), dtype=torch.float64)
    return Bounds.between(-ends, ends, step)


def cox_table(fit: SecureCoxFit, names: Sequence[str], terms: CoxAgreement) -> pa.Table:
    """Return a table with a row for each column of the regression.

    The table includes the numbers of rows and lost events.
    """
    low, high = fit.fit.interval()
    figures = {
        "coefficient": fit.fit.beta, "standard_error": fit.fit.se, "low": low, "high": high, "p": fit.fit.p_values,
        "bound": fit.bound,
    }  # fmt: skip
    facts: dict[str, float | str] = {
        "likelihood": fit.fit.likelihood,
        "rows": fit.fit.row_count,
        "events": fit.fit.events,
    }
    facts |= {f"{name}_lost": count for name, count in zip(("late", "rare"), fit.losses[2:4], strict=True)}
    facts |= {"left_out": fit.losses.left_out, "bins": len(terms.ends), "least": terms.least, "ties": terms.ties}
    facts |= {} if fit.fit.ridge is None else {"ridge": fit.fit.ridge.strength}
    columns = {name: pa.array([fact] * len(names)) for name, fact in facts.items()}
    return pa.table({"column": pa.array(names, pa.string()), **{k: pa.array(v) for k, v in figures.items()}, **columns})
