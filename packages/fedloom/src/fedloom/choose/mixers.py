"""Mixers, which send every client its own mixture of the clients' last models instead of one global model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.choose.weighers import clear_clusters, spectral_clusters
from fedloom.errors import ConfigError
from fedloom.local import Ctx
from fedloom.rows import algebra
from fedloom.rows.algebra import directions
from fedloom.seeds import random_state
from fedloom.values import Value

Among = Literal["cohort", "seen", "all"]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function that combines a client's own model ``[d]`` with the models ``[k, d]`` of its mixture, given the weights
``[k, 1]`` and ids of these models, and returns one model ``[d]``."""
Similarity = Literal["model", "change"]
WEIGHT_ERROR = 1e-6
"""Maximum rounding error in a sum of weights. A sum of weights that is not a whole number differs from the nearest
whole number by at least 1/n^2."""


class Mixer(Value, ABC):
    """Rule that computes a separate mixture of the clients' last models for each client.

    Mixers are stateless, because the server stores the models.
    """

    kind: ClassVar[str]
    among: Among = Field(
        "cohort",
        description="clients whose models are mixed: the round's cohort, all clients seen so far, or all clients",
    )
    mixing_weight: float = Field(
        1.0,
        ge=0,
        le=1,
        description="weight of the mixture in the model that a client receives. The server's model gets the rest",
    )

    @property
    def mixes_all(self) -> bool:
        """True if the mixer needs the models of all clients, or False if it needs only the models of the cohort."""
        return self.among != "cohort"

    def mix(self, models: Tensor, start: Tensor, ctx: Ctx, rule: Rule | None = None) -> Tensor:
        """Return a mixture for each client of the cohort, ``[m, d]``.

        Args:
            models: last models of the cohort ``[m, d]`` or, with `mixes_all`, of all clients ``[n, d]``. The model of a
                client that has never participated is the initial model.
            start: initial model ``[d]``.
            ctx: context with the cohort.
            rule: function that combines the models of a mixture, in place of their weighted mean.
        """
        place, ids = torch.arange(ctx.m), torch.arange(ctx.n) if self.mixes_all else ctx.ids
        if self.mixes_all:
            attended = torch.ones(ctx.n, dtype=torch.bool)
            if self.among == "seen":
                attended = (models != start).any(1).cpu().index_fill(0, ctx.ids, value=True)
            models, place, ids = models[attended.to(models.device)], (attended.cumsum(0) - 1)[ctx.ids], ids[attended]
        if rule is None:
            return self.move_models(models[place], self.mixtures(models, place, start, ctx), ctx)
        rows = list[Tensor]()
        for last_model, weights in zip(models[place], self.weights(models, start, ctx)[place], strict=True):
            mixed = weights > 0
            rows.append(rule(last_model, models[mixed], weights[mixed, None], ids[mixed.cpu()]))
        return self.move_models(models[place], torch.stack(rows), ctx)

    def mixtures(self, models: Tensor, place: Tensor, start: Tensor, ctx: Ctx) -> Tensor:
        """Return mixtures ``[m, d]`` for the clients at the positions ``place [m]`` in the mixed ``models [k, d]``."""
        return self.weights(models, start, ctx)[place] @ models

    def move_models(self, last_models: Tensor, mixtures: Tensor, ctx: Ctx) -> Tensor:
        """Return the models that clients receive, given their last models ``last_models [m, d]`` and their mixtures.

        By default, clients receive their mixtures.
        """
        return mixtures

    @abstractmethod
    def weights(self, models: Tensor, start: Tensor, ctx: Ctx) -> Tensor:
        """Return the weight of each model in each mixture, ``[k, k]``. Each row sums to 1."""

    def check(self, n: int) -> None:
        """Raise an error if the mixer does not work with ``n`` clients.

        Raises:
            ConfigError: the mixer does not work with this number of clients. The message states the reason.
        """


class Attention(Mixer):
    """Mixer of the models most similar to a client's own: those above a cosine quantile, weighted by cosine.

    Reference: "FedACS: Federated Learning with Attention-Based Client Selection", Algorithm 1, Eqs. 3-5.

    Deviations: the same as for the method ``fedacs``, in which clients train from these mixtures. Attackers that send
    several copies with the same direction can fill the quantile with the cosines between copies, so that no honest
    client exceeds it. With ``copies``, such copies are treated as a single client. Attackers are still treated
    separately if the cosine between their models is below ``copies``.
    """

    kind: ClassVar[str] = "attention"
    quantile: float = Field(
        0.5, ge=0, le=1, description="quantile p that sets the threshold delta_k (Algorithm 1; not stated in the paper)"
    )
    lam: float | None = Field(
        None,
        gt=0,
        description="lambda in the step size alpha_k = lambda * beta_k (Eq. 3, Theorem 2.1; None: alpha_k = 1, Eq. 4)",
    )
    similarity: Similarity = Field(
        "model",
        description="vectors whose cosines s_ij are compared: the models, or their changes from the initial model",
    )
    copies: float | None = Field(
        None,
        gt=0,
        le=1,
        description="cosine similarity at which models are treated as copies of one model (None: never)",
    )

    def move_models(self, last_models: Tensor, mixtures: Tensor, ctx: Ctx) -> Tensor:
        """Return the models by Eq. 4, or by Eq. 3 if ``lam`` is set."""
        alpha = 1.0 if self.lam is None else self.lam * ctx.local.lr_at(max(ctx.round, 1))
        return (
            mixtures if alpha == 1 else torch.lerp(last_models, mixtures, alpha)
        )  # Eq. 3, grad R_i = w_i - sum_j s_ij w_j

    def weights(self, models: Tensor, start: Tensor, ctx: Ctx) -> Tensor:
        """Return s_ij where s_ij is at least delta_k, normalized so that the sum over j is 1."""
        return attention(models if self.similarity == "model" else models - start, self.quantile, self.copies)


class Proximity(Mixer):
    """Mixer that weights models by distance. It performs one step of FedAMP's attraction between clients.

    Reference: Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang, "Personalized Cross-Silo Federated Learning
    on Non-IID Data", AAAI 2021, arXiv:2007.03797, Algorithm 1, line 4.

    Defaults: as in the method ``fedamp``, alpha = reach sqrt(rounds)/2 and sigma = 2 (n - 1) alpha.
    """

    kind: ClassVar[str] = "proximity"
    alpha: float | None = Field(
        None,
        gt=0,
        description="step size of the mixing (default: reach * sqrt(rounds)/2, where reach is lr times the steps "
        "per round)",
    )
    sigma: float | None = Field(
        None, gt=0, description="width sigma of A(t) = 1 - exp(-t/sigma) (default: 2 (n - 1) alpha)"
    )

    def mixtures(self, models: Tensor, place: Tensor, start: Tensor, ctx: Ctx) -> Tensor:
        """Return the mixtures u_i = sum_j xi_ij w_j."""
        xi = self._self_and_peers(models, ctx)
        return ((1 - xi.sum(1, keepdim=True)) * models + xi @ models)[place]  # xi_ii = 1 - sum_{j != i} xi_ij

    def weights(self, models: Tensor, start: Tensor, ctx: Ctx) -> Tensor:
        """Return the weights xi_ij."""
        xi = self._self_and_peers(models, ctx)
        return xi + torch.diag(1 - xi.sum(1))

    def _self_and_peers(self, models: Tensor, ctx: Ctx) -> Tensor:
        """Return xi_ij for j other than i, with zeros on the diagonal."""
        alpha = self.alpha or ctx.reach * ctx.rounds**0.5 / 2
        sigma = self.sigma or 2 * max(ctx.n - 1, 1) * alpha
        apart = algebra.distances(models).square()
        xi = alpha * torch.exp(-apart / sigma) / sigma  # alpha_k A'(.)
        xi = xi.fill_diagonal_(0.0)
        return xi / xi.sum(1, keepdim=True).clamp(min=1.0)


class Angles(Mixer):
    """Mixer that weights models by a softmax of their cosines (FedAMP's heuristic for deep networks).

    Reference: Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang, "Personalized Cross-Silo Federated Learning
    on Non-IID Data", AAAI 2021, arXiv:2007.03797, Sec. 5.
    """

    kind: ClassVar[str] = "angles"
    sigma: float = Field(25.0, ge=0, description="sharpness sigma of the weights exp(sigma * cos)")
    self_weight: float | None = Field(
        None, ge=0, le=1, description="weight xi_ii of the client's own model (default: 1/m for m mixed models)"
    )

    needs: ClassVar[Mapping[str, str]] = {"among": "self_weight not 1.0", "sigma": "self_weight not 1.0"}

    def mixtures(self, models: Tensor, place: Tensor, start: Tensor, ctx: Ctx) -> Tensor:
        """Return the mixtures u_i = xi_ii w_i + (1 - xi_ii) sum_j xi_ij w_j."""
        self_weight, xi = self._self_and_peers(models)
        return (self_weight * models + (1 - self_weight) * (xi @ models))[place]  # (1 - xi_ii) softmax

    def weights(self, models: Tensor, start: Tensor, ctx: Ctx) -> Tensor:
        """Return the weights xi_ij."""
        self_weight, xi = self._self_and_peers(models)
        return self_weight * torch.eye(len(models), dtype=models.dtype, device=models.device) + (1 - self_weight) * xi

    def _self_and_peers(self, models: Tensor) -> tuple[float, Tensor]:
        direction = directions(models)
        score = (self.sigma * direction @ direction.T).fill_diagonal_(-torch.inf)
        xi = torch.softmax(score, 1).nan_to_num(1.0)  # NaN: a single client has no peers
        return (1 / len(models) if self.self_weight is None else self.self_weight), xi


class ClusterMeans(Mixer):
    """Mixer that sends every client the mean model of its cluster.

    The clusters are computed from the clients' last models.

    Reference: the outlook in Equitable-FL (arXiv:2410.19207), which proposes clusters as a basis for personalized
    models. The clustering follows Algorithm 1 of the paper, but uses the directions of models instead of activations.

    Deviations: the models of the current cohort are clustered again in each round. If ``clusters`` is not set,
    `clear_clusters` estimates the number of clusters. If no clusters are clearly separated, all clients form a single
    cluster.
    """

    kind: ClassVar[str] = "clusters"
    clusters: int | None = Field(None, ge=1, description="C, number of clusters (default: estimated in every round)")
    similarity: Similarity = Field(
        "change", description="vectors to cluster: the models, or their changes from the initial model"
    )

    needs: ClassVar[Mapping[str, str]] = {"similarity": "clusters not 1"}

    def weights(self, models: Tensor, start: Tensor, ctx: Ctx) -> Tensor:
        """Return 1/|cluster| for models in the same cluster, and 0 for other models."""
        a = directions(models if self.similarity == "model" else models - start)
        rng = random_state(ctx.rng("mixer"))
        labels = spectral_clusters(a, self.clusters, rng) if self.clusters else clear_clusters(a, rng)
        same = (labels[:, None] == labels).to(models)
        return same / same.sum(1, keepdim=True)

    def check(self, n: int) -> None:
        """Raise an error if there are more clusters than clients."""
        if (self.clusters or 1) > n:
            raise ConfigError(
                f"personalized_aggregation.clusters must be at most the number of clients ({n}), got {self.clusters}",
                rule="mixer-clusters",
                fix=f"set {{personalized_aggregation.clusters = {n}}}, or use a smaller number",
            )


def attention(w: Tensor, quantile: float, copies: float | None = None) -> Tensor:
    """Return weights ``[m, m]`` of models ``w [m, d]``: cosines at or above the ``quantile`` of all m^2, normalized.

    With ``copies``, a model has the weight 1/c in the quantile and in mixtures, where c is the number of models,
    including itself, whose cosine with it is at least ``copies``. k copies of a model then have the same influence as a
    single model. Without copies, ``copies`` does not affect the weights.
    """
    direction = directions(w)
    s = direction @ direction.T
    s = ((s + s.T) / 2).fill_diagonal_(1.0)  # s_ij, exactly symmetric because delta is often an entry of s
    rounding = 16 * torch.finfo(s.dtype).eps
    counts = None if copies is None else 1 / (s >= copies - rounding).sum(1).double()
    delta = _quantile(s, quantile, counts) - rounding  # include ties: clients that never trained have equal rows
    s = torch.where((s >= delta).fill_diagonal_(True), s, 0.0)
    s = s if counts is None else s * counts.to(s)
    total = s.sum(1, keepdim=True)
    return torch.where(total > 1e-12, s / total, torch.eye(len(w), dtype=w.dtype, device=w.device))


def _quantile(s: Tensor, quantile: float, counts: Tensor | None) -> Tensor:
    """Return the interpolated quantile of all entries, where entry (i, j) has the weight ``counts[i] * counts[j]``."""
    ordered, order = s.flatten().sort()
    weights = torch.ones_like(ordered) if counts is None else (counts[:, None] * counts).flatten()[order]
    reached = weights.double().cumsum(0)
    place = quantile * max(float(reached[-1]) - 1, 0.0)
    lower, upper = ((reached < index + 1 - WEIGHT_ERROR).sum() for index in (math.floor(place), math.ceil(place)))
    last = len(ordered) - 1
    return torch.lerp(ordered[lower.clamp(max=last)], ordered[upper.clamp(max=last)], place % 1)


MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "proximity": Proximity,
    "angles": Angles,
    "clusters": ClusterMeans,
}
