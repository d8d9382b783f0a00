"""Sum-based analyses at real sites: the agreement before the first question, and the encoding of answers as integers.

Columns, ranges, bins and rules are defined in the agreed-upon experiment file. A message from the server contains a
question and the public numbers of all sites, and every site checks its own numbers. This module is independent of any
particular analysis.

Each number in an answer is sent as a multiple of its step, modulo 2^64. The step is a power of two. If 64 bits are not
enough for the range of the sum, the multiple is written as several limbs of 40 bits, and the last limb carries the
sign. The sum of answers is therefore exact for every range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedloom.analyses import (
    Analysis,
    AnalysisTerms,
    Bounds,
    ClientRows,
    Question,
    QuestionOrderError,
    Rules,
    Schema,
    answer_question,
    check_order,
)
from fedloom.analyses.registry import get_analysis_name
from fedloom.data.input_spec import InputSpec
from fedloom.data.survey.agreement import Agreement
from fedloom.engine.job import Job
from fedloom.engine.privacy import find_accounted_noise
from fedloom.errors import ConfigError, Refused
from fedloom.lab.experiment import Experiment
from fedloom.rundir import analysis_file
from fedloom_sites.deploy.protocol.envelope import MAX_FLAG_DIGITS
from fedloom_sites.deploy.secure.protocol import MIN_SITES, Integers, ProtocolBroken
from fedloom_sites.deploy.secure.terms import MAX_TERMS_BYTES, SessionTerms

LIMB_BITS, MAX_LIMBS = 40, 4
"""Number of bits per limb, and maximum number of limbs per number. The sums of 100 limbs, and of 100 signed last limbs,
fit in 63 bits."""
SUM_BITS = 62
"""A sum over all sites fits in a single limb if each number has at most this number of bits, including the sign."""
FACT_COUNT = 2
"""Number of integers at the end of an answer: the count of clipped numbers, and the number of the site's rows."""
DEFAULT_MIN_SUBJECTS = 5
"""Minimum number of subjects at a site, and in a cell at that site, if the agreement on an analysis contains no
rules."""
EXAMPLE_ROWS = 1000
"""Number of rows per site for checking the order of an analysis' questions before an agreement."""


class SumTooLarge(Refused):
    """Error: answers to a question do not fit in the limbs, for example because a fit diverges."""


@dataclass(frozen=True, eq=False)
class AgreedAnalysis:
    """Analysis agreed on by the server and the sites.

    Args:
        name: the analysis's name.
        analysis: the value.
        schema: columns and their agreed ranges.
        clients: number of sites.
        threshold: minimum number of sites in a sum. None without masks.
        first_flag: position of the analysis's first flag in a site's bit field.
    """

    name: str
    analysis: Analysis
    schema: Schema
    clients: int
    threshold: int | None
    first_flag: int = 0

    @cached_property
    def rules(self) -> Rules:
        """Rules that hold before the number of absent sites is known.

        A value of 1 is replaced by the default for real sites (see `check_rules`).
        """
        rules = self.analysis.rules or Rules()
        agreed = _rule_names(rules)
        questions = _limit_questions(self.analysis)
        least = rules.min_subjects if "min_subjects" in agreed else DEFAULT_MIN_SUBJECTS
        if self.threshold is not None:
            fewest = max(MIN_SITES, rules.min_clients)
        elif "min_clients" in agreed:
            fewest = rules.min_clients
        else:
            # without masks, the server sees the cells of each site
            fewest = 1 if self.analysis.suppresses else self.clients
        return rules.with_(questions=questions, min_subjects=least, min_clients=fewest)

    @cached_property
    def preliminary_terms(self) -> AnalysisTerms:
        """Terms for a site's flags, without the sizes of the other sites, which are not known yet."""
        return AnalysisTerms(self.schema, torch.zeros(self.clients, dtype=torch.long), self.rules)

    @cached_property
    def flags(self) -> int:
        """Number of flags that a site publishes."""
        return len(self.analysis.publish(empty_rows(self.schema), self.preliminary_terms))

    def publish(self, rows: ClientRows) -> int:
        """Return a site's flags encoded as bits."""
        return sum(bool(one) << k for k, one in enumerate(self.analysis.publish(rows, self.preliminary_terms).tolist()))

    def terms(self, terms: SessionTerms) -> AnalysisTerms:
        """Return the public facts about an analysis that follow from the terms of its session.

        Raises:
            FedloomError: too few sites have enough subjects in the cells.
        """
        missing = self.rules.missing if self.threshold is None else len(terms.cohort) - self.threshold
        return self.public(
            [sum(one) for one in terms.sizes], dict(zip(terms.cohort, terms.bits(), strict=True)), missing
        )

    def public(self, sizes: Sequence[int], bits: Mapping[int, int], missing: int) -> AnalysisTerms:
        """Return the public facts about an analysis.

        Args:
            sizes: number of rows at each site.
            bits: bit fields of the requested sites, keyed by site number.
            missing: number of these sites that may be absent from a sum.
        """
        published = tuple(
            torch.tensor(
                [float(bits.get(c, 0) >> self.first_flag + k & 1) for k in range(self.flags)], dtype=torch.float64
            )
            for c in range(self.clients)
        )
        return AnalysisTerms(self.schema, torch.tensor(sizes), self.rules.with_(missing=missing), published)

    def check_order(self) -> None:
        """Raise an error if the analysis asks its questions in an order that sites do not accept.

        Raises:
            CodeError: see `Analysis.check_step`.
        """
        everything = dict.fromkeys(range(self.clients), (1 << self.first_flag + self.flags) - 1)
        check_order(self.analysis, self.public([EXAMPLE_ROWS] * self.clients, everything, 0), at_sites=True)

    def read_question(self, step: int, message: bytes, terms: AnalysisTerms) -> tuple[Question, Bounds]:
        """Return the question of a step and the bounds of an answer, if the question is allowed at this step.

        Raises:
            WireError: the bytes do not encode a question.
            Refused: the question does not belong to this step, the rules do not allow it, or the maximum number of
                steps has been reached.
        """
        analysis = self.analysis
        if step >= self.rules.questions:
            raise ProtocolBroken(
                f"the analysis {self.name} has at most {self.rules.questions} steps, so there is no step {step}"
            )
        question = Question.decode(message, analysis.questions)
        try:
            analysis.check_step(step, question)
        except QuestionOrderError as error:
            raise ProtocolBroken(str(error)) from None
        analysis.check_question(question, terms)
        return question, analysis.bounds(question, terms)

    def answer(
        self, question: Question, bounds: Bounds, form: AnswerForm, rows: ClientRows, terms: AnalysisTerms
    ) -> tuple[Integers, int, bool]:
        """Return a site's answer as integers, its count of clipped values, and whether it contributes to the sum.

        Raises:
            Refused: the site has no answer, for example because it has too few subjects.
        """
        reply = answer_question(self.analysis, question, rows, terms, bounds, "this site")
        if reply.neutral:
            raise Refused("too few subjects contribute to the sums, or one subject outweighs all others")
        vector = form.encode(reply.values, reply.clipped, reply.rows)
        return vector, reply.clipped, len(self.analysis.used(rows, terms)) > 0


class AnswerForm:
    """Integer encoding of answers within given bounds, and of sums of answers.

    Args:
        bounds: bounds of one site's answer.
        sites: maximum number of sites in a sum.

    Raises:
        SumTooLarge: the range of a number is too large for its step.
    """

    def __init__(self, bounds: Bounds, sites: int) -> None:
        self._bounds, self._sites = bounds, sites
        self._exponents = torch.floor(torch.log2(bounds.step)).numpy().astype(np.int64)
        largest = torch.maximum(bounds.low.abs(), bounds.high.abs()).numpy()
        if not (np.isfinite(largest).all() and np.isfinite(self._exponents).all()):
            raise SumTooLarge("the bounds of an answer are not finite")
        bits = np.log2(np.maximum(largest * sites, 1e-300)) - self._exponents + 1
        limbs = 1 + np.ceil(np.maximum(bits - SUM_BITS, 0) / LIMB_BITS).astype(int)
        if (limbs > MAX_LIMBS).any():
            raise SumTooLarge(
                f"a number in an answer needs {bits.max():.0f} bits, but at most "
                f"{SUM_BITS + LIMB_BITS * (MAX_LIMBS - 1)} are allowed"
            )
        self._limbs = limbs
        self.length = int(limbs.sum()) + FACT_COUNT

    def encode(self, values: Tensor, clipped: int, rows: int) -> Integers:
        """Encode an answer ``[k]`` within the bounds as integers modulo 2^64."""
        multiples = np.rint(np.ldexp(values.numpy(), -self._exponents))
        digits = np.zeros((MAX_LIMBS, len(multiples)), dtype=np.int64)
        rest = multiples
        for k in range(MAX_LIMBS):
            last = self._limbs == k + 1
            digits[k][last] = rest[last].astype(np.int64)
            more = self._limbs > k + 1
            above = np.floor(np.ldexp(rest[more], -LIMB_BITS))
            digits[k][more] = (rest[more] - np.ldexp(above, LIMB_BITS)).astype(np.int64)
            rest = rest.copy()
            rest[more] = above
        parts = [digits[k][self._limbs > k] for k in range(MAX_LIMBS)]
        return np.concatenate([*parts, np.array([clipped, rows])]).astype(np.int64).view(np.uint64)

    @property
    def zeros(self) -> Integers:
        """Zeros sent by a site without an answer."""
        return np.zeros(self.length, dtype=np.uint64)

    def decode(self, total: Integers, sites: int) -> tuple[Tensor, int, int]:
        """Decode the sum ``[k]`` of some sites' answers, and return it with the numbers of clipped values and rows.

        Raises:
            ProtocolBroken: this sum is impossible for this number of sites if their answers are within the bounds.
        """
        if len(total) != self.length:
            raise ProtocolBroken(f"a sum for this question must have {self.length} numbers, got {len(total)}")
        whole = total.view(np.int64)
        clipped, rows = (int(fact) for fact in whole[-FACT_COUNT:])
        sums, at = [0] * len(self._limbs), 0
        for k in range(MAX_LIMBS):
            for j in np.flatnonzero(self._limbs > k).tolist():
                sums[j] += int(whole[at]) << (LIMB_BITS * k)
                at += 1
        values = torch.tensor(
            [_scale_by_power_of_two(one, e) for one, e in zip(sums, self._exponents.tolist(), strict=True)],
            dtype=torch.float64,
        )
        low, high, step = self._bounds
        slack = step / 2 + 1e-12 * torch.maximum(low.abs(), high.abs())
        inside = (values >= sites * (low.clamp(max=0) - slack)) & (values <= sites * (high.clamp(min=0) + slack))
        if not bool(inside.all()) or not 0 <= clipped <= sites * len(values) or rows < 0:
            raise ProtocolBroken(
                "the sum of the answers is out of range: a site sent a wrong vector, or a mask was not removed"
            )
        return values, clipped, rows


def _scale_by_power_of_two(multiple: int, exponent: int) -> float:
    """Return an integer times a power of two, with a single rounding."""
    return math.ldexp(float(multiple), exponent)


def agreed_analyses(
    experiment: Experiment, samples: InputSpec, clients: int, threshold: int | None, first: int
) -> dict[str, AgreedAnalysis]:
    """Return the sum-based analyses agreed on by the server and the sites, keyed by name.

    Args:
        experiment: agreed experiment.
        samples: description of a sample.
        clients: number of sites.
        threshold: minimum number of sites in a sum. None without masks.
        first: number of bits before the bits of the first analysis in a site's bit field.
    """
    schema, agreed = make_sample_schema(experiment, samples), dict[str, AgreedAnalysis]()
    for analysis in experiment.analyses:
        if analysis.by_sums:
            one = AgreedAnalysis(get_analysis_name(analysis), analysis, schema, clients, threshold, first)
            agreed[one.name] = one
            first += one.flags
    return agreed


def count_questions(experiment: Experiment) -> int:
    """Return the maximum number of questions that a site answers in an experiment, over all analyses."""
    return sum(_limit_questions(analysis) for analysis in experiment.analyses if analysis.by_sums)


def _limit_questions(analysis: Analysis) -> int:
    """Return the agreed number of questions of an analysis, or the default for real sites if no number was agreed."""
    rules = analysis.rules or Rules()
    return rules.questions if "questions" in _rule_names(rules) else analysis.most_questions


def _rule_names(rules: Rules) -> set[str]:
    """Return the names of the agreed rules.

    Agreements of older versions list every rule, with its value for simulations.
    """
    unchanged = {name for name in Rules.model_fields if getattr(rules, name) == getattr(Rules(), name)}
    is_older = rules.model_fields_set == {*Rules.model_fields}
    return {*rules.model_fields_set} - (unchanged if is_older else {name for name in unchanged if name != "questions"})


def check_rules(analysis: Analysis) -> None:
    """Raise an error if an agreement would turn off a rule that real sites need.

    Raises:
        ConfigError: ``min_subjects`` or ``min_clients`` is 1.
    """
    rules = analysis.rules
    if rules is None or rules.model_fields_set == {*Rules.model_fields}:
        return
    for name in ("min_subjects", "min_clients"):
        if name in rules.model_fields_set and getattr(rules, name) == 1:
            raise ConfigError(
                f"the analysis {get_analysis_name(analysis)} has the rule {name} = 1, but real sites do not reveal "
                "results about a single subject or client",
                rule="analysis-rule-of-one",
                fix=f"omit {name} from `rules` to use the value for real sites, or set it to 2 or more",
            )


def check_analyses(
    job: Job,
    experiment: Experiment,
    samples: InputSpec,
    clients: int,
    threshold: int | None,
    first: int,
    kinds: Sequence[str],
) -> None:
    """Raise an error if the sites cannot take part in the analyses.

    Raises:
        ConfigError: the data lack a column, a number lacks an agreed range, or there are too many cells.
        Refused: everything that leaves a site must contain noise, but these sums contain none. Or an analysis uses a
            kind of model that is not among ``kinds``, which the run has.
    """
    schema = make_sample_schema(experiment, samples)
    for analysis in experiment.analyses:
        if analysis.by_sums:
            name = get_analysis_name(analysis)
            if find_accounted_noise(job.setting.upload_transform, job.setting.aggregator) is not None:
                raise Refused(
                    f"the sums of the analysis {name} contain no noise, but the agreed delta requires "
                    "noise on everything that leaves a site. Omit the analysis or the delta"
                )
            check_rules(analysis)
            analysis.check(schema, job.setting)
            analysis.check_models(kinds)
            analysis.check_sites(schema, masked=threshold is not None)
            AgreedAnalysis(name, analysis, schema, clients, threshold).check_order()
    agreed = agreed_analyses(experiment, samples, clients, threshold, first)
    digits = (first + sum(one.flags for one in agreed.values())) // 4 + 1
    most = min(MAX_FLAG_DIGITS, MAX_TERMS_BYTES // 2 // clients)
    if digits > most:
        cells = ", ".join(f"{one.flags} of {name}" for name, one in agreed.items() if one.flags)
        raise ConfigError(
            f"the analyses need {cells} cells, but {clients} sites can list at most {4 * most} cells. "
            "Use fewer bins or groups"
        )


def make_sample_schema(experiment: Experiment, samples: InputSpec) -> Schema:
    """Return the agreed columns, levels and ranges."""
    agreement = getattr(experiment.source, "agreement", None)
    if agreement is not None:
        return make_agreement_schema(agreement, experiment.head.name, experiment.kept_columns)
    columns, ranges = () if samples.table is None else samples.table.columns, (None,) * samples.targets
    ranges = (None,) if samples.classed else ranges
    is_table = samples.table is not None
    return Schema(
        experiment.head.name, samples.task, columns, samples.classes, samples.outputs, ranges, {}, is_table
    )  # fmt: skip


def make_agreement_schema(agreement: Agreement, name: str, kept: Sequence[str] = ()) -> Schema:
    """Return the columns, levels and ranges in an agreement.

    Args:
        agreement: signed agreement.
        name: name of the site's data.
        kept: columns whose levels are kept in addition to the levels of the models' columns.
    """
    outputs = len(agreement.classes) if agreement.task == "classification" else 1
    ranges = (agreement.target_range, *((None,) if agreement.task == "survival" else ()))
    levels = {column: agreement.levels[column] for column in kept if column in agreement.levels}
    return Schema(name, agreement.task, agreement.table.columns, agreement.classes, outputs, ranges, levels)


def file_stem_of(name: str) -> str:
    """Return an analysis name that is safe in file names."""
    return analysis_file(name).rpartition(".")[0]


def empty_rows(schema: Schema, place: int = 0) -> ClientRows:
    """Return an empty set of rows for a client."""
    nothing, wide = torch.zeros(0, dtype=torch.long), torch.zeros(0, len(schema.columns), dtype=torch.float64)
    y = torch.zeros(0, len(schema.target_ranges), dtype=torch.float64)
    return ClientRows(wide, y, nothing, nothing, dict.fromkeys(schema.levels, nothing), None, place)
