"""FedSLR: the memory-efficient form, both phases, the variants, ranks and traffic."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.algorithms import LPGD, FedAvg, FedSLR, Model, encodings
from fedloom.algorithms.fedslr import Sparsity
from fedloom.algorithms.lpgd import Client
from fedloom.local import LocalSGD
from fedloom.rows.fields import Field
from fedloom.rows.layout import Layout
from fedloom.rows.wire import Codec
from fedloom.testing import Problem, federate, personal_models
from fedloom.testing.federate import ReferenceFederation, ReferenceState
from fedloom.testing.problems import proximal_point

SOME = [(0, 1, 2), (2, 3), (0, 4, 3), (1, 2, 4, 0), (3,), (0, 1, 2, 3, 4)]
ALL = [tuple(range(5))] * 6
SGD = LocalSGD(lr=0.07, batch_size=2, epochs=2)
WIDE = Layout.create_from_shapes({"conv": (3, 2, 2, 2), "fc": (4, 6), "bias": (4,)})
seeds = st.integers(0, 10**6)


def same(a: Tensor, b: Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tol * (1 + float(b.abs().max())))


def global_models(states: list[ReferenceState]) -> Tensor:
    return torch.stack([s.server.x for s in states])


def mixed(method: FedSLR, p: Problem, state: ReferenceState) -> Tensor:
    found = personal_models(method, ReferenceFederation(p.oracle(), p.alpha, LocalSGD()), state)
    assert found is not None
    return found


def figures(method: FedSLR, p: Problem, state: ReferenceState) -> dict[str, float]:
    """The record of a round: observed at every client, summed."""
    fed, everyone = ReferenceFederation(p.oracle(), p.alpha, LocalSGD()), range(p.n)
    ctx = fed.ctx(state.round, everyone)
    seen = method.observe(method.down(state.server, None, ctx), state.rows, fed.work(state.round, everyone))
    return method.diagnostics(state.server, Sparsity(seen.nonzeros.sum(0)), ctx)


def naive(p: Problem, eta_g: float, lam: float, cohorts: Any, divide: bool = False) -> Tensor:
    """Algorithm 2 as printed (a gamma per client at the server), with exact local solutions."""
    w, gamma, path = p.x0, [torch.zeros_like(p.x0)] * p.n, [p.x0]
    eye = torch.eye(p.d, dtype=w.dtype)
    for cohort in cohorts:
        ends = []
        for i in cohort:
            right = p.hessian[i] @ p.minimiser[i] + gamma[i] + w / eta_g
            ends.append(torch.linalg.solve(p.hessian[i] + eye / eta_g, right))
            gamma[i] = gamma[i] + (w - ends[-1]) / eta_g
        step = 1 / eta_g if divide else eta_g
        w = proximal_point(
            torch.stack(ends).mean(0) - step * torch.stack(gamma).mean(0), "nuclear", lam * eta_g, p.layout
        )
        path.append(w)
    return torch.stack(path)


# ---------------------------------------------------------------------------------------------------------- phase I


@pytest.mark.parametrize("cohorts", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("layout", [None, WIDE], ids=["linear", "conv"])
@settings(max_examples=10)
@given(seeds, st.floats(0.2, 4), st.floats(0, 0.3))
def test_one_mean_gamma_gives_the_iterates_of_algorithms_1_and_2(
    cohorts: Any, layout: Layout | None, seed: int, eta_g: float, lam: float
) -> None:
    p = Problem.random(seed) if layout is None else Problem.random(seed, layout=layout)
    states = federate(FedSLR(eta_g=eta_g, lam=lam), p, len(cohorts), solve=True, cohorts=cohorts)
    same(global_models(states), naive(p, eta_g, lam, cohorts))
    for state in states:
        same(state.server.gamma, state.rows.gi.mean(0))


def test_line_10_as_printed_diverges_or_settles_elsewhere() -> None:
    """Dividing gamma by eta_g: divergence below 1, a wrong limit at the paper's 10."""
    p = Problem.random(1)
    rounds = [tuple(range(p.n))] * 300
    assert naive(p, 0.3, 0.0, rounds, divide=True)[-1].norm() > 1e6
    same(naive(p, 0.3, 0.0, rounds)[-1], p.consensus())
    assert (naive(p, 10.0, 0.0, rounds, divide=True)[-1] - p.consensus()).norm() > 1e-3
    same(naive(p, 10.0, 0.0, rounds)[-1], p.consensus(), 1e-7)


@given(seeds)
@settings(max_examples=10)
def test_gamma_after_exact_steps_is_the_gradient(seed: int) -> None:
    """Remark 2, for any lam and eta_g: gamma_i = grad f_i(w_i)."""
    p, eta_g = Problem.random(seed), 0.8
    before, after = federate(FedSLR(eta_g=eta_g, lam=0.2), p, 3, solve=True)[-2:]
    w = before.server.x - eta_g * (after.rows.gi - before.rows.gi)
    same(after.rows.gi, p.gradient(w))


@pytest.mark.parametrize(("components", "penalty"), [("lr+s", "nuclear"), ("s+lr", "l1"), ("s+s", "l1")])
def test_limit_of_phase_1(components: Any, penalty: Any) -> None:
    """(P1), with absent clients."""
    p, lam = Problem.random(2), 0.3
    method = FedSLR(eta_g=1.0, lam=lam, components=components, personal_epochs=0)
    want = p.composite(penalty, lam)
    for rounds, cohorts in ((200, None), (600, lambda t: SOME[t % 6])):
        same(federate(method, p, rounds, solve=True, cohorts=cohorts)[-1].server.x, want)
    assert (want - p.consensus()).abs().max() > 0.05


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_a_quadratic_settles_where_3_s_plus_2_a_is_below_4(share: float) -> None:
    """One step of length lr has s = lr h and a = lr / eta_g: spectral radius of (x - c, gi / h)."""
    p = Problem.random(3, n=1, same_curvature=True)

    def distance(s: float) -> float:
        lr = s / float(p.hessian[0, 0, 0])
        method, local = FedSLR(eta_g=lr / share, lam=0.0, personal_epochs=0), LocalSGD(lr=lr, steps=1)
        return float((federate(method, p, 200, local=local)[-1].server.x - p.consensus()).norm())

    limit = (4 - 2 * share) / 3
    start = float((p.x0 - p.consensus()).norm())
    assert distance(limit - 0.04) < 1e-3 * start
    assert distance(limit + 0.04) > 1e3 * start


def test_the_default_eta_g_settles_for_a_step_to_the_minimum() -> None:
    p = Problem.random(4, n=1, same_curvature=True)
    lr = 1 / float(p.hessian[0, 0, 0])
    same(federate(FedSLR(lam=0.0), p, 100, local=LocalSGD(lr=lr, steps=1))[-1].server.x, p.consensus(), 1e-6)


def test_a_large_penalty_leaves_vectors_only() -> None:
    p = Problem.random(3)
    x = federate(FedSLR(eta_g=1.0, lam=1e4), p, 1, solve=True)[-1].server.x
    bias = p.layout.mask("head.bias")
    assert (x[~bias] == 0).all()
    assert (x[bias] != 0).all()


# --------------------------------------------------------------------------------------------------------- phase II


def phase_2(p: Problem, w: Tensor, start: Tensor, steps: list[int], lr: float, mu: float, penalty: Any) -> Tensor:
    """Eq. 7 client by client: p <- prox_{lr mu}(p - lr grad f_i(w + p))."""
    ends = []
    for i, k in enumerate(steps):
        own = start[i]
        for _ in range(k):
            g = p.hessian[i] @ (w + own - p.minimiser[i])
            own = proximal_point(own - lr * g, penalty, lr * mu, p.layout)
        ends.append(own)
    return torch.stack(ends)


@pytest.mark.parametrize(
    ("components", "penalty"), [("lr+s", "l1"), ("s+s", "l1"), ("s+lr", "nuclear"), ("lr+lr", "nuclear")]
)
@pytest.mark.parametrize("start", ["zero", "model"])
def test_phase_2_written_out(components: Any, penalty: Any, start: Any) -> None:
    """One epoch of proximal steps on the RECEIVED model, from the last p_i."""
    p, lr, mu = Problem.random(4), 0.2, 0.6
    local = LocalSGD(lr=lr, batch_size=2, epochs=2)
    method = FedSLR(eta_g=2.0, lam=0.1, mu=mu, components=components, personal_start=start)
    states = federate(method, p, 4, local=local)
    same(states[0].rows.p, (p.x0 if start == "model" else torch.zeros_like(p.x0)).expand(p.n, -1))
    steps = [local.batches(k) for k in p.sizes.tolist()]
    for before, after in itertools.pairwise(states):
        same(after.rows.p, phase_2(p, before.server.x, before.rows.p, steps, lr, mu, penalty))
    same(mixed(method, p, states[-1]), states[-1].server.x + states[-1].rows.p)


def test_personal_components_are_exactly_sparse_and_the_limit_of_p2() -> None:
    p, mu = Problem.random(5), 0.8
    method = FedSLR(eta_g=1.0, lam=0.2, mu=mu, personal_epochs=3)
    end = federate(method, p, 300, local=LocalSGD(lr=0.4, batch_size=2), solve=True)[-1]
    w, own = p.composite("nuclear", 0.2), end.rows.p
    same(end.server.x, w)
    g = p.gradient(w + own)
    zero = own == 0
    assert 0 < zero.sum() < own.numel()
    assert (g[zero].abs() <= mu + 1e-9).all()
    same(g[~zero], -mu * own[~zero].sign())
    assert figures(method, p, end)["personal_nonzeros"] == float((own != 0).sum()) / p.n


def test_a_large_mu_leaves_the_global_model() -> None:
    p = Problem.random(5)
    method = FedSLR(mu=1e4)
    end = federate(method, p, 3, local=SGD, noise=1.0)[-1]
    assert (end.rows.p == 0).all()
    assert torch.equal(mixed(method, p, end), end.server.x.expand(p.n, -1))


def test_phase_2_does_not_touch_phase_1() -> None:
    p, options = Problem.random(6), {"local": SGD, "noise": 1.0}
    one, other = (federate(FedSLR(mu=mu, personal_epochs=e), p, 4, **options) for mu, e in ((1e-3, 1), (0.5, 3)))
    assert torch.equal(global_models(one), global_models(other))
    assert (one[-1].rows.p - other[-1].rows.p).abs().max() > 1e-3


def test_the_phases_see_their_batches_in_different_orders() -> None:
    p = replace(Problem.random(6, n=1), sizes=torch.tensor([9]))
    for noise in (0.0, 1.0):
        options: dict[str, Any] = {"local": SGD, "noise": noise}
        own = federate(FedSLR(mu=0.0, personal_epochs=None), p, 1, **options)[-1].rows.p[0]
        first = federate(FedAvg(), p, 1, **options)[-1].server.x - p.x0
        assert ((own - first).abs().max() > 1e-4) == bool(noise)


# ---------------------------------------------------------------------------------------------------------- variants


def test_without_penalties_the_alternatives_are_fedavg() -> None:
    p, options = Problem.random(7), {"local": SGD, "noise": 1.0, "cohorts": SOME}
    want = global_models(federate(FedAvg(), p, 6, **options))
    for method in (LPGD(lam=0.0), FedSLR(method="gpgd", lam=0.0)):
        same(global_models(federate(method, p, 6, **options)), want)


@pytest.mark.parametrize("kind", [LPGD, partial(FedSLR, method="gpgd")], ids=["lpgd", "gpgd"])
@pytest.mark.parametrize(("components", "penalty"), [("lr+s", "nuclear"), ("s+s", "l1")])
def test_alternatives_written_out(kind: Any, components: Any, penalty: Any) -> None:
    """Eqs. 18-19 and 20-21; the server's threshold of GPGD is the local step size times lam."""
    p, lam = Problem.random(8), 0.4
    local = LocalSGD(lr=0.2, batch_size=2, schedule="exponential", decay=0.9)
    path = global_models(federate(kind(lam=lam, components=components), p, 4, local=local))
    for t, (old, new) in enumerate(itertools.pairwise(path)):
        lr, ends = 0.2 * 0.9**t, []
        for i, size in enumerate(p.sizes.tolist()):
            w = old
            for _ in range(local.batches(size)):
                w = w - lr * p.hessian[i] @ (w - p.minimiser[i])
                w = proximal_point(w, penalty, lr * lam, p.layout) if kind is LPGD else w
            ends.append(w)
        mean = torch.stack(ends).mean(0)
        same(new, mean if kind is LPGD else proximal_point(mean, penalty, lr * lam, p.layout))


# ------------------------------------------------------------------------------------------------- ranks and traffic


def test_ranks_in_the_server_s_state_are_those_of_the_download() -> None:
    p = Problem.random(9, layout=WIDE)
    method = FedSLR(eta_g=1.0, lam=6.0, personal_epochs=0)
    states = federate(method, p, 8, solve=True)
    found = torch.stack([s.server.ranks for s in states])
    for state, got in zip(states, found, strict=True):
        shapes = [torch.linalg.svdvals(w) for w in WIDE.matrices(state.server.x).values()]
        assert got.tolist() == [int((s > 1e-10).sum()) for s in shapes]
    assert found[0].tolist() == [4, 4]
    assert (found[-1] < found[0]).all()
    end = figures(method, p, states[-1])
    assert (end["rank"], end["nonzeros"]) == (float(found[-1].sum()), float(states[-1].server.x.count_nonzero()))


def test_the_download_travels_as_factors() -> None:
    """The codec with the declared encoding and the state's ranks: shorter, and the same model."""
    p = Problem.random(9, layout=WIDE)
    method = FedSLR(eta_g=1.0, lam=6.0, personal_epochs=0)
    server = federate(method, p, 8, solve=True)[-1].server
    sent = encodings(method, "down")["x"]
    assert (sent.encoding, sent.ranks) == ("lowrank", "ranks")
    field = Field((WIDE.d,), torch.float64, encoding=sent.encoding, layout=WIDE)
    codec = Codec(WIDE, {"x": field})
    given = {"x": dict(zip(WIDE.matrix_shapes, server.ranks.tolist(), strict=True))}
    message = codec.encode({"x": server.x}, given)
    same(codec.decode(message)["x"], server.x)
    assert int(codec.length({"x": server.x}, given)) == len(message) < 8 * WIDE.d
    factors = sum(min(r * c, k * (r + c)) for (r, c), k in zip(WIDE.matrix_shapes.values(), server.ranks, strict=True))
    assert int(codec.paper_bytes({"x": server.x}, given)) == 4 * (4 + int(factors))


@pytest.mark.parametrize(
    ("components", "form"), [("lr+s", "lowrank"), ("lr+lr", "lowrank"), ("s+s", "sparse"), ("s+lr", "sparse")]
)
def test_declared_encoding_follows_the_components(components: Any, form: str) -> None:
    assert encodings(FedSLR(components=components), "down")["x"].encoding == form
    assert encodings(FedSLR(components=components), "up")["dw"].encoding == "dense"


def test_an_upload_of_lpgd_travels_as_factors() -> None:
    """The codec with the declared encoding: shorter, the same models, and a length per client."""
    p = Problem.random(9, layout=WIDE)
    method = LPGD(lam=15.0, personal_epochs=0)
    work = ReferenceFederation(p.oracle(), p.alpha, LocalSGD(lr=0.2, steps=3)).work(1, range(5))
    up = method.client(Model(p.x0), Client(torch.zeros(5, WIDE.d, dtype=torch.float64)), work)[0]
    assert encodings(method, "up")["w"].encoding == "lowrank"
    assert encodings(method, "down")["x"].encoding == "dense"
    codec = Codec(WIDE, {"w": Field((WIDE.d,), torch.float64, encoding="lowrank", layout=WIDE)})
    lengths = codec.length({"w": up.w})
    for row, length in zip(up.w, lengths.tolist(), strict=True):
        message = codec.encode({"w": row})
        assert len(message) == length < 8 * WIDE.d
        same(codec.decode(message)["w"], row)


@pytest.mark.parametrize(("components", "form"), [("lr+s", "lowrank"), ("s+lr", "sparse")])
def test_an_upload_of_lpgd_is_what_its_prox_makes(components: Any, form: str) -> None:
    assert encodings(LPGD(components=components), "up")["w"].encoding == form


def test_ranks_of_a_diverged_model_and_of_a_model_without_matrices() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert WIDE.ranks(torch.full((WIDE.d,), bad)).tolist() == [min(shape) for shape in WIDE.matrix_shapes.values()]
    assert Layout.create_from_shapes({"w": (3,)}).ranks(torch.ones(3)).tolist() == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_the_potential_falls(seed: int, share: float) -> None:
    """Definition 1 and Lemma 3 (Eq. 35): with eta_g <= 1/(2 L) no round raises it, and it falls by a known amount."""
    p = Problem.random(seed)
    smooth = float(torch.linalg.eigvalsh(p.hessian)[:, -1].max())
    eta, lam = share / (2 * smooth), 0.3
    method = FedSLR(eta_g=eta, lam=lam, components="s+s", personal_epochs=0)
    states = federate(method, p, 40, solve=True)

    def potential(x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
        gap = y - p.minimiser
        f = 0.5 * torch.einsum("ni,nij,nj->n", gap, p.hessian, gap)
        apart = x - y
        return (f + (gamma * apart).sum(1) + apart.square().sum(1) / (2 * eta)).mean() + lam * x.abs().sum()

    points = [
        (after.server.x, before.server.x - eta * (after.rows.gi - before.rows.gi), after.rows.gi)  # Eq. 5 gives y_i
        for before, after in itertools.pairwise(states)
    ]
    falls = []
    for (x0, y0, g0), (x1, y1, g1) in itertools.pairwise(points):
        bound = (smooth**2 * eta + smooth / 2 - 1 / (2 * eta)) * (y1 - y0).square().sum(1).mean()
        bound = bound - (x1 - x0).square().sum() / (2 * eta)
        falls.append(float(potential(x0, y0, g0) - potential(x1, y1, g1)))
        assert falls[-1] >= -float(bound) - 1e-12
        assert bound <= 1e-12
    assert falls[0] > 1e-4
