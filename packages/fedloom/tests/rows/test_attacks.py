from __future__ import annotations

from math import erf, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import ConfigError
from fedloom.rows import attacks as K
from fedloom.seeds import generator

SEEDS = st.integers(0, 2**20)
FORGERIES = [cls for cls in K.ATTACKS.values() if issubclass(cls, K.Forgery)]


def gens(b: int, seed: int = 0) -> list[torch.Generator]:
    return [generator(seed, 1, i, "attack") for i in range(b)]


def scene(seed: int, h: int = 7, b: int = 3, d: int = 6, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(1, d, generator=g, dtype=torch.float64).expand(b, d).to(dtype)
    honest = base[:1] + torch.randn(h, d, generator=g, dtype=torch.float64).to(dtype)
    own = base + torch.randn(b, d, generator=g, dtype=torch.float64).to(dtype)
    return honest, base, own


def forge(attack, seed=0, honest="seen", m=10, **kw):
    rows, base, own = scene(seed, **kw)
    return attack.forge(rows if honest == "seen" else None, base, own, m, gens(len(base), seed))


@pytest.mark.parametrize("cls", FORGERIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sight", ["seen", "unseen"])
def test_every_forgery_has_its_shape_and_changes_no_argument(cls, dtype, sight):
    honest, base, own = scene(1, dtype=dtype)
    before = [x.clone() for x in (honest, base, own)]
    got = cls().forge(honest if sight == "seen" else None, base, own, 10, gens(3))
    assert got.shape == base.shape
    assert got.dtype == dtype
    got.fill_(9.0)
    assert all(torch.equal(x, y) for x, y in zip((honest, base, own), before, strict=True))


@pytest.mark.parametrize("cls", FORGERIES)
def test_declared_knowledge_is_all_that_is_read(cls):
    honest, base, own = scene(1)
    got = cls().forge(honest, base, own, 10, gens(3))
    assert torch.equal(got, cls().forge(honest if cls.sees_honest else honest * 7, base, own, 10, gens(3)))
    alone = cls().forge(None, base, own, 10, gens(3))
    assert torch.equal(alone, cls().forge(None, base, own if cls.trains else own * 7, 10, gens(3)))
    if not cls.sees_honest:
        assert torch.equal(got, alone)


@pytest.mark.parametrize("cls", [K.SameValue, K.SignFlip, K.Gaussian])
def test_a_draw_belongs_to_its_client(cls):
    _, base, own = scene(2)
    whole = cls().forge(None, base, own, 10, gens(3))
    for i in range(3):
        one = cls().forge(None, base[i : i + 1], own[i : i + 1], 10, [generator(0, 1, i, "attack")])
        assert torch.equal(one[0], whole[i])
    assert not torch.equal(whole[0], whole[1])


def test_same_value_and_sign_flip_are_of_their_form():
    rows = forge(K.SameValue(), b=4)
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    _, base, _ = scene(0, b=4)
    ratio = forge(K.SignFlip(), b=4) / base
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    assert (ratio < 0).all()


@pytest.mark.parametrize("variance", [0.1, 4.0])
def test_variances(variance):
    b = 4000
    base = torch.ones(b, 2, dtype=torch.float64)
    p = K.SameValue(variance=variance).forge(None, base, base, b, gens(b))[:, 0]
    q = K.SignFlip(variance=variance).forge(None, base, base, b, gens(b))[:, 0]
    g = K.Gaussian(variance=variance).forge(None, base, base, b, gens(b))
    for second in (p.square().mean(), q.square().mean(), g[:, 0].square().mean(), g[:, 1].square().mean()):
        assert abs(float(second) / variance - 1) < 4 * sqrt(2 / b)
    assert abs(float(q.mean()) + sqrt(2 * variance / np.pi)) < 4 * sqrt(variance / b)
    assert abs(float((g[:, 0] * g[:, 1]).mean())) < 4 * variance / sqrt(b)


@given(seed=SEEDS, scale=st.floats(0.5, 50))
@settings(max_examples=15)
def test_model_replacement_replaces_the_mean(seed, scale):
    """One attacker with scale m among m - 1 clients that did not move: the mean becomes the attacker's model."""
    m = 10
    _, base, own = scene(seed, b=1)
    forged = forge(K.ModelReplacement(), seed, b=1, m=m)
    torch.testing.assert_close((forged[0] + (m - 1) * base[0]) / m, own[0])
    torch.testing.assert_close(forge(K.ModelReplacement(scale=scale), seed, b=1), base + scale * (own - base))


@given(seed=SEEDS, z=st.floats(-2, 2))
@settings(max_examples=15)
def test_alie_by_numpy(seed, z):
    honest, _, _ = scene(seed)
    want = honest.numpy().mean(0) + z * honest.numpy().std(0, ddof=1)
    np.testing.assert_allclose(forge(K.ALIE(z=z), seed), np.tile(want, (3, 1)))


@pytest.mark.parametrize(("m", "b"), [(50, 24), (51, 12), (20, 5), (10, 1), (10, 9)])
def test_alie_chooses_z_as_the_paper(m, b):
    z, s = K.ALIE().deviations(m, b), m // 2 + 1 - b
    below = (1 + erf(z / sqrt(2))) / 2
    assert below == pytest.approx(max(min((m - b - s) / (m - b), 1 - 1e-6), 0.5))


@given(seed=SEEDS, epsilon=st.floats(0.05, 5))
@settings(max_examples=15)
def test_ipm_is_against_the_honest_mean(seed, epsilon):
    honest, base, _ = scene(seed)
    moved = forge(K.IPM(epsilon=epsilon), seed) - base
    torch.testing.assert_close(moved, -epsilon * (honest.mean(0) - base))


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
@given(seed=SEEDS)
@settings(max_examples=15)
def test_min_max_goes_as_far_as_allowed_and_no_farther(direction, seed):
    honest, base, _ = scene(seed)
    row = forge(K.MinMax(direction=direction), seed)[0]
    widest = max(float((a - b).norm()) for a in honest for b in honest)
    assert max(float((row - a).norm()) for a in honest) == pytest.approx(widest)
    centre = honest.mean(0)
    step = centre - row
    mean = centre - base[0]
    p = {"std": honest.std(0), "unit": mean / mean.norm(), "sign": mean.sign()}[direction]
    torch.testing.assert_close(step / step.norm(), p / p.norm())


def test_min_max_of_equal_rows_is_that_row():
    rows = torch.ones(4, 3, dtype=torch.float64)
    assert torch.equal(K.MinMax().forge(rows, rows[:2], rows[:2], 6, gens(2)), rows[:2])


@given(seed=SEEDS)
@settings(max_examples=15)
def test_mimic_copies_the_row_farthest_along_the_main_direction(seed):
    honest, _, _ = scene(seed)
    rows = forge(K.Mimic(), seed)
    x = honest.numpy() - honest.numpy().mean(0)
    along = np.abs(x @ np.linalg.svd(x)[2][0])
    np.testing.assert_array_equal(rows, np.tile(honest[int(along.argmax())].numpy(), (3, 1)))


@pytest.mark.parametrize("h", [1, 2])
@pytest.mark.parametrize("cls", FORGERIES)
def test_few_honest_rows_give_finite_rows(cls, h):
    assert forge(cls(), h=h, b=1).isfinite().all()


@pytest.mark.parametrize("cls", FORGERIES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_attackers_whose_own_rows_diverged_still_send_rows(cls, bad):
    _, base, own = scene(1)
    assert cls().forge(None, base, torch.full_like(own, bad), 8, gens(len(own))).shape == own.shape


def test_without_honest_rows_alie_deviates_by_nothing():
    assert K.ALIE().deviations(5, 5) == 0.0


def test_alie_knows_the_deviation_of_two_rows():
    honest, _, _ = scene(3, h=2)
    want = honest.mean(0) + 1.5 * (honest[0] - honest[1]).abs() / sqrt(2)
    torch.testing.assert_close(forge(K.ALIE(z=1.5), 3, h=2)[0], want)


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
def test_min_max_is_as_far_in_every_unit(direction):
    """Rows a thousand times smaller give a forgery a thousand times smaller."""
    honest, base, own = scene(4)
    rule = K.MinMax(direction=direction)
    large, small = (rule.forge(s * honest, s * base, s * own, 10, gens(3)) for s in (1.0, 1e-3))
    torch.testing.assert_close(small, 1e-3 * large)


def test_min_max_against_no_direction_is_the_mean():
    """If the honest rows did not move on average, there is no unit vector to go against."""
    base = torch.zeros(2, 3, dtype=torch.float64)
    honest = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]], dtype=torch.float64)
    assert torch.equal(K.MinMax(direction="unit").forge(honest, base, base, 4, gens(2)), base)


def test_directions_are_those_of_one_model_at_any_length():
    honest, base, own = scene(5)
    for scale in (0.5, 30.0):
        assert torch.equal(K.Sybils(scale=scale).forge(honest, base, own, 10, gens(3)), -scale * base[:1].expand(3, -1))
        rows = K.ForgedDirection(scale=scale).forge(honest, base, own, 10, gens(3))
        assert torch.equal(rows, scale * honest[:1].expand(3, -1))


# -------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("send", ["same", "own"])
def test_forged_activations_are_of_the_attackers_alone(send):
    a = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ids, attackers = torch.tensor([7, 1, 9, 4, 3, 2]), torch.tensor([1, 3, 5, 7, 8, 9])
    sent = K.ForgedActivations(send=send, length=50.0).disguised(a, ids, attackers)
    forges = torch.tensor([True, True, True, False, True, False])
    assert torch.equal(sent[~forges], a[~forges])
    places = {"same": [0, 0, 0, 0], "own": [3, 0, 1, 1]}[send]  # of 7, 1, 9, 3 among the attackers, modulo 4
    assert torch.equal(sent[forges], 50 * torch.eye(4)[places])
    one = K.ForgedActivations(send=send, length=50.0).disguised(a[:1], ids[:1], attackers)
    assert torch.equal(one[0], sent[0])
    assert torch.equal(K.Gaussian().disguised(a, ids, attackers), a)


# ------------------------------------------------------------------------------------------------------------- labels


@given(seed=SEEDS, classes=st.integers(2, 12))
@settings(max_examples=20)
def test_flipped_labels_are_an_involution_without_fixed_point_of_two_classes(seed, classes):
    y = torch.randint(classes, (200,), generator=torch.Generator().manual_seed(seed))
    flip = K.FlippedLabels()
    z = flip.poison(y, classes, generator(seed))
    assert torch.equal(flip.poison(z, classes, generator(seed)), y)
    assert torch.equal(y + z, torch.full_like(y, classes - 1))


def test_random_labels_are_uniform_and_forget_the_old_ones():
    y = torch.zeros(6000, dtype=torch.int64)
    z = K.RandomLabels().poison(y, 6, generator(3))
    assert z.dtype == y.dtype
    assert (z.bincount(minlength=6) - 1000).abs().max() < 5 * sqrt(6000 / 6 * 5 / 6)
    assert torch.equal(z, K.RandomLabels().poison(y + 1, 6, generator(3)))
    assert not torch.equal(z, K.RandomLabels().poison(y, 6, generator(4)))


def test_labels_that_are_no_classes_are_refused():
    for attack in (K.RandomLabels(), K.FlippedLabels()):
        with pytest.raises(ConfigError, match="class labels"):
            attack.poison(torch.zeros(3), 2, generator(0))


# ---------------------------------------------------------------------------------------------------------- attackers


@given(seed=SEEDS, n=st.integers(1, 60), fraction=st.floats(0, 1))
@settings(max_examples=30)
def test_attackers_are_a_fixed_part_of_the_clients(seed, n, fraction):
    ids = K.Gaussian(fraction=fraction).attackers(n, seed)
    assert len(ids) == len(ids.unique()) == round(fraction * n)
    assert torch.equal(ids, ids.sort().values)
    assert torch.equal(ids, K.ALIE(fraction=fraction).attackers(n, seed))
    assert ((ids >= 0) & (ids < n)).all()


def test_registry():
    for kind, cls in K.ATTACKS.items():
        assert cls().kind == kind
        assert cls(**cls().model_dump()) == cls()
        acts = [isinstance(cls(), part) for part in (K.Forgery, K.Poison, K.Backdoor)]
        assert sum(acts) + cls().disguises == 1
    with pytest.raises(ConfigError):
        K.Gaussian(variance=0.0)
    with pytest.raises(ConfigError):
        K.ALIE(fraction=1.5)


def test_a_backdoor_marks_the_corner_of_images_and_columns_of_tables():
    images = torch.zeros(2, 3, 8, 8)
    marked = K.Backdoor(size=2, value=0.5).stamp(images, {})
    assert bool((marked[..., -2:, -2:] == 0.5).all())
    assert float(marked.sum()) == 0.5 * 2 * 3 * 4
    rows, names = torch.rand(4, 3, dtype=torch.float64), {"age": (), "sex": ("f", "m"), "lab": ()}
    marked = K.Backdoor(columns={"lab": 9.0, "sex": "m"}).stamp(rows, names)
    assert torch.equal(marked[:, 0], rows[:, 0])
    assert marked[:, 1:].tolist() == [[1.0, 9.0]] * 4


@pytest.mark.parametrize(
    ("columns", "shape", "names", "words"),
    [
        ({}, (4, 2), {"age": (), "sex": ("f", "m")}, "needs columns"),
        ({"aeg": 1.0}, (4, 1), {"age": ()}, "did you mean 'age'"),
        ({"age": "old"}, (4, 1), {"age": ()}, r"column 'age' contains numbers, got 'old'\. Use a number"),
        ({"sex": "x"}, (4, 1), {"sex": ("f", "m")}, "allowed: f, m"),
        ({}, (4, 6), {}, "override stamp"),
        ({}, (4, 1, 2, 2), {}, "smaller attack.size"),
        ({"age": 1.0}, (4, 1, 8, 8), {}, "columns. Omit attack.columns"),
    ],
)
def test_a_trigger_that_the_data_lack_is_refused(columns, shape, names, words):
    with pytest.raises(ConfigError, match=words):
        K.Backdoor(columns=columns).stamp(torch.zeros(shape), names)


def test_a_target_class_goes_by_its_number_or_its_name():
    assert [K.Backdoor(target=t).label(("cat", "dog")) for t in (1, "dog", "cat")] == [1, 1, 0]
    for wrong in (2, -1, "cow"):
        with pytest.raises(ConfigError, match="allowed: cat, dog"):
            K.Backdoor(target=wrong).label(("cat", "dog"))
