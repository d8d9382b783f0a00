from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import ConfigError
from fedloom.rows import channels as C
from fedloom.rows.layout import Layout
from fedloom.rows.wire import Codec
from fedloom.seeds import generator

SEEDS = st.integers(0, 2**20)
ALL = [
    C.Clip(bound=1.5),
    C.GaussianNoise(clip=1.0, sigma=0.3),
    C.TopK(fraction=0.2),
    C.TopK(fraction=0.2, error_feedback=False),
    C.RandomK(fraction=0.3),
    C.RandomK(fraction=0.3, error_feedback=True),
    C.QSGD(levels=3),
    C.QSGD(levels=127, error_feedback=True),
    C.Sign(),
    C.Sign(error_feedback=False),
]
D = 17


def gens(m: int, seed: int = 0, round: int = 1) -> list[torch.Generator]:
    return [generator(seed, round, i, "channel") for i in range(m)]


def rows(m: int, seed: int, dtype=torch.float64, d: int = D) -> torch.Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def start(channel, m: int, dtype=torch.float64):
    row = channel.init(D, dtype)
    return None if row is None else row.repeat(m, 1)


@pytest.mark.parametrize("channel", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_independent_and_arguments_unmodified(channel, dtype):
    x, state = rows(4, 1, dtype), start(channel, 4, dtype)
    before = x.clone()
    sent, after = channel.apply(state, x, gens(4))
    assert sent.shape == x.shape
    assert sent.dtype == dtype
    assert torch.equal(x, before)
    assert state is None or not state.any()
    assert (after is None) == (state is None)
    for i in range(4):
        one, _ = channel.apply(None if state is None else state[i : i + 1], x[i : i + 1], [gens(4)[i]])
        torch.testing.assert_close(one[0], sent[i])


@pytest.mark.parametrize("channel", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=SEEDS, size=st.sampled_from([0.0, 1e-30, 1e-4, 1.0, 1e6]))
@settings(max_examples=8)
def test_the_wire_carries_exactly_what_was_sent(channel, dtype, seed, size):
    codec = Codec(Layout.create_from_shapes({"w": (D,)}), {"diff": channel.field(D, dtype)})
    x = (rows(3, seed, dtype) * size).index_fill(1, torch.tensor([seed % D]), 0.0)
    sent, _ = channel.apply(start(channel, 3, dtype), x, gens(3, seed))
    messages = [codec.encode({"diff": row}) for row in sent]
    assert [len(message) for message in messages] == codec.length({"diff": sent}).tolist()
    for row, message in zip(sent, messages, strict=True):
        assert torch.equal(codec.decode(message)["diff"], row)


def test_compressed_messages_are_as_short_as_they_say():
    d, dtype = 1000, torch.float32
    x = rows(1, 0, dtype, d)

    def payload(channel) -> int:
        codec = Codec(Layout.create_from_shapes({"w": (d,)}), {"diff": channel.field(d, dtype)})
        empty = Codec(Layout.create_from_shapes({"w": (d,)}), {"diff": channel.field(0, dtype)})
        nothing = empty.length({"diff": x[:, :0]}) - empty.paper_bytes({"diff": x[:, :0]})
        sent, _ = channel.apply(None, x, gens(1))
        return int(codec.length({"diff": sent}) - nothing)

    assert payload(C.Clip()) == 4 * d
    assert payload(C.TopK(fraction=0.05, error_feedback=False)) == 50 * 8
    assert payload(C.RandomK(fraction=0.05)) == 50 * 8
    assert payload(C.QSGD(levels=127)) == 4 + d
    assert payload(C.QSGD(levels=7)) == 4 + d // 2
    assert payload(C.Sign(error_feedback=False)) == 4 + d // 8


@pytest.mark.parametrize("channel", [c for c in ALL if getattr(c, "error_feedback", False)], ids=repr)
@given(seed=SEEDS)
@settings(max_examples=10)
def test_error_feedback_loses_nothing(channel, seed):
    """Sum of what was sent = sum of the differences - the last memory."""
    state, sent, given_ = start(channel, 3), torch.zeros(3, D), torch.zeros(3, D)
    for t in range(6):
        x = rows(3, seed + t)
        out, state = channel.apply(state, x, gens(3, seed, t))
        sent, given_ = sent + out, given_ + x
    torch.testing.assert_close(sent, given_ - state)
    assert state.abs().sum() > 0


@given(seed=SEEDS, fraction=st.floats(0.01, 1.0))
@settings(max_examples=25)
def test_contractions(seed, fraction):
    x = rows(5, seed)
    square = x.square().sum(1)
    for channel, factor in [
        (C.TopK(fraction=fraction), torch.full((5,), 1 - max(round(fraction * D), 1) / D, dtype=x.dtype)),
        (C.Sign(), 1 - x.abs().sum(1).square() / (D * square)),
    ]:
        assert ((x - channel.send(x, gens(5))).square().sum(1) <= factor * square + 1e-12).all()
    x[:, seed % D] = 0
    torch.testing.assert_close(C.Sign().send(x, [])[:, seed % D], x.abs().mean(1))


@given(seed=SEEDS, k=st.integers(1, D))
@settings(max_examples=25)
def test_top_k_keeps_the_largest(seed, k):
    x = rows(3, seed)
    sent = C.TopK(fraction=k / D).send(x, [])
    for row, out in zip(x, sent, strict=True):
        kept = out.nonzero().flatten()
        assert len(kept) == k
        assert torch.equal(out[kept], row[kept])
        rest = row.abs()[out == 0]
        assert k == D or row[kept].abs().min() >= rest.max()


@pytest.mark.parametrize(
    ("channel", "variance"),
    [
        (C.RandomK(fraction=0.3), lambda x: (D / 5 - 1) * x.square().sum()),
        (C.QSGD(levels=2), lambda x: D * x.abs().max().square() / (4 * 2**2)),
    ],
    ids=["random-k", "qsgd"],
)
def test_unbiased_with_bounded_variance(channel, variance):
    T, x = 6000, rows(1, 5)
    draws = channel.send(x.expand(T, D), gens(T))
    spread = draws.std(0) / sqrt(T)
    assert ((draws.mean(0) - x[0]).abs() <= 5 * spread + 1e-12).all()
    error = (draws - x).square().sum(1)
    assert float(error.mean()) <= float(variance(x[0])) + 5 * float(error.std()) / sqrt(T)
    if isinstance(channel, C.RandomK):
        assert abs(float(error.mean()) - float(variance(x[0]))) <= 5 * float(error.std()) / sqrt(T)
        assert (draws != 0).sum(1).unique().tolist() == [5]


def test_random_k_with_memory_is_not_scaled():
    x = rows(2, 3)
    sent = C.RandomK(fraction=0.3, error_feedback=True).send(x, gens(2))
    assert torch.equal(sent[sent != 0], x[sent != 0])


@given(seed=SEEDS, levels=st.integers(1, 40))
@settings(max_examples=25)
def test_qsgd_rounds_to_a_neighbour(seed, levels):
    x = rows(3, seed)
    step = x.abs().amax(1, keepdim=True) / levels
    sent = C.QSGD(levels=levels).send(x, gens(3, seed))
    assert ((sent - x).abs() <= step * (1 + 1e-9)).all()
    torch.testing.assert_close(sent / step, (sent / step).round())
    assert (sent * x >= 0).all()


@given(seed=SEEDS, bound=st.floats(0.1, 10))
@settings(max_examples=20)
def test_clip(seed, bound):
    x = rows(4, seed)
    sent = C.Clip(bound=bound).send(x, [])
    for row, out in zip(x, sent, strict=True):
        length = float(row.norm())
        torch.testing.assert_close(out, row if length <= bound else row * (bound / length))
    torch.testing.assert_close(C.GaussianNoise(clip=bound, sigma=0.0).send(x, gens(4)), sent)
    assert torch.equal(C.Clip().send(torch.zeros(2, D), []), torch.zeros(2, D))


def test_gaussian_noise_has_its_deviation():
    m, channel = 3000, C.GaussianNoise(clip=2.0, sigma=0.7)
    x = rows(1, 0).expand(m, D) * 100
    noise = channel.send(x, gens(m)) - C.Clip(bound=2.0).send(x, [])
    want = (0.7 * 2.0) ** 2
    assert abs(float(noise.square().mean()) / want - 1) < 5 * sqrt(2 / (m * D))
    assert abs(float(noise.mean())) < 5 * sqrt(want / (m * D))
    assert (torch.corrcoef(noise.T) - torch.eye(D)).abs().max() < 5 / sqrt(m)


def test_registry():
    for kind, cls in C.CHANNELS.items():
        assert cls().kind == kind
        assert cls(**cls().model_dump()) == cls()
        assert cls.remembers == ("error_feedback" in cls.model_fields)
    for make in (lambda: C.TopK(fraction=0.0), lambda: C.QSGD(levels=2**15), lambda: C.GaussianNoise(sigma=-1.0)):
        with pytest.raises(ConfigError):
            make()
