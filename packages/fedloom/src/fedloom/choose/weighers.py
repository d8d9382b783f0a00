"""Weighers, which determine each client's weight in the mean of the cohort's uploads."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.local import Ctx, Nothing, Work
from fedloom.seeds import random_state
from fedloom.values import Value

Floats = NDArray[np.float64]


class Weigher(Value, ABC):
    """Rule that weights the uploads of the accepted cohort.

    A weigher's state is a NamedTuple of tensors. It is passed explicitly and stored in checkpoints.
    """

    kind: ClassVar[str]
    probes: ClassVar[bool] = False
    """True if clients answer a query after training and send the answer with their reply. The answers are recorded as
    work and traffic."""
    describes: ClassVar[bool] = False
    """True if the answers consist of the clients' activations."""

    @property
    def signed(self) -> bool:
        """True if individual shares may be negative. The sum of a cohort's shares is always positive."""
        return False

    def init(self, ctx: Ctx) -> Any:
        """Return the state before the first round."""
        return Nothing()

    def probe(self, down: Any, model: Tensor, work: Work) -> Tensor:
        """Compute a client's answer ``[m, k]`` about its trained model ``[m, d]``. This function runs at the client."""
        raise AssertionError("this weigher has no query")

    @abstractmethod
    def apply(self, state: Any, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Any]:
        """Return the shares ``[m, 1]`` of the clients ``ctx.ids``. The engine divides the shares by their sum."""

    def with_groups(self, groups: Sequence[str]) -> Self:
        """Return the weigher with the options that depend on the run's groups.

        Raises:
            ConfigError: the weigher requires groups, but the run has none.
        """
        return self

    def remarks(self) -> list[str]:
        """Return notes for the user about options that were not set."""
        return []

    def check(self, n: int) -> None:
        """Raise an error if the weigher does not work with ``n`` clients.

        Raises:
            ConfigError: the weigher does not work with this number of clients. The message states the reason.
        """


class SharesWeigher(Weigher):
    """Weigher that uses each client's share alpha_i in the objective.

    By default, shares are proportional to samples.
    """

    kind: ClassVar[str] = "shares"

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Return alpha_i divided by the largest alpha of any client."""
        return ctx.cohort_masses, state


class UniformWeigher(Weigher):
    """Weigher that gives all clients of the cohort the same weight, regardless of their shares."""

    kind: ClassVar[str] = "uniform"

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Return 1 for every client."""
        return torch.ones(ctx.m, 1, dtype=torch.float64), state


class SamplesWeigher(Weigher):
    """Weigher that uses the numbers n_i of training samples as weights, regardless of the clients' shares."""

    kind: ClassVar[str] = "samples"

    def apply(self, state: Nothing, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Nothing]:
        """Return n_i."""
        return ctx.sizes[ctx.ids].double(), state


class Labels(NamedTuple):
    """Each client's most recent cluster ``[n]``, or -1 before its first round."""

    labels: Tensor


class EquitableWeigher(Weigher):
    """Weigher that gives all clusters of the cohort the same weight.

    The clusters are computed from the clients' activations. Within a cluster, all clients have the same weight.

    Reference: Equitable-FL, "Equitable Federated Learning with Activation Clustering", arXiv:2410.19207, Algorithm 1.
    The algorithm computes S = A A' and its spectral embedding (the eigenvectors of the C largest eigenvalues), runs
    k-means on the rows of the embedding, and sets p_i = 1/(C |cluster of i|).

    Deviations: C is the number of nonempty clusters, so the weights sum to 1. The paper does not state how a client's
    activations are combined into one vector. Here, the vector is the mean log-softmax of the penultimate
    representation, computed with the client's trained model over its training samples or its last mini-batch. The
    server receives individual clients' activations. In the paper, C is fixed in advance. If C is not set,
    `clear_clusters` estimates it in every round.
    """

    kind: ClassVar[str] = "equitable"
    clusters: int | None = Field(
        None,
        ge=1,
        description="number of clusters C (default: estimated). The paper uses the true number (2, 2, 3, 5; Table 1)",
    )
    layer: Literal["penultimate", "logits"] = Field("penultimate", description="representation a_i (Fig. 1)")
    log_softmax: bool = Field(
        True, description="apply log-softmax to each sample's representation before averaging (Fig. 1)"
    )
    reduce: Literal["mean", "last_batch"] = Field(
        "mean",
        description="samples to average over: the whole training set or the last mini-batch (not stated in the paper)",
    )

    probes: ClassVar[bool] = True
    describes: ClassVar[bool] = True

    def init(self, ctx: Ctx) -> Labels:
        """Return -1 for every client, because no client has a cluster yet."""
        return Labels(torch.full((ctx.n,), -1))

    def probe(self, down: object, model: Tensor, work: Work) -> Tensor:
        """Compute each client's activation vector a_i."""
        batch = None if self.reduce == "mean" else work.last_batch()
        return work.activations(model, self.layer, _log_softmax if self.log_softmax else None, batch)

    def apply(self, state: Labels, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Labels]:
        """Return p_i = 1/(C |cluster of i|), as in lines 8-11 of Algorithm 1."""
        assert info is not None
        rng = random_state(ctx.rng("k-means"))
        clusters = spectral_clusters(info, self.clusters, rng) if self.clusters else clear_clusters(info, rng)
        size = torch.bincount(clusters)
        labels = state.labels.clone()
        labels[ctx.ids] = clusters
        p = 1.0 / ((size > 0).sum() * size[clusters]).double()
        return p[:, None], Labels(labels)

    def remarks(self) -> list[str]:
        """If the number of clusters is not set, return a note that the best number depends on the federation."""
        if self.clusters is not None:
            return []
        return [
            f"aggregation_weights {self.kind!r} searches for clusters of clients in every round, and weights clients "
            f"equally if no clusters are clearly separated. Set clusters to the federation's number of clusters"
        ]

    def check(self, n: int) -> None:
        """Raise an error if there are more clusters than clients."""
        if (self.clusters or 1) > n:
            raise ConfigError(
                "aggregation_weights.clusters must be at most the number of clients in the "
                f"federation ({n}), got {self.clusters}"
            )


def _log_softmax(a: Tensor) -> Tensor:
    return a.log_softmax(-1)


def spectral_clusters(a: Tensor, clusters: int, rng: np.random.RandomState) -> Tensor:
    """Return cluster labels ``[m]`` of the rows of ``a [m, k]`` from k-means on the leading eigenvectors of A A'."""
    if clusters >= len(a):
        return torch.arange(len(a))
    return torch.as_tensor(_k_means(_eigenvectors(a), clusters, rng)[0], dtype=torch.long)


CLEAR_SILHOUETTE = 0.7
"""Minimum mean silhouette of clearly separated clusters. According to Kaufman and Rousseeuw ("Finding Groups in Data",
1990, chapter 2, Table 4), it indicates a strong structure. The two halves of a normal distribution that is split in the
middle have a silhouette of 0.59."""


def clear_clusters(a: Tensor, rng: np.random.RandomState) -> Tensor:
    """Return cluster labels ``[m]``.

    The number of clusters is the one up to sqrt(m) with the largest mean silhouette (Rousseeuw 1987).

    All rows form a single cluster if this silhouette is below `CLEAR_SILHOUETTE`, or if a cluster would contain only
    one client. Otherwise, a single outlier could have half of the total weight, which would be unfair to groups.
    """
    from sklearn.metrics import silhouette_score

    vectors, best, labels = _eigenvectors(a), CLEAR_SILHOUETTE, np.zeros(len(a), np.int64)
    for clusters in range(2, math.isqrt(len(a)) + 1):
        candidate, embedding = _k_means(vectors, clusters, rng)
        if np.bincount(candidate).min() < 2:
            continue
        score = silhouette_score(embedding, candidate)
        if score > best:
            best, labels = score, candidate
    return torch.as_tensor(labels, dtype=torch.long)


def _eigenvectors(a: Tensor) -> Floats:
    values = a.double().cpu().numpy()
    values = np.ldexp(values, -np.frexp(np.abs(values).max())[1])  # scaled to prevent overflow in the product
    return np.asarray(np.linalg.eigh(values @ values.T)[1])


def _k_means(vectors: Floats, clusters: int, rng: np.random.RandomState) -> tuple[Any, Floats]:
    """Return cluster labels, computed from the rows of the last ``clusters`` eigenvectors, and these rows."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    embedding = vectors[:, -clusters:]
    with threadpool_limits(1):
        return KMeans(clusters, n_init=10, random_state=rng).fit_predict(embedding), embedding


class Masses(NamedTuple):
    """Weights omega ``[n]`` of all clients, not normalized over a cohort."""

    omega: Tensor


class FairFedWeigher(Weigher):
    """Weigher that down-weights clients whose metric deviates more than average from the global metric.

    Reference: Y. H. Ezzeldin, S. Yan, C. He, E. Ferrara, S. Avestimehr, "FairFed: Enabling Group Fairness in Federated
    Learning", AAAI 2023, arXiv:2110.00857, Algorithm 1, Eqs. 6 and 7: Delta_i is |F - F_i| for a metric F that compares
    two groups, or |Acc - Acc_i| if F_i is undefined. With ``accuracy`` or ``loss``, Delta_i uses only this metric.

    F is P(1 | A, label 1) - P(1 | B, label 1) (``equal-opportunity``) or P(1 | A) - P(1 | B) (``statistical-parity``),
    where 1 is the predicted class, and A and B are the two groups. The global value F is computed on the cohort's
    pooled samples.

    Deviations: a client's metric is computed for the received model on the client's training set, and the global value
    is computed over the cohort. The metric is sent in plain text, without secure aggregation. For a metric that
    compares groups, clients send counts per group. Clients that do not participate keep their weights. Negative weights
    are set to 0, as in Equitable-FL (``floor``). If a cohort's weights do not have a positive sum, its clients are
    weighted by numbers of samples.
    """

    kind: ClassVar[str] = "fairfed"
    beta: float | None = Field(
        None,
        ge=0,
        description="fairness budget beta (Eq. 7; default: 1/(n * rounds)). With 0, clients are weighted by numbers "
        "of samples",
    )
    metric: Literal["accuracy", "loss", "equal-opportunity", "statistical-parity"] = Field(
        "accuracy",
        description=(
            "metric whose value at each client is compared with its global value. The last two metrics compare groups "
            "within clients"
        ),
    )
    group: str | None = Field(
        None,
        description=(
            "column with two levels, or a threshold such as 'age>=75', that defines the groups (default: the first "
            "group of an analysis of kind 'groups')"
        ),
    )
    floor: bool = Field(True, description="set negative weights to 0 (Equitable-FL). The paper allows negative weights")

    probes: ClassVar[bool] = True

    @property
    def signed(self) -> bool:
        """True if ``floor`` is not set."""
        return not self.floor

    def init(self, ctx: Ctx) -> Masses:
        """Return the initial weights omega_i = n_i / n."""
        n = ctx.sizes[:, 0].double()
        return Masses((n / n.sum()).to(ctx.weight.dtype))

    def with_groups(self, groups: Sequence[str]) -> Self:
        """If the metric compares groups and no group is set, use the run's first group."""
        if self.metric in ("accuracy", "loss") or self.group is not None:
            return self
        if not groups:
            raise ConfigError(
                f"weigher.metric = {self.metric!r} compares two groups of rows. Set group, for example group = 'sex' "
                f"or group = 'age>=75', or add an analysis of kind 'groups'"
            )
        return self.with_(group=groups[0])

    def probe(self, down: Any, model: Tensor, work: Work) -> Tensor:
        """Return each client's metric for the received model.

        If groups are compared, return counts and accuracies ``[m, 9]``.
        """
        if self.metric == "loss":
            return work.loss(down[0])
        accuracy = work.accuracy(down[0])
        return accuracy if self.group is None else torch.cat([work.group_counts(down[0], self.group), accuracy], 1)

    def apply(self, state: Masses, info: Tensor | None, ctx: Ctx) -> tuple[Tensor, Masses]:
        """Return the weights omega_i <- omega_i - beta (Delta_i - mean Delta)."""
        assert info is not None
        n, answers = ctx.sizes[ctx.ids].double(), info.double().cpu()
        metric, counts = answers[:, -1:].clamp(0, math.inf if self.metric == "loss" else 1), answers[:, :-1]
        gap = (metric - (n * metric).sum() / n.sum()).abs()  # Delta_i = |Acc_i - Acc|
        if counts.shape[1]:
            apart = (self._difference(counts.sum(0, keepdim=True)) - self._difference(counts)).abs()  # Eq. 6
            gap = torch.where(apart.isnan(), gap, apart)
        beta = 1 / (ctx.n * ctx.rounds) if self.beta is None else self.beta
        new = state.omega[ctx.ids, None].double() - beta * (gap - gap.mean())  # Eq. 7
        new = new.clamp(min=0) if self.floor else new
        omega = state.omega.clone()
        omega[ctx.ids] = new[:, 0].to(omega)
        return (new if bool(new.sum() > 0) else n), Masses(omega)

    def _difference(self, counts: Tensor) -> Tensor:
        """Return F ``[m, 1]`` from counts ``[m, 8]`` (`Work.group_counts`).

        F is NaN if it is undefined for either group.
        """
        groups = counts.unflatten(1, (2, 4))
        rows, predicted, positives, hits = groups.unbind(2)
        rates = (hits / positives if self.metric == "equal-opportunity" else predicted / rows).clamp(0, 1)
        difference: Tensor = rates[:, :1] - rates[:, 1:]
        return difference


WEIGHERS: dict[str, type[Weigher]] = {
    "shares": SharesWeigher,
    "uniform": UniformWeigher,
    "samples": SamplesWeigher,
    "equitable": EquitableWeigher,
    "fairfed": FairFedWeigher,
}
