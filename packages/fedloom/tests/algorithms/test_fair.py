"""q-FFL, AFL, GIFAIR-FL and the presets of samplers and weighers: their equations and limits, and runs on digits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fair_optima import losses
from short_runs import PARTIAL, SEEDS, SGD, equal, models, run
from torch import Tensor

from fedloom.algorithms import AFL, GIFAIR, QFFL, REGISTRY, Delta, FedAvg, Model, PresetMethod
from fedloom.algorithms.afl import Up as AflUp
from fedloom.choose import Clustered, FairFedWeigher, PowerOfChoice, Sampler, SizeWeighted, Uniform, UniformWeigher
from fedloom.data import load
from fedloom.data.federation import Federation as Data
from fedloom.data.partitions import Dirichlet
from fedloom.engine.result import Result
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.simulate import simulate
from fedloom.errors import Refused
from fedloom.local import Ctx, LocalSGD, Nothing, Work
from fedloom.testing import Problem
from fedloom.testing.federate import ReferenceFederation

FULL = LocalSGD(lr=0.1, steps=1, batch_size="full")


def ends(p: Problem, x: Tensor, local: LocalSGD = SGD) -> Tensor:
    """Where every client's local descent from x leads, ``[n, d]``."""
    return p.descent(x, torch.tensor([[local.batches(size)] for size in p.sizes.tolist()]), local.lr)


# --- q-FFL


@SEEDS
@pytest.mark.parametrize("lipschitz", [None, 3.0])
def test_q_0_is_fedavg(seed: int, lipschitz: float | None) -> None:
    p = Problem.random(seed)
    want = models(run(FedAvg(), p, cohorts=PARTIAL))
    equal(models(run(QFFL(q=0, lipschitz=lipschitz), p, cohorts=PARTIAL)), want)


@SEEDS
@pytest.mark.parametrize(("q", "lipschitz"), [(0.5, "step"), (1.0, "step"), (2.0, 7.0)])
def test_q_fedavg_step_by_the_papers_sums(seed: int, q: float, lipschitz: Any) -> None:
    p = Problem.random(seed)
    length = 1 / 0.1 if lipschitz == "step" else lipschitz
    (after,) = run(QFFL(q=q, lipschitz=lipschitz), p, 1, noise=0.0, cohorts=[(1, 3, 4)])[1:]
    x, w, f = p.x0.numpy(), ends(p, p.x0).numpy(), losses(p, p.x0).tolist()
    deltas, hs = [], []
    for k in (1, 3, 4):
        pseudo = length * (x - w[k])
        deltas.append(f[k] ** q * pseudo)
        hs.append(q * f[k] ** (q - 1) * (pseudo @ pseudo) + length * f[k] ** q)
    equal(after.server.x, torch.tensor(x - np.sum(deltas, 0) / np.sum(hs)))


def test_l_follows_the_step_size_of_the_round() -> None:
    p, local = Problem.random(0), LocalSGD(lr=0.2, schedule="exponential", decay=0.5, steps=1, batch_size=2)
    first, second = run(QFFL(q=1, lipschitz="step"), p, 2, local)[1:]
    fixed = run(QFFL(q=1, lipschitz=10.0), p, 1, local, start=first)[-1]
    equal(second.server.x, fixed.server.x)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0])
def test_a_client_without_loss_and_steps_answers_finitely(q: float) -> None:
    p = Problem.random(0)
    fed = ReferenceFederation(p.oracle(), p.alpha, SGD)
    down = QFFL().down(QFFL().init(p.minimiser[1], fed.ctx(0, [1]))[0], None, fed.ctx(1, [1]))
    for steps in (0, 2):
        up, _ = QFFL(q=q, lipschitz="step").client(down, QFFL().init(p.x0, fed.ctx(0, [1]))[1], fed.work(1, [1], steps))
        assert bool(up.dw.isfinite().all())
        assert bool(up.h.isfinite().all())


def test_a_larger_q_makes_losses_more_even() -> None:
    p = Problem.random(3)
    spreads = []
    for q in (0.0, 1.0, 3.0):
        x = run(QFFL(q=q), p, 150, LocalSGD(lr=0.5, steps=1), noise=0.0)[-1].server.x
        spreads.append(float(losses(p, x).var()))
    assert spreads[0] > 1.05 * spreads[1] > 1.05**2 * spreads[2]


# --- AFL


@SEEDS
def test_fixed_weights_are_fedavg(seed: int) -> None:
    p = Problem.random(seed)
    states = run(AFL(lambda_lr=0), p, cohorts=PARTIAL)
    equal(models(states), models(run(FedAvg(), p, cohorts=PARTIAL)))
    for state in states:
        equal(state.server.lam, torch.full((p.n,), 0.2, dtype=torch.float64))


@SEEDS
def test_one_full_step_of_everyone_is_stochastic_afl(seed: int) -> None:
    p = Problem.random(seed)
    states = run(AFL(lambda_lr=0.05), p, 8, FULL, noise=0.0)
    x, lam = p.x0, torch.full((p.n,), 0.2, dtype=torch.float64)
    for state in states[1:]:
        raised = lam + 0.05 * losses(p, x)
        x = x - 0.1 * lam @ p.gradient(x)
        lam = nearest_on_simplex(raised)
        equal(state.server.x, x)
        equal(state.server.lam, lam)
    assert bool((lam == 0).any())


@SEEDS
def test_the_adaptive_step_is_a_radius_over_the_norm_of_all_gradients_so_far(seed: int) -> None:
    p = Problem.random(seed)
    states = run(AFL(), p, cohorts=PARTIAL, noise=0.0)
    lam, squares = torch.full((p.n,), 0.2, dtype=torch.float64), 0.0
    for before, after, cohort in zip(states[:-1], states[1:], PARTIAL, strict=True):
        told = torch.zeros(p.n, dtype=torch.float64)
        told[list(cohort)] = losses(p, before.server.x)[list(cohort)] * p.n / len(cohort)
        squares += float(told.square().sum())
        lam = nearest_on_simplex(lam + told / (p.n * squares) ** 0.5)
        equal(after.server.lam, lam)


@SEEDS
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("factor", [None, "0.5x"])
def test_losses_in_other_units_give_the_same_mixtures(seed: int, scale: float, factor: str | None) -> None:
    """Targets times c are models times c and losses times c^2."""
    p = Problem.random(seed)
    other = replace(p, minimiser=scale * p.minimiser, x0=scale * p.x0)
    states, others = (run(AFL(lambda_lr=factor), q, 5, noise=0.0, cohorts=PARTIAL) for q in (p, other))
    for a, b in zip(states, others, strict=True):
        equal(b.server.lam, a.server.lam)
        equal(b.server.x / scale, a.server.x)
    assert float((states[-1].server.lam - 0.2).abs().max()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_losses_of_any_size_leave_a_mixture(dtype: torch.dtype, scale: float) -> None:
    p = Problem.random(0, dtype=dtype)
    ctx = ReferenceFederation(p.oracle(), p.alpha, SGD).ctx(1, range(p.n))
    method = AFL().derive_options(ctx)
    server = method.init(p.x0, ctx)[0]
    loss = scale * torch.arange(5, dtype=dtype)[:, None]
    up = AflUp(torch.zeros(p.d, dtype=dtype), torch.ones(1, dtype=dtype), loss)
    for _ in range(3):
        server = method.server(server, up, ctx)
    assert float(server.lam.sum()) == pytest.approx(1, abs=1e-6)
    assert server.lam.dtype == dtype
    if scale:
        assert float(server.lam[-1]) > 0.5
    else:
        equal(server.lam, p.alpha[:, 0])


@pytest.mark.parametrize("seed", range(3))
def test_the_adaptive_step_has_its_regret(seed: int) -> None:
    """At most (D^2/(2 eta) + eta) times the root of the sum of squared norms, with D^2 = 2 and eta the radius."""
    g, p = torch.Generator().manual_seed(seed), Problem.random(seed)
    ctx = ReferenceFederation(p.oracle(), p.alpha, SGD).ctx(1, range(p.n))
    method = AFL().derive_options(ctx)
    server, total, got, squares = method.init(p.x0, ctx)[0], torch.zeros(p.n, dtype=torch.float64), 0.0, 0.0
    for _ in range(200):
        loss = torch.rand(p.n, generator=g, dtype=torch.float64) * torch.rand(1, generator=g, dtype=torch.float64).exp()
        total, got, squares = total + loss, got + float(server.lam @ loss), squares + float(loss.square().sum())
        server = method.server(server, AflUp(torch.zeros(p.d), torch.ones(1), loss[:, None]), ctx)
        eta = p.n**-0.5
        assert float(total.max()) - got <= (1 / eta + eta) * squares**0.5


def nearest_on_simplex(v: Tensor) -> Tensor:
    """max(v - t, 0) with the t, by bisection, for which it sums to 1."""
    low, high = float(v.min()) - 1, float(v.max())
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if float((v - t).clamp(min=0).sum()) > 1 else (low, t)
    return (v - low).clamp(min=0)


@SEEDS
def test_a_cohort_counts_by_its_mixture_weights_and_tells_unbiased_losses(seed: int) -> None:
    p = Problem.random(seed)
    start = run(AFL(lambda_lr=0.01), p, 1, noise=0.0)[-1]
    x, lam, cohort = start.server.x, start.server.lam, [0, 2, 3]
    (after,) = run(AFL(lambda_lr=0.003), p, 1, noise=0.0, start=start, cohorts=lambda t: cohort)[1:]
    share = (lam / lam[cohort].sum())[cohort]
    equal(after.server.x, x + share @ (ends(p, x) - x)[cohort])
    told = torch.zeros(p.n, dtype=torch.float64)
    told[cohort] = losses(p, x)[cohort] * 5 / 3
    equal(after.server.lam, nearest_on_simplex(lam + 0.003 * told))
    everyone = [list(c) for c in itertools.combinations(range(p.n), 3)]
    mean = sum(torch.zeros(p.n).index_fill(0, torch.tensor(c), 5 / 3) for c in everyone) / len(everyone)
    equal(mean, torch.ones(p.n), 1e-6)


def test_a_cohort_without_weight_leaves_the_model() -> None:
    p = Problem.random(3)
    start = run(AFL(), p, 4, FULL, noise=0.0)[-1]
    idle = [i for i in range(p.n) if float(start.server.lam[i]) == 0]
    assert idle
    (after,) = run(AFL(), p, 1, FULL, noise=0.0, start=start, cohorts=lambda t: idle)[1:]
    equal(after.server.x, start.server.x, 0)


# --- GIFAIR-FL


@SEEDS
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_no_penalty_is_fedavg(seed: int, momentum: float) -> None:
    p = Problem.random(seed)
    local = LocalSGD(lr=0.1, batch_size=2, momentum=momentum, weight_decay=0.01, clip=1.0, epochs=2)
    got = models(run(GIFAIR(lam=0), p, local=local, cohorts=PARTIAL))
    equal(got, models(run(FedAvg(), p, local=local, cohorts=PARTIAL)))


def ctx_of(p: Problem, groups: list[int] | None, ids: list[int]) -> Ctx:
    found = ReferenceFederation(p.oracle(), p.alpha, SGD).ctx(3, ids)
    return found._replace(groups=None if groups is None else torch.tensor(groups))


@SEEDS
@pytest.mark.parametrize("groups", [None, [0, 1, 0, 2, 1], [1, 1, 0, 0, 0]])
@pytest.mark.parametrize("seen", [[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("told", [[3.0, 1.0, 0.5, 4.0, 2.0], [3.0, 1.0, 1.0, 3.0, 1.0]])
def test_scales_are_by_the_papers_sums(seed: int, groups: list[int] | None, seen: list[int], told: list[float]) -> None:
    p = Problem.random(seed, weights="samples")
    method = GIFAIR(lam=0.007, level="individual" if groups is None else "group")
    ctx = ctx_of(p, groups, [0, 3, 4])
    group = list(range(5)) if groups is None else groups
    server = method.init(p.x0, ctx)[0]._replace(
        loss=torch.tensor(told, dtype=torch.float64), seen=torch.tensor(seen, dtype=torch.float64)
    )
    mean = {}
    for a in set(group):
        values = [told[k] for k in range(5) if group[k] == a and seen[k]]
        if values:
            mean[a] = sum(values) / len(values)
    want = []
    for k in ctx.ids.tolist():
        mine = mean.get(group[k])
        r = 0 if mine is None else sum(np.sign(mine - other) for other in mean.values())
        want.append(1 + 0.007 * r / (float(p.alpha[k]) * group.count(group[k])))
    equal(method.down(server, None, ctx).scale[:, 0], torch.tensor(want, dtype=torch.float64))


def test_ranks_sum_to_zero_and_go_from_end_to_end() -> None:
    p = Problem.random(0)
    ctx = ctx_of(p, None, [0, 1, 2, 3, 4])
    told, seen = torch.tensor([3.0, 1, 0, 4, 2], dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    scale = GIFAIR(lam=0.01).down(GIFAIR().init(p.x0, ctx)[0]._replace(loss=told, seen=seen), None, ctx).scale
    equal((scale[:, 0] - 1) / 0.01 * 0.2, torch.tensor([2.0, -2, -4, 4, 0], dtype=torch.float64))


@SEEDS
def test_a_factor_of_the_gradient_is_a_factor_of_the_step_size(seed: int) -> None:
    p = Problem.random(seed)
    fed = ReferenceFederation(p.oracle(noise=0.5), p.alpha, SGD)
    method = GIFAIR().derive_options(fed.ctx(0, [0]))
    server = method.init(p.x0, fed.ctx(0, [0]))[0]
    down = method.down(server, None, fed.ctx(1, [2]))
    up, _ = GIFAIR().client(down._replace(scale=torch.tensor([[1.7]], dtype=torch.float64)), server, fed.work(1, [2]))
    faster = ReferenceFederation(p.oracle(noise=0.5), p.alpha, LocalSGD(lr=0.17, batch_size=2))
    want, _ = FedAvg().client(down, server, faster.work(1, [2]))
    equal(up.dw, want.dw)
    equal(up.loss, fed.work(1, [2]).loss(p.x0))


@SEEDS
def test_last_known_losses_are_kept_at_the_server(seed: int) -> None:
    p = Problem.random(seed)
    states = run(GIFAIR(), p, cohorts=PARTIAL, noise=0.0)
    loss, seen = torch.zeros(p.n, dtype=torch.float64), torch.zeros(p.n, dtype=torch.float64)
    for before, after, cohort in zip(states[:-1], states[1:], PARTIAL, strict=True):
        loss[list(cohort)], seen[list(cohort)] = losses(p, before.server.x)[list(cohort)], 1.0
        equal(after.server.loss, loss)
        equal(after.server.seen, seen, 0)


@SEEDS
@pytest.mark.parametrize("groups", [None, [0, 1, 0, 2, 1], [1, 1, 0, 0, 0]])
def test_the_penalty_is_below_its_bound_and_half_of_it_by_default(seed: int, groups: list[int] | None) -> None:
    p = Problem.random(seed, weights="samples")
    ctx = ctx_of(p, groups, list(range(5)))
    group = list(range(5)) if groups is None else groups
    level = "individual" if groups is None else "group"
    bound = min(float(p.alpha[k]) * group.count(group[k]) for k in range(5)) / (len(set(group)) - 1)
    assert GIFAIR(level=level, lam=0.999 * bound).check(p.layout, ctx) == []
    with pytest.raises(Refused, match="must be below"):
        GIFAIR(level=level, lam=bound).check(p.layout, ctx)
    assert GIFAIR(level=level).check(p.layout, ctx) == []
    told, seen = torch.arange(5.0, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    server = GIFAIR().init(p.x0, ctx)[0]._replace(loss=told, seen=seen)
    half = GIFAIR(level=level, lam=bound / 2).down(server, None, ctx)
    equal(GIFAIR(level=level).derive_options(ctx).down(server, None, ctx).scale, half.scale)
    assert float(half.scale.min()) >= 0.5


def test_groups_are_needed_for_fairness_over_groups_and_one_group_is_fedavg() -> None:
    p = Problem.random(0)
    with pytest.raises(Refused, match="needs clients in groups"):
        GIFAIR(level="group").check(p.layout, ctx_of(p, None, [0]))
    assert GIFAIR().check(p.layout, ctx_of(p, None, [0])) == []
    told = torch.arange(5.0, dtype=torch.float64)
    known = GIFAIR().init(p.x0, ctx_of(p, None, [0]))[0]._replace(loss=told, seen=torch.ones_like(told))
    method = GIFAIR().derive_options(ctx_of(p, None, [0]))
    by_itself = [method.down(known, None, ctx_of(p, groups, [0, 3])).scale for groups in (None, [0, 1, 0, 2, 1])]
    equal(by_itself[0], by_itself[1], 0)
    alone = ctx_of(p, [0] * 5, [0, 1])
    server = GIFAIR().init(p.x0, alone)[0]._replace(seen=torch.ones(5, dtype=torch.float64))
    equal(
        GIFAIR(level="group").derive_options(alone).down(server, None, alone).scale,
        torch.ones(2, 1, dtype=torch.float64),
    )
    assert GIFAIR(level="group").check(p.layout, alone) == []


# --- presets, and runs on digits


def test_presets_are_fedavg_with_what_their_papers_choose() -> None:
    assert REGISTRY["clustered-sampling"](clients=3) == PresetMethod(FedAvg(), sampler=Clustered(clients=3))
    assert REGISTRY["clustered-sampling"](by="size") == PresetMethod(FedAvg(), sampler=Clustered(by="size"))
    assert REGISTRY["power-of-choice"](estimate="last", candidates=9) == PresetMethod(
        FedAvg(), sampler=PowerOfChoice(estimate="last", candidates=9)
    )
    assert REGISTRY["fairfed"](beta=0.3) == PresetMethod(FedAvg(), weigher=FairFedWeigher(beta=0.3))


@pytest.fixture(scope="module")
def digits() -> Data:
    return Dirichlet(clients=12, alpha=0.5, min_size=4)(load("digits"), seed=0)


def simulated(fed: Data, method: Any, **changes: Any) -> Result:
    settings: dict[str, Any] = {
        "rounds": 3,
        "local": LocalSGD(lr=0.05, batch_size=8),
        "sampler": Uniform(fraction=0.4),
        "evaluate": Evaluate(every=3),
        **changes,
    }
    return simulate(method, fed, "softmax", **settings)


METHODS: dict[str, Callable[[], Any]] = {
    **{
        name: REGISTRY[name]
        for name in ("q-ffl", "afl", "gifair-fl", "clustered-sampling", "power-of-choice", "fairfed")
    },
    "cluster1": lambda: REGISTRY["clustered-sampling"](by="size"),
    "cpow-d": lambda: REGISTRY["power-of-choice"](estimate="batch"),
    "rpow-d": lambda: REGISTRY["power-of-choice"](estimate="last"),
}


@pytest.mark.parametrize("name", METHODS)
def test_digits_with_one_and_two_workers(digits: Data, name: str) -> None:
    one, two = (simulated(digits, METHODS[name](), engine=Engine(workers=w, clients_per_batch=2)) for w in (1, 2))
    assert torch.equal(one.models.rows("global"), two.models.rows("global"))
    assert one.state.totals.tolist() == two.state.totals.tolist()
    assert one.state.tensors().keys() == two.state.tensors().keys()
    for group in ("sampler", "weigher", "server"):
        for a, b in zip(getattr(one.state, group), getattr(two.state, group), strict=True):
            assert torch.equal(a, b)
    start = simulated(digits, METHODS[name](), rounds=1, local=LocalSGD(lr=1e-9, batch_size=8))
    assert float(one.final("global", "loss").nanmean()) < float(start.final("global", "loss").nanmean())
    assert len(one.state.cohort) <= 5


def test_a_preset_takes_the_size_of_the_runs_cohorts(digits: Data) -> None:
    for sampler, size in ((Uniform(clients=3), 3), (Uniform(fraction=0.5), 6), (None, 12)):
        assert simulated(digits, REGISTRY["power-of-choice"](), sampler=sampler).job.setting.sampler.size(12) == size  # type: ignore[attr-defined]
    made = simulated(digits, REGISTRY["power-of-choice"](clients=2), sampler=Uniform(clients=3))
    assert made.job.setting.sampler == PowerOfChoice(clients=2)


class Thrice(Sampler):
    """Client 4 three times, client 7 once."""

    kind: ClassVar[str] = "thrice"

    def apply(self, state: Any, info: Any, ctx: Ctx) -> tuple[Tensor, Any]:
        return torch.tensor([4, 4, 4, 7]), state


class Probing(UniformWeigher):
    """Uniform, but after an answer of the client."""

    probes: ClassVar[bool] = True

    def probe(self, down: Any, model: Tensor, work: Any) -> Tensor:
        return model[:, :1]


@pytest.mark.parametrize("weigher", [UniformWeigher(), Probing()])
def test_a_client_drawn_three_times_trains_once_and_counts_three_times(digits: Data, weigher: UniformWeigher) -> None:
    options: dict[str, Any] = {"rounds": 1, "engine": Engine(dtype="float64")}
    got = simulated(digits, FedAvg(), sampler=Thrice(), aggregation_weights=weigher, **options)
    ctx = got.job.ctx(1, torch.tensor([4, 7]))

    class Only(Sampler):
        kind: ClassVar[str] = "only"
        who: int

        def apply(self, state: Any, info: Any, ctx: Ctx) -> tuple[Tensor, Any]:
            return torch.tensor([self.who]), state

    four, seven = (simulated(digits, FedAvg(), sampler=Only(who=k), **options).models.rows("global") for k in (4, 7))
    torch.testing.assert_close(got.models.rows("global"), 0.75 * four + 0.25 * seven, rtol=1e-10, atol=1e-12)
    assert got.state.cohort.sort().values.tolist() == ctx.ids.tolist()
    assert int(got.state.totals[0]) == int(ctx.sizes[ctx.ids].sum())


def test_the_clustered_server_remembers_what_clients_changed(digits: Data) -> None:
    result = simulated(digits, REGISTRY["clustered-sampling"](), rounds=1, engine=Engine(dtype="float64"))
    g, cohort = result.state.sampler.g, result.state.cohort
    assert g.count_nonzero(1).bool().nonzero()[:, 0].tolist() == cohort.sort().values.tolist()
    still = LocalSGD(lr=1e-12, batch_size=8)
    start = simulated(digits, FedAvg(), rounds=1, local=still, engine=Engine(dtype="float64"))
    sampler, job = result.job.setting.sampler, result.job
    times = torch.bincount(sampler.apply(sampler.init(job.ctx(0)), None, job.ctx(1))[0])
    mean = (times[cohort, None] * g[cohort].double()).sum(0) / times.sum()
    moved = result.models.rows("global") - start.models.rows("global")
    torch.testing.assert_close(moved, mean, rtol=1e-5, atol=1e-6)


class Broken(FedAvg):
    """FedAvg whose client 3 uploads something that is not finite."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        up, rows = super().client(down, rows, work)
        return Delta(torch.where(work.ids[:, None] == 3, torch.nan, up.dw)), rows


def test_a_sampler_learns_from_accepted_clients_only(digits: Data) -> None:
    options: dict[str, Any] = {"rounds": 1, "engine": Engine(dtype="float64", clients_per_batch=2)}
    clustered, remembering = Clustered(masses="uniform"), PowerOfChoice(estimate="last")
    whole, part = (simulated(digits, m, sampler=clustered, **options).state for m in (FedAvg(), Broken()))
    others = torch.arange(12) != 3
    assert torch.equal(part.sampler.g[others], whole.sampler.g[others])
    assert bool(whole.sampler.g.any(1).all())
    assert not bool(part.sampler.g[3].any())
    whole, part = (simulated(digits, m, sampler=remembering, **options).state for m in (FedAvg(), Broken()))
    assert torch.equal(part.sampler.loss[others], whole.sampler.loss[others])
    assert bool(whole.sampler.loss.isfinite().all())
    assert float(part.sampler.loss[3]) == float("inf")


def test_asking_and_reporting_are_counted(digits: Data) -> None:
    """Candidates cost a download, a loss and a pass over their data; what rpow-d remembers, one loss and one batch."""
    plain = simulated(digits, FedAvg(), rounds=1, sampler=SizeWeighted(clients=3, replacement=False))
    asked = simulated(digits, REGISTRY["power-of-choice"](clients=3, candidates=5), rounds=1)
    told = simulated(digits, REGISTRY["power-of-choice"](clients=3, candidates=3, estimate="last"), rounds=1)
    columns = ("samples_backward", "samples_forward", "steps", "up", "down", "up_paper", "down_paper")
    counts = [dict(zip(columns, r.state.totals.tolist(), strict=False)) for r in (plain, asked, told)]
    d = digits.data.x[0].numel() * 10 + 10
    candidates = PowerOfChoice(clients=3, candidates=5).query(None, asked.job.ctx(1))
    assert counts[1]["samples_forward"] == int(digits.sizes("train")[candidates].sum())
    assert counts[1]["up_paper"] == counts[0]["up_paper"] + 5 * 4
    assert counts[1]["down_paper"] == counts[0]["down_paper"] + 5 * 4 * d
    assert counts[2]["up_paper"] == counts[0]["up_paper"] + 3 * 4
    assert counts[2]["down_paper"] == counts[0]["down_paper"]
    assert 0 < counts[2]["samples_forward"] <= 3 * 8
