"""Epsilon against Opacus, which has accountants of its own: the same figures from other code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from fedloom.engine.privacy import Noise, composed_epsilon
from fedloom.rows.aggregators import PrivateMean
from fedloom.rows.channels import GaussianNoise

ERROR = 0.01
"""How far above the truth Opacus' figure of privacy losses may be."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning"),  # it may be the first or the last
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),  # log(1 - q) of all
]
FEW = settings(deadline=None, max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""Opacus takes up to a second for privacy losses."""

multipliers = st.floats(0.7, 30.0)
steps = st.integers(1, 400)
deltas = st.sampled_from([1e-7, 1e-5, 1e-3])
accountants: st.SearchStrategy[Literal["rdp", "pld"]] = st.sampled_from(["rdp", "pld"])


def opacus(multiplier: float, rate: float, steps: int, delta: float, accountant: str) -> float:
    """Epsilon of so many steps of a Gaussian mechanism on a Poisson sample, by Opacus."""
    from opacus.accountants import PRVAccountant, RDPAccountant  # slow to import, needed here alone

    book = RDPAccountant() if accountant == "rdp" else PRVAccountant()
    book.history = [(multiplier, rate, steps)]
    if isinstance(book, RDPAccountant):
        return float(book.get_epsilon(delta, alphas=list(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)))
    return float(book.get_epsilon(delta, eps_error=ERROR))


@settings(deadline=None, max_examples=60)
@given(multipliers, steps, deltas)
def test_renyi_divergences_of_all_clients_in_every_round(multiplier: float, steps: int, delta: float) -> None:
    """At the same orders the two are the same number."""
    ours, theirs = composed_epsilon(multiplier, steps, delta, "rdp"), opacus(multiplier, 1.0, steps, delta, "rdp")
    assert ours == pytest.approx(max(theirs, 0.0), rel=1e-9, abs=1e-12)


@FEW
@given(multipliers, steps, deltas)
def test_privacy_losses_of_all_clients_in_every_round(multiplier: float, steps: int, delta: float) -> None:
    """Both are bounds from above, so each is within the other's error."""
    assume(steps / multiplier**2 < 60)  # epsilon below some 100, where Opacus' grid fits into memory
    ours, theirs = composed_epsilon(multiplier, steps, delta, "pld"), opacus(multiplier, 1.0, steps, delta, "prv")
    assert theirs - 2 * ERROR <= ours <= theirs + ERROR


@FEW
@given(multipliers, st.floats(0.01, 0.9), st.integers(1, 100), accountants)
def test_sampling_is_never_counted_for_more_than_it_gives(
    multiplier: float, rate: float, steps: int, accountant: Literal["rdp", "pld"]
) -> None:
    """No amplification is claimed: a Poisson sample of clients costs at most what is counted for all rounds."""
    assume(steps / multiplier**2 < 60)
    ours = composed_epsilon(multiplier, steps, 1e-5, accountant)
    assert opacus(multiplier, rate, steps, 1e-5, accountant) <= ours + ERROR


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_sampling_of_nearly_all_is_all(accountant: Literal["rdp", "pld"]) -> None:
    ours, theirs = composed_epsilon(2.0, 10, 1e-5, accountant), opacus(2.0, 0.9999, 10, 1e-5, accountant)
    assert theirs == pytest.approx(ours, rel=0.01)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(
    ("kind", "neighbours", "multiplier"),
    [(GaussianNoise, "replace", 2.0), (GaussianNoise, "zero", 4.0), (PrivateMean, "zero", 4.0)],
)
def test_a_ledger_is_opacus_history(
    tmp_path: Path, kind: type[Noise], neighbours: str, multiplier: float, accountant: str
) -> None:
    """Entry k is k steps whose multiplier is the noise in units of the sensitivity, clip or 2 clip."""
    given = {"clip": 3.0, "sigma": 4.0, "delta": 1e-6, "neighbours": neighbours, "accountant": accountant}
    ledger = pytest.importorskip("fedloom_sites.deploy.site.ledger")
    book = ledger.Ledger(tmp_path, kind.model_validate(given), None, "x")
    for round in range(1, 5):
        book.release(round)
    entries = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in entries] == [1, 2, 3, 4]
    for entry in entries:
        theirs = opacus(multiplier, 1.0, entry["round"], 1e-6, accountant)
        assert entry["epsilon"] == pytest.approx(theirs, rel=1e-9, abs=1e-12 if accountant == "rdp" else 2 * ERROR)
