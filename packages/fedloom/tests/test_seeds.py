"""Streams of a run: the whole state of a generator depends on every bit of its name."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom import seeds
from fedloom.models import MLP
from fedloom.seeds import as_global, cuda_state, derive, generator, numpy_generator, random_state, words

CPU = torch.device("cpu")


def twister(state: torch.Tensor) -> np.random.MT19937:
    """numpy's Mersenne Twister with the words of a PyTorch state."""
    made = np.random.MT19937(0)
    key = state.numpy()[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32)
    made.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": 624}}
    return made


def test_the_whole_state_comes_from_the_hash() -> None:
    """What PyTorch draws is the stream of a Mersenne Twister whose 624 words SHAKE-128 has given."""
    gen = generator(5, 3, 7, ("local", 2))
    drawn = hashlib.shake_128(b"5|3|7|('local', 2)").digest(4 * 624)
    numpys = twister(gen.get_state())
    assert np.array_equal(numpys.state["state"]["key"], np.frombuffer(drawn, np.uint32))
    got = torch.rand(2000, generator=gen) * 2**24  # the low 24 of 32 bits each
    assert np.array_equal(got.numpy(), numpys.random_raw(2000) % 2**24)


@pytest.mark.parametrize("purpose", ["local", ("local", 2), "x" * 400])
@pytest.mark.parametrize("draws", [0, 1, 6, 227, 228, 5000])
def test_states_of_many_clients_are_those_of_their_generators(purpose: seeds.Purpose, draws: int) -> None:
    """As many words as so many draws look at."""
    clients = [0, 7, 10**12, 3, 12, 500, 99, 1, 2, -1, 8]
    found = seeds.states(5, 3, clients, purpose, draws)
    assert found.shape[1] >= min(624, 397 + draws)
    for row, client in zip(found, clients, strict=True):
        drawn = hashlib.shake_128(f"5|3|{client}|{purpose!r}".encode()).digest(4 * found.shape[1])
        assert np.array_equal(row, np.frombuffer(drawn, "<u4"))


def names() -> list[tuple[int, int, int, str]]:
    """A name, and all that differ from it in one bit of a number or in one letter."""
    start = 0x5DEECE66D1234567, 1000, 77
    flipped = []
    for k, width in enumerate((63, 20, 20)):
        for bit in range(width):
            changed = list(start)
            changed[k] ^= 1 << bit
            flipped.append((*changed, "local"))
    purposes = [(*start, "local"[:i] + "x" + "local"[i + 1 :]) for i in range(5)]
    return [(*start, "local"), *flipped, *purposes]


def test_every_bit_of_a_name_gives_another_stream() -> None:
    """Also those beyond the 32 bits that PyTorch's own seeding keeps; and the streams have nothing in common."""
    known = names()
    drawn = torch.stack([torch.randn(64, generator=generator(*name), dtype=torch.float64) for name in known])
    assert len({*map(tuple, drawn.tolist())}) == len(known)
    worst = torch.corrcoef(drawn).fill_diagonal_(0).abs().max()
    assert float(worst) < 0.75  # 64 draws: one pair of 6000 exceeds 0.6 once in a few hundred tries
    assert len({derive(*name) for name in known}) == len(known)
    assert len({float(numpy_generator(*name).random()) for name in known}) == len(known)


def test_what_is_derived_has_128_bits() -> None:
    values = [derive(k) for k in range(400)]
    assert max(values) < 2**128
    for bit in range(128):
        assert 140 < sum(v >> bit & 1 for v in values) < 260  # six standard deviations


def test_words_are_a_seed_of_128_bits() -> None:
    """`RandomState` takes them all."""
    drawn = words(generator(0))
    assert len(drawn) == 4
    streams = {tuple(np.random.RandomState(drawn).randint(2**31, size=8).tolist())}
    for word, bit in itertools.product(range(4), range(32)):
        other = [w ^ (1 << bit if k == word else 0) for k, w in enumerate(drawn)]
        streams.add(tuple(np.random.RandomState(other).randint(2**31, size=8).tolist()))
    assert len(streams) == 129
    assert random_state(generator(0)).randint(2**31) == np.random.RandomState(drawn).randint(2**31)


def test_threads_do_not_mix_their_generators() -> None:
    def draw(k: int) -> float:
        return float(torch.rand((), generator=generator(k), dtype=torch.float64))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(draw, range(2000))) == [draw(k) for k in range(2000)]


def test_global_draws_are_those_of_the_generator_and_leave_no_trace() -> None:
    before = torch.get_rng_state()
    with as_global(generator(3), CPU):
        got = torch.randn(5)
    assert torch.equal(got, torch.randn(5, generator=generator(3)))
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_take_turns_with_the_global_generator() -> None:
    def draw(k: int) -> float:
        with as_global(generator(k), CPU):
            time.sleep(0.005)
            return float(torch.rand((), dtype=torch.float64))

    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        drawn = pool.map(draw, range(8))
        child = multiprocessing.get_context("fork").Process(target=draw, args=(0,))
        child.start()  # while a thread that the child does not have draws
        assert list(drawn) == [float(torch.rand((), generator=generator(k), dtype=torch.float64)) for k in range(8)]
    child.join(600)
    assert child.exitcode == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_models_initial_values_have_the_whole_seed() -> None:
    """Seeds that differ beyond the 32nd bit give different models, equal ones the same."""
    models = [MLP(hidden=(3,)).build((4,), 2, seed) for seed in (1, 1, 1 + (7 << 32), 1 + (1 << 62))]
    first = [torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in models]
    assert torch.equal(first[0], first[1])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(first[1:], 2))


def test_a_cuda_state_is_a_key_and_an_offset() -> None:
    states = torch.stack([cuda_state(generator(k)) for k in range(300)])
    assert (states.dtype, states.shape) == (torch.uint8, (300, 16))
    keys, offsets = (part.contiguous().view(torch.int64)[:, 0] for part in (states[:, :8], states[:, 8:]))
    assert bool((offsets >= 0).all())
    assert bool((offsets < 2**62).all())
    assert not bool((offsets % 4).any())
    assert len(set(keys.tolist())) == len(set(offsets.tolist())) == 300


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_global_draws_on_a_gpu_are_those_of_the_whole_state() -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.get_rng_state(device)
    drawn = []
    for k in (0, 0, 1):
        with as_global(generator(k), device):
            assert torch.equal(torch.cuda.get_rng_state(device), cuda_state(generator(k)))
            drawn.append(torch.randn(64, device=device))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.cuda.get_rng_state(device), before)


def test_nothing_else_seeds_a_generator() -> None:
    """PyTorch's and numpy's own seeding keeps 32 bits, or what it is given."""
    folder = Path(fedloom.__file__).parent
    seeding = re.compile(
        r"manual_seed\(|\.seed\(|default_rng|RandomState\(|SeedSequence|PCG64\(|set_rng_state|set_state\("
    )
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*.py") if seeding.search(p.read_text())}
    resamples = "lab/report/comparison/bootstrap.py"  # the same in every report, which does without PyTorch
    assert found == {Path(seeds.__file__).name, resamples}
