"""Chunks of clients as processes exchange them: what is asked of a chunk, and what comes back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

COUNTS = (
    "samples_backward",
    "samples_forward",
    "steps",
    "bytes_up",
    "bytes_down",
    "bytes_up_paper",
    "bytes_down_paper",
)
"""What is counted for every client of a cohort."""


class TrainTask(NamedTuple):
    """A chunk to train.

    Attributes:
        round: round number.
        place: ``[m]`` places of the clients in the cohort.
        ids: ``[m]`` their ids.
        share: ``[m, 1]`` shares in the mean.
    """

    round: int
    place: Tensor
    ids: Tensor
    share: Tensor


class Trained(NamedTuple):
    """What a chunk sends back.

    Attributes:
        accepted: ``[m]`` uploads that are finite and within the bound.
        tensors: ``sum/<field>`` weighted sums ``[d]`` over the accepted, ``kept/<field>`` changes of the sums over all
            clients ``[d]``, ``rows/<field>`` accepted rows, ``info`` their answers to the weigher, ``models`` their
            models if an attacker sees them, ``told`` what a sampler learns from them.
        shares: sum of the shares of the accepted.
        counts: ``[m, 7]``, see `COUNTS`.
    """

    accepted: Tensor
    tensors: dict[str, Tensor]
    shares: float
    counts: Tensor


class AskTask(NamedTuple):
    """Candidates to ask before a round.

    Attributes:
        round: round number.
        ids: ``[m]`` candidates.
    """

    round: int
    ids: Tensor


class ScoreTask(NamedTuple):
    """Clients to score.

    Attributes:
        round: round after which models are scored.
        ids: ``[m]`` clients of the evaluated federation.
        cohort: ``[c]`` clients whose training parts give the normalisation statistics of the global model.
        common: score the global model on the common test set too.
    """

    round: int
    ids: Tensor
    cohort: Tensor
    common: bool
