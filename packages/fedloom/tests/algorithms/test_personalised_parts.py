"""Methods of which a part of the model stays at home, and FedSpa, of which every client has a part."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from short_runs import PARTIAL, equal
from torch import Tensor, nn

from fedloom.algorithms import Algorithm, FedAvg, FedBN, FedPer, FedRep, FedSpa, LGFedAvg, LocalOnly, upload_fields
from fedloom.errors import LayoutError, Refused
from fedloom.local import LocalSGD
from fedloom.models import make_spec
from fedloom.rows import masks
from fedloom.rows.layout import Layout
from fedloom.testing import Problem, ReferenceState, federate, locate_difference, personal_models
from fedloom.testing.federate import ReferenceFederation
from fedloom.testing.problems import TOY_LAYOUT

SEEDS = pytest.mark.parametrize("seed", [0, 1])
SGD = LocalSGD(lr=0.1, batch_size=2, schedule="exponential", decay=0.8, weight_decay=0.05, momentum=0.3)
DEEP = Layout.create_from_shapes(
    {"a.weight": (4, 5), "a.bias": (4,), "norm.weight": (4,), "norm.bias": (4,), "b.weight": (3, 4), "b.bias": (3,)}
)
ALL = ("body", "head")


def run(algorithm: Algorithm, p: Problem, rounds: int = 5, **options: Any) -> list[ReferenceState]:
    return federate(algorithm, p, rounds, **{"local": SGD, "noise": 0.5, "cohorts": PARTIAL, **options})


def personal(algorithm: Algorithm, p: Problem, state: ReferenceState) -> Tensor:
    got = personal_models(algorithm, ReferenceFederation(p.oracle(noise=0.5), p.alpha, SGD), state)
    assert got is not None
    return got


def uncoupled(seed: int, *home: str, layout: Layout = TOY_LAYOUT) -> tuple[Problem, Tensor]:
    """A problem whose Hessians do not couple the parameters under ``home`` with the others; their mask."""
    p = Problem.random(seed, layout=layout)
    mask = layout.mask(*home)
    return replace(p, hessian=torch.where(mask[:, None] == mask, p.hessian, 0.0)), mask


# --- who stays at home

SPLITS: list[tuple[Algorithm, tuple[str, ...]]] = [
    (FedPer(), ("head",)),
    (FedPer(head=("head.bias",)), ("head.bias",)),
    (FedPer(head=("body",)), ("body",)),
    (LGFedAvg(), ("body",)),
    (LGFedAvg(head=("head.bias", "body")), ("head.weight",)),
    (FedBN(layers=("head.bias",)), ("head.bias",)),
    (FedRep(head_epochs=1), ("head",)),
    (FedRep(head=("body", "head.bias"), head_epochs=1), ("body", "head.bias")),
]


@SEEDS
@pytest.mark.parametrize(("algorithm", "home"), SPLITS)
def test_uncoupled_parts_train_as_local_at_home_and_as_fedavg_away(
    seed: int, algorithm: Algorithm, home: tuple[str, ...]
) -> None:
    """With all at home it is Local, with nothing at home FedAvg: here both at once, coordinate by coordinate."""
    p, mask = uncoupled(seed, *home)
    quiet = {"noise": 0.0 if isinstance(algorithm, FedRep) else 0.5}  # FedRep's head has batches of its own
    end = run(algorithm, p, **quiet)[-1]
    shared, alone = run(FedAvg(), p, **quiet)[-1].server.x, run(LocalOnly(), p, **quiet)[-1].rows.v
    got = personal(algorithm, p, end)
    equal(got[:, mask], alone[:, mask])
    equal(got[:, ~mask], shared[~mask].expand(p.n, -1))
    equal(end.server.x[~mask], shared[~mask])
    equal(end.server.x[mask], p.x0[mask], 0)
    assert end.rows[0].shape == (p.n, int(mask.sum()))


@SEEDS
def test_limits_of_the_split(seed: int) -> None:
    p = Problem.random(seed)
    alone, together = run(LocalOnly(), p)[-1].rows.v, run(FedAvg(), p)[-1].server.x
    for algorithm in (FedPer(head=ALL), FedBN(layers=ALL)):
        equal(personal(algorithm, p, run(algorithm, p)[-1]), alone, 0)
    equal(run(LGFedAvg(head=ALL), p)[-1].server.x, together, 0)
    equal(run(FedBN(), p)[-1].server.x, together, 0)
    one = {"noise": 0.0}
    equal(run(FedRep(head=ALL, head_epochs=1), p, **one)[-1].rows.head, run(LocalOnly(), p, **one)[-1].rows.v, 1e-14)


@SEEDS
@pytest.mark.parametrize(("algorithm", "home"), SPLITS)
def test_only_the_shared_part_is_sent(seed: int, algorithm: Algorithm, home: tuple[str, ...]) -> None:
    p, everyone = Problem.random(seed), range(5)
    mask = p.layout.mask(*home)
    fed = ReferenceFederation(p.oracle(noise=0.5), p.alpha, SGD)
    state = run(algorithm, p)[-1]
    down = algorithm.down(state.server, None, fed.ctx(6, everyone))
    up, rows = algorithm.client(down, state.rows, fed.work(6, everyone))
    assert torch.equal(up.dw[:, mask], torch.zeros_like(up.dw[:, mask]))
    assert (up.dw[:, ~mask] != 0).all()
    assert (rows[0] != state.rows[0]).all()
    part = upload_fields(type(algorithm))["dw"].part
    assert part is not None
    assert torch.equal(algorithm.part(part, p.layout), ~mask)


@SEEDS
def test_fedper_and_lgfedavg_are_each_other_with_head_and_body_exchanged(seed: int) -> None:
    p = Problem.random(seed)
    a, b = run(FedPer(head=("body",)), p), run(LGFedAvg(head=("head",)), p)
    for x, y in zip(a, b, strict=True):
        equal(x.server.x, y.server.x, 0)
        equal(x.rows.head, y.rows.body, 0)


@SEEDS
def test_fedper_by_hand(seed: int) -> None:
    """Joint descent from the shared body and the own head."""
    p, local = Problem.random(seed), LocalSGD(lr=0.2, batch_size=2)
    mask = p.layout.mask("head")
    steps = torch.tensor([[local.batches(size)] for size in p.sizes.tolist()])
    for before, after in pairwise(run(FedPer(), p, local=local, noise=0.0)):
        start = before.server.x.expand(p.n, -1).clone()
        start[:, mask] = before.rows.head
        end, cohort = p.descent(start, steps, 0.2), list(PARTIAL[before.round])
        equal(after.rows.head[cohort], end[cohort][:, mask])
        equal(after.server.x[~mask], end[cohort][:, ~mask].mean(0))
        absent = [i for i in range(p.n) if i not in cohort]
        equal(after.rows.head[absent], before.rows.head[absent], 0)


# --- FedRep


@SEEDS
def test_fedrep_solves_the_head_for_the_body_and_then_the_body_for_the_head(seed: int) -> None:
    p = Problem.random(seed)
    head = p.layout.mask("head")

    def best(i: int, w: Tensor, free: Tensor) -> Tensor:
        a, c = p.hessian[i], p.minimiser[i]
        w = w.clone()
        w[free] = c[free] - torch.linalg.solve(a[free][:, free], a[free][:, ~free] @ (w - c)[~free])
        return w

    for before, after in pairwise(run(FedRep(), p, local=LocalSGD(), solve=True)):
        bodies = []
        for i in PARTIAL[before.round]:
            w = best(i, torch.where(head, 0.0, before.server.x), head)
            equal(after.rows.head[i], w[head])
            bodies.append(best(i, w, ~head)[~head])
        equal(after.server.x[~head], torch.stack(bodies).mean(0))


@SEEDS
@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_fedrep_has_epochs_of_the_head_on_batches_of_their_own(seed: int, epochs: int) -> None:
    p = Problem.random(seed)
    head, local = p.layout.mask("head"), LocalSGD(lr=0.1, batch_size=2, epochs=2)
    for before, after in pairwise(run(FedRep(head_epochs=epochs), p, local=local)):
        bodies = []
        for i in PARTIAL[before.round]:
            work = ReferenceFederation(p.oracle(noise=0.5), p.alpha, local).work(after.round, [i])
            w = before.server.x.clone()
            w[head] = before.rows.head[i]
            for stream, free, count in (("head", head, epochs), ("local", ~head, 2)):
                steps = count * local.batches(int(p.sizes[i]))
                plan = work.plan(stream, torch.tensor([steps]))
                for k in range(steps):
                    w = w - 0.1 * torch.where(free, work.grad(w[None], plan.batch(k))[0], 0.0)
            equal(after.rows.head[i], w[head])
            bodies.append(w[~head])
        equal(after.server.x[~head], torch.stack(bodies).mean(0))


# --- FedBN


def test_fedbn_refuses_a_model_without_normalisation() -> None:
    ctx = ReferenceFederation(Problem.random().oracle(), Problem.random().alpha, SGD).ctx(0, (0,))
    with pytest.raises(Refused, match="the model has no normalization layers"):
        FedBN().check(ctx.layout, ctx)
    assert FedBN(layers=("head",)).check(ctx.layout, ctx) == []
    assert FedBN().check(DEEP, ctx) == []


@SEEDS
def test_fedbn_keeps_the_normalisation_layers(seed: int) -> None:
    p, mask = uncoupled(seed, "norm", layout=DEEP)
    end = run(FedBN(), p)[-1]
    equal(personal(FedBN(), p, end)[:, mask], run(LocalOnly(), p)[-1].rows.v[:, mask])
    equal(end.server.x[~mask], run(FedAvg(), p)[-1].server.x[~mask])


# --- masks


def layout_of(model: str, shape: tuple[int, ...] = (1, 8, 8), **options: Any) -> Layout:
    return Layout.create(make_spec(model).with_(**options).build(shape, 10, 0))


def names_in(layout: Layout, mask: Tensor) -> list[str]:
    return [name for name, part in layout.tree(mask).items() if bool(part.any())]


def test_head_is_the_last_layer_with_a_matrix() -> None:
    mlp = layout_of("mlp", hidden=(7, 5))
    assert names_in(mlp, masks.head(mlp)) == ["head.weight", "head.bias"]
    assert masks.head(mlp).sum() == 60
    cnn = layout_of("cnn", channels=(4,), kernel=3, norm="group", hidden=())
    assert names_in(cnn, masks.head(cnn)) == ["head.weight", "head.bias"]
    tail = Layout.create_from_shapes({"x.w": (2, 2), "x.b": (3,), "scale": (1,), "y.b": (2,)})
    assert names_in(tail, masks.head(tail)) == ["x.w", "x.b"]
    bare = Layout.create_from_shapes({"weight": (3, 2), "bias": (3,)})
    assert names_in(bare, masks.head(bare)) == ["weight", "bias"]
    assert names_in(mlp, masks.head(mlp, ("fc1", "head.bias"))) == ["fc1.weight", "fc1.bias", "head.bias"]


def test_head_of_a_model_without_a_matrix_is_refused() -> None:
    flat = Layout.create_from_shapes({"w": (7,)})
    with pytest.raises(Refused, match="no layer with a weight matrix"):
        masks.head(flat)
    with pytest.raises(LayoutError, match="tail"):
        masks.head(flat, ("tail",))
    assert masks.head(flat, ("w",)).all()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.gn, self.ln = nn.GroupNorm(2, 4), nn.LayerNorm([4, 6, 6])
        self.plain, self.act = nn.LayerNorm(6, bias=False), nn.PReLU()
        self.square, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(2))
        self.lone = nn.Linear(1, 1)


def test_normalisation_layers_are_known_by_their_shapes() -> None:
    layout = Layout.create(Mixed())
    want = ["bn.weight", "bn.bias", "gn.weight", "gn.bias", "ln.weight", "ln.bias", "plain.weight", "act.weight"]
    assert names_in(layout, masks.normalisation(layout)) == want
    assert names_in(layout, masks.normalisation(layout, ("gn",))) == ["gn.weight", "gn.bias"]
    assert not masks.normalisation(layout_of("mlp")).any()
    assert masks.normalisation(layout_of("mlp")).shape == (layout_of("mlp").d,)


def test_joined_puts_own_values_in_their_places() -> None:
    mask = DEEP.mask("norm", "a.bias")
    x, own = torch.randn(DEEP.d, generator=torch.Generator().manual_seed(0)), torch.arange(36.0).reshape(3, 12)
    got = masks.joined(x, own, mask)
    equal(got[:, mask], own, 0)
    equal(got[:, ~mask], x[~mask].expand(3, -1), 0)


@pytest.mark.parametrize("density", [0.1, 0.3, 0.5, 0.9, 1.0])
def test_erdos_renyi_kernel_keeps_the_share_and_the_proportions(density: float) -> None:
    layout = layout_of("cnn", channels=(4, 8), kernel=3, padding=1, hidden=(32,))
    kept = masks.erdos_renyi_kernel(layout, density).double()
    shapes = [s for s in layout.shapes if len(s) > 1]
    size = torch.tensor([math.prod(s) for s in shapes], dtype=torch.float64)
    assert abs(float(kept.sum() - density * size.sum())) <= len(shapes)
    assert (kept <= size).all()
    raw = torch.tensor([sum(s) / math.prod(s) for s in shapes], dtype=torch.float64)
    sparse = kept < size
    scale = (kept / size / raw)[sparse]
    assert (raw[~sparse] * (scale.max() if len(scale) else math.inf) >= 0.98).all()  # full where it would exceed one
    assert sparse.any() == (density < 1)
    if len(scale):
        low, high = ((kept[sparse] + sign) / size[sparse] / raw[sparse] for sign in (-0.5, 0.5))
        assert low.max() <= high.min()  # one scale for all, up to the rounding of counts


def test_smallest_scores_of_each_matrix() -> None:
    score = torch.randn(4, DEEP.d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    count = torch.tensor([6, 5])
    chosen = masks.smallest(score, DEEP, count)
    for row, got in zip(DEEP.tree(score)["a.weight"], DEEP.tree(chosen)["a.weight"], strict=True):
        assert sorted(row[got].tolist()) == sorted(row.flatten().tolist())[:6]
    for row, got in zip(DEEP.tree(score)["b.weight"], DEEP.tree(chosen)["b.weight"], strict=True):
        assert sorted(row[got].tolist()) == sorted(row.flatten().tolist())[:5]
    assert names_in(DEEP, chosen.any(0)) == ["a.weight", "b.weight"]
    assert torch.equal(masks.smallest(score[2], DEEP, count), chosen[2])
    assert torch.equal(masks.matrices(DEEP), DEEP.mask("a.weight", "b.weight"))


# --- FedSpa


def spa(seed: int) -> Problem:
    return Problem.random(seed, layout=DEEP)


@SEEDS
def test_fedspa_with_density_1_is_fedavg(seed: int) -> None:
    p = spa(seed)
    states, want = run(FedSpa(density=1.0), p), run(FedAvg(), p)
    for a, b in zip(states, want, strict=True):
        equal(a.server.x, b.server.x)
        assert (a.rows.mask == 1).all()


@SEEDS
@pytest.mark.parametrize("density", [0.3, 0.6])
def test_fedspa_masks_keep_their_size_per_layer(seed: int, density: float) -> None:
    p = spa(seed)
    states = run(FedSpa(density=density, horizon=50), p)
    kept = masks.erdos_renyi_kernel(DEEP, density)
    assert len(states[0].rows.mask.unique(dim=0)) == 1
    for state in states:
        assert set(state.rows.mask.unique().tolist()) == {0.0, 1.0}
        tree = DEEP.tree(state.rows.mask)
        assert tree["a.weight"].sum((1, 2)).tolist() == [int(kept[0])] * p.n
        assert tree["b.weight"].sum((1, 2)).tolist() == [int(kept[1])] * p.n
        assert (state.rows.mask[:, ~masks.matrices(DEEP)] == 1).all()
    assert len(states[-1].rows.mask.unique(dim=0)) > 1


def test_fedspa_first_masks_differ_between_seeds_only() -> None:
    first = [run(FedSpa(), spa(0), 0, seed=s)[0].rows.mask for s in (0, 0, 1)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


@SEEDS
def test_fedspa_by_hand(seed: int) -> None:
    """Masked descent, masked update; the smallest weights leave, the largest gradients of one batch enter."""
    p, local = spa(seed), LocalSGD(lr=0.1, batch_size=2, weight_decay=0.05)
    algorithm = FedSpa(density=0.5, exchange=0.8, horizon=4)
    kept = masks.erdos_renyi_kernel(DEEP, 0.5).tolist()
    changes = []
    for before, after in pairwise(run(algorithm, p, 6, local=local, cohorts=[*PARTIAL, (0, 1, 2, 3, 4)])):
        rate = 0.4 * (1 + math.cos(math.pi * min(before.round, 4) / 4))
        updates = []
        for i in [*PARTIAL, (0, 1, 2, 3, 4)][before.round]:
            work = ReferenceFederation(p.oracle(noise=0.5), p.alpha, local).work(after.round, [i])
            mask = before.rows.mask[i] == 1
            w = torch.where(mask, before.server.x, 0.0)
            plan = work.plan("local", work.steps[:, 0])
            for k in range(int(work.steps)):
                w = torch.where(mask, w - 0.1 * work.grad(w[None], plan.batch(k))[0], 0.0)
            updates.append(torch.where(mask, w - before.server.x, 0.0))
            g = work.grad(w[None], work.plan("regrow", torch.ones(1, dtype=torch.long)).batch(0))[0].abs()
            new = mask.clone()
            for name, count in zip(("a.weight", "b.weight"), kept, strict=True):
                here, exchanged = DEEP.mask(name).nonzero()[:, 0].tolist(), int(rate * count)
                inside = sorted((j for j in here if mask[j]), key=lambda j: abs(float(w[j])))
                new[inside[:exchanged]] = False
                outside = sorted((j for j in here if not new[j]), key=lambda j: -float(g[j]))
                new[outside[:exchanged]] = True
                changes.append((after.round, exchanged))
            assert torch.equal(after.rows.mask[i] == 1, new)
        equal(after.server.x, before.server.x + torch.stack(updates).mean(0))
        equal(personal(algorithm, p, after), after.server.x * after.rows.mask, 0)
        absent = [i for i in range(p.n) if i not in [*PARTIAL, (0, 1, 2, 3, 4)][before.round]]
        assert torch.equal(after.rows.mask[absent], before.rows.mask[absent])
    assert {k for r, k in changes if r == 1} == {int(0.8 * c) for c in kept}
    assert {k for r, k in changes if r >= 5} == {0}


def test_fedspa_leaves_what_no_mask_has() -> None:
    p = spa(0)
    states = run(FedSpa(density=0.4, exchange=0.0), p)
    out = states[0].rows.mask[0] == 0
    equal(states[-1].server.x[out], p.x0[out], 0)
    assert (states[-1].server.x[~out] != p.x0[~out]).all()
    assert locate_difference(states[-1].rows, states[0].rows) is None


def test_fedspa_without_steps_keeps_the_mask() -> None:
    p = spa(0)
    fed, algorithm = ReferenceFederation(p.oracle(noise=0.5), p.alpha, SGD), FedSpa(horizon=1000)
    state = run(algorithm, p, 1)[-1]
    down = algorithm.down(state.server, None, fed.ctx(2, range(p.n)))
    still = fed.work(2, range(p.n), steps=0)
    up, rows = algorithm.client(down, state.rows, still)
    assert torch.equal(rows.mask, state.rows.mask)
    assert not up.dw.any()
    assert not still.counts.backward.any()
