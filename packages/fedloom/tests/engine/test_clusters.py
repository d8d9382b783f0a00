"""Shares by recovered clusters: those of the planted groups, in every method that has shares, and what they cost."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from fedloom.algorithms import FIAELT, FLAME, SCAFFOLD, Algorithm, FedADMM, FedAvg, FedDR, FedDyn, FedSLR
from fedloom.choose import EquitableWeigher
from fedloom.choose.shares import equal_clusters
from fedloom.data.federation import Federation
from fedloom.data.partitions import Natural
from fedloom.data.sources import Csv
from fedloom.engine.setting import Setting
from fedloom.engine.setup import check
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, Refused, RunStopped
from fedloom.lab.experiment import Plan, read
from fedloom.local import LocalSGD
from fedloom.models import MLP
from fedloom.testing import Problem
from fedloom.testing.federate import ReferenceFederation as Clients

GROUPS = torch.tensor([0, 0, 0, 0, 1, 1])


@pytest.fixture(scope="module")
def fed() -> Federation:
    """Four clients of one group and two of another, whose samples are elsewhere."""
    clients = []
    for k, group in enumerate(GROUPS.tolist()):
        x = 0.2 * torch.randn(16, 6, generator=Generator().manual_seed(k)) + torch.eye(6)[group] * 4
        y = (x[:, 2] > 0).long()
        clients.append(((x[:12], y[:12]), (x[12:], y[12:])))
    return replace(Federation.create(clients), groups=GROUPS)


def run(fed: Federation, method: Algorithm, weights: Any, **choices: Any) -> Any:
    local = LocalSGD(lr=0.1, steps=2, batch_size=4)
    return simulate(
        method, fed, MLP(hidden=(5,)), rounds=2, local=local, client_weights=weights, evaluate={"every": 2}, **choices
    )


@pytest.mark.parametrize("method", [FLAME(), FedSLR(), FIAELT(), FedDR(), FedAvg()], ids=lambda m: type(m).__name__)
def test_recovered_clusters_have_the_shares_of_planted_groups(fed: Federation, method: Algorithm) -> None:
    found, planted, uniform = (run(fed, method, w) for w in ("clusters-2", "groups", "uniform"))
    assert torch.equal(found.job.alpha, planted.job.alpha)
    assert all(torch.equal(a, b) for a, b in zip(found.state.server, planted.state.server, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(found.state.server, uniform.state.server, strict=True))


def test_one_cluster_is_uniform_and_the_number_can_be_sought(fed: Federation) -> None:
    one, uniform, sought = (run(fed, FLAME(), w) for w in ("clusters-1", "uniform", "clusters"))
    assert torch.equal(one.state.server.x, uniform.state.server.x)
    torch.testing.assert_close(sought.job.alpha[:, 0], torch.tensor([0.125] * 4 + [0.25] * 2))


def test_finding_them_is_counted(fed: Federation) -> None:
    """A round of local training of all clients, and their activations for it."""
    found, planted = (run(fed, FedAvg(), w).state.totals for w in ("clusters-2", "groups"))
    d, width = 6 * 5 + 5 + 5 * 2 + 2, 5
    assert (found - planted)[[0, 2, 3, 4]].tolist() == [6 * 8, 6 * 2, 6 * 4 * width, 6 * 4 * d]


def test_refused_where_they_cannot_be(fed: Federation) -> None:
    with pytest.raises(ConfigError, match="requires at least as many clients"):
        run(fed, FedAvg(), "clusters-7")
    with pytest.raises(ConfigError, match="weights"):
        run(fed, FedAvg(), "clusters-x")


def test_a_check_trains_nobody(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engine.setup.problems.cluster_shares", None)
    check(Setting.create("flame", model="mlp", client_weights="clusters-2"), fed)


@pytest.mark.parametrize("weights", ["clusters-2", "clusters"])
def test_activations_that_are_not_finite_end_their_run_alone(weights: str, tmp_path: Path) -> None:
    """A step size with which clients diverge costs the methods that look for clusters their run, and no other."""
    file = tmp_path / "far.toml"
    file.write_text(
        f"""rounds = 1
data = {{ source = "digits" }}
partition = {{ kind = "iid", clients = 4 }}
model = {{ kind = "mlp", hidden = [4] }}
local = {{ lr = 1e30 }}
[[method]]
algorithm = "fedavg"
client_weights = "{weights}"
[[method]]
algorithm = "fedavg"
label = "uniform"
client_weights = "uniform"
"""
    )
    clustered, uniform = Plan(read(file), tmp_path / "out").run(page=False)
    assert re.search("before round 1: . of 4 clients have non-finite activations", clustered.reason)
    assert (clustered.status, uniform.status) == ("failed", "diverged")


def test_clusters_are_sought_among_finite_activations_only() -> None:
    for bad in (math.nan, math.inf):
        info = torch.eye(4, dtype=torch.float64).index_fill(0, torch.tensor([2]), bad)
        for t, when in ((0, "before round 1"), (3, "round 3")):
            p = Problem.random(0)
            ctx = Clients(p.oracle(), p.alpha, LocalSGD()).ctx(t, range(p.n))._replace(n=4, m=4, ids=torch.arange(4))
            with pytest.raises(RunStopped, match=f"{when}: 1 of 4 clients have non-finite activations"):
                equal_clusters(2, info, ctx)


# --- shares by a column


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six hospitals, four of the north and two of the south, a table of 16 rows each."""
    file = tmp_path_factory.mktemp("regions") / "regions.csv"
    rows = ["hospital,region,sex,a,b,ill"]
    for k, group in enumerate(GROUPS.tolist()):
        x = torch.randn(16, 2, generator=Generator().manual_seed(k))
        for i, (a, b) in enumerate(x.tolist()):
            rows.append(f"h{k},{'ns'[group]},{'fm'[i % 2]},{a:.3f},{b:.3f},{int(a + b * group > 0)}")
    file.write_text("\n".join(rows))
    return file


def hospitals(file: Path, **options: Any) -> Federation:
    source = Csv(path=str(file), client_column="hospital", target="ill", drop=("region", "sex"), **options)
    return Natural()(source.read(None), seed=0)


@pytest.mark.parametrize("method", [FLAME(), FedSLR(), FIAELT(), FedDR(), FedAvg()], ids=lambda m: type(m).__name__)
def test_a_column_gives_the_shares_of_its_groups(regions: Path, method: Algorithm) -> None:
    fed = hospitals(regions, group_columns=("region", "sex"))
    by_column = run(fed, method, "groups by region")
    planted = run(replace(fed, groups=GROUPS), method, "groups")
    uniform = run(fed, method, "uniform")
    torch.testing.assert_close(by_column.job.alpha[:, 0], torch.tensor([0.125] * 4 + [0.25] * 2))
    assert all(torch.equal(a, b) for a, b in zip(by_column.state.server, planted.state.server, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(by_column.state.server, uniform.state.server, strict=True))


def test_a_column_without_one_level_of_every_client_is_refused(regions: Path) -> None:
    fed = hospitals(regions, group_columns=("region", "sex"))
    with pytest.raises(Refused, match="requires the same level in all rows of a client, but client 'h0' has f, m"):
        run(fed, FLAME(), "groups by sex")
    with pytest.raises(ConfigError, match=r"unknown column 'country'; .* has hospital, region, sex"):
        run(fed, FLAME(), "groups by country")
    with pytest.raises(ConfigError, match="Name the columns of a table in data.group_columns"):
        run(hospitals(regions), FLAME(), "groups by region")


# --- forged activations


def shares(info: Tensor, clusters: int | None) -> Tensor:
    p = Problem.random(0)
    ctx = Clients(p.oracle(), p.alpha, LocalSGD()).ctx(1, range(p.n))
    ctx = ctx._replace(n=len(info), m=len(info), ids=torch.arange(len(info)))
    weigher = EquitableWeigher(clusters=clusters)
    p_i, _ = weigher.apply(weigher.init(ctx), info, ctx)
    return p_i[:, 0] / p_i.sum()


def test_forged_activations_buy_a_cluster_of_their_own() -> None:
    """Eight clients in two groups and one forger: with C = 3 given it has a third of the model, with C sought 1/9."""
    groups = torch.eye(5, dtype=torch.float64)[[0, 0, 0, 0, 1, 1, 1, 1]]
    noise = 0.01 * torch.randn(8, 5, generator=Generator().manual_seed(0), dtype=torch.float64)
    forged = 30 * torch.eye(5, dtype=torch.float64)[2:]
    info = torch.cat([groups + noise, forged[:1]])
    assert float(shares(info, 3)[-1]) == pytest.approx(1 / 3)
    assert float(shares(info, 2)[-1]) >= 1 / 2 - 1e-9  # and with C = 2 the honest groups are one cluster
    assert float(shares(info, None)[-1]) < 1 / 4  # a cluster that would be a client alone is none
    apart = torch.cat([groups + noise, forged[:2]])
    assert float(shares(apart, 3)[-2:].sum()) == pytest.approx(2 / 3)  # two forgers buy two of three clusters
    alike = torch.cat([groups + noise, forged[:1], forged[:1]])
    assert float(shares(alike, None)[-2:].sum()) == pytest.approx(1 / 3)  # and two that agree are a cluster when sought


def test_no_activations_buy_more_than_a_cluster_each() -> None:
    """Whatever is sent: a cluster has 1/C, so that k of n clients have at most k/C where C is given."""
    for seed in range(20):
        info = torch.randn(9, 3, generator=Generator().manual_seed(seed), dtype=torch.float64) ** 3
        for clusters in (2, 3, 4):
            bought = shares(info, clusters).sort(descending=True).values.cumsum(0)
            found = len(shares(info, clusters).unique())
            assert bool((bought <= torch.arange(1, 10) / clusters + 1e-9).all()) or found < clusters


@pytest.mark.parametrize(
    "part", [{"weights": "clusters-3"}, {"aggregation_weights": {"kind": "equitable", "clusters": 3}}]
)
def test_in_a_run_a_forger_moves_the_model_by_the_share_of_its_cluster(fed: Federation, part: dict[str, Any]) -> None:
    """The client trains as it should and lies about its activations: a third of the model is its own, and no more."""
    attack = {"kind": "forged-activations", "fraction": 0.17}
    attacked, honest = (run(fed, FedAvg(), **{"weights": "uniform", "attack": a, **part}) for a in (attack, None))
    (forger,) = attacked.job.attackers.tolist()
    if "weights" in part:
        assert float(attacked.job.alpha[forger]) == pytest.approx(1 / 3)
        assert float(honest.job.alpha[forger]) < 1 / 3
    else:
        labels = attacked.state.weigher.labels
        assert (int((labels == labels[forger]).sum()), len(labels.unique())) == (1, 3)  # p_i = 1/(3 * 1)
    assert not torch.equal(attacked.state.server.x, honest.state.server.x)
    assert attacked.state.totals.tolist() == honest.state.totals.tolist()  # forgers work and send as much


def test_forgers_of_one_vector_share_a_cluster_and_others_have_one_each(fed: Federation) -> None:
    for send, most in (("same", 1 / 3), ("own", 2 / 3)):
        attack = {"kind": "forged-activations", "fraction": 0.34, "send": send}
        job = run(fed, FLAME(), "clusters-3", attack=attack).job
        assert float(job.alpha[job.malicious].sum()) == pytest.approx(most)
    moved = run(fed, FedAvg(), "clusters-3 every 1", attack=attack)
    assert float(moved.state.shares[moved.job.malicious].sum()) == pytest.approx(2 / 3)  # found again, forged again


@pytest.mark.parametrize("part", [{}, {"aggregation_weights": "fairfed"}])
def test_forged_activations_are_refused_where_there_are_none(fed: Federation, part: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="attack 'forged-activations' has nothing to forge"):
        run(fed, FedAvg(), **{"weights": "uniform", "attack": "forged-activations", **part})


# --- clusters that are found again

MOVED = {3: (1, 1, 1, 1, 4, 4), 5: (3, 1, 1, 2, 1, 4)}
"""Shares, not yet divided by their sum, that the rounds which find clusters again give to the six clients."""


@pytest.fixture
def shares_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the clusters found before rounds 3 and 5 be those of `MOVED`."""

    def moved(_clusters: Any, activations: Tensor, ctx: Any) -> Tensor:
        assert activations.shape == (6, 5)
        masses = torch.tensor(MOVED[ctx.round], dtype=torch.float64)[:, None]
        return masses / masses.sum()

    monkeypatch.setattr("fedloom.engine.clients.regroup.equal_clusters", moved)


def long(fed: Federation, method: Algorithm, weights: str, **choices: Any) -> Any:
    """Six rounds of half of the clients in double precision."""
    engine = {"dtype": "float64", "clients_per_batch": 2, **choices.pop("engine", {})}
    common = {"rounds": 6, "sampler": {"kind": "uniform", "clients": 3}, "evaluate": {"every": 3}}
    local = LocalSGD(lr=0.1, steps=2, batch_size=4)
    return simulate(
        method, fed, MLP(hidden=(5,)), local=local, client_weights=weights, engine=engine, **{**common, **choices}
    )


def state_of(result: Any) -> list[Tensor]:
    everyone = torch.arange(result.job.n)
    return [*result.state.server, *result.job.clients.read(everyone), *result.job.kept.read(everyone)]


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(v, w) for v, w in zip(state_of(a), state_of(b), strict=True))


@pytest.mark.parametrize("method", [FLAME(), FedSLR(), FIAELT(), FedAvg()], ids=lambda m: type(m).__name__)
def test_clusters_that_stay_the_same_change_no_bit(fed: Federation, method: Algorithm) -> None:
    once, never, twice = (long(fed, method, f"clusters-2{again}") for again in ("", " every 6", " every 2"))
    assert equal(once, never)
    assert torch.equal(once.state.totals, never.state.totals)
    assert equal(once, twice)
    d, width = 6 * 5 + 5 + 5 * 2 + 2, 5
    asked = twice.state.totals - once.state.totals  # before rounds 3 and 5
    assert asked[[0, 2, 3, 4]].tolist() == [2 * 6 * 8, 2 * 6 * 2, 2 * 6 * 8 * width, 2 * 6 * 8 * d]


@pytest.mark.parametrize(
    ("method", "sums"),
    [
        (FIAELT(beta=2.0, smooth=0.4), {"xbar": "x", "zbar": "z"}),
        (SCAFFOLD(), {"c": "ci"}),
        (FedADMM(), {"x": "u"}),
        (FedDyn(), {"h": "hi"}),
        (FedSLR(), {"gamma": "gi"}),
    ],
    ids=lambda v: type(v).__name__,
)
def test_sums_over_rounds_are_those_by_the_new_shares(
    fed: Federation, shares_move: None, method: Algorithm, sums: dict[str, str]
) -> None:
    """What the server has added up is the sum by the last shares of what clients keep, as computed from scratch."""
    result = long(fed, method, "clusters-2 every 2")
    rows, shares = result.job.clients.read(torch.arange(6)), torch.tensor(MOVED[5], dtype=torch.float64)
    for name, kept in sums.items():
        scratch = (shares / shares.sum()) @ getattr(rows, kept)
        assert float(scratch.abs().max()) > 1e-3
        torch.testing.assert_close(getattr(result.state.server, name), scratch, rtol=0, atol=1e-12)
    assert not equal(result, long(fed, method, "clusters-2"))


@pytest.mark.parametrize("method", [FedDR(), FLAME()], ids=lambda m: type(m).__name__)
def test_means_of_kept_rows_are_those_by_the_new_shares(fed: Federation, shares_move: None, method: Algorithm) -> None:
    result = long(fed, method, "clusters-2 every 2")
    torch.testing.assert_close(result.job.alpha[:, 0] * sum(MOVED[5]), torch.tensor(MOVED[5], dtype=torch.float64))
    name, masses = result.job.primary, result.job.masses[:, 0]
    scratch = masses @ getattr(result.job.kept.read(torch.arange(6)), name).double()
    torch.testing.assert_close(result.state.sums[name], scratch, rtol=0, atol=1e-12)
    assert len(masses.unique()) == (1 if method.uses_shares else 4)  # FLAME has the shares in its local problems
    assert not equal(result, long(fed, method, "clusters-2"))


def test_shares_that_moved_once_are_those_given_from_the_start(fed: Federation, shares_move: None) -> None:
    """Before the first upload nothing is summed: FedAvg from round 3 on is FedAvg with these shares from there."""
    shares = []
    result = long(fed, FedAvg(), "clusters-2 every 2", callbacks=[lambda state: shares.append(state.shares[:, 0])])
    assert [row.tolist() for row in shares[2:4]] == [[1 / 12] * 4 + [1 / 3] * 2] * 2
    assert torch.equal(shares[0], shares[1])
    assert torch.equal(result.job.alpha[:, 0], shares[-1])
    recorded = {r.round: r.values.tolist() for r in result.state.records.items if r.metric == "share"}
    assert recorded == {t: shares[max(t - 1, 0)].double().tolist() for t in (0, 3, 6)}


def test_shares_that_are_given_are_not_recorded(fed: Federation) -> None:
    records = {w: run(fed, FedAvg(), w).state.records.items for w in ("clusters-2", "groups")}
    assert {w: any(r.metric == "share" for r in items) for w, items in records.items()} == {
        "clusters-2": True, "groups": False
    }  # fmt: skip


@pytest.mark.parametrize("method", [FIAELT(beta=2.0, smooth=0.4), FLAME()], ids=lambda m: type(m).__name__)
def test_workers_and_a_resumed_run_have_the_same_bits(
    fed: Federation, shares_move: None, method: Algorithm, tmp_path: Path
) -> None:
    whole = long(fed, method, "clusters-2 every 2")
    assert equal(whole, long(fed, method, "clusters-2 every 2", engine={"workers": 2}))

    def kill(state: Any) -> None:
        if state.round == 4:
            raise KeyboardInterrupt

    often = {"checkpoint_every": 1e-9}
    with pytest.raises(KeyboardInterrupt):
        long(fed, method, "clusters-2 every 2", folder=tmp_path, engine=often, callbacks=[kill])
    resumed = long(fed, method, "clusters-2 every 2", folder=tmp_path, engine=often)
    assert equal(whole, resumed)
    assert torch.equal(whole.state.shares, resumed.state.shares)
    assert whole.table().equals(resumed.table())


def test_a_robust_rule_on_sums_takes_the_new_shares_by_itself(fed: Federation, shares_move: None) -> None:
    """A trimmed mean of nothing trimmed counts all alike; the sums that it decides on are those of the clients."""
    method, rule = FIAELT(beta=2.0, smooth=0.4), {"kind": "trimmed-mean", "f": 0}
    moved = long(fed, method, "clusters-2 every 2", aggregator=rule)
    rows = moved.job.clients.read(torch.arange(6))
    torch.testing.assert_close(moved.state.server.xbar, rows.x.mean(0), rtol=0, atol=1e-12)


class Adds(FedADMM):
    """A method that does not state what its sum is with other shares."""

    def reshared(self, server: Any, moved: Any, ctx: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("method", "choices", "why"),
    [
        ("fedacs", {}, "has no global model"),
        ("local", {}, "has no global model"),
        (Adds(), {}, "accumulates uploads weighted by the shares of their round"),
        (FedADMM(server_lr=1.0), {}, "accumulates uploads weighted by the shares"),
        (FedDyn(), {"aggregator": "median"}, "sums the results of this rule, which does not use client shares"),
        (
            "fedavg",
            {"devices": {"kind": "lognormal"}, "schedule": {"kind": "deadline", "seconds": 1.0}},
            "but schedule 'deadline' does not wait",
        ),
        (
            "fedavg",
            {"upload_transform": {"kind": "gaussian-noise", "sigma": 1.0, "clip": 1.0, "delta": 1e-5}},
            "without noise",
        ),
    ],
)
def test_clusters_that_cannot_be_found_again_are_refused(
    fed: Federation, method: Any, choices: dict[str, Any], why: str
) -> None:
    with pytest.raises(Refused, match=why):
        check(Setting.create(method, model="mlp", client_weights="clusters-2 every 2", rounds=6, **choices), fed)


def test_in_virtual_time_finding_them_takes_time(fed: Federation) -> None:
    devices = {"kind": "lognormal"}
    once, again = (long(fed, FedAvg(), w, devices=devices) for w in ("clusters-2", "clusters-2 every 2"))
    assert equal(once, again)
    assert again.state.clock.now > once.state.clock.now
