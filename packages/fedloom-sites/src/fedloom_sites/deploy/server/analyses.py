"""Analyses by sums after the last round of a run: questions to the sites, each with one sum that is stored on disk.

A step that a site cannot answer has no sum. In that case, the analysis either asks for a shorter step, which counts as
a separate step, or ends with an error. Every result therefore covers the rows of all sites that have rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from fedloom.analyses import Bounds, Info, Question, SumRecord, run_questions
from fedloom.errors import DataError, Refused
from fedloom.processes.clients import ScoreRequest
from fedloom_sites.deploy.analyses import AgreedAnalysis, AnswerForm, SumTooLarge, file_stem_of
from fedloom_sites.deploy.secure.opened import read_checked, write_checked
from fedloom_sites.deploy.secure.terms import AnalysisStep, SessionTerms
from fedloom_sites.deploy.server.sites import Sites

RECORD_SUFFIX, SUMS_PATTERN = "-analysis.json", "sum-*.bin"
"""Suffix of the checkpoint file with an analysis's terms and sites, and pattern of the names of files with its sums."""


class AnalysisEnd(NamedTuple):
    """Result of an analysis: its table and the log of its questions."""

    table: pa.Table
    log: list[SumRecord]


class AnalysisServer:
    """The server's part in a single analysis.

    Args:
        sites: sites of the run.
        agreed: agreed analysis.
        folder: folder with the checkpoints.
        request: request for the models that the analysis reads. None if the analysis reads no models.
        names: names of the sites, in the order of the clients.
    """

    def __init__(
        self, sites: Sites, agreed: AgreedAnalysis, folder: Path, request: ScoreRequest | None, names: Sequence[str]
    ) -> None:
        self._sites, self._agreed, self._request, self._names = sites, agreed, request, tuple(names)
        self._record = folder / f"{file_stem_of(agreed.name)}{RECORD_SUFFIX}"
        self._sums = folder / file_stem_of(agreed.name)
        self._unanswered = 0

    def run(self) -> AnalysisEnd:
        """Ask all questions, and return the result. The result is then sent to the sites.

        Raises:
            RunStopped: sites are missing. Sums that have already been computed are kept.
            GivenUp: a sum cannot be revealed.
            DataError: the analysis has no result, or some sites cannot answer.
            ConfigError: too few sites have enough subjects in the cells, or a site's vector is invalid.
        """
        record = read_checked(self._record)
        if record is None:
            self._check_folder()
            terms = self._sites.analysis_terms(self._agreed.name, self._request)
            record = {"terms": terms.encode().decode(), "clients": []}
            write_checked(self._record, record)
        common = SessionTerms.model_validate_json(record["terms"], strict=False)
        public = replace(self._agreed.terms(common), names=self._names)

        def ask(question: Question, bounds: Bounds) -> tuple[Tensor, Info]:
            total, info, clients = self._ask(question, bounds, common, record["clients"])
            if clients != record["clients"]:
                record["clients"] = clients
                write_checked(self._record, record)
            return total, info

        try:
            state, log = run_questions(self._agreed.analysis, public, ask, self._sums)
            table = self._agreed.analysis.result(state)
        except (DataError, Refused) as error:
            if self._unanswered:
                raise type(error)(
                    f"{error}. In {self._unanswered} of its steps some sites could not answer, for "
                    "example because one row has more than half of its site's weight"
                ) from error
            raise
        self._sites.share_result(self._agreed.name, table)
        return AnalysisEnd(table, log)

    def _ask(
        self, question: Question, bounds: Bounds, common: SessionTerms, clients: list[int]
    ) -> tuple[Tensor, Info, list[int]]:
        """Ask the sites a question, and return the sum, details of the sum, and the sites that were asked.

        Raises:
            DataError: some sites cannot answer, and asking a different question would not help.
        """
        name, place = self._agreed.name, len([*self._sums.glob(SUMS_PATTERN)])
        nothing = torch.zeros_like(bounds.low)
        may_retry = place > 0 and question.name in self._agreed.analysis.retried
        try:
            form = AnswerForm(bounds, self._agreed.clients)
        except SumTooLarge:
            if not may_retry:
                raise
            return nothing, Info(len(clients), 0, len(clients), 0), clients  # the step is too long, so no site is asked
        terms = common.with_(question=AnalysisStep.create(name, place, question.encode()))
        got = self._sites.analysis_sum(terms, form, self._request, clients)
        if got.total is None:
            silent = got.counts.silent or len(got.clients) - got.counts.answered
            if not may_retry:
                raise DataError(
                    f"{silent} of {len(got.clients)} sites did not answer step {place + 1} of the "
                    f"analysis {name} ({question.name}). The log of each such site states the reason"
                )
            self._unanswered += 1
            return nothing, Info(len(got.clients), 0, silent, 0), got.clients
        total, clipped, rows = form.decode(got.total, len(got.clients))
        return total, Info(len(got.clients), clipped, 0, rows), got.clients

    def _check_folder(self) -> None:
        """Raise an error if the checkpoints contain steps in an older format.

        Raises:
            ConfigError: the checkpoints contain steps in that format.
        """
        stem = file_stem_of(self._agreed.name)
        if any(self._record.parent.glob(f"{stem}-[0-9]*.json")):
            raise Refused(
                f"the steps of the analysis {self._agreed.name} in {self._record.parent} were recorded by an earlier "
                "version of fedloom, and only that version can finish these steps. Deploy the experiment again"
            )
