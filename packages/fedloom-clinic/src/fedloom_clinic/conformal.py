"""Split conformal prediction: a threshold on scores, shared or per client, computed from histograms of scores.

References: V. Vovk, A. Gammerman, G. Shafer, "Algorithmic Learning in a Random World", 2005. M. Sadinle, J. Lei, L.
Wasserman, JASA 2019 (scores 1 - p of a class). C. Lu et al., "Federated Conformal Predictors", ICML 2023.

Bins in which too few clients have enough subjects are merged. The first question counts the clients with enough
subjects in the range of all bins, in each of its halves, in each half of these halves, and so on. Starting from the
largest scores, neighboring ranges are merged until they contain a range in which enough clients have enough subjects.
All parties derive the same bins from these counts.

A prediction set contains every class whose probability is at least 1 - threshold (see `fedloom predict
--set-threshold`). In a regression, scores are absolute residuals, and the interval is the prediction plus and minus the
threshold (J. Lei et al., JASA 2018). With n calibration rows, the threshold is the upper edge of the bin that contains
the score of rank ceil((n + 1) (1 - alpha)). If a new row has the same distribution as the calibration rows, its set
contains its class with a probability between 1 - alpha and 1 - alpha + 1 / (n + 1) + the mass of a bin. A shared
threshold guarantees this for all clients' pooled rows, but not at each client.

Calibration rows are drawn from the test set, which was not used to choose the round, the model or any setting. Coverage
is measured on the remaining test rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from fedloom.analyses import Analysis, AnalysisTerms, Bounds, ClientRows, Info, Question, Rules, Schema
from fedloom.analyses.models import ModelKind, compute_outputs
from fedloom.analyses.tables import NUMBER_TYPE, TEXT_TYPE, make_table
from fedloom.data import DATA_PARTS
from fedloom.errors import DataError, Refused
from fedloom_clinic.cells import forbids_small_cells

if TYPE_CHECKING:
    from fedloom.engine import Setting

ALL_CLASSES_THRESHOLD = 2.0
"""Threshold above all scores, so that sets contain every class. It is used if there are too few calibration rows for a
smaller one. In a regression, the threshold is then infinite, as is a threshold beyond the last bin."""


class ConformalState(NamedTuple):
    """Results of a conformal analysis so far.

    Attributes:
        terms: public facts about the analysis.
        owners: number S of thresholds, which is 1 if all clients share a threshold.
        reached: number of clients with enough subjects in each range of bins, ``[S, B]``.
        thresholds: thresholds on scores, ``[S]``.
        rows: number of calibration rows for each threshold, ``[S]``.
        covered: totals from the last question.
    """

    terms: AnalysisTerms
    owners: int
    reached: Tensor | None = None
    thresholds: Tensor | None = None
    rows: Tensor | None = None
    covered: Tensor | None = None


class Conformal(Analysis):
    """Thresholds for sets or intervals that contain the true value with a given probability, and their coverage."""

    kind: ClassVar[str] = "conformal"
    tasks: ClassVar = ("binary", "classification", "regression")
    questions: ClassVar = {"reached": {}, "scores": {"reached": 2}, "coverage": {"thresholds": 1}}
    uses_models: ClassVar[bool] = True

    alpha: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="target fraction of rows whose prediction set or interval misses the true value",
    )
    model_kind: ModelKind = Field(
        None,
        description="model whose predictions are used (default: global, or personal if there is no global model)",
    )
    by_client: bool = Field(
        False, description="use a separate threshold for each client. Clients then reveal their individual histograms"
    )
    calibration_fraction: float = Field(0.5, gt=0, lt=1, description="fraction of the test rows used for calibration")
    bins: int = Field(
        1000, ge=10, le=100_000, description="number of equal-width bins for scores from 0 to 1 or for residuals"
    )
    max_error: float | None = Field(
        None, gt=0, description="largest binned residual (regression only; None: the width of the target's range)"
    )
    draw: int = Field(0, ge=0, description="seed for drawing the calibration rows")

    @property
    def shows_rows(self) -> bool:
        return self.by_client

    def check(self, schema: Schema, setting: Setting | None = None) -> None:
        super().check(schema, setting)
        if setting is not None and setting.evaluate.select_on == "test":
            raise Refused(
                "conformal thresholds require rows that were not used to choose the round, but this run selects the "
                "round on the test set",
                rule="analysis-selects-on-test",
                fix="set {evaluate.select_on = 'validation'}",
            )

        if schema.task == "regression" and len(schema.target_ranges) != 1:
            raise Refused(
                f"the analysis conformal computes an interval for one number, but {schema.name} has "
                f"{len(schema.target_ranges)} targets",
                rule="conformal-targets",
                fix="train on one target, {data.target = 'NAME'}, or omit the analysis",
            )
        if schema.task != "regression" and self.max_error is not None:
            raise Refused(
                "max_error applies only to the residuals of a regression, but the task of "
                f"{schema.name} is {schema.task}",
                rule="conformal-max-error",
                fix="omit max_error",
            )

    def check_sites(self, schema: Schema, *, masked: bool) -> None:
        super().check_sites(schema, masked=masked)
        if schema.task == "regression" and self.max_error is None and schema.target_ranges[0] is None:
            raise Refused(
                "the analysis conformal requires a range for the residuals, but the target has no range",
                rule="conformal-range",
                fix="set `max_error` in the analysis, or set a range for the target in the agreement",
            )

    def used(self, client: ClientRows, terms: AnalysisTerms) -> ClientRows:
        return client.select(client.part == DATA_PARTS.index("test"))

    def start(self, terms: AnalysisTerms) -> ConformalState:
        owners = len(terms.sizes) if self.by_client else 1
        every = torch.zeros(owners, len(self._nodes), dtype=torch.float64)
        return ConformalState(terms, owners, None if forbids_small_cells(terms.rules) else every)

    def check_question(self, question: Question, terms: AnalysisTerms) -> None:
        owners = self.start(terms).owners
        for name, shape in (("reached", (owners, len(self._nodes))), ("thresholds", (owners,))):
            if name in question.values and question.values[name].shape != shape:
                raise Refused(
                    f"{name} of a question must have the shape {shape}, got {tuple(question.values[name].shape)}"
                )
        for reached in question.values.get("reached", ()):
            check_reached(reached, self._nodes, len(terms.sizes))

    def row_sets(self, client: ClientRows, terms: AnalysisTerms) -> Sequence[ClientRows]:
        test = self.used(client, terms)
        drawn = self._draw_numbers(test) < self.calibration_fraction
        return [test.select(drawn), test.select(~drawn)]

    def question(self, state: ConformalState) -> Question | None:
        if state.reached is None:
            return Question("reached")
        if state.thresholds is None:
            return Question("scores", {"reached": state.reached})
        if state.covered is None:  # messages must not contain infinite numbers
            return Question("coverage", {"thresholds": state.thresholds.clamp(max=torch.finfo(torch.float64).max)})
        return None

    def bounds(self, question: Question, terms: AnalysisTerms) -> Bounds:
        owners, most = self.start(terms).owners, float(terms.most_rows)
        if question.name == "reached":
            return Bounds.counts(owners * len(self._nodes), 1.0)
        if question.name == "scores":
            return Bounds.counts(sum(len(of) - 1 for of in self._find_edges(question.values["reached"], terms)), most)
        rows = torch.full((owners,), most, dtype=torch.float64)
        high = torch.cat([rows, rows, most * max(len(terms.schema.classes), 1) * torch.ones(owners)])
        return Bounds.between(torch.zeros(3 * owners), high, 1.0)

    def answer(self, question: Question, client: ClientRows, terms: AnalysisTerms) -> Tensor:
        owners = self.start(terms).owners
        place = client.place if self.by_client else 0
        test = client.select(client.part == DATA_PARTS.index("test"))
        drawn = self._draw_numbers(test) < self.calibration_fraction
        some = test.select(~drawn if question.name == "coverage" else drawn)
        score, every = self._scores(some, terms)
        fine = (score * self.bins).long().clamp(max=self.bins - 1)
        if question.name == "reached":
            flags = torch.zeros(owners, len(self._nodes), dtype=torch.float64)
            flags[place] = flag_ranges(fine, some.subjects, self._nodes, terms.rules.min_subjects)
            return flags.flatten()
        if question.name == "scores":
            ends = self._find_edges(question.values["reached"], terms)
            histograms = [torch.zeros(len(of) - 1, dtype=torch.float64) for of in ends]
            of = torch.bucketize(fine, torch.tensor(ends[place][1:-1]), right=True)
            histograms[place] = torch.bincount(of, minlength=len(histograms[place])).double()
            return torch.cat(histograms)
        counts = torch.zeros(3, owners, dtype=torch.float64)
        limit = question.values["thresholds"][place] / self._unit(terms.schema)
        counts[:, place] = torch.tensor([len(some), int((score <= limit).sum()), int((every <= limit).sum())]).double()
        return counts.flatten()

    def step(self, state: ConformalState, total: Tensor, info: Info) -> ConformalState:
        if state.reached is None:
            return state._replace(reached=total.view(state.owners, -1))
        if state.thresholds is not None:
            return state._replace(covered=total.view(3, -1))
        if not total.any():
            raise DataError("no client has test rows for calibration. Set a larger test fraction in the partition")
        ends = self._find_edges(state.reached, state.terms)
        counts = total.split([len(of) - 1 for of in ends])
        limits = [self._find_threshold(row, of, state.terms.schema) for row, of in zip(counts, ends, strict=True)]
        rows = torch.stack([row.sum() for row in counts])
        return state._replace(thresholds=torch.tensor(limits, dtype=torch.float64), rows=rows)

    def result(self, state: ConformalState) -> pa.Table:
        assert state.thresholds is not None
        assert state.rows is not None
        assert state.covered is not None
        lines, numbers = list[tuple[object, ...]](), state.terms.schema.task == "regression"
        for k, (limit, rows) in enumerate(zip(state.thresholds.tolist(), state.rows.tolist(), strict=True)):
            tested, covered, size = state.covered[:, k].tolist()
            mean = (covered / tested, 2 * limit if numbers else size / tested) if tested else (None, None)
            lines.append(
                (state.terms.client_names[k] if self.by_client else "all", limit, rows, 1 - self.alpha, tested, *mean)
            )
        names = ("threshold", "rows", "wanted", "test_rows", "coverage", "interval_width" if numbers else "set_size")
        return make_table(lines, client=TEXT_TYPE, **dict.fromkeys(names, NUMBER_TYPE))

    @cached_property
    def _nodes(self) -> list[tuple[int, int]]:
        return make_bin_ranges(self.bins)

    def _find_edges(self, reached: Tensor, terms: AnalysisTerms) -> list[list[int]]:
        """Return the upper edges of the merged bins for each threshold, which are between 0 and the number of bins.

        Raises:
            Refused: too few clients have calibration rows.
        """
        if not forbids_small_cells(terms.rules):
            return [[*range(self.bins + 1)]] * len(reached)
        rules = terms.rules.with_(min_clients=1, missing=0) if self.by_client else terms.rules
        return [find_bin_edges(row, self._nodes, rules, what="that calibrate") for row in reached]

    def _find_threshold(self, counts: Tensor, ends: Sequence[int], schema: Schema) -> float:
        """Return the upper edge of the bin that contains the score with the required rank.

        If there are too few rows, return a threshold above all scores. Scores beyond the range of residuals fall into
        the last bin, which has no upper edge.
        """
        rank = math.ceil((float(counts.sum()) + 1) * (1 - self.alpha) - 1e-9)
        at = len(counts) if rank > counts.sum() else int(torch.searchsorted(counts.cumsum(0), float(rank)))
        if schema.task == "regression":
            return math.inf if at >= len(counts) - 1 else ends[at + 1] / self.bins * self._unit(schema)
        return ALL_CLASSES_THRESHOLD if at == len(counts) else ends[at + 1] / self.bins

    def _unit(self, schema: Schema) -> float:
        """Return the score at the upper edge of the last bin, which is 1 or the largest residual in the bins."""
        if schema.task != "regression":
            return 1.0
        low, high = schema.target_ranges[0] or (0.0, 1.0)
        return self.max_error or max(high - low, 1e-300)

    def _scores(self, client: ClientRows, terms: AnalysisTerms) -> tuple[Tensor, Tensor]:
        """Return scores of the true targets ``[N]``, and of every class ``[N, classes]`` (``[N, 0]`` in a regression).

        Scores are multiples of the upper edge of the last bin.
        """
        if terms.schema.task == "regression":
            values = compute_outputs(client, self.model_kind, client.inputs) if len(client) else client.y
            return (values - client.y).abs()[:, 0] / self._unit(terms.schema), client.y[:, :0]
        every = 1 - predict_probabilities(client, len(terms.schema.classes), self.model_kind)
        return every[torch.arange(len(client)), client.y[:, 0].long()], every

    def _draw_numbers(self, client: ClientRows) -> Tensor:
        """Return numbers ``[N]`` in [0, 1) that depend only on ``draw`` and a row's cells, not on its position."""
        key = f"conformal {self.draw}".encode()
        cells = torch.cat([client.x, client.y], 1).numpy()
        digests = (hashlib.blake2b(row.tobytes(), key=key, digest_size=6).digest() for row in cells)
        return torch.tensor([int.from_bytes(digest, "little") / 2**48 for digest in digests], dtype=torch.float64)


def predict_probabilities(client: ClientRows, classes: int, model_kind: ModelKind) -> Tensor:
    """Return the probabilities ``[N, classes]`` that a model predicts for a client's rows.

    Raises:
        Refused: the run has no model of this kind.
    """
    if not len(client):
        return torch.zeros(0, classes, dtype=torch.float64)
    outputs = compute_outputs(client, model_kind, client.inputs)
    if classes == 2 and outputs.shape[1] == 1:
        return torch.cat([torch.sigmoid(-outputs), torch.sigmoid(outputs)], 1)
    return outputs.softmax(1)


def make_bin_ranges(bins: int) -> list[tuple[int, int]]:
    """Return ranges of bins, from the range of all bins to single bins. Each range precedes its two halves."""
    ranges = [(0, bins)]
    for low, high in ranges:  # the list grows during the loop
        if high - low > 1:
            ranges += [(low, (low + high) // 2), ((low + high) // 2, high)]
    return ranges


def check_reached(reached: Tensor, ranges: Sequence[tuple[int, int]], clients: int) -> None:
    """Raise an error if the counts ``[B]`` of clients in `make_bin_ranges` cannot be sums of `flag_ranges`.

    If a client has enough subjects in a range, it also has enough subjects in every range that contains this range.

    Raises:
        Refused: a number is not a possible number of clients, or a range has fewer clients than one of its halves.
    """
    possible = (reached >= 0) & (reached <= clients) & (reached == reached.round())
    whole = [place for place, (low, high) in enumerate(ranges) if high - low > 1]
    halves = reached[1:].view(-1, 2)  # halves of the ranges in `whole`, in the same order
    wrong = [whole[k] for k in (halves > reached[whole, None]).any(1).nonzero()[:, 0].tolist()]
    if not bool(possible.all()) or wrong:
        low, high = ranges[wrong[0] if possible.all() else 0]
        raise Refused(
            f"invalid `reached` in the server's request: the number of clients for bins {low} to {high} "
            "is inconsistent with the numbers for the two halves of this range"
        )


def flag_ranges(bin_of: Tensor, subjects: Tensor, ranges: Sequence[tuple[int, int]], least: int) -> Tensor:
    """Return flags ``[B]``: 1 for each range of bins in which a client has enough subjects, otherwise 0.

    Args:
        bin_of: bin of each row, ``[N]``.
        subjects: subject of each row, ``[N]``.
        ranges: ranges of bins.
        least: minimum number of subjects.
    """
    counts = [len(subjects[(bin_of >= low) & (bin_of < high)].unique()) for low, high in ranges]
    return torch.tensor([float(count >= least) for count in counts], dtype=torch.float64)


def find_bin_edges(reached: Tensor, ranges: Sequence[tuple[int, int]], rules: Rules, what: str) -> list[int]:
    """Return the upper edges of the merged bins, which are between 0 and the number of bins.

    In each merged bin, enough clients have enough subjects.

    Args:
        reached: number of clients that have enough subjects in each range, ``[B]``.
        ranges: ranges of bins (see `make_bin_ranges`).
        rules: agreed-upon rules.
        what: description of the rows, for messages.

    Raises:
        Refused: too few clients have enough subjects in the range that covers all bins.
    """
    count, needed = dict(zip(ranges, map(round, reached.tolist()), strict=True)), rules.min_clients + rules.missing
    if count[ranges[0]] < needed:
        raise Refused(
            f"only {count[ranges[0]]} clients have {rules.min_subjects} subjects {what}, but {needed} clients are "
            "needed",
            rule="small-cells",
            fix="agree on a smaller minimum count, or set a larger test fraction in the partition",
        )
    starts, top = list[int](), ranges[0][1]
    for low, high in sorted(ranges, reverse=True):  # start from large scores, near thresholds
        if high <= top and count[low, high] >= needed:
            starts, top = [low, *starts], low
    return [0, *starts[1:], ranges[0][1]]
