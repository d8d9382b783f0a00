"""Aggregators: their definitions, their invariances, and other libraries on random rows.

Flower's rules come with the dev dependencies. byzfl declares torchvision, matplotlib and seaborn, which its rules do
not use, and an extra cannot leave them out: `make test` installs it alone (``pip install --no-deps byzfl``), and the
test puts stubs in their place. Without byzfl that comparison is skipped, but not where CI is set.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from itertools import combinations
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import ConfigError
from fedloom.rows import aggregators as A
from fedloom.seeds import generator


@pytest.fixture(scope="module")
def flower():
    """The library's rules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from flwr.server.strategy import aggregate
    return aggregate


@pytest.fixture(scope="module")
def byzfl():
    """The library's rules; imports of its data sets and charts are stood in for where missing."""
    if find_spec("byzfl") is None and not os.environ.get("CI"):
        pytest.skip("byzfl is not installed (pip install --no-deps byzfl)")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        for name in ("torchvision", "matplotlib", "seaborn"):
            if find_spec(name) is None:
                patch.setitem(sys.modules, name, MagicMock())
                patch.setitem(sys.modules, f"{name}.pyplot", MagicMock())
        import byzfl as found
    return found


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ctx(m: int, ids=None, seed: int = 0) -> SimpleNamespace:
    ids = torch.arange(m) if ids is None else ids
    return SimpleNamespace(ids=ids, m=m, rng=lambda purpose: generator(seed, 1, purpose=purpose))


def cohort(m: int, seed: int, dtype=torch.float64, d: int = 6) -> dict[str, torch.Tensor]:
    g = gen(seed)
    x = torch.randn(m, d, generator=g, dtype=torch.float64) + 1
    x[: m // 4] *= 10
    return {"w": x.to(dtype), "c": torch.randn(m, 2, generator=g, dtype=torch.float64).to(dtype)}


def uniform(m: int, dtype=torch.float64) -> torch.Tensor:
    return torch.full((m, 1), 1 / m, dtype=dtype)


def run(rule, rows, weights=None, state=None, ids=None):
    m = len(rows["w"])
    state = rule.init(ctx(m)) if state is None else state
    return rule.apply(state, rows, uniform(m, rows["w"].dtype) if weights is None else weights, "w", ctx(m, ids))[0]


M = 11
RULES = [
    A.WeightedMean(),
    A.Median(),
    A.TrimmedMean(f=2),
    A.GeometricMedian(),
    A.CenteredClipping(tau=2.0, iterations=3),
    A.Krum(f=2),
    A.MultiKrum(f=2),
    A.MultiKrum(f=2, k=3, squared=False),
    A.Bulyan(f=2),
    A.MDA(f=2),
    A.FLTrust(root=4),
    A.WeightedMean(pre=(A.ClipRows(bound=1.0),)),
    A.Krum(f=2, pre=(A.NNM(f=2),)),
    A.TrimmedMean(f=1, pre=(A.ClipRows(bound=3.0), A.NNM(f=2))),
]
SELECTING = (A.Krum, A.MultiKrum, A.Bulyan, A.MDA, A.FLTrust)
"""Decide on the primary field which rows count how much, for all fields."""
SEEDS = st.integers(0, 2**20)


def name(rule) -> str:
    return f"{rule.kind}-{'-'.join(p.kind for p in rule.pre)}-{getattr(rule, 'k', '')}"


# ------------------------------------------------------------------------------------------------------- all the rules


@pytest.mark.parametrize("rule", RULES, ids=name)
@given(seed=SEEDS)
@settings(max_examples=15)
def test_order_of_the_clients_does_not_matter(rule, seed):
    rows, weights = cohort(M, seed), torch.rand(M, 1, generator=gen(seed), dtype=torch.float64) + 0.1
    order = torch.randperm(M, generator=gen(seed + 1))
    want = run(rule, rows, weights)
    got = run(rule, {n: r[order] for n, r in rows.items()}, weights[order], ids=torch.arange(M)[order])
    for n in rows:
        torch.testing.assert_close(got[n], want[n])


@pytest.mark.parametrize("rule", RULES, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arguments_unmodified_shapes_and_types(rule, dtype):
    rows, weights = cohort(M, 3, dtype), uniform(M, dtype)
    before = {n: r.clone() for n, r in rows.items()}
    got, state = rule.apply(rule.init(ctx(M)), rows, weights, "w", ctx(M))
    assert {n: (g.shape, g.dtype) for n, g in got.items()} == {n: (r.shape[1:], dtype) for n, r in rows.items()}
    assert all(torch.equal(rows[n], before[n]) for n in rows)
    again = rule.apply(rule.init(ctx(M)), rows, weights, "w", ctx(M))[0]
    for n, g in got.items():
        assert torch.equal(g, again[n])
        g.fill_(7.0)
    assert all(torch.equal(rows[n], before[n]) for n in rows)
    exact = run(rule, {n: r.double() for n, r in cohort(M, 3, dtype).items()})
    for n in rows:
        torch.testing.assert_close(again[n].double(), exact[n], rtol=1e-4, atol=1e-4)
    assert isinstance(state, dict)


@pytest.mark.parametrize("rule", [r for r in RULES if not any(p.kind == "clip" for p in r.pre)], ids=name)
def test_equal_rows_give_that_row(rule):
    row = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    got = run(rule, {"w": row.repeat(M, 1), "c": row.repeat(M, 1)})
    torch.testing.assert_close(got["w"], row)
    torch.testing.assert_close(got["c"], row)


@pytest.mark.parametrize("rule", RULES, ids=name)
@given(seed=SEEDS)
@settings(max_examples=10)
def test_linear_means_linear_and_weighted_means_weighted(rule, seed):
    rows, weights = cohort(M, seed), torch.rand(M, 1, generator=gen(seed), dtype=torch.float64) + 0.1
    if rule.linear:
        other = cohort(M, seed + 1)
        both = run(rule, {n: 2 * rows[n] - 3 * other[n] for n in rows}, weights)
        for n in rows:
            want = 2 * run(rule, rows, weights)[n] - 3 * run(rule, other, weights)[n]
            torch.testing.assert_close(both[n], want)
    same = all(torch.equal(run(rule, rows)[n], run(rule, rows, weights)[n]) for n in rows)
    assert same != rule.weighted


@pytest.mark.parametrize("rule", [r for r in RULES if isinstance(r, SELECTING)], ids=name)
@given(seed=SEEDS)
@settings(max_examples=10)
def test_selection_depends_on_the_primary_field_alone(rule, seed):
    rows = cohort(M, seed)
    apart = run(rule, rows)["w"]
    torch.testing.assert_close(run(rule, rows | {"c": rows["c"] * 100})["w"], apart)
    if rule.kind != "bulyan":
        twin = run(rule, {"w": rows["w"], "c": rows["w"]})
        torch.testing.assert_close(twin["c"], twin["w"])


@pytest.mark.parametrize("rule", [r for r in RULES if not isinstance(r, SELECTING) and not r.pre], ids=name)
def test_other_rules_act_on_every_field_by_itself(rule):
    rows = cohort(M, 2)
    both, alone = run(rule, rows), run(rule, {"w": rows["c"]})
    torch.testing.assert_close(both["c"], alone["w"])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (A.TrimmedMean(f=0), "mean"),
        (A.MultiKrum(f=0), "mean"),
        (A.MDA(f=0), "mean"),
        (A.CenteredClipping(tau=1e9), "mean"),
        (A.WeightedMean(pre=(A.Bucketing(s=3),)), "mean"),
        (A.WeightedMean(pre=(A.NNM(f=0),)), "mean"),
        (A.WeightedMean(pre=(A.ClipRows(bound=1e9),)), "mean"),
        (A.Bulyan(f=0), "mean"),
    ],
    ids=lambda v: v.kind if hasattr(v, "kind") else v,
)
def test_without_attackers_it_is_the_mean(rule, words):
    rows = cohort(M, 5)
    for n, g in run(rule, rows).items():
        torch.testing.assert_close(g, rows[n].mean(0))


@pytest.mark.parametrize(
    "rule", [r for r in RULES if r.kind not in ("mean", "fltrust") and getattr(r, "f", 2) == 2], ids=name
)
def test_two_far_attackers_do_not_carry_the_result_away(rule):
    rows = {"w": torch.randn(M, 5, generator=gen(1), dtype=torch.float64)}
    honest = rows["w"][2:]
    rows["w"][:2] = 1e6
    got = run(rule, rows)["w"]
    assert (got - honest.mean(0)).norm() < 3 * honest.std(0).norm()
    assert (run(A.WeightedMean(), rows)["w"] - honest.mean(0)).norm() > 1e4


# --------------------------------------------------------------------------------------------------------- definitions


@given(seed=SEEDS, m=st.integers(1, 9))
@settings(max_examples=20)
def test_mean_median_and_trimmed_mean_by_numpy(seed, m):
    rows, weights = cohort(m, seed), torch.rand(m, 1, generator=gen(seed), dtype=torch.float64) + 0.1
    x, w = rows["w"].numpy(), weights.numpy()[:, 0]
    np.testing.assert_allclose(run(A.WeightedMean(), rows, weights)["w"], np.average(x, axis=0, weights=w))
    np.testing.assert_allclose(run(A.Median(), rows)["w"], np.median(x, axis=0))
    for f in range((m + 1) // 2):
        want = [np.mean(sorted(column)[f : m - f]) for column in x.T]
        np.testing.assert_allclose(run(A.TrimmedMean(f=f), rows)["w"], want)


def scores_by_hand(x: np.ndarray, f: int, power: int = 2) -> list[float]:
    m = len(x)
    out = []
    for i in range(m):
        far = sorted(np.linalg.norm(x[i] - x[j]) ** power for j in range(m) if j != i)
        out.append(sum(far[: max(m - f - 2, 1)]) + 1e-9 * sum(far))  # of two nearest to each other, the more central
    return out


@given(seed=SEEDS, f=st.integers(0, 2), more=st.integers(0, 4))
@settings(max_examples=20)
def test_krum_family_by_hand(seed, f, more):
    m = 4 * f + 3 + more
    rows = cohort(m, seed)
    x = rows["w"].numpy()
    for power in (1, 2):
        order = np.argsort(scores_by_hand(x, f, power))
        for k in (1, 2, m):
            got = run(A.MultiKrum(f=f, k=k, squared=power == 2), rows)["w"]
            np.testing.assert_allclose(got, x[order[:k]].mean(0))
    np.testing.assert_allclose(run(A.Krum(f=f), rows)["w"], x[np.argmin(scores_by_hand(x, f))])

    left, chosen = list(range(m)), []
    while len(chosen) < m - 2 * f:
        chosen.append(left.pop(int(np.argmin(scores_by_hand(x[left], f)))))
    picked = x[chosen]
    want = []
    for column in picked.T:
        centre = np.median(column)
        want.append(np.mean(sorted(column, key=lambda v: abs(v - centre))[: m - 4 * f]))
    np.testing.assert_allclose(run(A.Bulyan(f=f), rows)["w"], want)


@given(seed=SEEDS, m=st.integers(3, 9))
@settings(max_examples=15)
def test_minimum_diameter_by_hand(seed, m):
    rows, f = cohort(m, seed), (m - 1) // 2
    x = rows["w"].numpy()
    subsets = list(combinations(range(m), m - f))
    best = min(subsets, key=lambda s: max(np.linalg.norm(x[a] - x[b]) for a in s for b in s))
    np.testing.assert_allclose(run(A.MDA(f=f), rows)["w"], x[list(best)].mean(0))


@given(seed=SEEDS)
@settings(max_examples=20)
def test_geometric_median_is_the_minimiser(seed):
    rows, weights = cohort(M, seed), torch.rand(M, 1, generator=gen(seed), dtype=torch.float64) + 0.1
    x = run(A.GeometricMedian(iterations=3000, tolerance=0.0), rows, weights)["w"]

    def cost(z):
        return float((weights[:, 0] * (rows["w"] - z).norm(dim=1)).sum())

    for scale in (1e-3, 1e-2, 1.0):
        assert cost(x) <= cost(x + scale * torch.randn(6, generator=gen(seed), dtype=torch.float64)) + 1e-9
    assert cost(run(A.GeometricMedian(iterations=5), rows, weights)["w"]) >= cost(x) - 1e-9


@given(seed=SEEDS, tau=st.floats(0.1, 20.0))
@settings(max_examples=15)
def test_centered_clipping_by_hand_with_its_state(seed, tau):
    rule, v, state = A.CenteredClipping(tau=tau, iterations=2), np.zeros(6), {"w": torch.zeros(6, dtype=torch.float64)}
    for t in range(3):
        x = cohort(M, seed + t)["w"]
        weights = torch.rand(M, 1, generator=gen(seed), dtype=torch.float64) + 0.1
        got, state = rule.apply(state, {"w": x}, weights, "w", ctx(M))
        for _ in range(2):
            steps = [s * min(1, tau / np.linalg.norm(s)) for s in x.numpy() - v]
            v = v + np.average(steps, axis=0, weights=weights.numpy()[:, 0])
        np.testing.assert_allclose(got["w"], v)
        np.testing.assert_allclose(state["w"], v)


@given(seed=SEEDS)
@settings(max_examples=15)
def test_fltrust_by_hand(seed):
    rows, ids = cohort(M, seed), torch.arange(M) * 3 + 1
    x, root = rows["w"].numpy(), 4
    got = run(A.FLTrust(root=root * 3 + 1), rows, ids=ids)["w"]
    total, scores = np.zeros(6), 0.0
    for i in range(M):
        if i != root:
            lengths = np.linalg.norm(x[i]) * np.linalg.norm(x[root])
            score = max(0.0, x[i] @ x[root] / lengths)
            scores += score
            total += score * np.linalg.norm(x[root]) / np.linalg.norm(x[i]) * x[i]
    np.testing.assert_allclose(got, total / scores if scores else x[root])
    against = {"w": torch.cat([rows["w"][:1], -rows["w"][:1].repeat(3, 1)])}
    torch.testing.assert_close(run(A.FLTrust(root=0), against)["w"], rows["w"][0])


@pytest.mark.parametrize("length", [1e-20, 1e-21, 1e-23, 1e-30, 1e-44])
def test_fltrust_gives_a_row_too_short_for_a_norm_no_more_than_its_length(length):
    rows = {"w": 1 + 0.1 * cohort(M, 3)["w"].float()}
    rows["w"][1] = 0
    without = run(A.FLTrust(root=0), rows)["w"]
    rows["w"][1] = length * torch.tensor([1, 1, 1, 1, 1, -1.0])
    torch.testing.assert_close(run(A.FLTrust(root=0), rows)["w"], without, rtol=1e-3, atol=0)


@given(seed=SEEDS, s=st.integers(1, 5))
@settings(max_examples=15)
def test_steps_before_the_rule(seed, s):
    rows, weights = cohort(M, seed), torch.rand(M, 1, generator=gen(seed), dtype=torch.float64) + 0.1
    mixed, heavier = A.Bucketing(s=s).mix(rows, weights, "w", ctx(M, seed=seed))
    assert len(mixed["w"]) == len(heavier) == A.Bucketing(s=s).rows(M)
    for n in rows:
        torch.testing.assert_close(heavier.T @ mixed[n], weights.T @ rows[n])
    order = torch.randperm(M, generator=generator(seed, 1, purpose="bucketing"))
    first = order[:s]
    torch.testing.assert_close(mixed["w"][0], (weights[first] * rows["w"][first]).sum(0) / weights[first].sum())
    by_share, _ = A.Bucketing(s=s).mix(rows, weights / weights.sum(), "w", ctx(M, seed=seed))
    torch.testing.assert_close(by_share["w"], mixed["w"])

    near, _ = A.NNM(f=3).mix(rows, weights, "w", ctx(M))
    for i in range(M):
        chosen = sorted(range(M), key=lambda j: float((rows["w"][i] - rows["w"][j]).norm()))[: M - 3]
        for n in rows:
            torch.testing.assert_close(near[n][i], rows[n][chosen].mean(0), rtol=0, atol=1e-14)

    clipped, _ = A.ClipRows(bound=2.0).mix(rows, weights, "w", ctx(M))
    whole, cut = torch.cat([rows["w"], rows["c"]], 1), torch.cat([clipped["w"], clipped["c"]], 1)
    for i in range(M):
        torch.testing.assert_close(cut[i], whole[i] * min(1.0, 2.0 / float(whole[i].norm())))


def test_bucketing_is_a_new_draw_every_round_and_nothing_else():
    rows, rule = cohort(M, 0), A.Median(pre=(A.Bucketing(s=2),))
    draws = [rule.apply({}, rows, uniform(M), "w", ctx(M, seed=s))[0]["w"] for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_a_bucket_without_weight_is_the_plain_mean_of_its_rows():
    rows, weights = cohort(M, 0), uniform(M)
    weights[:3] = 0
    mixed, heavy = A.Bucketing(s=1).mix(rows, weights, "w", ctx(M))
    order = torch.cdist(mixed["w"], rows["w"]).argmin(1)
    assert sorted(order.tolist()) == list(range(M))
    torch.testing.assert_close(mixed["w"], rows["w"][order])
    torch.testing.assert_close(heavy, weights[order])


@given(seed=SEEDS, scale=st.floats(1e-3, 1e-2))
@settings(max_examples=10)
def test_rows_that_are_left_are_weighted_and_uniform_without_weight(seed, scale):
    rows, weights = cohort(M, seed), scale * torch.rand(M, 1, generator=gen(seed), dtype=torch.float64)
    x = rows["w"].numpy()
    best = np.argsort(scores_by_hand(x, 2))[:4]
    want = np.average(x[best], axis=0, weights=weights.numpy()[best, 0])
    np.testing.assert_allclose(run(A.MultiKrum(f=2, k=4), rows, weights)["w"], want)
    weights[best] = 0
    np.testing.assert_allclose(run(A.MultiKrum(f=2, k=4), rows, weights)["w"], x[best].mean(0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_minimum_diameter_of_many_subsets(seed, first):
    """More subsets than are looked at together; the five rows that are far come first or last."""
    x = torch.randn(16, 4, generator=gen(seed), dtype=torch.float64)
    far = slice(0, 5) if first else slice(11, 16)
    x[far] = 50 * torch.randn(5, 4, generator=gen(seed + 99), dtype=torch.float64)
    near = torch.ones(16, dtype=torch.bool)
    near[far] = False
    torch.testing.assert_close(run(A.MDA(f=5), {"w": x})["w"], x[near].mean(0))


def test_minimum_diameter_counts_its_subsets(monkeypatch):
    monkeypatch.setattr("fedloom.rows.aggregators.selection.MAX_SUBSETS", 45)
    A.MDA(f=2).check(10)
    with pytest.raises(ConfigError, match="C\\(11, 2\\) = 55"):
        A.MDA(f=2).check(11)


@pytest.mark.parametrize("tolerance", [0.0, *np.geomspace(0.002, 0.5, 15).round(4).tolist()])
@pytest.mark.parametrize("iterations", [1, 3, 50])
def test_weiszfeld_by_hand(tolerance, iterations):
    rows, weights = cohort(M, 7), torch.rand(M, 1, generator=gen(7), dtype=torch.float64) + 0.1
    x, w = rows["w"].numpy(), weights.numpy()[:, 0]
    z = np.average(x, axis=0, weights=w)
    for _ in range(iterations):
        b = w / np.maximum(np.linalg.norm(x - z, axis=1), 1e-6)
        last, z = z, b @ x / b.sum()
        if np.linalg.norm(z - last) <= tolerance * (1 + np.linalg.norm(last)):
            break
    rule = A.GeometricMedian(tolerance=tolerance, iterations=iterations)
    np.testing.assert_allclose(run(rule, rows, weights)["w"], z)


# -------------------------------------------------------------------------------------------------- other libraries


@pytest.mark.parametrize("seed", range(10))
def test_flower_agrees(flower, seed):
    x = cohort(15, seed)["w"]
    results = [([row.numpy()], 1) for row in x]
    for rule, theirs in [
        (A.Median(), flower.aggregate_median(results)),
        (A.TrimmedMean(f=2), flower.aggregate_trimmed_avg(results, 2.5 / 15)),
        (A.Krum(f=2), flower.aggregate_krum(results, 2, 0)),
        (A.MultiKrum(f=2, k=5), flower.aggregate_krum(results, 2, 5)),
        (A.Bulyan(f=3), flower.aggregate_bulyan(list(results), 3, flower.aggregate_krum, to_keep=0)),
        (A.WeightedMean(), flower.aggregate(results)),
    ]:
        np.testing.assert_allclose(run(rule, {"w": x})["w"], theirs[0], err_msg=rule.kind)


@pytest.mark.parametrize("seed", range(5))
def test_byzfl_agrees(byzfl, seed):
    x = cohort(M, seed)["w"]
    zeros = {"w": torch.zeros(6, dtype=torch.float64)}
    for rule, theirs in [
        (A.WeightedMean(), byzfl.Average()),
        (A.Median(), byzfl.Median()),
        (A.TrimmedMean(f=2), byzfl.TrMean(f=2)),
        (A.GeometricMedian(nu=0.1, iterations=500, tolerance=0.0), byzfl.GeometricMedian(nu=0.1, T=500)),
        (A.CenteredClipping(tau=3.0, iterations=2), byzfl.CenteredClipping(tau=3.0, L=2)),
        (A.MDA(f=2), byzfl.MDA(f=2)),
    ]:
        got = run(rule, {"w": x}, state=zeros)["w"]
        np.testing.assert_allclose(got, theirs(x.numpy()), rtol=1e-6, err_msg=rule.kind)
    np.testing.assert_allclose(A.NNM(f=2).mix({"w": x}, uniform(M), "w", ctx(M))[0]["w"], byzfl.NNM(f=2)(x.numpy()))
    np.testing.assert_allclose(A.ClipRows(bound=2.0).mix({"w": x}, uniform(M), "w", ctx(M))[0]["w"],
                               byzfl.Clipping(c=2.0)(x.numpy()))  # fmt: skip


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("rule", "small", "enough"),
    [
        (A.TrimmedMean(f=2), 4, 5),
        (A.Krum(f=2), 6, 7),
        (A.MultiKrum(f=2), 6, 7),
        (A.MultiKrum(f=1, k=6), 5, 6),
        (A.Bulyan(f=2), 10, 11),
        (A.MDA(f=2), 4, 5),
        (A.FLTrust(), 1, 2),
        (A.Krum(f=1, pre=(A.Bucketing(s=2),)), 8, 9),
        (A.WeightedMean(pre=(A.NNM(f=3),)), 3, 4),
    ],
    ids=lambda v: name(v) if hasattr(v, "kind") else str(v),
)
def test_too_few_rows_are_refused_with_a_sentence(rule, small, enough):
    rule.check(enough)
    arriving = rule.pre[0].rows(small) if rule.kind == "krum" and rule.pre else small
    with pytest.raises(ConfigError, match=rf"needs .*m.* got m = {arriving} "):
        rule.check(small)
    with pytest.raises(ConfigError):
        run(rule, cohort(small, 0))
    run(rule, cohort(enough, 0))


def test_other_refusals():
    with pytest.raises(ConfigError, match="tries every subset"):
        A.MDA(f=20).check(50)
    with pytest.raises(ConfigError, match="trusts client 99"):
        run(A.FLTrust(root=99), cohort(M, 0))
    with pytest.raises(ConfigError, match="row of the trusted client"):
        A.FLTrust(pre=(A.NNM(),))
    with pytest.raises(ConfigError):
        A.Krum(f=-1)


def test_registry():
    for kind, cls in A.AGGREGATORS.items():
        rule = cls()
        assert rule.kind == kind
        assert rule.linear == (kind == "mean")
        assert cls(**rule.model_dump()) == rule
    rule = A.Krum(f=1, pre=({"kind": "bucketing", "s": 3}, {"kind": "nnm", "f": 1}))
    assert rule.pre == (A.Bucketing(s=3), A.NNM(f=1))
    assert A.Krum(**rule.model_dump()) == rule
