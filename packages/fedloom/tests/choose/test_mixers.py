"""Mixers: weights against their equations, copies of one direction, rules within a mixture, and runs with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Generator, Tensor

from fedloom.algorithms import FLAME, Ditto, FedACS, FedALA, FedAS, FedAvg, FedAvgFT, FedRep, FedSLR, LocalOnly
from fedloom.choose import MIXERS, Angles, Attention, ClusterMeans, Mixer, Proximity, Uniform
from fedloom.choose.mixers import attention
from fedloom.data.federation import Federation
from fedloom.engine.setting import Evaluate
from fedloom.engine.simulate import simulate
from fedloom.errors import Refused
from fedloom.local import Ctx, LocalSGD
from fedloom.models import MLP
from fedloom.rows.aggregators import Median
from fedloom.rows.attacks import ForgedDirection, Sybils
from fedloom.testing import Problem
from fedloom.testing.federate import ReferenceFederation as Clients

LOCAL, EVALUATE = LocalSGD(lr=0.1, steps=2, batch_size=4), Evaluate(every=3, parts=("train", "validation"))


def context(n: int, ids: Sequence[int], round: int = 1) -> Ctx:
    p = Problem.random(0)
    ctx = Clients(p.oracle(), p.alpha, LocalSGD()).ctx(round, range(p.n))
    return ctx._replace(n=n, m=len(ids), ids=torch.tensor(ids))


def models(m: int, seed: int = 0, d: int = 7) -> Tensor:
    return torch.randn(m, d, generator=Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["attention", "proximity", "angles"])
def test_a_mixture_among_all_does_not_depend_on_who_else_receives_one(kind: str) -> None:
    mixer, w = MIXERS[kind](among="all"), models(6)
    together = mixer.mix(w, w[0], context(6, [4, 1, 3]))
    alone = torch.cat([mixer.mix(w, w[0], context(6, [i])) for i in (4, 1, 3)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("among", ["cohort", "all"])
def test_mixtures_are_weighted_means_of_the_attended_models(kind: str, among: Literal["cohort", "all"]) -> None:
    mixer, w, ids = MIXERS[kind](among=among), models(6), [4, 1, 3]
    ctx = context(6, ids)
    attended = w if among == "all" else w[ids]
    weights = mixer.weights(attended, w[0] * 0, ctx)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(attended), dtype=w.dtype), rtol=0, atol=1e-12)
    want = (weights @ attended)[ids if among == "all" else slice(None)]
    torch.testing.assert_close(mixer.mix(attended, w[0] * 0, ctx), want, rtol=0, atol=1e-12)


def test_clients_never_seen_are_left_out_of_those_seen() -> None:
    start, w = torch.ones(7, dtype=torch.float64), models(5)
    w[[1, 2]] = start
    got = Angles(among="seen").mix(w, start, context(5, [2, 4]))
    want = Angles().mix(w[[0, 2, 3, 4]], start, context(4, [0, 1, 2, 3]))[[1, 3]]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.9, 0.97])
@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("copies", [0.999, 1.0])
def test_copies_of_a_model_count_as_one(copies: float, k: int, quantile: float) -> None:
    """Whatever the number of attackers that send one direction, honest clients have the same mixtures."""
    honest, sybil = models(6), models(1, 1)
    first = attention(torch.cat([honest, sybil]), quantile, copies=copies)
    more = attention(torch.cat([honest, sybil.repeat(k, 1) * torch.arange(1, k + 1)[:, None]]), quantile, copies=copies)
    torch.testing.assert_close(more[:6, :6], first[:6, :6], rtol=0, atol=1e-12)
    torch.testing.assert_close(more[:6, 6:].sum(1), first[:6, 6], rtol=0, atol=1e-12)


def test_copies_fill_the_quantile_without_a_cap() -> None:
    """Nine honest clients of one group, three sybils: with q = 0.88 the sybils' cosines are all that pass."""
    w = torch.cat([1 + 0.3 * models(9), models(1, 1).repeat(3, 1)])
    off, on = attention(w, 0.88), attention(w, 0.88, copies=0.999)
    assert torch.equal(off[:9], torch.eye(12, dtype=w.dtype)[:9])  # collaboration is off: each client has itself
    assert int((on[:9, :9] > 0).sum()) > 9


@pytest.mark.parametrize("length", [1e-18, 1e-21, 1e-23, 1e-30, 1e-44])
@pytest.mark.parametrize("copies", [None, 0.999])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_model_too_short_for_a_norm_attracts_no_client(sign: int, copies: float | None, length: float) -> None:
    """A model whose squares underflow in float32 is attended to no more than its direction at ordinary length."""
    honest = (1 + 0.3 * models(6)).float()
    forged = sign * honest[:1].repeat(3, 1)

    def attracted(w: Tensor) -> list[Tensor]:
        mixtures = [attention(w, quantile, copies) for quantile in (0.5, 0.9)]
        mixtures.append(Angles(sigma=5.0).weights(w, w[0], context(9, range(9))))
        return [weights[:6, 6:].abs() for weights in mixtures]

    ordinary, short = attracted(torch.cat([honest, forged])), attracted(torch.cat([honest, length * forged]))
    for most, got in zip(ordinary, short, strict=True):
        assert bool((got <= most.clamp(min=0.01) + 1e-5).all())


def test_similarity_of_changes_tells_clients_apart_that_models_do_not() -> None:
    start = 100 * torch.ones(7, dtype=torch.float64)
    two = torch.cat([models(1).repeat(3, 1), -models(1).repeat(3, 1)])
    weights = Attention(similarity="change").weights(start + two, start, context(6, range(6)))
    block = torch.block_diag(*[torch.full((3, 3), 1 / 3, dtype=torch.float64)] * 2)
    torch.testing.assert_close(weights, block, rtol=0, atol=1e-9)
    torch.testing.assert_close(
        ClusterMeans(clusters=2).weights(start + two, start, context(6, range(6))), block, rtol=0, atol=1e-12
    )


def test_proximity_and_angles_are_fedamp_s_equations() -> None:
    w, alpha, sigma = models(4), 0.3, 5.0
    got = Proximity(alpha=alpha, sigma=sigma).mix(w, w[0], context(4, range(4)))
    rows = []
    for i in range(4):
        xi = [
            0.0 if i == j else alpha * float(torch.exp(-(w[i] - w[j]).square().sum() / sigma)) / sigma for j in range(4)
        ]
        xi[i] = 1 - sum(xi)
        rows.append(sum(x * v for x, v in zip(xi, w, strict=True)))
    torch.testing.assert_close(got, torch.stack(rows), rtol=0, atol=1e-12)  # type: ignore[arg-type]
    mean = Angles(sigma=0.0).mix(w, w[0], context(4, range(4)))
    torch.testing.assert_close(mean, w.mean(0).expand_as(w), rtol=0, atol=1e-12)  # no sharpness: a mean of all


# --- runs


@pytest.fixture(scope="module")
def fed() -> Federation:
    """Six clients in two groups with opposite labels."""
    clients = []
    for k in range(6):
        x = models(16, seed=k, d=4).float()
        y = ((x[:, 0] > 0) ^ (k % 2 == 1)).long()
        clients.append(((x[:12], y[:12]), (x[12:], y[12:])))
    return Federation.create(clients)


def run(fed: Federation, method: Any, **choices: Any) -> Any:
    return simulate(
        method,
        fed,
        **{
            "model": MLP(hidden=(3,)),
            "rounds": 3,
            "local": LOCAL,
            "evaluate": EVALUATE,
            "sampler": Uniform(clients=5),
            **choices,
        },
    )


def state_of(result: Any) -> Tensor:
    job = result.job
    rows = [*result.state.server, *job.clients.read(torch.arange(job.n)), *job.kept.read(torch.arange(job.n))]
    return torch.cat([row.flatten().double() for row in rows])


@pytest.mark.parametrize("method", [FedAvg(), FLAME(), Ditto(), FedSLR(), FedRep(head_epochs=1), FedAS()])
def test_no_share_is_the_method_itself_and_a_share_is_not(fed: Federation, method: Any) -> None:
    bare, none, some = (
        state_of(run(fed, method, **m))
        for m in (
            {},
            {"personalized_aggregation": Attention(mixing_weight=0.0)},
            {"personalized_aggregation": Attention()},
        )
    )
    assert torch.equal(bare, none)
    assert not torch.equal(bare, some)


@pytest.mark.parametrize("kind", MIXERS)
def test_where_nothing_travels_there_is_nothing_to_mix(fed: Federation, kind: str) -> None:
    bare, mixed = (
        state_of(run(fed, FedRep(), model="softmax", personalized_aggregation=m)) for m in (None, MIXERS[kind]())
    )
    assert torch.equal(bare, mixed)


def test_fedavg_with_attention_is_fedacs(fed: Federation) -> None:
    """FedAvg's clients upload FedACS's models from attention's mixtures, up to the rounding of w - u + u."""
    options: dict[str, Any] = {"engine": {"dtype": "float64"}}
    acs = run(fed, FedACS(quantile=0.4), **options).job.kept.read(torch.arange(6)).w
    mixed = (
        run(fed, FedAvg(), personalized_aggregation=Attention(quantile=0.4, copies=0.999), **options)
        .job.models.read(torch.arange(6))
        .w
    )
    torch.testing.assert_close(mixed, acs, rtol=0, atol=1e-12)


def test_fedala_takes_the_mixture_for_the_server_s_model(fed: Federation) -> None:
    """With weights of 1 it is FedAvg from mixtures; where weights are learned, mixtures change what is learned."""
    fixed, average = (
        run(fed, m, personalized_aggregation=Attention()).job.models.read(torch.arange(6)).w
        for m in (FedALA(eta=0), FedAvg())
    )
    assert torch.equal(fixed, average)
    mixed, bare = (
        state_of(run(fed, FedALA(eta=1.0, first=2), personalized_aggregation=m)) for m in (Attention(), None)
    )
    assert not torch.equal(mixed, bare)


def test_without_collaboration_every_client_trains_alone(fed: Federation) -> None:
    """q = 1: FedAvg's clients start from their own last model, as those of `local` do."""
    options: dict[str, Any] = {"engine": {"dtype": "float64"}, "sampler": Uniform(fraction=1.0)}
    alone = run(fed, LocalOnly(), **options).job.clients.read(torch.arange(6))[0]
    mixed = run(fed, FedAvg(), personalized_aggregation=Attention(quantile=1.0, similarity="change"), **options)
    torch.testing.assert_close(mixed.job.models.read(torch.arange(6)).w, alone, rtol=0, atol=1e-12)


def test_clusters_serve_two_groups_that_one_model_cannot(fed: Federation) -> None:
    many: dict[str, Any] = {
        "rounds": 8,
        "local": LocalSGD(lr=1.0, steps=8, batch_size=4),
        "model": "softmax",
        "sampler": Uniform(fraction=1.0),
        "evaluate": {"every": 12},
    }
    one = run(fed, FedAvg(), **many).final("global", "accuracy")
    two = run(fed, FedAvg(), personalized_aggregation=ClusterMeans(clusters=2), **many).final("personal", "accuracy")
    assert float(two.nanmean()) > float(one.nanmean()) + 0.2


def test_mixtures_are_sent_dense_and_counted(fed: Federation) -> None:
    """FedSLR's download is a matrix of low rank, its mixtures are not."""
    d, many = 23, {"sampler": Uniform(fraction=1.0)}
    mixed = run(fed, FedSLR(lam=10.0), personalized_aggregation=Attention(), **many)
    figures = {
        r.metric: float(r.values[0])
        for r in mixed.state.records.items
        if r.round == 3 and r.metric == "bytes_down_paper"
    }
    assert figures["bytes_down_paper"] >= 3 * 6 * 4 * d


def test_resume_equals_the_uninterrupted_run(fed: Federation, tmp_path: Path) -> None:
    def stop(state: Any) -> None:
        if state.round == 2:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"personalized_aggregation": Attention(among="seen"), "rounds": 4}
    settings["engine"] = {"checkpoint_every": 1e-9}
    with pytest.raises(KeyboardInterrupt):
        run(fed, FedAvgFT(), folder=tmp_path / "a", callbacks=[stop], **settings)
    resumed = run(fed, FedAvgFT(), folder=tmp_path / "a", **settings)
    whole = run(fed, FedAvgFT(), **settings)
    assert torch.equal(state_of(resumed), state_of(whole))
    assert torch.equal(*(r.job.models.read(torch.arange(6)).w for r in (resumed, whole)))


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_change_rounding_only(fed: Federation, chunk: int) -> None:
    many = {"engine": {"clients_per_batch": chunk, "dtype": "float64"}, "personalized_aggregation": Attention()}
    got, want = (
        run(fed, FedAvg(), **{**many, "engine": e}).job.models.read(torch.arange(6)).w
        for e in (many["engine"], {"dtype": "float64"})
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


# --- attacks


def collaborators(fed: Federation, method: Any, **choices: Any) -> list[int]:
    """How many other honest clients' models each honest client receives in the last round."""
    result = run(fed, method, attack=Sybils(fraction=1 / 2), sampler=Uniform(fraction=1.0), **choices)
    honest = ~result.job.malicious
    mixer = result.job.setting.personalized_aggregation or result.job.algorithm.mixer(3)
    store = result.job.models if result.job.models.template else result.job.kept
    w = store.read(torch.arange(6)).w
    weights = mixer.weights(w, store.template.w, result.job.ctx(4))
    return ((weights > 0)[honest][:, honest].sum(1) - 1).tolist()


@pytest.mark.parametrize("method", ["preset", "mixer"])
def test_sybils_turn_collaboration_off_and_a_cap_keeps_it(fed: Federation, method: str) -> None:
    """Three of six clients send one direction: 12 of the 36 cosines are then 1, so that the quantile is 1."""

    def attacked(copies: float | None) -> list[int]:
        if method == "preset":
            return collaborators(fed, FedACS(quantile=0.7, copies=copies or "off"))
        return collaborators(fed, FedAvg(), personalized_aggregation=Attention(quantile=0.7, copies=copies))

    assert sum(attacked(None)) == 0
    assert sum(attacked(0.999)) > 0
    assert FedACS().copies == 0.999


@pytest.mark.parametrize("quantile", [0.0, 0.31, 0.5, 0.88, 1.0])
@pytest.mark.parametrize("n", [1, 2, 6, 9])
def test_a_cap_changes_nothing_if_no_model_is_a_copy(n: int, quantile: float) -> None:
    assert torch.equal(attention(models(n), quantile, copies=0.999), attention(models(n), quantile))


def test_a_forged_direction_buys_a_mixture_and_a_rule_within_it_does_not_sell(fed: Federation) -> None:
    """Cosines do not see lengths: the victim receives the forged model, unless a median of its mixture is sent."""
    options: dict[str, Any] = {
        "attack": ForgedDirection(fraction=0.17, scale=1e3),
        "sampler": Uniform(fraction=1.0),
        "rounds": 2,
    }

    def longest(**more: Any) -> float:
        result = run(fed, FedACS(quantile=0.0), **options | more)
        return float(result.job.clients.read((~result.job.malicious).nonzero()[:, 0]).w.norm(dim=1).max())

    bare, protected, honest = longest(), longest(aggregator=Median()), longest(attack=None)
    assert bare > 20 * honest
    assert protected < 3 * honest


@pytest.mark.parametrize("method", [FedACS(quantile=0.0), FedAvg()])
def test_a_rule_of_one_model_is_the_client_s_own(fed: Federation, method: Any) -> None:
    """With q = 1 every mixture has one model, which is its median."""
    many: dict[str, Any] = {} if isinstance(method, FedACS) else {"personalized_aggregation": Attention(quantile=1.0)}
    method = FedACS(quantile=1.0) if isinstance(method, FedACS) else method
    result = run(fed, method, aggregator=Median(), **many)
    plain = run(fed, method, **many)
    w, v = ((r.job.models if r.job.models.template else r.job.kept).read(torch.arange(6)).w for r in (result, plain))
    torch.testing.assert_close(w, v, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["local", "scaffold", "fiaelt", "fedskip", "ifca", "fedproto", "fedmid"])
def test_refused_where_a_model_of_one_s_own_has_no_meaning(fed: Federation, name: str) -> None:
    with pytest.raises(Refused, match=r"personalized.aggregation"):
        run(fed, name, personalized_aggregation=Attention())


def test_a_user_s_mixer_by_class(fed: Federation) -> None:
    class Everyone(Mixer):
        """The mean of all."""

        kind: ClassVar[str] = "everyone"

        def weights(self, models: Tensor, start: Tensor, ctx: Ctx) -> Tensor:
            return torch.full((len(models), len(models)), 1 / len(models), dtype=models.dtype)

    result = run(fed, FLAME(), personalized_aggregation=Everyone(among="all"))
    assert result.state.round == 3
