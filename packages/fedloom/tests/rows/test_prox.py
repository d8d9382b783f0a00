from __future__ import annotations

import numpy as np
import pyproximal
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import ConfigError
from fedloom.rows import proxes as P
from fedloom.rows.layout import Layout

LAYOUT = Layout.create_from_shapes(
    {"conv.weight": (2, 3, 2, 1), "conv.bias": (2,), "fc.weight": (3, 4), "fc.bias": (3,)}
)
D = LAYOUT.d
A = tuple(tuple(float((j * (i + 2) + i) % (5 + i) - 2) for j in range(D)) for i in range(3))

CONVEX = [
    P.L1(c=0.3),
    P.L2(c=0.8),
    P.SquaredL2(c=0.4),
    P.ElasticNet(a=0.2, b=0.3),
    P.Linf(c=0.9),
    P.GroupL1(c=0.5),
    P.GroupL1(c=0.5, by="parameter", scaled=True),
    P.GroupL1(c=0.5, by=4),
    P.Nuclear(c=0.4),
    P.Total(parts=(P.L1(c=0.2), P.SquaredL2(c=0.3), P.L1(c=0.1))),
    P.Total(parts=(P.L1(c=0.2), P.GroupL1(c=0.3))),
    P.Total(parts=(P.L2(c=0.3), P.L1(c=0.2))),
    P.Total(parts=(P.Nuclear(c=0.3), P.SquaredL2(c=0.2))),
    P.Total(parts=(P.Nuclear(c=0.3), P.L1(c=0.1), P.SquaredL2(c=0.2)), tolerance=1e-8),
    P.Total(parts=(P.Linf(c=0.3), P.L2(c=0.5)), tolerance=1e-8),
]
SETS = [
    P.Box(lower=-0.5, upper=0.8),
    P.Box(lower=0.0, upper=None),
    P.Box(lower=None, upper=None),
    P.LinfBall(radius=0.6),
    P.L2Ball(radius=1.5),
    P.L1Ball(radius=2.0),
    P.Simplex(radius=1.3),
    P.HalfSpace(a=A[0], b=-0.7),
    P.HalfSpace(a=(1.0,), b=0.3),
    P.Affine(A=A, b=(0.5, -1.0, 0.2)),
    P.NuclearBall(radius=1.2),
]
WEAK = [P.SCAD(c=0.5, a=3.7), P.MCP(c=0.5, gamma=3.0)]
ALL = CONVEX + SETS + WEAK
TOTALS = [f for f in CONVEX if isinstance(f, P.Total)]


def name(f) -> str:
    return repr(f)[:60]


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(m: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    return 1.5 * torch.randn(m, D, dtype=torch.float64, generator=gen(seed)).to(dtype)


def moreau_value(f, x, v, t):
    return f.f(x, LAYOUT) + (x - v).square().sum(-1, keepdim=True) / (2 * t)


def slack(f) -> float:
    """A sum solved by splitting is exact to its tolerance."""
    return 1e-6 if isinstance(f, P.Total) else 1e-10


@pytest.mark.parametrize("f", ALL, ids=name)
@given(seed=st.integers(0, 2**20), t=st.floats(0.05, 1.5))
@settings(max_examples=12)
def test_no_point_is_better_than_the_prox(f, seed, t):
    v = rows(4, seed)
    x = f.prox(v, t, LAYOUT)
    best = moreau_value(f, x, v, t)
    assert best.shape == (4, 1)
    assert best.isfinite().all()
    for scale in (1e-4, 1e-2, 1.0):
        y = x + scale * torch.randn(x.shape, dtype=x.dtype, generator=gen(seed + 1))
        for other in (y, f.prox(y, t, LAYOUT), (1 - scale) * x, (1 - scale) * x + scale * v, x * (1 + scale)):
            inside = f.prox(other, 1e-9, LAYOUT) if f in SETS else other
            assert (moreau_value(f, inside, v, t) >= best - slack(f)).all()


@pytest.mark.parametrize("f", CONVEX + SETS, ids=name)
@given(seed=st.integers(0, 2**20), t=st.floats(0.05, 5.0))
@settings(max_examples=10)
def test_firmly_nonexpansive(f, seed, t):
    u, v = rows(4, seed), rows(4, seed + 1)
    p, q = f.prox(u, t, LAYOUT), f.prox(v, t, LAYOUT)
    assert ((p - q).square().sum(-1) <= ((p - q) * (u - v)).sum(-1) + slack(f)).all()
    assert f.convex


@pytest.mark.parametrize("f", [f for f in CONVEX if type(f) in (P.L1, P.L2, P.Linf, P.Nuclear)], ids=name)
@given(seed=st.integers(0, 2**20), t=st.floats(0.1, 5.0))
@settings(max_examples=10)
def test_moreau_identity_with_the_dual_ball(f, seed, t):
    """For a norm c||.||, v = prox_{t f}(v) + projection of v on the ball of radius c t of the dual norm."""
    v, radius = rows(3, seed), f.c * t
    if isinstance(f, P.Nuclear):
        rest = v - f.prox(v, t, LAYOUT)
        for matrix, whole in zip(LAYOUT.matrices(rest).values(), LAYOUT.matrices(v).values(), strict=True):
            u, s, vh = torch.linalg.svd(whole, full_matrices=False)
            torch.testing.assert_close(matrix, (u * s.clamp_max(radius)[:, None, :]) @ vh)
        return
    dual = {P.L1: P.LinfBall, P.L2: P.L2Ball, P.Linf: P.L1Ball}[type(f)](radius=radius)
    torch.testing.assert_close(f.prox(v, t) + dual.prox(v, 1.0), v)


@pytest.mark.parametrize("f", [f for f in CONVEX if not isinstance(f, P.SquaredL2)], ids=name)
@given(seed=st.integers(0, 2**20), t=st.floats(0.1, 3.0))
@settings(max_examples=8)
def test_the_residual_is_a_subgradient(f, seed, t):
    """f(y) >= f(x) + <(v - x) / t, y - x> for every y: the definition, without using the prox again."""
    v = rows(3, seed)
    x = f.prox(v, t, LAYOUT)
    for scale in (1e-3, 0.1, 1.0, 10.0):
        y = x + scale * torch.randn(x.shape, dtype=x.dtype, generator=gen(seed + 2))
        linear = f.f(x, LAYOUT) + ((v - x) / t * (y - x)).sum(-1, keepdim=True)
        assert (f.f(y, LAYOUT) >= linear - 100 * slack(f) * (1 + scale)).all()


@pytest.mark.parametrize("f", ALL, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_independent_and_arguments_unmodified(f, dtype):
    v, t = rows(5, 3, dtype), torch.linspace(0.1, 1.4, 5, dtype=dtype)[:, None]
    before = v.clone()
    x = f.prox(v, t, LAYOUT)
    assert x.dtype == dtype
    assert x.shape == v.shape
    assert torch.equal(v, before)
    tight = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    for i in range(5):
        torch.testing.assert_close(x[i], f.prox(v[i], float(t[i]), LAYOUT), **tight)
        torch.testing.assert_close(f.f(x, LAYOUT)[i, 0], f.f(x[i], LAYOUT), **tight)
        torch.testing.assert_close(f.f(v, LAYOUT)[i, 0], f.f(v[i], LAYOUT), **tight)
    assert f.f(v[0], LAYOUT).shape == ()
    exact = f.prox(v.double(), t.double(), LAYOUT)
    torch.testing.assert_close(x.double(), exact, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("f", SETS, ids=name)
def test_projections_are_idempotent_and_f_tells_inside(f):
    for dtype in (torch.float32, torch.float64):
        v = rows(6, 11, dtype) * 3
        x = f.prox(v, 1.0, LAYOUT)
        assert (f.f(x, LAYOUT) == 0).all()
        torch.testing.assert_close(f.prox(x, 2.0, LAYOUT), x)
        if f != P.Box(lower=None, upper=None):
            assert f.f(v, LAYOUT).isinf().any()


@pytest.mark.parametrize("f", WEAK, ids=name)
@given(seed=st.integers(0, 2**20))
@settings(max_examples=20)
def test_weak_convexity_constant_is_right_and_sharp(f, seed):
    x, y = rows(40, seed), rows(40, seed + 1)

    def convexified(z, weak):
        return f.f(z) + weak / 2 * z.square().sum(-1, keepdim=True)

    middle = convexified((x + y) / 2, f.weak)
    assert (middle <= (convexified(x, f.weak) + convexified(y, f.weak)) / 2 + 1e-12).all()
    flat = f.c * (f.a if isinstance(f, P.SCAD) else f.gamma)
    z = torch.linspace(f.c * 1.01, flat * 0.99, 9, dtype=torch.float64)[:, None]
    bend = (convexified(z + 1e-3, 0.9 * f.weak) + convexified(z - 1e-3, 0.9 * f.weak)) / 2 - convexified(
        z, 0.9 * f.weak
    )
    assert (bend < 0).all()
    ends = convexified(z + 1e-3, f.weak) + convexified(z - 1e-3, f.weak)
    assert (ends / 2 > convexified(z, f.weak) - 1e-14).all()
    assert not f.convex


@pytest.mark.parametrize("f", WEAK, ids=name)
def test_weakly_convex_prox_refuses_long_steps(f):
    v = rows(2, 0)
    f.prox(v, 0.99 / f.weak)
    for t in (1 / f.weak, torch.tensor([[0.1], [1 / f.weak + 1]])):
        with pytest.raises(ConfigError, match="weakly convex"):
            f.prox(v, t)


@given(seed=st.integers(0, 2**20), t=st.floats(0.01, 4.0), more=st.floats(0.01, 4.0))
@settings(max_examples=25)
def test_singular_value_threshold(seed, t, more):
    f, v = P.Nuclear(c=1.0), rows(1, seed)[0]
    x, further = f.prox(v, t, LAYOUT), f.prox(v, t + more, LAYOUT)
    for name, w in LAYOUT.matrices(v).items():
        shrunk, smaller = LAYOUT.matrices(x)[name], LAYOUT.matrices(further)[name]
        assert torch.linalg.matrix_norm(shrunk - w, 2) <= t + 1e-10
        assert torch.linalg.matrix_rank(smaller, atol=1e-9) <= torch.linalg.matrix_rank(shrunk, atol=1e-9)
        torch.testing.assert_close(torch.linalg.svdvals(shrunk), (torch.linalg.svdvals(w) - t).clamp_min(0))
    tree, before = LAYOUT.tree(x), LAYOUT.tree(v)
    assert torch.equal(tree["fc.bias"], before["fc.bias"])
    assert torch.equal(tree["conv.bias"], before["conv.bias"])
    q, r = (torch.linalg.qr(torch.randn(k, k, dtype=torch.float64, generator=gen(seed)))[0] for k in (3, 4))
    turned = LAYOUT.replace_matrices(v, {"fc.weight": q @ LAYOUT.matrices(v)["fc.weight"] @ r})
    torch.testing.assert_close(
        LAYOUT.matrices(f.prox(turned, t, LAYOUT))["fc.weight"], q @ LAYOUT.matrices(x)["fc.weight"] @ r
    )


def test_a_row_that_is_not_finite_stays_so_and_harms_no_other():
    for f in ALL:
        v = rows(3, 5)
        v[1, D - 5] = torch.nan
        x = f.prox(v, 0.5, LAYOUT)
        assert x[1].isnan().any(), f
        if isinstance(f, P.Nuclear | P.NuclearBall):
            assert LAYOUT.matrices(x)["fc.weight"][1].isnan().all(), f
        torch.testing.assert_close(x[[0, 2]], f.prox(v[[0, 2]], 0.5, LAYOUT))


# ------------------------------------------------------------------------------------------------------------- totals


@pytest.mark.parametrize("f", TOTALS, ids=name)
def test_closed_forms_and_splitting_agree(f):
    v = rows(3, 8)
    split = f.with_(tolerance=1e-8)._split(f._functions, v, 0.7, LAYOUT)
    torch.testing.assert_close(f.prox(v, 0.7, LAYOUT), split, rtol=1e-5, atol=1e-5)


def test_total_of_sets_is_the_projection_on_their_intersection():
    f = P.Total(parts=(P.Simplex(radius=1.0), P.LinfBall(radius=0.1)), tolerance=1e-10)
    v = rows(3, 1)
    x = f.prox(v, 1.0)
    theta = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    for i in range(3):
        sums = torch.stack([(v[i] - part).clamp(0, 0.1).sum() for part in theta[::400]])
        k = int((sums - 1).abs().argmin())
        fine = theta[max(0, 400 * k - 400) : 400 * k + 400]
        best = min(fine, key=lambda part: abs(float((v[i] - part).clamp(0, 0.1).sum()) - 1))
        torch.testing.assert_close(x[i], (v[i] - best).clamp(0, 0.1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("others", [(P.LinfBall(radius=0.1),), (P.Box(lower=0.0, upper=0.2), P.L1(c=0.3))])
def test_the_sum_is_finite_at_its_prox_and_infinite_outside(others: tuple[P.Prox, ...]):
    f = P.Total(parts=(P.Simplex(radius=1.0), *others))
    x = f.prox(rows(3, 1), 1.0)
    value = f.f(x)
    assert value.shape == (3, 1)
    assert value.isfinite().all()
    x[1, 0] += 1e-3
    assert f.f(x).isfinite()[:, 0].tolist() == [True, False, True]
    assert f.f(x[1]).isinf()


def test_total_l1_and_box_is_clip_after_soft():
    f = P.Total(parts=(P.L1(c=0.3), P.Box(lower=0.1, upper=0.4)))
    v = rows(3, 2)
    x = f.prox(v, 0.5)
    grid = torch.linspace(0.1, 0.4, 3001, dtype=torch.float64)
    values = 0.3 * grid.abs() + (grid - v[..., None]).square() / (2 * 0.5)
    torch.testing.assert_close(x, grid[values.argmin(-1)], atol=2e-4, rtol=0)


def test_total_from_tables_and_refusals():
    f = P.Total(parts=({"kind": "l1", "c": 0.2}, {"kind": "squared-l2", "c": 0.1}))
    assert f.parts == (P.L1(c=0.2), P.SquaredL2(c=0.1))
    assert P.Total(**f.model_dump()) == f
    assert P.Total(parts=(P.SCAD(), P.SquaredL2())).convex is False
    with pytest.raises(ConfigError, match="did you mean .nuclear"):
        P.Total(parts=({"kind": "nuklear"},))
    with pytest.raises(ConfigError, match="weakly convex"):
        P.Total(parts=(P.SCAD(), P.L1()))
    with pytest.raises(ConfigError, match="Check that the sets intersect"):
        P.Total(parts=(P.Simplex(radius=3.0), P.L1Ball(radius=1.0)), iterations=200).prox(rows(2, 0), 1.0)


def test_weak_total_against_a_grid():
    f, v = P.Total(parts=(P.SCAD(c=0.5), P.SquaredL2(c=0.2))), rows(2, 4)
    grid = torch.linspace(-6, 6, 60_001, dtype=torch.float64)[:, None]
    values = f.f(grid)[:, 0] + (grid[:, 0] - v[..., None]).square() / 2
    torch.testing.assert_close(f.prox(v, 1.0), grid[values.argmin(-1), 0], atol=4e-4, rtol=0)


# -------------------------------------------------------------------------------------------------------- pyproximal

T = 0.7
PEERS = [
    (P.L1(c=0.3), pyproximal.L1(sigma=0.3)),
    (P.L2(c=0.8), pyproximal.Euclidean(sigma=0.8)),
    (P.SquaredL2(c=0.4), pyproximal.L2(sigma=0.8)),  # sigma / 2 ||x||^2
    (P.SCAD(c=0.5), pyproximal.SCAD(0.5, 3.7)),
    (P.Box(lower=-0.5, upper=0.8), pyproximal.Box(-0.5, 0.8)),
    (P.L2Ball(radius=1.5), pyproximal.EuclideanBall(np.zeros(D), 1.5)),
    (P.L1Ball(radius=2.0), pyproximal.L1Ball(D, 2.0, xtol=1e-12)),
    (P.Simplex(radius=1.3), pyproximal.Simplex(D, 1.3, maxiter=500, xtol=1e-12, engine="numpy")),
    (P.HalfSpace(a=A[0], b=-0.7), pyproximal.HalfSpace(np.array(A[0]), -0.7)),
]


@pytest.mark.parametrize(("f", "peer"), PEERS, ids=lambda f: type(f).__name__)
def test_pyproximal_agrees(f, peer):
    for v in rows(5, 21):
        torch.testing.assert_close(f.prox(v, T), torch.from_numpy(peer.prox(v.numpy(), T)), rtol=1e-6, atol=1e-6)
        if type(f) in (P.L1, P.L2, P.SquaredL2):
            assert float(f.f(v)) == pytest.approx(float(peer(v.numpy())))


def test_pyproximal_agrees_on_matrices_groups_and_affine_sets():
    single = Layout.create_from_shapes({"fc": (5, 4)})
    v = torch.randn(20, dtype=torch.float64, generator=gen(3))
    peer = pyproximal.Nuclear((5, 4), sigma=0.4)
    torch.testing.assert_close(P.Nuclear(c=0.4).prox(v, T, single), torch.from_numpy(peer.prox(v.numpy(), T)))
    assert float(P.Nuclear(c=0.4).f(v, single)) == pytest.approx(float(peer(v.numpy())))
    ball = pyproximal.NuclearBall((5, 4), 1.2, xtol=1e-12)
    ours = P.NuclearBall(radius=1.2).prox(v, T, single)
    torch.testing.assert_close(ours, torch.from_numpy(ball.prox(v.numpy(), T)).reshape(-1), rtol=1e-6, atol=1e-6)
    groups = pyproximal.L21(ndim=4, sigma=0.5)  # groups are the columns of a 4 x 5 array
    ours = P.GroupL1(c=0.5, by=4).prox(v, T)
    theirs = groups.prox(v.view(5, 4).T.reshape(-1).numpy(), T)
    torch.testing.assert_close(ours, torch.from_numpy(theirs).view(4, 5).T.reshape(-1))
    from pylops import MatrixMult

    affine = pyproximal.AffineSet(MatrixMult(np.array(A)), np.array([0.5, -1.0, 0.2]), niter=200)
    w = rows(1, 9)[0]
    ours = P.Affine(A=A, b=(0.5, -1.0, 0.2)).prox(w, T)
    torch.testing.assert_close(ours, torch.from_numpy(affine.prox(w.numpy(), T)), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_registry_and_refusals():
    assert all(
        isinstance(cls(**({"parts": (P.L1(),)} if kind == "total" else {})), P.Prox)
        for kind, cls in P.PROXES.items()
        if kind not in ("half-space", "affine")
    )
    for f in (P.Nuclear(), P.NuclearBall(), P.GroupL1()):
        with pytest.raises(ConfigError, match="layout"):
            f.prox(rows(1, 0), 1.0)
    for make in (
        lambda: P.Box(lower=2.0, upper=1.0),
        lambda: P.L1(c=-1.0),
        lambda: P.HalfSpace(a=(0.0,), b=1.0),
        lambda: P.Affine(A=((1.0, 0.0), (1.0, 0.0)), b=(0.0, 1.0)),
        lambda: P.Affine(A=((1.0, 0.0), (1.0,)), b=(0.0, 1.0)),
        lambda: P.SCAD(a=2.0),
    ):
        with pytest.raises(ConfigError):
            make()
    for f in (P.HalfSpace(a=(1.0, 2.0), b=0.0), P.Affine(A=((1.0, 2.0),), b=(0.0,))):
        with pytest.raises(ConfigError, match=rf"R\^2, but the rows have {D} scalars"):
            f.prox(rows(1, 0), 1.0)


# -------------------------------------------------------------------------------------------------------------- edges


def test_groups_by_hand():
    layout = Layout.create_from_shapes({"fc.weight": (2, 3), "gain": (), "fc.bias": (2,)})
    v = torch.arange(1.0, 10.0, dtype=torch.float64)
    groups = {"parameter": ([0, 1, 2, 3, 4, 5], [6], [7, 8]), "unit": ([0, 1, 2], [3, 4, 5], [6], [7], [8])}
    for by, parts in groups.items():
        f = P.GroupL1(c=2.0, by=by, scaled=True)
        lengths = [float(v[part].norm()) for part in parts]
        want = 2.0 * sum(length * len(part) ** 0.5 for length, part in zip(lengths, parts, strict=True))
        assert float(f.f(v, layout)) == pytest.approx(want)
        x = f.prox(v, 0.5, layout)
        for length, part in zip(lengths, parts, strict=True):
            torch.testing.assert_close(x[part], v[part] * max(0.0, 1 - len(part) ** 0.5 / length))


def test_a_group_of_zeros_stays_zero():
    zero = torch.zeros(D, dtype=torch.float64)
    for c in (0.0, 0.5):
        assert torch.equal(P.GroupL1(c=c).prox(zero, 1.0, LAYOUT), zero)


@pytest.mark.parametrize("f", [f for f in SETS if f.f(1e-3 * rows(1, 0), LAYOUT) == 0], ids=name)
def test_what_is_inside_stays(f):
    v = 1e-3 * rows(1, 0)
    torch.testing.assert_close(f.prox(v, 1.0, LAYOUT), v)


def test_large_sets_know_what_is_inside():
    """Rounding grows with what is projected: a projection is in its set."""
    for f in (P.Simplex(radius=1e6), P.L1Ball(radius=1e6), P.HalfSpace(a=A[0], b=1e6), P.NuclearBall(radius=1e6)):
        for dtype in (torch.float32, torch.float64):
            x = f.prox(1e7 * rows(6, 3, dtype), 1.0, LAYOUT)
            assert (f.f(x, LAYOUT) == 0).all()


def test_a_box_may_be_a_point_and_a_large_system_is_solvable():
    assert P.Box(lower=0.5, upper=0.5).prox(rows(2, 0), 1.0).eq(0.5).all()
    x = 1e6 * rows(1, 5)[0]
    b = torch.tensor(A, dtype=torch.float64) @ x
    P.Affine(A=A, b=tuple(b.tolist()))
    with pytest.raises(ConfigError, match="must have 2 rows"):
        P.Affine(A=A, b=(0.5, -1.0))


def test_momentum_saves_iterations():
    """Against the same splitting without it, written here: a seventh on an ill-conditioned sum."""
    f = P.Total(parts=(P.Simplex(radius=1.0), P.LinfBall(radius=0.06)), tolerance=1e-9)
    for v in rows(3, 6)[:, None]:
        u, count = torch.zeros(2, *v.shape, dtype=v.dtype), 0
        while True:
            z, count = u + (v - u.mean(0)), count + 1
            p = torch.stack([part.prox(zi, 2.0) for part, zi in zip(f.parts, z, strict=True)])
            if (p - p.mean(0)).norm(dim=-1).max() <= 1e-9 * (1 + v.norm()):
                break
            u = z - p
        few = f.with_(iterations=count // 7)
        torch.testing.assert_close(few.prox(v, 1.0), p.mean(0), rtol=0, atol=1e-6)
