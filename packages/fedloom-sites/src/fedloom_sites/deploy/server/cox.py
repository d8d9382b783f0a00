"""The Cox regression of a run: Newton's steps, each with one sum of the sites' that is kept on the disk.

A step at which a site cannot answer has no sum: Newton's step is halved, and the half is a step of its own. So no fit
is without the rows of a site that has any.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.errors import DataError, GivenUp
from fedloom.tasks.cox_vectors import CoxAgreement, Ring
from fedloom.tasks.penalty import Floats
from fedloom.tasks.secure_cox import SecureCoxFit, fit_of_sums
from fedloom_sites.deploy.cox import MAX_SUMS, CoxFound, CoxStep
from fedloom_sites.deploy.secure.opened import read_checked, write_checked
from fedloom_sites.deploy.server.sites import Sites


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
        self._incomplete = list[int]()

    def fit(self) -> SecureCoxFit:
        """Fit the regression. Afterwards the sites have its coefficients.

        Raises:
            RunStopped: sites are missing. The steps so far are kept.
            GivenUp: a sum is never revealed.
            DataError: there is no finite fit, or sites cannot answer.
            Refused: too few sites have events, or a site's vector is wrong.
        """
        first = self._next(np.zeros(len(self._names)))
        if first is None:
            raise DataError(
                f"{self._incomplete[0]} of {len(self._clients)} sites have no sums for the first step of the Cox "
                "regression; the log of each such site has the reason"
            )
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

    def _next(self, beta: Floats) -> Ring | None:
        """Return the sum at the next coefficients, from disk if it is there, or None if sites cannot answer."""
        if self._step == MAX_SUMS:
            lacking = (
                f"; in {len(self._incomplete)} of them sites could not answer, as where one row has more than half of "
                "the weight of its site"
            )
            raise DataError(
                f"the Cox regression has not converged after {MAX_SUMS} "
                f"steps{lacking if self._incomplete else ''}; look "
                f"at {', '.join(self._names)}"
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
            got = self._sites.cox_sum(step, self._agreed, self._clients)
            total = None if got.total is None else got.total.astype("<u8").tobytes().hex()
            kept |= {"total": total, "clients": got.clients, "ends": got.terms.ends.tolist(), **got.counts._asdict()}
            write_checked(path, kept)
        self._clients, self._step = kept["clients"], self._step + 1
        self.terms = self._agreed._replace(ends=np.array(kept["ends"]))
        if kept["total"] is None:
            self._incomplete.append(kept["neutral"] or len(self._clients) - kept["answered"])
            return None
        return np.frombuffer(bytes.fromhex(kept["total"]), dtype="<u8").astype(np.uint64)
