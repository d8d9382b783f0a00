"""A site's answers to the questions of analyses, and its record of them.

A site answers each step only once: for one question, on the same rows as the first step, and under unchanged terms.
Ranges, bins and minimum counts come from the agreed experiment. If the site cannot answer, it sends zeros, or random
numbers under masks. The site records the step before it reads its rows. Nothing else that the server receives depends
on the rows: neither the text, nor the length, nor the number of messages.

Across experiments on data with the same name, a site remembers which experiments have requested an analysis, and which
subjects are in each set of rows that an analysis sums. Two analyses of sets that differ by only a few subjects would
reveal these subjects. In that case, a site answers only the first of these analyses. A site records each set of rows,
and whether it will answer, before it answers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.analyses import AnalysisTerms, ClientRows, client_rows
from fedloom.engine.clients.scores import personal_models
from fedloom.errors import Refused, WireError, describe_error
from fedloom.storage import write_atomic
from fedloom_sites.deploy.analyses import (
    AgreedAnalysis,
    AnswerForm,
    agreed_analyses,
    empty_rows,
    file_stem_of,
)
from fedloom_sites.deploy.protocol.envelope import digest_arrays
from fedloom_sites.deploy.protocol.public import publish_reasons
from fedloom_sites.deploy.row_sets import columns_digest, judge_row_sets
from fedloom_sites.deploy.secure.changes import MAX_CHANGES
from fedloom_sites.deploy.secure.counters import ABSENT_COUNTS, ANSWERED_COUNTS, SILENT_COUNTS
from fedloom_sites.deploy.secure.opened import STEPS_FILE_SUFFIX, lock_folder, read_checked, write_checked
from fedloom_sites.deploy.secure.protocol import Integers, ProtocolBroken
from fedloom_sites.deploy.secure.terms import SessionTerms
from fedloom_sites.deploy.site.local_data import part_sizes
from fedloom_sites.deploy.site.trainer import Trainer

MEMORY_FILE = "analyses.json"
"""File in the site's memory of the data that lists the experiments that have requested each analysis, and the sets of
rows."""
MAX_RESULT_BYTES = 1 << 26
"""Maximum size in bytes of a result that a site stores."""


class SiteAnswer(NamedTuple):
    """A site's answer to one step.

    Attributes:
        vector: the site's sums as integers, or zeros.
        counters: see `fedloom_sites.deploy.secure.counters`.
    """

    vector: Integers
    counters: tuple[int, ...]


class SiteAnalyses:
    """A site's part in an experiment's analyses.

    Args:
        trainer: object that trains at the site and provides its samples.
        folder: folder with the site's state in this experiment.
        first: function that returns the number of bits that precede the bits of the first analysis in the site's bit
            field.
    """

    def __init__(self, trainer: Trainer, folder: Path, first: Callable[[], int] = int) -> None:
        self._trainer, self._folder, self._first = trainer, folder, first

    @cached_property
    def agreed(self) -> dict[str, AgreedAnalysis]:
        """Agreed analyses. Empty if the site adds noise to everything that it sends."""
        trainer, site = self._trainer, self._trainer.site
        if trainer.private:
            return {}
        return agreed_analyses(trainer.experiment, site.samples, site.clients, site.survivors, self._first())

    def begin(self) -> None:
        """Start a complete record of steps for every analysis, if the site has sent nothing in this experiment yet.

        As long as the record contains no step, a damaged list of opened sums does not prevent an analysis.
        """
        begun = (f"*{STEPS_FILE_SUFFIX}", "session/*.json", "round-*.state")
        if not any(path for name in begun for path in self._folder.glob(name)):
            for name in self.agreed:
                write_checked(self._steps(name), {"rows": "", "steps": {}, "whole": True})

    @cached_property
    def bits(self) -> int:
        """Bit field of the cells where the site has enough subjects, for all analyses together."""
        if not self.agreed or not part_sizes(self._trainer.fed, self._trainer.site.client)[0]:
            return 0
        return sum(one.publish(self._rows) << one.first_flag for one in self.agreed.values() if one.flags)

    @cached_property
    def _rows(self) -> ClientRows:
        """The rows of the site's training, validation and test parts."""
        trainer, client = self._trainer, self._trainer.site.client
        if not part_sizes(trainer.fed, client)[0]:
            return empty_rows(next(iter(self.agreed.values())).schema, client)
        return client_rows(trainer.fed, client)

    def answer(self, terms: SessionTerms, models: Sequence[bytes] = ()) -> SiteAnswer:
        """Return the answer to a step. If the site cannot answer, log the reason at the site and return zeros.

        Args:
            terms: terms of the session, which have already been checked against this site.
            models: messages from the server that contain models.

        Raises:
            PublicReason: the analysis was not agreed on, the question does not follow from the rules, the step was
                already answered for a different question, or the site has lost its record of answers.
        """
        assert terms.question is not None
        _, step, name = self.agreed, terms.question.step, terms.question.analysis
        with publish_reasons():
            one = self._get_agreed_analysis(name)
            agreed = one.terms(terms)
            question, bounds = one.read_question(step, terms.question.message, agreed)
            if bool(models) != one.analysis.uses_models:
                raise ProtocolBroken(
                    f"the message must contain {'the' if one.analysis.uses_models else 'no'} models "
                    f"of the run for the analysis {name}"
                )
            form = AnswerForm(bounds, self._trainer.site.clients)
            self._remember(one)
        digest = self._digest()
        with publish_reasons():
            may_answer = self._enter(one, terms, digest)
        try:
            may_answer &= self._are_apart(one, agreed)
            rows = self._attach_models(terms, models) if models else self._rows
            vector, clipped, has_part = one.answer(question, bounds, form, rows, agreed)
            if not may_answer:  # only now, so that the response time does not show it
                raise Refused(
                    "the rows differ from the rows of the first step, or they differ from a "
                    "previously summed set of rows in too few subjects"
                )
            if clipped and self._trainer.site.secure is not None:  # a masked sum does not show which sites clipped
                raise Refused(f"{clipped} numbers in the answer are outside their bounds. {one.analysis.wider}")
            return SiteAnswer(vector, ANSWERED_COUNTS if has_part else ABSENT_COUNTS)
        except Exception as error:  # the server must not notice the error, because it depends on the rows
            self._trainer.log_privately(f"step {step} of the analysis {name}: {describe_error(error)}")
            return SiteAnswer(form.zeros, SILENT_COUNTS)

    def keep(self, message: bytes) -> None:
        """Write the result of an analysis to the folder with the site's state.

        Raises:
            PublicReason: the message is not a result, or the analysis was not agreed on.
        """
        _ = self.agreed  # builds the run, which is not allowed in a `publish_reasons` block
        with publish_reasons():
            name, content = _read_result(message)
            self._get_agreed_analysis(name)
            write_atomic(self._folder / f"{file_stem_of(name)}.json", (json.dumps(content, indent=1) + "\n").encode())

    # ---------------------------------------------------------------------------------------------------- inside

    def _get_agreed_analysis(self, name: str) -> AgreedAnalysis:
        if name not in self.agreed:
            raise Refused(
                f"this site does not allow the analysis {name[:60]!r}: the agreement does not "
                "include it, or the site limits epsilon"
            )
        return self.agreed[name]

    def _steps(self, name: str) -> Path:
        return self._folder / f"{file_stem_of(name)}{STEPS_FILE_SUFFIX}"

    def _attach_models(self, terms: SessionTerms, models: Sequence[bytes]) -> ClientRows:
        """Return the site's rows, together with the run's final models as functions of the inputs."""
        trainer, ids = self._trainer, self._trainer.ids
        job, _ = trainer.attach_local_data(terms.bases[trainer.site.client], trainer.job)
        down, shared = trainer.node.receive(models, common=terms.common)
        kinds = {} if shared is None else {"global": shared.to(job.oracle.device)}
        if down is not None:
            personal = personal_models(job, down, terms.round, ids)[0]
            if personal is not None:
                kinds["personal"] = personal

        def function_of(row: Tensor) -> Callable[[Tensor], Tensor]:
            def run(inputs: Tensor) -> Tensor:
                job.oracle.set_statistics(row, ids)
                outputs: Tensor = job.oracle.run(
                    row.flatten(), inputs.to(row) if inputs.is_floating_point() else inputs
                )
                return outputs

            return run

        rows = self._rows
        return ClientRows(
            rows.x, rows.y, rows.part, rows.subjects, rows.columns, rows.fetch, rows.place,
            {kind: function_of(row) for kind, row in kinds.items()},
        )  # fmt: skip

    def _enter(self, one: AgreedAnalysis, terms: SessionTerms, rows: str) -> bool:
        """Record a step before the site answers it, and return True if the rows have not changed since the first step.

        If they have changed, the site must not use them in an answer.

        Args:
            one: requested analysis.
            terms: terms of the session.
            rows: digest of the rows that the analysis uses.

        Raises:
            ProtocolBroken: the step was already answered for a different question or under different terms, or the site
                has lost its record of answers.
        """
        assert terms.question is not None
        path, step = self._steps(one.name), terms.question.step
        record = read_checked(path)
        if record is None and path.exists():
            raise ProtocolBroken(
                f"{path.name} of this site is damaged, so fedloom does not know which steps of the "
                f"analysis {one.name} the site has answered"
            )
        record = record or {"rows": "", "steps": {}}
        question = digest_arrays([terms.question.message])
        if record["steps"].setdefault(f"{step}", question) != question:
            raise ProtocolBroken(
                f"step {step} of the analysis {one.name} has already been answered for a different question"
            )
        if record.setdefault("terms", terms.course) != terms.course:
            raise ProtocolBroken(
                f"the analysis {one.name} was started with different terms: sites, sizes or cells have changed"
            )
        first = record["rows"] or rows
        write_checked(path, {**record, "rows": first})
        return bool(rows == first)

    def _remember(self, one: AgreedAnalysis) -> None:
        """Record, in the site's memory of the data, that this experiment requests the analysis.

        Raises:
            ProtocolBroken: as many experiments as permitted have already requested the analysis.
        """
        site = self._trainer.site
        most = max(1, MAX_CHANGES if site.secure is None else site.secure.changes)
        with lock_folder(site.memory_folder):
            record = self._read_memory()
            fits = record["asked"].setdefault(one.name, [])
            if site.fingerprint in fits:
                return
            if len(fits) >= most:
                raise ProtocolBroken(
                    f"{len(fits)} experiments have already requested the analysis {one.name} of the data "
                    f"{site.data_name!r}, and every further request would reveal a difference (key `changes` in the "
                    "table `secure`). Omit the analysis, or request it for other patients"
                )
            fits.append(site.fingerprint)
            write_checked(site.memory_folder / MEMORY_FILE, record)

    def _are_apart(self, one: AgreedAnalysis, terms: AnalysisTerms) -> bool:
        """Return True if the analysis may sum its row sets in addition to earlier analyses, and record the decision."""
        sets = one.analysis.row_sets(self._rows, terms)
        with lock_folder(self._trainer.site.memory_folder):
            record = self._read_memory()
            salt, columns = bytes.fromhex(record["salt"]), columns_digest(one.schema)
            name = f"{self._trainer.site.fingerprint} {one.name}"
            for old in record.pop("snapshots", ()):  # written by an earlier version of fedloom
                earlier = {"set": digest_arrays(["".join(old).encode()]), "of": "", "answered": True}
                record.setdefault("sets", {})[earlier["set"]] = {"columns": columns, "subjects": old}
                record.setdefault("verdicts", []).append(earlier)
            may_answer = judge_row_sets(record, name, sets, columns, salt, one.rules.min_subjects)
            write_checked(self._trainer.site.memory_folder / MEMORY_FILE, record)
        return may_answer

    def _read_memory(self) -> dict[str, Any]:
        """Return the site's memory of the data.

        Raises:
            ProtocolBroken: the file is damaged.
        """
        path = self._trainer.site.memory_folder / MEMORY_FILE
        record = read_checked(path)
        if record is None and path.exists():
            raise ProtocolBroken(
                f"{path.name} of this site is damaged, so fedloom does not know the earlier analyses of the site's data"
            )
        return record or {"asked": {}, "salt": secrets.token_hex(16)}

    def _digest(self) -> str:
        """Return the digest of the rows, or the digest of no rows if the rows cannot be read."""
        try:
            rows = self._rows
            cells = torch.cat([rows.x, rows.y, *(codes[:, None].double() for codes in rows.columns.values())], 1)
            return digest_arrays(
                [cells.numpy().tobytes(), rows.part.numpy().tobytes(), rows.subjects.numpy().tobytes()]
            )
        except Exception as error:  # as in `answer`
            self._trainer.log_privately(f"rows of the analyses: {describe_error(error)}")
            return digest_arrays([])


def _read_result(message: bytes) -> tuple[str, dict[str, Any]]:
    """Return an analysis's name, its result, and the columns of its table, all read from a message.

    Raises:
        WireError: the message is not a result.
    """
    try:
        if len(message) > MAX_RESULT_BYTES:
            raise ValueError("it is too long")
        content = json.loads(message)
        if not isinstance(content["analysis"], str) or not isinstance(content["columns"], dict):
            raise ValueError("it has no columns")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"the result of an analysis cannot be read: {str(error)[:200]}") from None
    return content["analysis"], content
