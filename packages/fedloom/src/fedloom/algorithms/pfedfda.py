"""pFedFDA: clients share class distributions of features, and combine them with their own estimates to compute heads.

Problem: min over x (phi, the body on the server) of sum_i alpha_i f_i(x), where the head of x is Bayes' rule for
Gaussian features.

Reference: C. McLaughlin, L. Su, "Personalized Federated Learning via Feature Distribution Adaptation", NeurIPS 2024.

    paper          here          meaning
    mu, Sigma      means, cov    class means and covariance of features: on the server (g) or of client i (i)
    pi_i, beta_i   prior, beta   shares of a client's classes, and weight of its own estimate against the server's

Client state: none. Traffic per round: the body and c k + k^2 numbers down and up (c classes, k features).

Deviations: there is a single beta, which is chosen from 0, 0.1, ..., 1 by the loss in two folds (every other sample of
a class). Clients use their own means for classes with at least three samples. The server raises all eigenvalues below
min(ridge, 1)/2 to this value. Public code: cj-mclaughlin/pFedFDA (73c7c407) produces the same models to within 1e-15,
once these differences are removed. That code finds two betas by L-BFGS, leaves classes with one sample out of its
folds, uses the features from its training steps, uses a client's own means for classes with fewer samples, and computes
covariances with 1e-4 in all entries, shrunk by 1e-4.

Use this method if the same class looks different at different clients. The last layer must have a bias, and if the head
is the only layer of a model, the model is not trained.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Mean, Sent
from fedloom.algorithms._prototypes import head_of, require_bias, shape_of, shares
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows import masks
from fedloom.rows.algebra import lifted, solved
from fedloom.rows.layout import Layout

MIN_CLASS_SAMPLES, BETA_CHOICES = 3, torch.linspace(0, 1, 11, dtype=torch.float64)


class Server(NamedTuple):
    """Model x ``[d]`` (only its body is sent), and class means ``[c k]`` and covariance ``[k k]`` of features."""

    x: Annotated[Tensor, Sent(part="body")]
    means: Tensor
    cov: Tensor


class Up(NamedTuple):
    """Change dw ``[m, d]`` of the body, which is 0 in the head, with means ``[m, c k]`` and covariance ``[m, k k]``."""

    dw: Annotated[Tensor, Mean(base="down.x", primary=True, part="body")]
    means: Annotated[Tensor, Mean()]
    cov: Annotated[Tensor, Mean()]


class Gauss(NamedTuple):
    """Distribution of features: class means ``[..., c, k]``, and the common covariance ``[..., k, k]``."""

    means: Tensor
    cov: Tensor

    def mix_with(self, other: Gauss, beta: Tensor) -> Gauss:
        """Return mixtures ``[b, ...]`` of this distribution (weight 1 - beta) and another (weight ``beta [b]``)."""
        return Gauss(*(torch.lerp(a, b, beta[:, None, None]) for a, b in zip(self, other, strict=True)))

    def head(self, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight ``[..., c, k]`` and bias ``[..., c]`` of the linear discriminant for class priors ``[c]``."""
        weight = solved(self.cov, self.means.mT).mT
        return weight, prior.log() - (self.means * weight).sum(-1) / 2


class PFedFDA(Algorithm):
    """pFedFDA (McLaughlin and Su 2024)."""

    ridge: float = Field(1.0, gt=0, description="value added to the diagonal of a covariance (1 in the public code)")

    family: ClassVar[str] = "personalised"

    def part(self, name: str, layout: Layout) -> Tensor:
        return ~masks.head(layout)

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        require_bias("PFedFDA", layout)
        return masks.note_head_is_model("PFedFDA", masks.head(layout), "a discriminant analysis of the raw samples")

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Server, Nothing, None]:
        classes, k = shape_of(ctx.layout)
        means = torch.rand(classes * k, generator=ctx.rng("means"), dtype=torch.float64).to(x0)
        return Server(x0, means, torch.eye(k).flatten().to(x0)), Nothing(), None

    def client(self, down: Server, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        top, (shared, prior) = masks.head(work.layout).to(down.x.device), self._received(down, work)
        w = insert_heads([shared] * work.m, prior, down.x, work)
        w = descend(w, work, mask=~top)  # phi <- SGD under the head of (mu_g, Sigma_g, pi_i)
        return self.encode(w, down, rows, work)

    def encode(self, model: Tensor, down: Server, rows: Nothing, work: Work) -> tuple[Up, Nothing]:
        mixtures = zip(*self._mixtures(model, *self._received(down, work), work), strict=True)
        means, cov = (torch.stack([part.flatten() for part in parts]).to(model) for parts in mixtures)
        return Up(masks.zero_outside_(model - down.x, ~masks.head(work.layout).to(model.device)), means, cov), rows

    def server(self, server: Server, up: Up, ctx: Ctx) -> Server:
        x = server.x + up.dw * self.part("body", ctx.layout).to(server.x.device)
        return Server(x, up.means, lifted(up.cov, min(self.ridge, 1.0) / 2))

    def global_model(self, server: Server) -> None:
        return None

    def personal(self, down: Server, rows: Nothing, work: Work) -> Tensor:
        shared, prior = self._received(down, work)
        return insert_heads(self._mixtures(down.x, shared, prior, work), prior, down.x, work)

    def _received(self, down: Server, work: Work) -> tuple[Gauss, Tensor]:
        """Return the server's distribution and each client's class priors ``[m, c]`` (shares plus 1e-4, normalized)."""
        (classes, k), prior = shape_of(work.layout), shares(work, down.x.double()) + 1e-4
        shared = Gauss(down.means.double().view(classes, k), down.cov.double().view(k, k))
        return shared, prior / prior.sum(1, keepdim=True)

    def _mixtures(self, w: Tensor, shared: Gauss, prior: Tensor, work: Work) -> list[Gauss]:
        """Mix the shared distribution with each client's own distribution, with weights chosen by cross-validation."""
        mixtures = []
        for (z, y), pi in zip(work.features(w), prior, strict=True):
            z, losses = z.double(), torch.zeros_like(BETA_CHOICES, device=z.device)
            member = torch.eye(len(pi), dtype=torch.long, device=y.device)[y]
            order = (member.cumsum(0).gather(1, y[:, None]) % 2)[:, 0]  # every other sample of a class
            for fold in (0, 1):
                test = (order == fold) & (member.sum(0) > 1)[y]
                if bool(test.any()):
                    estimate = self._estimate(z[order != fold], y[order != fold], shared)
                    weight, bias = shared.mix_with(estimate, BETA_CHOICES.to(z)).head(pi)
                    outputs = z[test] @ weight.mT + bias[:, None]  # [betas, b, c]
                    losses += torch.stack([-out.log_softmax(1).gather(1, y[test][:, None]).mean() for out in outputs])
            best = BETA_CHOICES[losses.argmin().cpu()].to(z).view(1)
            mixtures.append(Gauss(*(part[0] for part in shared.mix_with(self._estimate(z, y, shared), best))))
        return mixtures

    def _estimate(self, z: Tensor, y: Tensor, shared: Gauss) -> Gauss:
        """Return a client's class means (shared for classes below `MIN_CLASS_SAMPLES` samples) and covariance."""
        member = torch.eye(len(shared.means), dtype=z.dtype, device=z.device)[y]
        count = member.sum(0)[:, None]
        means = torch.where(count >= MIN_CLASS_SAMPLES, member.T @ z / count.clamp(min=1), shared.means)
        gap, eye = z - means[y], torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        return Gauss(means, gap.T @ gap / max(len(z) - 1, 1) + self.ridge * eye)


def insert_heads(distributions: list[Gauss], prior: Tensor, x: Tensor, work: Work) -> Tensor:
    """Return models ``[m, d]`` that consist of the body of ``x`` and the discriminants as heads."""
    models = x.expand(work.m, -1).clone()
    for row, of, pi in zip(models, distributions, prior, strict=True):
        weight, bias = of.head(pi)
        binary = len(head_of(work.layout, row).bias) == 1  # one output for two classes
        for to, value in zip(head_of(work.layout, row), (weight, bias), strict=True):
            to.copy_(value[1:] - value[:1] if binary else value)
    return models
