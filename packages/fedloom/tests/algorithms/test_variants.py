"""Every named variant, with given batches and cohorts, against loops written by hand from the cards; and the replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom import Engine, Evaluate, simulate
from fedloom.algorithms import (
    APFL,
    FIAELT,
    FLAME,
    SCAFFOLD,
    ADMMLpProj,
    Algorithm,
    Ditto,
    FedADMM,
    FedADMMComposite,
    FedAMP,
    FedAvg,
    FedDR,
    FedDyn,
    FedNova,
    FedPD,
    FedSLR,
    HeurFedAMP,
    LpProj,
    PFedMe,
)
from fedloom.choose import Uniform
from fedloom.data import load
from fedloom.data.partitions import QuantitySkew
from fedloom.engine.result import Result
from fedloom.errors import ConfigError, RunDirError
from fedloom.local import LocalSGD
from fedloom.seeds import generator
from fedloom.testing import check_algorithm

DATA = load("digits")
FEW = replace(DATA, x=DATA.x[:200], y=DATA.y[:200])
FED = QuantitySkew(clients=4, alpha=0.5)(FEW, 0).to(torch.device("cpu"), torch.float64)
N, D = 4, 650
INDEX = [FED.indices("train", i) for i in range(N)]
X = [FED.fetch(k).reshape(len(k), -1) for k in INDEX]
Y = [torch.nn.functional.one_hot(FED.data.y[k], 10).double() for k in INDEX]
SIZE = [len(x) for x in X]
COHORTS = [[0, 1, 3], [1, 2], [3, 2, 0], [0, 1, 2, 3]]
ROUNDS, LR, B, EPOCHS = len(COHORTS), 0.2, 12, 2
LOCAL: dict[str, Any] = {"lr": LR, "batch_size": B, "epochs": EPOCHS}
X0 = 0.1 * torch.randn(D, generator=generator(1), dtype=torch.float64)

QUICK = {"evaluate": Evaluate(every=ROUNDS, parts=("test",))}

Batches = list[list[int]]


def epoch(i: int, t: int, name: str, e: int) -> Batches:
    order = torch.randperm(SIZE[i], generator=generator(7, t, i, (name, e))).tolist()
    return [order[k : k + B] for k in range(0, SIZE[i], B)]


def orders(name: str) -> list[list[Batches]]:
    return [[[*chain(*(epoch(i, t, name, e) for e in range(EPOCHS)))] for t in range(ROUNDS)] for i in range(N)]


BATCHES, OTHERS = orders("first"), orders("second")


def grad(i: int, w: Tensor, batch: list[int]) -> Tensor:
    """Of softmax regression on some of a client's samples."""
    x, y = X[i][batch], Y[i][batch]
    error = (torch.softmax(x @ w[:640].view(10, 64).T + w[640:], 1) - y) / len(batch)
    return torch.cat([(error.T @ x).reshape(-1), error.sum(0)])


def full(i: int, w: Tensor) -> Tensor:
    return grad(i, w, list(range(SIZE[i])))


def sgd(i: int, w: Tensor, steps: Batches, more: Callable[[Tensor], Any] = lambda w: 0.0) -> Tensor:
    for batch in steps:
        w = w - LR * (grad(i, w, batch) + more(w))
    return w


def replayed(method: Algorithm, batches: Any = BATCHES, local: dict[str, Any] | None = None, **more: Any) -> Result:
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "engine": Engine(dtype="float64"),
        "cohorts": COHORTS,
        "client_weights": "uniform",
        **QUICK,
        **more,
    }
    return simulate(method, FED, local=LocalSGD(**{**LOCAL, **(local or {})}), initial=X0, batches=batches, **settings)


def shared(result: Result) -> Tensor:
    model = result.job.algorithm.global_model(result.state.server)
    assert model is not None
    return model


def rows(result: Result) -> Any:
    return result.job.clients.read(torch.arange(N))


def close(got: Tensor, want: Tensor | list[Tensor]) -> None:
    want = torch.stack(want) if isinstance(want, list) else want
    assert float((got - want).abs().max()) <= 1e-10 * max(1.0, float(want.abs().max()))


def mean(vectors: list[Tensor]) -> Tensor:
    return torch.stack(vectors).mean(0)


def zeros() -> list[Tensor]:
    return [torch.zeros(D, dtype=torch.float64) for _ in range(N)]


# ------------------------------------------------------------------------------------------ the replay by itself


def test_fedavg() -> None:
    x = X0
    for t, cohort in enumerate(COHORTS):
        x = mean([sgd(i, x, BATCHES[i][t]) for i in cohort])
    close(shared(replayed(FedAvg())), x)


def test_the_initial_model_by_name() -> None:
    tree = {"weight": X0[:640].view(10, 64), "bias": X0[640:]}
    names = replayed(FedAvg()).job.oracle.layout.names
    tree = dict(zip(names, tree.values(), strict=True))
    again = simulate(
        FedAvg(), FED, rounds=ROUNDS, engine=Engine(dtype="float64"), local=LocalSGD(**LOCAL), initial=tree,
        cohorts=[torch.tensor(c) for c in COHORTS], batches=dict(enumerate(BATCHES)), client_weights="uniform",
    )  # fmt: skip
    assert torch.equal(shared(again), shared(replayed(FedAvg())))


def test_batches_of_unequal_number_and_size() -> None:
    ragged = [[steps[: 1 + (i + t) % 3] for t, steps in enumerate(rounds)] for i, rounds in enumerate(BATCHES)]
    ragged[2][1] = [[0], [3, 1, 2, 0], []][:2]
    x = X0
    for t, cohort in enumerate(COHORTS):
        x = mean([sgd(i, x, ragged[i][t]) for i in cohort])
    close(shared(replayed(FedAvg(), ragged)), x)


def test_chunks_and_workers_change_nothing() -> None:
    engine = Engine(dtype="float64", clients_per_batch=1, workers=2)
    close(shared(replayed(FedAvg(), engine=engine)), shared(replayed(FedAvg())))


def test_a_projection() -> None:
    dim, lam, rho = 3, 1.0, 0.1
    p = torch.randn(dim, D, generator=generator(3), dtype=torch.float64) / 25
    theta, w, pi, u, x = [X0] * N, [p @ X0] * N, [torch.zeros(dim, dtype=torch.float64)] * N, [p @ X0] * N, p @ X0
    for t, cohort in enumerate(COHORTS):
        for i in cohort:
            theta[i] = sgd(i, theta[i], BATCHES[i][t], lambda v, i=i: lam * p.T @ (p @ v - w[i]))
            w[i] = (lam / N * p @ theta[i] + rho * x - pi[i]) / (lam / N + rho)
            pi[i] = pi[i] + rho * (w[i] - x)
            u[i] = w[i] + pi[i] / rho
        x = mean(u)
    close(rows(replayed(ADMMLpProj(dim=dim, lam=lam, rho=rho), projection=p)).theta, theta)


def test_a_folder_holds_one_replay(tmp_path: Any) -> None:
    first = replayed(FedAvg(), folder=tmp_path)
    assert torch.equal(shared(replayed(FedAvg(), folder=tmp_path)), shared(first))
    with pytest.raises(RunDirError, match=r"replay\.batches"):
        replayed(FedAvg(), OTHERS, folder=tmp_path)


def changed(client: int, round: int, steps: Any) -> list[list[Any]]:
    made: list[list[Any]] = [list(rounds) for rounds in BATCHES]
    made[client][round] = steps
    return made


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"initial": X0[1:]}, r"initial must be a vector \[650\]"),
        ({"initial": X0 * torch.nan}, "initial must be finite"),
        ({"initial": {"wait": X0}}, "initial: .*wait"),
        ({"initial": {"module.head.weight": X0}}, "did you mean 'head.weight'"),
        ({"initial": {"head.weight": X0, "head.bias": X0, "mean": X0}}, "no parameter 'mean'; remove buffers"),
        ({"initial": {"head.weight": "w.pt", "head.bias": X0}}, "'head.weight' must consist of numbers, got str"),
        ({"initial": torch.nn.Linear(64, 10)}, "or a state dict, got Linear"),
        ({"initial": "model.pt"}, "or a state dict, got str"),
        ({"cohorts": COHORTS[1:]}, r"cohorts: must have one entry for each of the 4 rounds, got 3"),
        ({"cohorts": [*COHORTS[1:], [0, 4]]}, "cohorts: round 4: client ids must be from 0 to 3, got 4"),
        ({"cohorts": [*COHORTS[1:], []]}, "cohorts: round 4: must be a nonempty list of client ids"),
        ({"cohorts": COHORTS, "sampler": Uniform(clients=2)}, "cohorts and sampler 'uniform'"),
        ({"batches": BATCHES[1:]}, "batches: must have one entry for each of the 4 clients, got 3"),
        ({"batches": [*BATCHES[:3], BATCHES[3][:2]]}, "batches: client 3: .* 4 rounds, got 2"),
        ({"batches": dict(list(enumerate(BATCHES))[1:])}, "batches: round 1 contains client 0, but no"),
        ({"batches": {9: BATCHES[0]}}, "batches: client ids must be from 0 to 3, got 9"),
        ({"batches": changed(1, 2, [[0], [SIZE[1]]])}, rf"round 3, step 2: positions must be from 0 to {SIZE[1] - 1}"),
        ({"batches": changed(1, 2, [[0], [-1]])}, "client 1, round 3, step 2: positions must be"),
        ({"batches": changed(1, 2, [[0.5]])}, "client 1, round 3, step 1: must be a nonempty list of positions"),
        ({"batches": changed(1, 2, [["a"]])}, "client 1, round 3, step 1: must be a nonempty list of positions"),
        ({"projection": torch.zeros(10, D)}, "projection has no effect with FedAvg"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(FedAvg(), FED, rounds=ROUNDS, local=LocalSGD(**LOCAL), **given)


@pytest.mark.parametrize(
    ("method", "says"), [(LpProj(dim=3), r"projection must have shape \[3, 650\]"), (LpProj(dim=None), "dim = None")]
)
def test_a_projection_that_does_not_fit(method: LpProj, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(method, FED, rounds=1, projection=torch.zeros(4, D))


def test_missing_batches_are_named_with_their_stream() -> None:
    with pytest.raises(ConfigError, match="client 1, round 1, stream 'phase II': the method requires"):
        replayed(FedSLR())


# ----------------------------------------------------------------------------------------------------- variants


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    ("centre", "dual"), [("own", "round"), ("received", "round"), ("received", "epoch"), ("own", "epoch")]
)
def test_flame(centre: Any, dual: Any, momentum: float) -> None:
    lam, rho, decay = 0.7, 0.1, 0.01
    theta, w, pi, u, x = [X0] * N, [X0] * N, zeros(), [X0] * N, X0
    for t, cohort in enumerate(COHORTS):
        for i in cohort:
            steps, a = BATCHES[i][t], lam / N
            per = len(steps) // EPOCHS
            z = x if centre == "received" else w[i]
            velocity = torch.zeros_like(x)
            for k, batch in enumerate(steps, 1):
                g = grad(i, theta[i], batch) + decay * theta[i] + lam * (theta[i] - z)
                velocity = momentum * velocity + g
                theta[i] = theta[i] - LR * velocity
                if k == len(steps) or (dual == "epoch" and k % per == 0):
                    w[i] = z = (a * theta[i] + rho * x - pi[i]) / (a + rho)
                    pi[i] = pi[i] + rho * (w[i] - x)
            u[i] = w[i] + pi[i] / rho
        x = mean(u)
    method = FLAME(lam=lam, rho=rho, centre=centre, dual=dual)
    result = replayed(method, local={"momentum": momentum, "weight_decay": decay})
    close(shared(result), x)
    close(rows(result).theta, theta)


@pytest.mark.parametrize("start", ["received", "kept"])
@pytest.mark.parametrize("moves", ["batch", "epoch", "round"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_pfedme(start: Any, moves: Any, momentum: float) -> None:
    lam, eta, inner = 3.0, 0.1, 2
    theta, x = [X0] * N, X0
    for t, cohort in enumerate(COHORTS):
        new = []
        for i in cohort:
            steps, w = BATCHES[i][t], x
            per = {"batch": 1, "epoch": len(steps) // EPOCHS, "round": len(steps)}[moves]
            v, velocity = theta[i] if start == "kept" else x, torch.zeros_like(x)
            for k, batch in enumerate(steps, 1):
                for _ in range(inner):
                    velocity = momentum * velocity + grad(i, v, batch) + lam * (v - w)
                    v = v - LR * velocity
                if k % per == 0:
                    w = w - eta * lam * (w - v)
            theta[i] = v
            new.append(w)
        x = mean(new)
    result = replayed(PFedMe(lam=lam, eta=eta, inner=inner, theta=start, moves=moves), local={"momentum": momentum})
    close(shared(result), x)
    close(rows(result).theta, theta)


@pytest.mark.parametrize("scaled", [False, True])
def test_feddyn(scaled: bool) -> None:
    alpha, x, history = 0.1, X0, zeros()
    for t, cohort in enumerate(COHORTS):
        new = []
        for i in cohort:
            a = alpha * sum(SIZE) / N / SIZE[i] if scaled else alpha
            w = sgd(i, x, BATCHES[i][t], lambda w, i=i, a=a, x=x: a * (w - x) + a * history[i])
            history[i] = history[i] + w - x
            new.append(w)
        x = mean(new) + mean(history)
    close(shared(replayed(FedDyn(alpha=alpha, scaled=scaled))), x)


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("scaled", [False, True])
def test_scaffold(scaled: bool, option: Any) -> None:
    x, c, ci = X0, torch.zeros_like(X0), zeros()
    for t, cohort in enumerate(COHORTS):
        new, change = [], []
        for i in cohort:
            s, steps = SIZE[i] * N / sum(SIZE) if scaled else 1.0, BATCHES[i][t]
            y = sgd(i, x, steps, lambda w, i=i, s=s, c=c: c / s - ci[i])
            fresh = full(i, x) if option == "I" else ci[i] - c + (x - y) / (LR * len(steps))
            change.append(s * (fresh - ci[i]))
            ci[i] = fresh
            new.append(y)
        x, c = mean(new), c + torch.stack(change).sum(0) / N
    close(shared(replayed(SCAFFOLD(scaled=scaled, option=option))), x)


@pytest.mark.parametrize("batches", ["same", "own"])
@pytest.mark.parametrize("branch", ["server", "own"])
def test_ditto(branch: Any, batches: Any) -> None:
    lam, x, v, own = 0.5, X0, [X0] * N, [X0] * N
    for t, cohort in enumerate(COHORTS):
        new = []
        for i in cohort:
            steps = BATCHES[i][t]
            own[i] = sgd(i, own[i], steps[:EPOCHS]) if branch == "own" else sgd(i, x, steps)
            new.append(own[i])
            mine = steps if batches == "same" else OTHERS[i][t]
            v[i] = sgd(i, v[i], mine, lambda w, x=x: lam * (w - x))
        x = mean(new)
    pairs = zip(BATCHES, OTHERS, strict=True)
    both = [[{"local": a, "personal branch": b} for a, b in zip(*pair, strict=True)] for pair in pairs]
    result = replayed(Ditto(lam=lam, batches=batches, branch=branch), both)
    close(shared(result), x)
    close(rows(result).v, v)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
def test_apfl(order: Any, adaptive: bool) -> None:
    decay, x, v, alpha = 0.05, X0, [X0] * N, [0.4] * N
    for t, cohort in enumerate(COHORTS):
        new = []
        for i in cohort:
            w = x
            for k, batch in enumerate(BATCHES[i][t]):
                moved, a = w - LR * (grad(i, w, batch) + decay * w), alpha[i]
                mix = a * v[i] + (1 - a) * (w if order == "before" else moved)
                g = grad(i, mix, batch) + (decay * mix if order == "before" else 0)
                if adaptive and k == 0:
                    slope = float((v[i] - (w if order == "before" else moved)) @ g)
                    alpha[i] = min(max(a - LR * slope, 0.0), 1.0)
                v[i] = v[i] - LR * (a * g + (decay * v[i] if order == "after" else 0))
                w = moved
            new.append(w)
        x = mean(new)
    result = replayed(APFL(alpha=0.4, adaptive=adaptive, mix=order), local={"weight_decay": decay})
    close(shared(result), x)
    close(rows(result).v, v)


@pytest.mark.parametrize("start", ["own", "server"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_fedamp(start: Any, decay: float) -> None:
    lam, alpha, sigma, w = 0.3, 0.2, 4.0, [X0] * N
    for t, cohort in enumerate(COHORTS):
        a = alpha * decay ** (t // 2)
        mixed = {}
        for i in cohort:
            others = {j: a / sigma * float(torch.exp(-(w[i] - w[j]).square().sum() / sigma)) for j in cohort if j != i}
            assert sum(others.values()) <= 1
            mixed[i] = (1 - sum(others.values())) * w[i] + sum(xi * w[j] for j, xi in others.items())
        for i in cohort:
            u = mixed[i]
            w[i] = sgd(i, w[i] if start == "own" else u, BATCHES[i][t], lambda v, u=u, a=a: lam / a * (v - u))
    every = {} if decay == 1 else {"every": 2}
    close(rows(replayed(FedAMP(lam=lam, alpha=alpha, sigma=sigma, start=start, decay=decay, **every))).w, w)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("mu", "gamma"), [(0.0, 1.0), (0.5, 1.0), (0.0, 0.9), (0.5, 0.9)])
def test_fednova(mu: float, gamma: float, momentum: float) -> None:
    """||a_i||_1 is found by following the weight of every gradient in the change."""
    x = X0
    for t, cohort in enumerate(COHORTS):
        changes, sizes = [], []
        for i in cohort:
            w, velocity, steps = x, torch.zeros_like(x), BATCHES[i][t]
            a, va = torch.zeros(len(steps), dtype=torch.float64), torch.zeros(len(steps), dtype=torch.float64)
            for k, batch in enumerate(steps):
                velocity = momentum * velocity + grad(i, w, batch) + mu * (w - x)
                va = momentum * va - LR * mu * a
                va[k] += 1
                w, a = w - LR * gamma**k * velocity, a + gamma**k * va
            changes.append((w - x) / a.sum())
            sizes.append(float(a.sum()))
        x = x + sum(sizes) / len(sizes) * mean(changes)
    close(shared(replayed(FedNova(mu=mu, gamma=gamma), local={"momentum": momentum})), x)


@pytest.mark.parametrize("decayed", ["model", "component"])
def test_fedslr(decayed: Any) -> None:
    eta, mu, decay, x, gi, p = 10.0, 0.01, 0.05, X0, zeros(), zeros()
    for t, cohort in enumerate(COHORTS):
        new = []
        for i in cohort:
            w = sgd(i, x, BATCHES[i][t], lambda w, i=i, x=x: decay * w + (w - x) / eta - gi[i])
            gi[i] = gi[i] + (x - w) / eta
            new.append(w)
            for batch in OTHERS[i][t]:
                g = grad(i, x + p[i], batch) + decay * (p[i] if decayed == "component" else x + p[i])
                p[i] = p[i] - LR * g
                p[i] = p[i].sign() * (p[i].abs() - LR * mu).clamp(min=0)
        x = mean(new) - eta * mean(gi)
    pairs = zip(BATCHES, OTHERS, strict=True)
    both = [[{"local": a, "phase II": b} for a, b in zip(*pair, strict=True)] for pair in pairs]
    method = FedSLR(eta_g=eta, lam=0.0, mu=mu, personal_epochs=EPOCHS, personal_decay=decayed)
    result = replayed(method, both, local={"weight_decay": decay})
    close(shared(result), x)
    close(rows(result).p, p)


@pytest.mark.parametrize("start", ["own", "server"])
def test_where_local_work_starts(start: Any) -> None:
    own = start == "own"
    eta, rho = 2.0, 0.5
    w, y, u, x = [X0] * N, zeros(), [X0] * N, X0
    for t, cohort in enumerate(COHORTS):
        for i in cohort:
            w[i] = sgd(i, w[i] if own else x, BATCHES[i][t], lambda v, i=i, x=x: (v - x) / eta + y[i])
            y[i] = y[i] + (w[i] - x) / eta
            u[i] = w[i] + eta * y[i]
        x = mean(u)
    close(shared(replayed(FedPD(eta=eta, start=start))), x)
    close(shared(replayed(FedADMMComposite(eta=eta, start=start))), x)
    w, y, u, x = [X0] * N, [X0] * N, [X0] * N, X0
    for t, cohort in enumerate(COHORTS):
        for i in cohort:
            y[i] = y[i] + 1.5 * (x - w[i])
            w[i] = sgd(i, w[i] if own else x, BATCHES[i][t], lambda v, i=i: (v - y[i]) / eta)
            u[i] = 2 * w[i] - y[i]
        x = mean(u)
    close(shared(replayed(FedDR(eta=eta, alpha=1.5, start=start))), x)
    w, y, x = [X0] * N, zeros(), X0
    for t, cohort in enumerate(COHORTS):
        moves = []
        for i in cohort:
            before = w[i] + y[i] / rho
            w[i] = sgd(i, w[i] if own else x, BATCHES[i][t], lambda v, i=i, x=x: y[i] + rho * (v - x))
            y[i] = y[i] + rho * (w[i] - x)
            moves.append(w[i] + y[i] / rho - before)
        x = x + mean(moves)
    close(shared(replayed(FedADMM(rho=rho, server_lr=1.0, start=start))), x)


@pytest.mark.parametrize("start", ["own", "server"])
def test_where_fiaelt_starts(start: Any) -> None:
    beta, tau, lr = 4.0, 0.5, 0.1
    local, z, y = [X0] * N, zeros(), X0
    xbar, zbar = X0, torch.zeros_like(X0)
    for cohort in COHORTS:
        dx, dz = torch.zeros_like(X0), torch.zeros_like(X0)
        for i in cohort:
            new = local[i] if start == "own" else y
            for _ in range(3):
                new = new - lr * (full(i, new) + z[i] + beta * (new - y))
            dx, dz = dx + new - local[i], dz + tau * beta * (new - y)
            local[i], z[i] = new, z[i] + tau * beta * (new - y)
        xbar, zbar = xbar + dx / N, zbar + dz / N
        y = xbar + zbar / beta
    method = FIAELT(beta=beta, smooth=1.0, tau=tau, r=0.0, solver="gd", iterations=3, lr=lr, start=start)
    close(shared(replayed(method)), y)


# ----------------------------------------------------------------------------------- limits, laws, contradictions


def same(a: Algorithm, b: Algorithm, pick: Callable[[Result], Tensor] = shared, **local: Any) -> None:
    close(pick(replayed(a, local=local)), pick(replayed(b, local=local)))


def test_limits() -> None:
    """With one epoch, or one step, variants fall together."""
    one = [[steps[: len(steps) // EPOCHS] for steps in rounds] for rounds in BATCHES]
    for a, b in (
        (FLAME(centre="received", dual="epoch"), FLAME(centre="received")),
        (PFedMe(moves="epoch"), PFedMe(moves="round")),
    ):
        close(shared(replayed(a, one, {"epochs": 1})), shared(replayed(b, one, {"epochs": 1})))
    single = [[steps[:1] for steps in rounds] for rounds in BATCHES]
    close(shared(replayed(PFedMe(moves="round"), single)), shared(replayed(PFedMe(), single)))
    close(shared(replayed(FedNova(gamma=0.5), single)), shared(replayed(FedNova(), single)))
    same(FedSLR(personal_epochs=0, personal_decay="component"), FedSLR(personal_epochs=0), weight_decay=0.01)
    same(APFL(alpha=0.0, mix="after"), FedAvg())
    same(FedAMP(decay=0.5, every=ROUNDS), FedAMP(), lambda r: rows(r).w)


def test_ditto_with_its_published_branch_has_a_mean_of_local_runs() -> None:
    v = list[Tensor]([X0] * N)
    everyone = [[*range(N)]] * ROUNDS
    for t in range(ROUNDS):
        v = [sgd(i, v[i], BATCHES[i][t][:EPOCHS]) for i in range(N)]
    close(shared(replayed(Ditto(branch="own"), cohorts=everyone)), mean(v))


VARIANTS = [
    FLAME(centre="received"),
    FLAME(centre="received", dual="epoch"),
    PFedMe(theta="kept", moves="epoch"),
    PFedMe(moves="round"),
    FedDyn(scaled=True),
    SCAFFOLD(scaled=True),
    SCAFFOLD(scaled=True, option="I"),
    Ditto(batches="own"),
    Ditto(branch="own"),
    APFL(mix="after", adaptive=True),
    FedAMP(start="server", alpha=0.1, decay=0.5, every=1),
    HeurFedAMP(start="server"),
    FedNova(mu=0.1, gamma=0.9),
    FedPD(start="server", skip=0.5),
    FedDR(start="server"),
    FedADMMComposite(start="server"),
    FedADMM(start="own"),
    FIAELT(start="server", beta=5.0, smooth=1.0, inner=5, iterations=3),  # differences of a network measure L by dtype
]


@pytest.mark.parametrize("method", VARIANTS, ids=repr)
def test_laws(method: Algorithm) -> None:
    counts_iterations = isinstance(method, FIAELT)  # of which the model does not tell
    check_algorithm(method, without=("encoding",) if counts_iterations else ())


def test_laws_of_fedslr() -> None:
    check_algorithm(FedSLR(personal_decay="component"), without={"translation": "its penalties know the origin"})


@pytest.mark.parametrize(
    ("make", "both"),
    [
        (lambda: FLAME(dual="epoch", eps0=1.0), ("dual", "eps0")),
        (lambda: FedAMP(every=10), ("every", "decay")),
    ],
)
def test_a_contradiction_names_both(make: Callable[[], Any], both: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{both[0]}.*{both[1]}"):
        make()
