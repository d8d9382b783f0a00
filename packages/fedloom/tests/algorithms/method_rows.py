"""Rows of the methods: where each ends, and what its paper has for its options.

A new method needs one row in ROWS: where it ends on heterogeneous quadratics, and options that deserve the laws too;
and one in PAPERS: the default of every option, and where it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest.mock import ANY

import numpy as np
import torch
from fair_optima import agnostic, penalised, q_fair
from scipy.optimize import minimize
from torch import Tensor

from fedloom.algorithms._regulariser import proximal
from fedloom.local import LocalSGD
from fedloom.rows.algebra import norm
from fedloom.rows.layout import Layout
from fedloom.rows.projection import new_key, projection
from fedloom.rows.proxes import L1, Nuclear
from fedloom.testing import Problem
from fedloom.testing.federate import ReferenceFederation

DESCENT = LocalSGD(lr=0.4, batch_size=2)  # one to four steps a round, by client
Models = dict[str, Tensor]  # "global" [d], "personal" [n, d]
Weights = Literal["uniform", "samples"]


def gradient_mapping(f: object, x: Tensor, gradient: Tensor, t: float, layout: Layout) -> Tensor:
    """Return ||x - prox_{t f}(x - t gradient)|| / t, ``[..., 1]``: 0 exactly if 0 is in gradient + df(x) (f convex)."""
    gap = x - proximal(f, x - t * gradient, t, layout)
    return norm(gap) / t


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        limit: the models after many rounds, from the problem; or from the problem and those models, if the limit is
            only known to be left alone by one more round of an independent formula.
        rounds: how many are many.
        options: of the method.
        local: settings of local training.
        solve: local problems are solved exactly.
        problem: what is solved with these shares, "uniform" or "samples".
        lean: options of the run of the laws, where the method's defaults take long or end within float32's rounding.
        variants: further options that are held to the laws.
        without: laws that the method breaks on purpose, each with its reason.
    """

    limit: Callable[[Problem, Models], Models]
    rounds: int = 80
    options: Mapping[str, Any] = field(default_factory=dict)
    local: LocalSGD = DESCENT
    solve: bool = False
    problem: Callable[[Weights], Problem] = lambda weights: Problem.random(3, weights=weights)
    lean: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Mapping[str, Any], ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)


def steps_of(p: Problem) -> Tensor:
    return torch.tensor([[DESCENT.batches(size)] for size in p.sizes.tolist()])


def mean_of_descents(p: Problem, mu: float = 0.0, share: Tensor | None = None) -> Tensor:
    """The known bias: unequal curvature and steps pull the mean of local descents away from the optimum."""
    share = p.alpha if share is None else share
    x = p.drifted(steps_of(p), DESCENT.lr, mu, share)
    assert torch.linalg.vector_norm(x - p.consensus(share)) > 0.01
    return x


def fedavg_ft(p: Problem, end: Models) -> Models:
    x = mean_of_descents(p)
    return {"global": x, "personal": p.descent(x, 2 * steps_of(p), 0.2)}


def ditto(p: Problem, end: Models) -> Models:
    x = mean_of_descents(p)
    return {"global": x, "personal": p.proximal(0.7, x)}


def flame(p: Problem, end: Models) -> Models:
    best = p.moreau(2.0)
    return {"global": best.w, "personal": best.theta}


def fedacs(p: Problem, end: Models) -> Models:
    """One round by the paper's sums, client by client."""
    w = end["personal"].numpy()
    cosine = np.array([[a @ b / np.sqrt((a @ a) * (b @ b)) for b in w] for a in w])
    delta = np.quantile(cosine, 0.6)
    mixed = []
    for i in range(p.n):
        chosen = [j for j in range(p.n) if j == i or cosine[i, j] >= delta]
        weight = {j: 1.0 if j == i else cosine[i, j] for j in chosen}
        mixed.append(sum(weight[j] * w[j] for j in chosen) / sum(weight.values()))
    assert any(np.abs(u - v).max() > 0.01 for u, v in zip(mixed, w, strict=True))
    return {"personal": p.descent(torch.tensor(np.array(mixed)), steps_of(p), DESCENT.lr)}


def mean(p: Problem, rows: list[Tensor] | Tensor) -> Tensor:
    """The mean of rows by the clients' shares."""
    return (p.alpha * (torch.stack(rows) if isinstance(rows, list) else rows)).sum(0)


def two_groups(weights: Weights) -> Problem:
    p = Problem.random(3, weights=weights)
    centre = torch.tensor([4.0, -4, 4, -4, 4, -4, 4], dtype=torch.float64)
    side = torch.tensor([[1.0], [1], [-1], [1], [-1]], dtype=torch.float64)
    return replace(p, minimiser=side * centre + 0.3 * p.minimiser)


def equitable(p: Problem, end: Models) -> Models:
    share = torch.tensor([[1 / 6], [1 / 6], [1 / 4], [1 / 6], [1 / 4]], dtype=torch.float64)
    return {"global": mean_of_descents(p, 0.3, share)}


def soft(v: Tensor, t: float) -> Tensor:
    return v.sign() * (v.abs() - t).clamp(min=0)


def fedmid(p: Problem, end: Models) -> Models:
    """One round written out: the prox in every step, the mean, and the prox again. Not the solution."""
    ends, steps = [], steps_of(p)[:, 0].tolist()
    for i, k in enumerate(steps):
        w = end["global"]
        for _ in range(k):
            w = soft(w - 0.4 * p.hessian[i] @ (w - p.minimiser[i]), 0.4 * 0.3)
        ends.append(w)
    assert torch.linalg.vector_norm(end["global"] - p.composite("l1", 0.3)) > 0.01
    count = float((p.alpha[:, 0] * torch.tensor(steps)).sum())
    return {"global": soft(mean(p, ends), 0.4 * 0.3 * count)}


def fedslr(p: Problem, end: Models) -> Models:
    """Low-rank global model; of each personal part, one more proximal gradient step, which must change nothing."""
    x = p.composite("nuclear", 0.3)
    part = end["personal"] - x
    assert (part.abs() < 1e-12).any()
    return {"global": x, "personal": x + soft(part - 0.1 * p.gradient(x + part), 0.1 * 0.2)}


def lpgd(p: Problem, end: Models) -> Models:
    """One round written out, the prox in every step and the mean: not the solution. The personal part as FedSLR's."""
    ends = []
    for i, k in enumerate(steps_of(p)[:, 0].tolist()):
        w = end["global"]
        for _ in range(k):
            w = Nuclear(c=0.3).prox(w - 0.4 * p.hessian[i] @ (w - p.minimiser[i]), 0.4, p.layout)
        ends.append(w)
    x = end["global"]
    assert torch.linalg.vector_norm(x - p.composite("nuclear", 0.3)) > 0.01
    part = end["personal"] - x
    return {"global": mean(p, ends), "personal": x + soft(part - 0.1 * p.gradient(x + part), 0.1 * 0.2)}


def powers(base: Tensor, steps: Tensor) -> Tensor:
    return torch.stack([torch.linalg.matrix_power(b, int(k)) for b, k in zip(base, steps[:, 0], strict=True)])


def mean_fixed_point(p: Problem, map_: Tensor) -> Tensor:
    """The x that is the mean by shares of c_i + M_i (x - c_i), M [n, d, d]."""
    pull = p.alpha[:, :, None] * (torch.eye(p.d, dtype=map_.dtype) - map_)
    return torch.linalg.solve(pull.sum(0), torch.einsum("nij,nj->i", pull, p.minimiser))


def pfedme(p: Problem, end: Models) -> Models:
    """A local round shrinks w - c by I - eta lam (A + lam)^-1 A; theta is the proximal point of the last w but one."""
    eye = torch.eye(p.d, dtype=torch.float64)
    shrink = eye - 0.25 * 2.0 * torch.linalg.solve(p.hessian + 2.0 * eye, p.hessian)
    x = mean_fixed_point(p, powers(shrink, steps_of(p)))
    assert torch.linalg.vector_norm(x - p.moreau(2.0).w) > 0.01
    last = p.minimiser + torch.einsum("nij,nj->ni", powers(shrink, steps_of(p) - 1), x - p.minimiser)
    return {"global": x, "personal": p.proximal(2.0, last)}


def perfedavg(p: Problem, end: Models) -> Models:
    eye = torch.eye(p.d, dtype=torch.float64)
    ahead = eye - 0.3 * p.hessian
    x = mean_fixed_point(p, powers(eye - 0.4 * ahead @ p.hessian @ ahead, steps_of(p)))
    assert torch.linalg.vector_norm(x - mean_of_descents(p)) > 0.01
    return {"global": x, "personal": x - 0.3 * p.gradient(x)}


def apfl(p: Problem, end: Models) -> Models:
    """One more round of v by hand, beside FedAvg."""
    x, alpha, mixed = mean_of_descents(p), 0.8, []
    for i, k in enumerate(steps_of(p)[:, 0].tolist()):
        w, v = x, (end["personal"][i] - (1 - alpha) * x) / alpha
        for _ in range(k):
            g = p.hessian[i] @ (alpha * v + (1 - alpha) * w - p.minimiser[i])
            w, v = w - 0.4 * p.hessian[i] @ (w - p.minimiser[i]), v - 0.4 * alpha * g
        mixed.append(alpha * v + (1 - alpha) * x)
    return {"global": x, "personal": torch.stack(mixed)}


def fedamp(p: Problem, end: Models) -> Models:
    w = end["personal"]
    near = [[5.0 / 20 * float(torch.exp(-((a - b) ** 2).sum() / 20)) for b in w] for a in w]
    u = [w[i] + sum(near[i][j] * (w[j] - w[i]) for j in range(p.n)) for i in range(p.n)]
    return {"personal": p.descent(w, steps_of(p), DESCENT.lr, 0.5 / 5.0, torch.stack(u))}


def heurfedamp(p: Problem, end: Models) -> Models:
    w, u = end["personal"], []
    for i in range(p.n):
        others = [j for j in range(p.n) if j != i]
        score = {j: float(torch.exp(3.0 * w[i] @ w[j] / (w[i].norm() * w[j].norm()))) for j in others}
        u.append(0.4 * w[i] + 0.6 * sum(score[j] * w[j] for j in others) / sum(score.values()))
    return {"personal": p.descent(w, steps_of(p), DESCENT.lr, 0.5 / 2.0, torch.stack(u))}


def fedrep(p: Problem, end: Models) -> Models:
    """Heads are best for the body; the body is the mean of the bodies that are best for the heads."""
    head, w = p.layout.mask("head"), end["personal"]
    for free in (head, ~head):
        h, c = p.hessian[:, free][:, :, free], p.minimiser
        cross = torch.einsum("nij,nj->ni", p.hessian[:, free][:, :, ~free], (w - c)[:, ~free])
        best = c[:, free] - torch.linalg.solve(h, cross)
        w = w.index_put((torch.arange(p.n)[:, None], free.nonzero()[:, 0]), best)
    return {"personal": torch.where(head, w, mean(p, w))}


def partly_shared(*home: str) -> Callable[[Problem, Models], Models]:
    """One more round: descent of all parameters, the mean of those that are not at home."""

    def limit(p: Problem, end: Models) -> Models:
        w = p.descent(end["personal"], steps_of(p), DESCENT.lr)
        new = torch.where(p.layout.mask(*home), w, mean(p, w))
        assert torch.linalg.vector_norm(new - p.minimiser) > 0.01
        return {"personal": new}

    return limit


def fedspa(p: Problem, end: Models) -> Models:
    """One more round of descent in the mask, the same for all while nothing is exchanged."""
    mask = end["personal"] != 0
    assert mask.sum(1).tolist() == [4] * p.n
    ends = []
    for i, k in enumerate(steps_of(p)[:, 0].tolist()):
        w = end["personal"][i]
        for _ in range(k):
            w = w - 0.4 * (p.hessian[i] @ (w - p.minimiser[i])) * mask[i]
        ends.append(w)
    return {"personal": mean(p, ends).expand(p.n, -1)}


def subspace(p: Problem, end: Models) -> Models:
    """Stationary theta_i, and w = sum alpha_i P theta_i."""
    matrix = projection(
        new_key(ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).ctx(0, (0,)).rng("projection")), 3, p.x0
    ).matrix
    assert matrix is not None
    h = p.hessian + 0.8 * matrix.T @ matrix
    alone = torch.linalg.solve(h, torch.einsum("nij,nj->ni", p.hessian, p.minimiser))
    lift = torch.linalg.solve(h, 0.8 * matrix.T.expand(p.n, -1, -1))
    a, b = (p.alpha[:, :, None] * matrix @ lift).sum(0), (p.alpha * alone @ matrix.T).sum(0)
    w = torch.linalg.solve(torch.eye(3, dtype=a.dtype) - a, b)
    return {"personal": alone + lift @ w}


def fednova(p: Problem, end: Models) -> Models:
    """Changes count per step taken: sum_i (w_i - x) / K_i = 0. Not the optimum, but nearer than FedAvg."""
    share = p.alpha / steps_of(p)
    return {"global": mean_of_descents(p, share=share / share.sum())}


def by_samples(p: Problem, end: Models) -> Models:
    return {"global": mean_of_descents(p, share=p.sizes[:, None].double() / p.sizes.sum())}


def consensus(p: Problem, end: Models) -> Models:
    return {"global": p.consensus()}


def sparse(p: Problem, end: Models) -> Models:
    x = p.composite("l1", 1.0)
    assert (x == 0).any()
    return {"global": x}


HEAD = torch.tensor([False] * 4 + [True] * 3)


def fedbabu(p: Problem, end: Models) -> Models:
    """The body where its descents balance under the initial head; from there two epochs on both."""
    ends = []
    for i, k in enumerate(steps_of(p)[:, 0].tolist()):
        w = end["global"]
        for _ in range(k):
            w = w - 0.4 * (p.hessian[i] @ (w - p.minimiser[i])) * ~HEAD
        ends.append(w)
    assert torch.equal(end["global"][HEAD], p.x0[HEAD])
    return {"global": mean(p, ends), "personal": p.descent(end["global"], 2 * steps_of(p), 0.4)}


def fedala(p: Problem, end: Models) -> Models:
    x = mean_of_descents(p)
    return {"global": x, "personal": p.descent(x, steps_of(p), 0.4)}


def fedrod(p: Problem, end: Models) -> Models:
    """One more round by single steps, which must change nothing; the prior of the second class moves the bias."""
    ends, own, x = [], [], end["global"]
    for i, k in enumerate(steps_of(p)[:, 0].tolist()):
        head, w, shift = (end["personal"][i] - x) * HEAD, x, torch.zeros(7, dtype=x.dtype)
        shift[6] = -np.log(max(int(p.sizes[i]) - 1, 1e-9))
        for _ in range(k):
            slope = p.hessian[i] @ (w + head - p.minimiser[i]) * HEAD
            w = w - 0.4 * p.hessian[i] @ (w + shift - p.minimiser[i])
            head = head - 0.4 * slope
        ends.append(w)
        own.append(head)
    x = mean(p, ends)
    return {"global": x, "personal": x + torch.stack(own)}


def moon(p: Problem, end: Models) -> Models:
    """One more round by single steps, from the ends that rounds from this model come to."""

    def slope(w: Tensor, near: Tensor, far: Tensor) -> Tensor:
        gap, rise = 0.0, torch.zeros_like(w)
        for sign, anchor in ((-1, near), (1, far)):
            z, a = w[:2], anchor[:2]
            cosine = z @ a / (z.norm() * a.norm())
            gap += sign * cosine / 0.5
            rise[:2] += sign * (a / (z.norm() * a.norm()) - cosine * z / (z @ z)) / 0.5
        return 0.5 * torch.sigmoid(torch.as_tensor(gap)) * rise

    x, ends = end["global"], [end["global"]] * p.n
    for _ in range(100):
        for i, k in enumerate(steps_of(p)[:, 0].tolist()):
            w = x
            for _ in range(k):
                w = w - 0.4 * (p.hessian[i] @ (w - p.minimiser[i]) + slope(w, x, ends[i]))
            ends[i] = w
    assert torch.linalg.vector_norm(x - mean_of_descents(p)) > 1e-3
    return {"global": mean(p, ends)}


def fedproto(p: Problem, end: Models) -> Models:
    """Minimisers of f_i + 0.7/2 |z - C|^2, C the mean of the z by samples of the first class."""
    w, pull = p.minimiser, torch.diag(torch.tensor([0.7, 0.7, 0, 0, 0, 0, 0], dtype=torch.float64))
    mass = p.alpha * (p.sizes[:, None] - 1) / p.sizes[:, None]
    for _ in range(2000):
        centre = (mass * w).sum(0) / mass.sum()
        right = (p.hessian @ p.minimiser[:, :, None])[:, :, 0] + pull @ centre
        w = torch.linalg.solve(p.hessian + pull, right)
    return {"personal": w}


def mean_target(p: Problem, share: Tensor | None = None) -> Tensor:
    """The mean by shares of targets of 1 for a client's last sample and -1 for its others."""
    share = p.alpha if share is None else share
    return (share * (2 / p.sizes.double() - 1)[:, None]).sum() / share.sum()


def headed(p: Problem, weight: Tensor | float, bias: Tensor | float) -> Tensor:
    """The initial model with this last layer, on two features that are the same for every sample."""
    x = p.x0.clone()
    x[4:6], x[6] = weight, bias
    return x


def analytic(p: Problem, end: Models) -> Models:
    """The smallest head that gives the mean target."""
    z, target = p.x0[:2], mean_target(p)
    scale = target / (1 + z @ z)
    return {"global": headed(p, scale * z, scale)}


def fed3r(p: Problem, end: Models) -> Models:
    """A head without a bias, of length 1."""
    z = p.x0[:2]
    return {"global": headed(p, mean_target(p).sign() * z / z.norm(), 0.0)}


def fedhip(p: Problem, end: Models) -> Models:
    """The bias gives the mean target, in which others' rows count half."""
    shares = [torch.where(torch.arange(p.n)[:, None] == i, p.alpha, 0.5 * p.alpha) for i in range(p.n)]
    personal = [headed(p, 0.0, mean_target(p, share)) for share in shares]
    return {"global": headed(p, 0.0, mean_target(p)), "personal": torch.stack(personal)}


def fedpac(p: Problem, end: Models) -> Models:
    """One more round by single steps, with the weights of heads by SciPy, which must change nothing."""
    received, heads, bodies = end["personal"], [], []
    share = (p.sizes[:, None] - 1).double() / p.sizes[:, None]
    both = torch.cat([share, 1 - share], 1)
    moment = (both[:, :, None] * received[:, None, :2]).flatten(1)
    spread = (received[:, :2].square().sum(1) - moment.square().sum(1)) / p.sizes
    mass, z = p.alpha * share, received
    for _ in range(60):  # the prototype is that of the features after the round, which are drawn to it
        centre, ends = (mass * z[:, :2]).sum(0) / mass.sum(), []
        for i, k in enumerate(steps_of(p)[:, 0].tolist()):
            w = received[i]
            for moves in (HEAD, ~HEAD):
                for _ in range(k):
                    slope = p.hessian[i] @ (w - p.minimiser[i])
                    slope[:2] += 0.4 * (w[:2] - centre) * (moves[0])
                    w = w - 0.4 * slope * moves
            ends.append(w)
        z = torch.stack(ends)
    for i in range(p.n):
        gaps = (moment[i] - moment).numpy()
        matrix = np.diag(spread.clamp(min=0).numpy()) + gaps @ gaps.T
        found = minimize(
            lambda a, m=matrix: a @ m @ a, np.full(p.n, 1 / p.n), jac=lambda a, m=matrix: 2 * m @ a, method="SLSQP",
            bounds=[(0, 1)] * p.n, constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like},
            options={"ftol": 1e-16, "maxiter": 1000},
        )  # fmt: skip
        heads.append((torch.tensor(found.x)[:, None] * z).sum(0))
        bodies.append(mean(p, z))
    limit = torch.where(HEAD, torch.stack(heads), torch.stack(bodies))
    torch.testing.assert_close(received, limit, rtol=0, atol=1e-5)  # SciPy's weights are not exact
    return {"personal": received}


def ifca(p: Problem, end: Models) -> Models:
    """Every group where the descents of its clients balance."""
    models = torch.zeros_like(p.minimiser)
    for members in ([0, 1, 3], [2, 4]):
        share = torch.zeros_like(p.alpha)
        share[members] = p.alpha[members] / p.alpha[members].sum()
        models[members] = mean_of_descents(p, share=share)
    return {"personal": models}


def dbe(p: Problem, end: Models) -> Models:
    """One more round by single steps that pull the mean of the features to that after the first round."""
    x, first, ends = end["global"], p.descent(p.x0, steps_of(p), 0.4), []
    centre = mean(p, first[:, :2])
    for i, k in enumerate(steps_of(p)[:, 0].tolist()):
        w = x
        for _ in range(k):
            slope = p.hessian[i] @ (w - p.minimiser[i])
            slope[:2] += 0.6 * (w[:2] - centre) / 2
            w = w - 0.4 * slope
        ends.append(w)
    return {"global": mean(p, ends), "personal": x.expand(p.n, -1)}


def fedas(p: Problem, end: Models) -> Models:
    """One more round by single steps, which must change nothing."""
    w, ends, counts = end["personal"], [], steps_of(p)[:, 0].tolist()
    fisher = torch.stack([k * (p.hessian[i] @ (w[i] - p.minimiser[i])).square().sum() for i, k in enumerate(counts)])
    mass = fisher * p.alpha[:, 0]
    body = (mass / mass.sum()) @ w
    for i, k in enumerate(counts):
        v = torch.where(HEAD, w[i], body)
        for _ in range(k if p.sizes[i] > 1 else 0):  # who has no sample of the first class does not align
            v = v.index_add(0, torch.arange(2), v[:2] - w[i][:2], alpha=-0.4)
        for _ in range(k):
            v = v - 0.4 * p.hessian[i] @ (v - p.minimiser[i])
        ends.append(v)
    return {"personal": torch.stack(ends)}


def pfedfda(p: Problem, end: Models) -> Models:
    """Bodies where they balance under heads of the prior alone: both classes look the same to a client."""
    ends, heads, prior = [], [], torch.stack([p.sizes - 1, torch.ones_like(p.sizes)], 1).double() / p.sizes[:, None]
    prior = (prior + 1e-4) / (prior + 1e-4).sum(1, keepdim=True)
    for i, k in enumerate(steps_of(p)[:, 0].tolist()):
        head = torch.where(HEAD, end["personal"][i], 0)
        head[:4] = end["personal"][i][:4]
        w = head
        for _ in range(k):
            w = w - 0.4 * (p.hessian[i] @ (w - p.minimiser[i])) * ~HEAD
        ends.append(w)
        heads.append(head)
    assert torch.equal(end["personal"][:, :4], end["personal"][:1, :4].expand(p.n, -1))
    return {"personal": torch.where(HEAD, torch.stack(heads), mean(p, ends))}


ROWS: dict[str, Row] = {
    "fedavg": Row(lambda p, end: {"global": mean_of_descents(p)}, variants=({"server_lr": 0.5},)),
    "fedavg-ft": Row(fedavg_ft, options={"epochs": 2, "lr": 0.2}, variants=({"steps": 3}, {"epochs": 0})),
    "fedbabu": Row(fedbabu, 120, {"epochs": 2}, variants=({"tunes": "head", "epochs": 1}, {"head": ("body",)})),
    "fedala": Row(fedala, 200, {"eta": 0.0}, variants=({"eta": 0.0}, {"share": 0.4, "first": 3, "eta": 0.01})),
    "fedrod": Row(fedrod, 200, variants=({"gamma": 0.5},)),
    "ifca": Row(
        ifca,
        problem=two_groups,
        variants=({"clusters": 1}, {"clusters": 3}),
        without={"translation": "its further models have the entries of the first in another order"},
    ),
    "fedem": Row(lambda p, end: {"personal": mean_of_descents(p).expand(p.n, -1)}),
    "cfl": Row(
        ifca,
        problem=two_groups,
        options={"first": 2, "least": 5, "gap": 0.0, "ratio": 1.0},
        variants=({"first": 0.0, "gap": -2.0, "least": 2},),
    ),
    "dbe": Row(
        dbe,
        120,
        {"kappa": 0.6, "memory": False},
        variants=({"momentum": 0.4, "kappa": 3.0}, {"kappa": 0.0}),
        without={"translation": "it sends means of features"},
    ),
    "gpfl": Row(partly_shared("head"), 200, variants=({"lam": 1.0, "mu": 0.0},)),
    "knn-per": Row(
        lambda p, end: {"global": mean_of_descents(p), "personal": mean_of_descents(p).expand(p.n, -1)},
        variants=({"weight": 1.0}, {"share": 0.5}),
    ),
    "fedas": Row(
        fedas,
        120,
        variants=({"align": 0},),
        without={"encoding": "its Fisher information is that of the trained head, which no upload has"},
    ),
    "pfedfda": Row(pfedfda, 80, without={"translation": "its means of features know the origin"}),
    "fedfomo": Row(
        lambda p, end: {"personal": p.minimiser},
        150,
        variants=({"peers": 0}, {"peers": 2, "epsilon": 1.0, "decay": 0.0}),
        without={"encoding": "what it likes are the models that it received, of which an attacker tries none"},
    ),
    "fedpac": Row(
        fedpac,
        200,
        {"lam": 0.4},
        variants=({"lam": 0.0, "head_epochs": 2},),
        without={"translation": "it sends means of features"},
    ),
    "moon": Row(
        moon, 120, {"mu": 0.5}, variants=({"mu": 5.0, "tau": 2.0},), without={"translation": "angles know the origin"}
    ),
    "fedproto": Row(
        fedproto, 250, {"lam": 0.7}, variants=({"lam": 0.0},), without={"translation": "it sends means of features"}
    ),
    "analytic-fl": Row(analytic, 2, variants=({"ridge": 1.0},), without={"translation": "it sends sums of features"}),
    "fed3r": Row(
        fed3r,
        2,
        lean={"ridge": 1.0},
        variants=({"ridge": 1.0, "normalise": False},),
        without={"translation": "it sends sums of features"},
    ),
    "fedhip": Row(
        fedhip,
        2,
        {"share": 0.5},
        variants=({"share": None, "ridge": 3.0}, {"share": 0.0}),
        without={"translation": "it sends sums of features"},
    ),
    "fedprox": Row(lambda p, end: {"global": mean_of_descents(p, 0.5)}, options={"mu": 0.5}),
    "local": Row(lambda p, end: {"personal": p.minimiser}, rounds=120),
    "scaffold": Row(consensus, rounds=150, local=LocalSGD(lr=0.2, batch_size=2), variants=({"option": "I"},)),
    "feddyn": Row(consensus, rounds=150, options={"alpha": 0.5}, solve=True),
    "fedpd": Row(consensus, rounds=150, options={"eta": 2.0}, solve=True, variants=({"skip": 0.5},)),
    "fedadmm": Row(
        consensus,
        rounds=150,
        options={"rho": 0.5},
        solve=True,
        variants=({"server_lr": "fraction", "start": "own"},),
    ),
    "fedadmm-inexact": Row(
        consensus,
        rounds=100,
        options={"rho": 1.0, "iterations": 2},
        lean={"inner": 2},  # a fifth step on a quadratic is so small that its curvature has three digits in float32
        variants=({"rho": 1.0},),
        without={"encoding": "the curvature is that along its steps, of which the model does not tell"},
    ),
    "fedadmm-composite": Row(sparse, rounds=150, options={"regulariser": L1(c=1.0)}, solve=True),
    "feddr": Row(
        sparse,
        rounds=300,
        options={"eta": 1.0, "regulariser": L1(c=1.0)},
        solve=True,
        variants=({"eta": 1.0, "alpha": 1.0},),
    ),
    "fedsplit": Row(consensus, rounds=100, solve=True),
    "fiaelt": Row(
        sparse,
        rounds=100,
        options={"regulariser": L1(c=5 * 1.0), "beta": 4.0, "smooth": 2.0, "solver": "gd"},
        lean={"inner": 4, "iterations": 2},
        variants=({"beta": 4.0, "smooth": 2.0, "solver": "gd"}, {"beta": 2.0, "solver": "sgd"}, {"solver": "released"}),
        without={"encoding": "it counts iterations, of which the model does not tell"},
    ),
    "fedmid": Row(fedmid, 80, {"regulariser": L1(c=0.3)}, variants=({"regulariser": L1(c=0.3), "server_lr": 0.5},)),
    "feddualavg": Row(
        sparse,
        rounds=300,
        options={"regulariser": L1(c=1.0)},
        local=LocalSGD(lr=0.4, steps=1),
        variants=({"regulariser": L1(c=1.0)},),
    ),
    "fedskip": Row(by_samples, options={"skip": 1}, variants=({"skip": 1},)),
    "fedslr": Row(
        fedslr,
        rounds=150,
        options={"eta_g": 2.0, "lam": 0.3, "mu": 0.2},
        solve=True,
        variants=({"lam": 0.0, "mu": 0.0}, {"method": "gpgd", "components": "s+lr"}),
        without={"translation": "its penalties know the origin"},
    ),
    "lpgd": Row(
        lpgd,
        rounds=150,
        options={"lam": 0.3, "mu": 0.2},
        variants=({"lam": 0.0, "mu": 0.0}, {"components": "s+lr"}),
        without={"translation": "its penalties know the origin"},
    ),
    "ditto": Row(ditto, options={"lam": 0.7}, variants=({"personal_lr": 0.05, "personal_epochs": 2},)),
    "flame": Row(
        flame,
        300,
        {"lam": 2.0, "rho": 0.2},
        variants=({"eps0": 1e-2},),
    ),
    "fedacs": Row(
        fedacs, options={"quantile": 0.6}, variants=({"quantile": 0.0}, {"among": "all"}, {"among": "seen", "lam": 2.0})
    ),
    "pfedme": Row(pfedme, 120, {"lam": 2.0, "eta": 0.25, "inner": 25, "personal_lr": 0.3}, variants=({"beta": 0.5},)),
    "perfedavg": Row(perfedavg, 150, {"alpha": 0.3}, variants=({"variant": "fo"},)),
    "apfl": Row(apfl, 250, {"alpha": 0.8}, variants=({"adaptive": True},)),
    "fedamp": Row(fedamp, 200, {"lam": 0.5, "alpha": 5.0, "sigma": 20.0}, variants=({"sigma": 30.0, "alpha": 40.0},)),
    "heurfedamp": Row(heurfedamp, 200, {"lam": 0.5, "alpha": 2.0, "sigma": 3.0, "self_weight": 0.4}),
    "fedrep": Row(fedrep, 100, solve=True, variants=({"head": ("body", "head.bias"), "head_epochs": 1},)),
    "fedper": Row(partly_shared("head"), 200, variants=({"head": ("body",)},)),
    "lg-fedavg": Row(partly_shared("body"), 200, variants=({"head": ("head.bias",)},)),
    "fedbn": Row(partly_shared("head.bias"), 200, {"layers": ("head.bias",)}, variants=({"layers": ("head",)},)),
    "fedspa": Row(
        fedspa,
        200,
        {"exchange": 0.0},
        variants=({"horizon": 2},),
        without={"translation": "a mask sets parameters to zero"},
    ),
    "lp-proj": Row(
        subspace,
        300,
        {"p": 2.0, "lam": 0.8, "dim": 3, "eta": 0.5, "local_rounds": 1},
        variants=({"p": 2.0, "lam": 1.0, "dim": 3}, {"p": 1.5, "lam": 1.0, "dim": None}),
        without={"translation": "its w starts at zero"},
    ),
    "admm-lp-proj": Row(
        subspace,
        300,
        {"lam": 0.8, "rho": 0.2, "dim": 3},
        variants=({"dim": None},),
    ),
    "centralized": Row(consensus),
    "afl": Row(lambda p, end: {"global": agnostic(p)[0]}, 400, {"lambda_lr": 0.02}, LocalSGD(lr=0.4, steps=1)),
    "fednova": Row(fednova),
    "fedopt": Row(
        lambda p, end: {"global": mean_of_descents(p)},
        200,
        {"server_lr": 1.0, "tau": 1.0, "beta1": 0.5, "beta2": 0.9},
        variants=({"optimiser": "yogi"}, {"optimiser": "adagrad"}, {"optimiser": "momentum"}),
    ),
    "gifair-fl": Row(
        lambda p, end: {"global": penalised(p, 0.001, torch.arange(p.n))},
        100,
        {"lam": 0.001},
        LocalSGD(lr=0.4, steps=1),
    ),
    "q-ffl": Row(
        lambda p, end: {"global": q_fair(p, 1.0)}, 120, {"q": 1.0}, LocalSGD(lr=1.0, steps=1), variants=({"q": 0.5},)
    ),
    "clustered-sampling": Row(lambda p, end: {"global": mean_of_descents(p)}),  # everyone, once
    "power-of-choice": Row(lambda p, end: {"global": mean_of_descents(p)}),  # everyone
    "fairfed": Row(
        by_samples,
        options={"beta": 0.0, "metric": "loss"},
        lean={"metric": "loss"},
        variants=({"metric": "loss", "beta": 1e-4, "floor": False},),
    ),
    "equitable-fl": Row(equitable, 45, {"mu": 0.3, "clusters": 2}, problem=two_groups),
}

OURS = "no value in the paper"
OPTION = "an option of fedloom; the default is what the paper does"

# method: option: (default, where it is written)
PAPERS: dict[str, dict[str, tuple[Any, str]]] = {
    "fedavg": {"server_lr": (1.0, "McMahan et al. 2017, Algorithm 1: the mean itself")},
    "fedprox": {"mu": (0.01, "Li et al. 2020, Sec. 5.1: tuned in {0.001, 0.01, 0.1, 1}")},
    "fedavg-ft": {
        "epochs": (ANY, OURS),
        "steps": (None, OPTION),
        "lr": (None, "Yu et al. 2020, Sec. 4.1: that of training, or smaller"),
    },
    "fedbabu": {
        "head": ((), OPTION),
        "epochs": (5, "Oh et al. 2022, Sec. 5: fine-tuning epochs of the tables"),
        "lr": (None, OPTION),
        "tunes": ("all", "Sec. 5: whole networks unless it says otherwise"),
    },
    "fedala": {
        "head": ((), OPTION),
        "eta": (1.0, "Zhang et al. 2023, Sec. 5.1"),
        "share": (0.8, "Sec. 5.1: s = 80"),
        "first": (ANY, OURS),
    },
    "fedrod": {"gamma": (1.0, "Chen and Chao 2022, Eq. 8: gamma = 1")},
    "moon": {"mu": (ANY, "Li et al. 2021, Sec. 4.1: tuned in {0.1, 1, 5, 10}"), "tau": (0.5, "Sec. 4.1")},
    "fedpac": {"lam": (1.0, "Xu et al. 2023, Sec. 5.1"), "head_epochs": (1, "Sec. 5.1: one epoch")},
    "analytic-fl": {"ridge": (0.0, "He et al. 2025, Theorem 2: the regulariser is removed")},
    "fed3r": {
        "ridge": (0.01, "Fani et al. 2024, experiments: 0.01"),
        "normalise": (True, "Sec. 4"),
        "bias": (False, "Sec. 4"),
    },
    "fedhip": {"ridge": (1.0, OURS), "share": (None, OURS)},
    "fedproto": {"lam": (1.0, "Tan et al. 2022, Sec. 5.1")},
    "cfl": {
        "ratio": (0.25, "felisat/clustered-federated-learning: 0.4 and 1.6"),
        "gap": (-2.0, "the public code has none"),
        "first": (20.0, "the public code: after 20 rounds"),
        "least": (3, "the public code: more than 2 clients"),
    },
    "dbe": {
        "kappa": (50.0, "Zhang et al. 2023: 50 with 512 features"),
        "momentum": (1.0, "Zhang et al. 2023: 1 with them"),
        "memory": (True, OPTION),
    },
    "gpfl": {
        "lam": (0.01, "TsingZ0/GPFL, run_me.sh: for small networks"),
        "mu": (0.1, "TsingZ0/GPFL, run_me.sh: for small networks"),
        "angle": (1.0, OPTION),
    },
    "knn-per": {
        "neighbours": (10, "Marfoq et al. 2022, Sec. 5: k = 10"),
        "scale": (1.0, "omarfoq/knn-per: 1"),
        "weight": (None, "Sec. 5: every client's own"),
        "share": (ANY, "Sec. 5: a validation set"),
    },
    "fedas": {"align": (1, "FedAS in PFLlib: one epoch"), "lr": (None, "a step size of its own there")},
    "fedem": {},
    "pfedfda": {"ridge": (1.0, "cj-mclaughlin/pFedFDA: the identity")},
    "fedfomo": {
        "peers": (ANY, "Zhang et al. 2021: by experiment"),
        "epsilon": (0.3, "Zhang et al. 2021: at first"),
        "decay": (0.05, "Zhang et al. 2021: per round"),
        "share": (ANY, "Zhang et al. 2021: a validation set of every client"),
        "returns": (True, "Zhang et al. 2021: the sum of the update has no term"),
    },
    "ifca": {"clusters": (ANY, "Ghosh et al. 2020, Sec. 6: 2 to 4, by problem")},
    "local": {},
    "centralized": {"server_lr": (1.0, "as FedAvg")},
    "scaffold": {
        "server_lr": (1.0, "Karimireddy et al. 2020, Sec. 7: eta_g = 1"),
        "option": ("II", "Sec. 7: option II"),
        "scaled": (False, "FedDyn's public code only"),
    },
    "feddyn": {
        "alpha": (0.01, "Acar et al. 2021, the authors' example code"),
        "scaled": (False, "the paper's alpha is constant; public code: by samples"),
    },
    "fedpd": {
        "eta": (1.0, "FedDR's scripts: 1 for (.5, .5) and FEMNIST, else 10"),
        "skip": (0.0, OPTION),
        "start": ("own", OPTION),
    },
    "fedadmm": {
        "rho": (0.01, "Gong et al. 2022, Sec. V"),
        "server_lr": (1.0, "Sec. V: eta = 1, 0.5 from round 60 on"),
        "start": ("server", "public code: SGD starts at theta"),
    },
    "fedadmm-inexact": {
        "r0": (None, "MATLAB code: r0 r_i, 0.5 or 0.05; a number of its own in its place"),
        "rho": (ANY, OURS),
        "iterations": (ANY, OURS),
        "inner": (3, "Zhou and Li, MATLAB code: at most 3"),
        "eps0": ("matlab", "MATLAB code: k0^2"),
        "shrink": (0.95, "MATLAB code"),
    },
    "fedadmm-composite": {"eta": (ANY, OURS), "regulariser": (None, OPTION), "start": (None, OPTION)},
    "feddr": {
        "eta": (100.0, "Tran-Dinh et al. 2021, scripts: 100 for iid and (0, 0)"),
        "alpha": (1.95, "always"),
        "regulariser": (None, OPTION),
        "start": ("own", "public code"),
    },
    "fedsplit": {"step": (ANY, OURS)},
    "fiaelt": {
        "regulariser": (None, OPTION),
        "tau": (0.5, "Corollary 2"),
        "r": (0.005, "Corollary 2"),
        "beta": (None, "Corollary 2: 5 L"),
        "smooth": (None, OPTION),
        "solver": ("svrg", "Corollary 2: SVRG, option II"),
        "passes": (ANY, OURS),
        "iterations": (10, "Corollary 2: 9 outer epochs are enough, at most 10"),
        "inner": (200, "Corollary 2: m_i = 200"),
        "lr": (None, "Corollary 2: 1/(40 L)"),
        "start": ("own", OPTION),
    },
    "fedmid": {"regulariser": (None, OPTION), "server_lr": (1.0, "Yuan et al. 2021")},
    "feddualavg": {"regulariser": (None, OPTION), "server_lr": (1.0, "Yuan et al. 2021")},
    "fedskip": {"skip": (3, "Fan et al. 2022: default 3")},
    "fedslr": {
        "eta_g": (10.0, "Huang et al. 2023, Sec. 6.1"),
        "lam": (1e-4, "Sec. 6.1"),
        "mu": (1e-3, "Sec. 6.1"),
        "personal_epochs": (1, "Sec. 6.1: one epoch in phase II"),
        "components": ("lr+s", "the method itself"),
        "method": ("fedslr", OPTION),
        "personal_start": ("zero", "the public code copies w_0; the paper does not say"),
        "personal_decay": ("model", "part of f_i; the public code decays p"),
    },
    "lpgd": {
        "lam": (1e-4, "Huang et al. 2023, Sec. 6.1"),
        "mu": (1e-3, "Sec. 6.1"),
        "personal_epochs": (1, "Sec. 6.1: one epoch in phase II"),
        "components": ("lr+s", "the method itself"),
    },
    "ditto": {
        "lam": (1.0, "Li et al. 2021, Sec. 5: tuned in {0.1, 1, 2}"),
        "personal_lr": (None, OPTION),
        "personal_epochs": (None, OPTION),
        "batches": ("same", "public code"),
        "branch": ("server", "Algorithm 1; FLAME's public code: own"),
    },
    "flame": {
        "lam": (1.0, "Table III"),
        "rho": (0.1, "Table III"),
        "eps0": (None, "the experiments take H epochs of SGD"),
        "shrink": (0.5, OURS),
        "most": (1000, OURS),
        "centre": ("own", "Eq. 11; public code: received"),
        "dual": ("round", "Algorithm 1; public code: epoch"),
        "residuals": (False, OPTION),
        "regulariser": (None, OPTION),
        "solver": ("sgd", OPTION),
        "r": (0.005, OPTION),
        "iterations": (100, OPTION),
        "smooth": (None, OPTION),
    },
    "fedacs": {
        "quantile": (ANY, OURS),
        "among": ("cohort", OPTION),
        "lam": (None, OPTION),
        "copies": (0.999, OURS),
    },
    "pfedme": {
        "lam": (15.0, "Dinh et al. 2020, experiments: 15 for MNIST"),
        "eta": (0.005, "experiments: 0.005"),
        "inner": (5, "experiments: K = 5"),
        "personal_lr": (None, "0.1 or 0.09 in the experiments, which fedloom takes from the run"),
        "beta": (1.0, "experiments: 1, 2 where tuned"),
        "theta": ("received", "public code; FLAME's: kept"),
        "moves": ("batch", "Algorithm 1; FLAME's public code: epoch"),
    },
    "perfedavg": {
        "alpha": (0.01, "Huang et al. 2023 (FedSLR), comparison: 0.01"),
        "variant": ("hf", "FedACS's comparison: three data batches"),
        "delta": (0.001, "public codes: 0.001"),
    },
    "apfl": {
        "alpha": (0.5, "FedSLR's comparison: 0.5, fixed"),
        "adaptive": (False, "FedSLR's comparison: fixed"),
        "mix": ("before", "Algorithm 1; public code: after"),
    },
    "fedamp": {
        "lam": (1.0, "PFLlib: 1"),
        "alpha": (1.0, "PFLlib: alphaK = 1"),
        "sigma": (1.0, "PFLlib: 1"),
        "decay": (1.0, "0.1 in the experiments"),
        "every": (30, "experiments: 30 rounds"),
        "start": ("own", OPTION),
        "among": ("cohort", OPTION),
    },
    "heurfedamp": {
        "lam": (1.0, "PFLlib: 1"),
        "alpha": (1.0, "PFLlib: alphaK = 1"),
        "sigma": (25.0, "flgo, not by the authors: 25"),
        "self_weight": (None, "flgo: 1/n"),
        "start": ("own", OPTION),
        "among": ("cohort", OPTION),
    },
    "fedrep": {"head": ((), OPTION), "head_epochs": (10, "Collins et al. 2021, public code: 10")},
    "fedper": {"head": ((), OPTION)},
    "lg-fedavg": {"head": ((), OPTION)},
    "fedbn": {"layers": ((), OPTION)},
    "fedspa": {
        "density": (0.5, "FedSLR's comparison: 0.5"),
        "exchange": (0.5, OURS),
        "horizon": (1000, "FedSLR's comparison: 1000 rounds"),
    },
    "lp-proj": {
        "p": (1.0, "Lin et al. 2022, public code: 1"),
        "lam": (15.0, "public code: 15"),
        "dim": (10, "public code: d = 10"),
        "eta": (0.1, "public code: local_lr 0.1"),
        "local_rounds": (5, "public code: 5"),
        "beta": (1.0, "public code: 1"),
    },
    "admm-lp-proj": {
        "lam": (1.0, "FLAME, Table III"),
        "rho": (0.1, "FLAME, Table III"),
        "dim": (10, "FLAME's public code: d_sub = 10"),
    },
    "equitable-fl": {
        "mu": (0.01, "Equitable-FL: the best of {0.001, 0.01, 0.1, 1} is reported"),
        "clusters": (None, "Table 1: the true number of every federation"),
        "layer": ("penultimate", "Fig. 1: the layer before the last"),
        "log_softmax": (True, "Fig. 1"),
        "reduce": (ANY, OURS),
    },
    "afl": {
        "lambda_lr": (0.1, "the q-FFL authors' code: learning_rate_lambda = 0.1"),
        "step": ("fixed", "Figure 3: one gamma_lambda"),
    },
    "fednova": {"mu": (0.0, OPTION), "gamma": (1.0, OPTION)},
    "fedopt": {
        "optimiser": ("adam", OPTION),
        "server_lr": (ANY, "Reddi et al. 2021: tuned for every task"),
        "beta1": (None, "Sec. 4: 0.9 for Adam and Yogi, 0 for Adagrad"),
        "beta2": (0.99, "Sec. 4"),
        "tau": (1e-3, "Sec. 4"),
    },
    "gifair-fl": {
        "lam": (None, "public code: half of min p_k / (d - 1)"),
        "level": ("individual", "public code: each client its own group"),
    },
    "q-ffl": {"q": (ANY, "Li et al. 2020, Sec. 4: tuned"), "lipschitz": ("step", "Sec. 3.3: 1 / step size")},
    "clustered-sampling": {
        "server_lr": (1.0, "as FedAvg"),
        "fraction": (1.0, OPTION),
        "clients": (None, OPTION),
        "by": ("similarity", "Equitable-FL compares with Cluster2"),
        "distance": ("arccos", "Fraboni et al. 2021, Sec. 5"),
        "masses": ("samples", "p_i = n_i / n"),
    },
    "power-of-choice": {
        "server_lr": (1.0, "as FedAvg"),
        "fraction": (1.0, OPTION),
        "clients": (None, OPTION),
        "candidates": (ANY, "d is unknown in Equitable-FL"),
        "estimate": ("loss", "Cho et al. 2022: pow-d"),
    },
    "fairfed": {
        "server_lr": (1.0, "as FedAvg"),
        "beta": (ANY, "unknown in Equitable-FL"),
        "metric": ("accuracy", "Ezzeldin et al. 2023, Eq. 6: without a metric of groups"),
        "group": (None, "the first group of an analysis"),
        "floor": (True, "Equitable-FL: weights are lower-bounded by 0"),
    },
}
