"""The Cox regression of a run: Newton's steps, each with one sum of the sites' that is kept on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.deploy.cox import STEPS, CoxFound, CoxStep
from fedloom.deploy.secure.opened import read_checked, write_checked
from fedloom.deploy.server.sites import Sites
from fedloom.errors import DataError, GivenUp
from fedloom.tasks.cox import Floats
from fedloom.tasks.cox_vectors import CoxAgreement, Ring
from fedloom.tasks.secure_cox import SecureCoxFit, fit_of_sums


class CoxServer:
    """The server's side of a Cox regression.

    Args:
        sites: of the run.
        agreed: on by all.
        names: of the columns.
        folder: of the checkpoints.

    Attributes:
        terms: what was agreed on, with the bins that the sums have.
    """

    def __init__(self, sites: Sites, agreed: CoxAgreement, names: Sequence[str], folder: Path) -> None:
        self._sites, self._agreed, self._names, self._folder = sites, agreed, names, folder
        self.terms, self._clients, self._step = agreed, list[int](), 0

    def fit(self) -> SecureCoxFit:
        """The regression, after which the sites have its coefficients.

        Raises:
            RunStopped: sites are missing; the steps so far are kept.
            GivenUp: a sum is never revealed.
            DataError: there is no finite fit.
            Refused: too few sites have events, or a site's vector is wrong.
        """
        first = self._next(np.zeros(len(self._names)))
        fit = fit_of_sums(lambda beta: self._next(beta) if beta.any() else first, self.terms, self._names,
                          len(self._clients))  # fmt: skip
        beta, se = fit.fit.beta.tolist(), fit.fit.se.tolist()
        self._sites.share_cox(
            CoxFound(
                columns=tuple(self._names), coefficients=tuple(beta), standard_errors=tuple(se),
                likelihood=fit.fit.likelihood, rows=fit.fit.rows, events=fit.fit.events,
            )
        )  # fmt: skip
        return fit

    def _next(self, beta: Floats) -> Ring:
        """The sum at the next coefficients, from the disk where it is there."""
        if self._step == STEPS:
            raise DataError(
                f"the Cox regression has not converged after {STEPS} sums; look at {', '.join(self._names)}"
            )
        step = CoxStep(step=self._step, beta=tuple(beta.tolist()))
        path, text = self._folder / f"cox-{self._step}.json", step.encode().decode()
        kept = read_checked(path) or {"asked": text}
        if kept["asked"] != text:
            raise GivenUp(
                f"step {self._step} of the Cox regression was asked for at other coefficients, and a second sum would "
                "reveal more; put the checkpoints back that belong to it",
                self._clients,
            )
        if "total" not in kept:
            write_checked(path, kept)
            total, clients, terms = self._sites.cox_sum(step, self._agreed, self._clients)
            kept |= {"total": total.astype("<u8").tobytes().hex(), "clients": clients, "ends": terms.ends.tolist()}
            write_checked(path, kept)
        self._clients, self._step = kept["clients"], self._step + 1
        self.terms = self._agreed._replace(ends=np.array(kept["ends"]))
        return np.frombuffer(bytes.fromhex(kept["total"]), dtype="<u8").astype(np.uint64)
