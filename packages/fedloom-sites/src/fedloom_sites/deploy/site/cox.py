"""Answer the steps of a Cox regression at a site, and remember them.

A site answers a step at one vector of coefficients, on the rows of the first step. Where it cannot, it sends zeros, as
where one of its rows has more than half of all weight at the coefficients of the step. It enters the step first, so a
step has one answer. Nothing else that the server gets depends on its rows: no sentence, no length, no further message.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from pydantic import ValidationError

from fedloom.errors import DataError, Refused, WireError, sentence_of
from fedloom.storage.files import write_atomic
from fedloom.tasks.cox import SurvivalSite
from fedloom.tasks.cox_sites import rows_of, survival_site, table_of, within
from fedloom.tasks.cox_vectors import CoxAgreement, Ring, SiteVectors, bins_with_events, merged_ends
from fedloom.tasks.penalty import Floats
from fedloom.values import Value
from fedloom_sites.deploy.cox import MAX_QUESTION_BYTES, STEPS_FILE, CoxFound, CoxStep, agreed_cox
from fedloom_sites.deploy.protocol.envelope import digest_of
from fedloom_sites.deploy.protocol.public import publish_reasons
from fedloom_sites.deploy.secure.counters import ABSENT_COUNTS, ANSWERED_COUNTS, NEUTRAL_COUNTS
from fedloom_sites.deploy.secure.opened import read_checked, write_checked
from fedloom_sites.deploy.secure.protocol import MIN_SITES, Broken
from fedloom_sites.deploy.secure.terms import Terms
from fedloom_sites.deploy.site.local_data import part_sizes, read_data
from fedloom_sites.deploy.site.trainer import Trainer

FIT_FILE = "cox.json"
"""The file in the folder of a site's state with what the regression found."""
MAX_ROW_SHARE = 0.5
"""Largest share of one row in the weights of a site's rows: beyond, the sums of the site are mostly this row's."""
V = TypeVar("V", bound=Value)


class CoxAnswer(NamedTuple):
    """Answer of a site to a step.

    Attributes:
        vector: its sums, or zeros.
        counters: see `fedloom_sites.deploy.secure.counters`.
    """

    vector: Ring
    counters: tuple[int, ...]


class SiteCox:
    """The part of one site in the experiment's Cox regression.

    Args:
        trainer: its samples.
        folder: of its state in this experiment.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer, self._folder, self._steps = trainer, folder, folder / STEPS_FILE

    @cached_property
    def agreed(self) -> CoxAgreement | None:
        """Agreement on a regression, or None if the site takes no part in one."""
        agreed = agreed_cox(self._trainer.experiment, self._trainer.site.samples)
        return None if agreed is None or self._trainer.private else agreed[0]

    def begin(self) -> None:
        """Begin a whole record of the steps, at a site that has sent nothing yet of this experiment.

        While it has no step, a list of opened sums that is damaged costs no regression.
        """
        begun = (STEPS_FILE, "session/*.json", "round-*.state")
        if self.agreed is not None and not any(path for name in begun for path in self._folder.glob(name)):
            write_checked(self._steps, {"rows": "", "steps": {}, "whole": True})

    @cached_property
    def bits(self) -> int:
        """The bins in which the site has events that it may send."""
        filled = () if self.agreed is None else bins_with_events(self._rows[0], self.agreed).tolist()
        return sum(bool(one) << k for k, one in enumerate(filled))

    @cached_property
    def _rows(self) -> tuple[SurvivalSite, int]:
        """The site's complete rows within the agreed ranges, and the number of its other rows."""
        trainer, site, terms = self._trainer, self._trainer.site, self._terms()
        if not part_sizes(trainer.fed, site.client)[0]:
            nothing = np.zeros(0)
            return SurvivalSite(np.zeros((0, len(terms.low))), nothing, nothing), 0
        data = read_data(trainer.experiment, site)
        rows = rows_of(trainer.fed, site.client)
        used = within(survival_site(data, table_of(data), rows), terms)
        return used, len(rows) - len(used.time)

    def vector(self, step: CoxStep, terms: CoxAgreement | None = None) -> CoxAnswer:
        """Compute the site's sums at the coefficients of a step, or zeros if it cannot, with the reason in its own log.

        Args:
            step: what is asked.
            terms: with bins that are merged. None: as agreed.

        Raises:
            PublicReason: nothing was agreed on, the step was answered at other coefficients, or the site has
                lost what it answered.
        """
        with publish_reasons():
            terms = terms or self._terms()
            if len(step.beta) != len(terms.low):
                raise Broken(f"a step of the Cox regression has {len(terms.low)} coefficients, got {len(step.beta)}")
        rows = self._rows_digest()
        with publish_reasons():
            same_rows = self._enter(step, rows)
        try:
            return self._sums(step, terms, same_rows)
        except Exception as error:  # whatever it is, the error depends on rows, and so must not show
            self._trainer.log_privately(f"step {step.step} of the Cox regression: {sentence_of(error)}")
            return CoxAnswer(np.zeros(terms.length, dtype=np.uint64), NEUTRAL_COUNTS)

    def _sums(self, step: CoxStep, terms: CoxAgreement, same_rows: bool) -> CoxAnswer:
        """Compute the site's sums.

        Raises:
            DataError: a row has too much weight, a sum is too large, or the rows are not those of the first step.
        """
        if not same_rows:
            raise DataError("the rows of this site are not those of the first step")
        beta: Floats = np.array(step.beta)
        vectors = SiteVectors(self._rows[0], terms, self._rows[1])
        if len(self._rows[0].time) > 1 and not vectors.largest_share(beta) <= MAX_ROW_SHARE:
            raise DataError(
                f"at these coefficients one row has more than {MAX_ROW_SHARE:.0%} of the weight of this site's"
            )
        return CoxAnswer(vectors.at(beta), ANSWERED_COUNTS if vectors.rows else ABSENT_COUNTS)

    def masked_vector(self, terms: Terms, first: int) -> CoxAnswer:
        """Compute the vector of a step for a masked sum, with the bins of enough sites.

        Args:
            terms: of the session.
            first: place of the first bin among the bits of a site.
        """
        assert terms.question is not None
        threshold = self._trainer.site.survivors or MIN_SITES
        with publish_reasons():
            agreed = merge_bins(self._terms(), terms, first, threshold)
            step = _read(CoxStep, terms.question.message, "a step of the Cox regression")
            if step.step != terms.question.step:
                raise Broken(f"the terms are of step {terms.question.step}, the question is of step {step.step}")
        return self.vector(step, agreed)

    def answer(self, message: bytes) -> bytes:
        """Answer a plain server's request with the vector, and then with the site's counters.

        Raises:
            WireError: the message is no step.
        """
        vector, counters = self.vector(_read(CoxStep, message, "a step of the Cox regression"))
        return np.concatenate([vector, np.array(counters, dtype=np.uint64)]).astype("<u8", copy=False).tobytes()

    def keep(self, message: bytes) -> None:
        """Write what the regression found into the folder of the site's state.

        Raises:
            WireError: the message is not that.
            Refused: nothing was agreed on.
        """
        self._terms()
        fit = _read(CoxFound, message, "the Cox regression")
        write_atomic(self._folder / FIT_FILE, (fit.model_dump_json(indent=2) + "\n").encode())

    def _terms(self) -> CoxAgreement:
        if self.agreed is None:
            raise Refused("this site sends nothing of a Cox regression: it is not agreed on, or epsilon is limited")
        return self.agreed

    def _enter(self, step: CoxStep, rows: str) -> bool:
        """Record a step before answering it. Return whether the rows are still the first step's.

        Args:
            step: what is asked.
            rows: digest of the rows.

        Raises:
            Broken: it was answered at other coefficients, or the site has
                lost what it answered.
        """
        record = read_checked(self._steps)
        if record is None and self._steps.exists():
            raise Broken(
                f"{STEPS_FILE} of this site is damaged, so the steps of the Cox regression that it has answered cannot "
                "be known"
            )
        record = record or {"rows": "", "steps": {}}
        question = digest_of([step.encode()])
        if record["steps"].setdefault(f"{step.step}", question) != question:
            raise Broken(f"step {step.step} of the Cox regression was answered already, at other coefficients")
        first = record["rows"] or rows
        write_checked(self._steps, {**record, "rows": first})
        return rows == first

    def _rows_digest(self) -> str:
        """Digest of the rows. Where they cannot be read, of nothing."""
        try:
            return digest_of([part.tobytes() for part in self._rows[0]])
        except Exception as error:  # as in `vector`
            self._trainer.log_privately(f"rows of the Cox regression: {sentence_of(error)}")
            return digest_of([])


def _read(kind: type[V], message: bytes, what: str) -> V:
    """Decode a message."""
    try:
        if len(message) > MAX_QUESTION_BYTES:
            raise ValueError("it is too long")
        return kind.model_validate_json(message)
    except (ValidationError, ValueError) as error:
        raise WireError(f"{what} cannot be read: {str(error)[:200]}") from None


def merge_bins(agreed: CoxAgreement, terms: Terms, first: int, threshold: int) -> CoxAgreement:
    """Merge bins with too few sites, in the same way at the server and at every site of a session.

    Args:
        agreed: on by all.
        terms: of the session, with the bins of every site.
        first: place of the first bin among the bits of a site.
        threshold: fewest sites of a sum.
    """
    filled = terms.bins(first, 1 if agreed.stratify else len(agreed.ends))
    return merged_ends(agreed, filled, len(filled) - threshold, MIN_SITES)
