"""Every method of the registry obeys every law and ends where its paper says.

A new method needs one row in ROWS: where it ends on heterogeneous quadratics, and options that deserve the laws too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from fair_optima import agnostic, penalised, q_fair
from scipy.optimize import minimize
from torch import Tensor

from fedloom.algorithms import REGISTRY, Composition
from fedloom.local import LocalSGD
from fedloom.rows.projection import new_key, projection
from fedloom.rows.prox import L1, Nuclear
from fedloom.testing import LAWS, Problem, check_law, federate, laws_of, personal_models
from fedloom.testing.federate import ReferenceFederation
from fedloom.testing.laws import check_network
from fedloom.testing.network import Classifier

DESCENT = LocalSGD(lr=0.4, batch_size=2)  # one to four steps a round, by client
Models = dict[str, Tensor]  # "global" [d], "personal" [n, d]
Weights = Literal["uniform", "samples"]


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
    "fedas": Row(fedas, 120, variants=({"align": 0},)),
    "pfedfda": Row(pfedfda, 80, without={"translation": "its means of features know the origin"}),
    "fedfomo": Row(
        lambda p, end: {"personal": p.minimiser},
        150,
        variants=({"peers": 0}, {"peers": 2, "epsilon": 1.0, "decay": 0.0}),
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
        variants=({"beta": 4.0, "smooth": 2.0, "solver": "gd"}, {"beta": 2.0, "solver": "sgd"}),
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


def composition(name: str, options: Mapping[str, Any]) -> Composition:
    made = REGISTRY[name](**options)
    return made if isinstance(made, Composition) else Composition(made)


def end_of(c: Composition, row: Row, weights: Weights) -> tuple[Problem, Models]:
    p = row.problem(weights)
    played = p.pooled() if c.pooled else p
    run = federate(c.algorithm, played, row.rounds, local=row.local, solve=row.solve, weigher=c.weigher)
    x = c.algorithm.global_model(run[-1].server)
    v = personal_models(c.algorithm, ReferenceFederation(played.oracle(), played.alpha, row.local), run[-1])
    return p, {name: model for name, model in (("global", x), ("personal", v)) if model is not None}


def test_every_method_has_a_row() -> None:
    assert sorted(ROWS) == sorted(REGISTRY)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("name", REGISTRY)
def test_fixed_point(name: str, weights: Weights) -> None:
    row = ROWS[name]
    p, end = end_of(composition(name, row.options), row, weights)
    want = row.limit(p, end)
    assert want.keys() == end.keys()
    for which, model in want.items():
        torch.testing.assert_close(end[which], model, rtol=0, atol=1e-9)


CASES = [(name, o) for name in REGISTRY for o in ((ROWS[name].lean, *ROWS[name].variants) if name in ROWS else ({},))]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}{dict(o) or ''}" for n, o in CASES])
def test_law(name: str, options: Mapping[str, Any], law: str) -> None:
    made = composition(name, options)
    if law in laws_of(made, ROWS[name].without if name in ROWS else ()):
        check_law(law, made)


NETWORK = Classifier.of()
ROUGH = {"fiaelt": "its curvature is a difference of gradients, which float32 rounds"}


@pytest.mark.parametrize("name", REGISTRY)
def test_laws_on_a_network(name: str) -> None:
    row = ROWS.get(name)
    without = {*(row.without if row else ()), *(("precision",) if name in ROUGH else ())}
    check_network(composition(name, row.lean if row else {}), None, without, NETWORK)
