"""The compiled loops against NumPy's einsum, for every remainder of the blocks of four."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from filelock import FileLock, Timeout
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom import kernels
from fedloom.kernels import machine

SIZES = st.tuples(*[st.integers(1, 9)] * 4)
"""Clients, samples, inputs, outputs."""
DTYPES = st.sampled_from([np.float32, np.float64])


def close(got: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 if got.dtype == np.float32 else 1e-12)


class Layer:
    """Random rows with a layer in the middle, inputs and gradients of its outputs."""

    def __init__(self, sizes: tuple[int, int, int, int], dtype: type, bias: bool, seed: int) -> None:
        m, b, i, o = sizes
        rng = np.random.default_rng(seed)
        self.at, self.bias = 3, 3 + o * i if bias else -1
        self.rows = rng.standard_normal((m, 3 + o * i + o + 2)).astype(dtype)
        self.weight = self.rows[:, 3 : 3 + o * i].reshape(m, o, i).astype(float)
        self.own = self.rows[:, 3 + o * i : 3 + o * i + o].astype(float) * bias
        self.x = rng.standard_normal((m, b, i)).astype(dtype)
        self.delta = rng.standard_normal((m, b, o)).astype(dtype)
        self.factor = rng.standard_normal(m).astype(dtype)
        self.steady = rng.standard_normal(self.rows.shape).astype(dtype)


@settings(max_examples=60, deadline=None)
@given(SIZES, DTYPES, st.booleans(), st.integers(0, 2**32 - 1))
def test_forward_and_backward(sizes: tuple[int, int, int, int], dtype: type, bias: bool, seed: int) -> None:
    layer = Layer(sizes, dtype, bias, seed)
    out, below = np.full_like(layer.delta, np.nan), np.full_like(layer.x, np.nan)
    kernels.forward(layer.rows, layer.at, layer.bias, layer.x, out)
    kernels.backward(layer.rows, layer.at, layer.delta, below)
    close(out, np.einsum("mbi,moi->mbo", layer.x, layer.weight) + layer.own[:, None])
    close(below, np.einsum("mbo,moi->mbi", layer.delta, layer.weight))


@settings(max_examples=60, deadline=None)
@given(SIZES, DTYPES, st.booleans(), st.lists(st.integers(0, 9), min_size=9, max_size=9))
def test_apply_to_any_number_of_samples(
    sizes: tuple[int, int, int, int], dtype: type, bias: bool, held: list[int]
) -> None:
    layer = Layer(sizes, dtype, bias, 0)
    ends = np.cumsum(held[: sizes[0]])
    x = np.random.default_rng(1).standard_normal((ends[-1], sizes[2])).astype(dtype)
    out = np.full((ends[-1], sizes[3]), np.nan, dtype)
    kernels.apply(layer.rows, layer.at, layer.bias, x, ends, out)
    for c, (end, size) in enumerate(zip(ends, held, strict=False)):
        own = slice(end - size, end)
        close(out[own], x[own] @ layer.weight[c].T + layer.own[c])


@settings(max_examples=60, deadline=None)
@given(SIZES, DTYPES, st.booleans(), st.sampled_from(["none", "common", "own"]), st.integers(0, 2**32 - 1))
def test_add_gradient(sizes: tuple[int, int, int, int], dtype: type, bias: bool, steady: str, seed: int) -> None:
    layer = Layer(sizes, dtype, bias, seed)
    added = {"none": layer.steady[:0], "common": layer.steady[:1], "own": layer.steady}[steady]
    gradient = np.zeros(layer.rows.shape)
    weights = slice(layer.at, layer.at + layer.weight[0].size)
    gradient[:, weights] = np.einsum("mbo,mbi->moi", layer.delta, layer.x, dtype=float).reshape(len(layer.x), -1)
    touched = np.zeros(layer.rows.shape[1], dtype=bool)
    touched[weights] = True
    if bias:
        biases = slice(layer.bias, layer.bias + sizes[3])
        gradient[:, biases] = layer.delta.sum(1, dtype=float)
        touched[biases] = True
    stepped = layer.factor[:, None] * layer.rows - 0.5 * gradient + (added.sum(0) if steady == "common" else 0)
    stepped = stepped + (added if steady == "own" else 0)
    out = layer.rows.copy()
    kernels.add_gradient(out, layer.at, layer.bias, layer.delta, layer.x, layer.factor, dtype(-0.5), added)
    close(out, np.where(touched, stepped, layer.rows))


def test_beta_zero_forgets_what_is_not_finite_and_else_it_stays() -> None:
    layer = Layer((2, 5, 6, 7), np.float64, True, 0)
    out = np.full_like(layer.rows, np.nan)
    kernels.add_gradient(out, 3, layer.bias, layer.delta, layer.x, np.array([0.0, 1.0]), 1.0, layer.steady[:0])
    assert np.isfinite(out[0, 3:-2]).all()
    assert np.isnan(out[1, 3:-2]).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 100), st.lists(st.integers(0, 10**6), max_size=30), DTYPES)
def test_gather(n: int, width: int, places: list[int], dtype: type) -> None:
    rng = np.random.default_rng(n)
    data = rng.integers(0, 256, (n, width)).astype(np.uint8)
    index = np.array([p % n for p in places], dtype=np.int64)
    scale, shift = rng.standard_normal((2, width)).astype(dtype)
    out = np.full((len(index), width), np.nan, dtype)
    kernels.gather(data, index, scale, shift, out)
    close(out, data[index] * scale.astype(float) + shift)


@pytest.mark.parametrize("place", [-1, 4])
def test_gather_refuses_a_place_outside(place: int) -> None:
    data, one = np.zeros((4, 2), np.uint8), np.ones(2, np.float32)
    with pytest.raises(IndexError, match="position"):
        kernels.gather(data, np.array([0, place]), one, one, np.empty((2, 2), np.float32))


def test_without_room_on_disk_nothing_is_kept_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def add(a: float, b: float) -> float:
        return a + b

    assert kernels.compile_loop(add)(1.0, 2.0) == 3.0
    assert list(tmp_path.rglob("*.nbc"))
    monkeypatch.setattr(machine, "MIN_FREE_BYTES", 1 << 60)
    assert kernels.compile_loop(add)(1, 2) == 3
    assert len(list(tmp_path.rglob("*.nbc"))) == 1


def test_one_process_at_a_time_stores_machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """numba picks the name of a file from an index that another process may be writing."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def add(a: float, b: float) -> float:
        return a + b

    loop: Any = kernels.compile_loop(add)
    files, is_locked = loop._cache._cache_file, list[bool]()

    def observe(step: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any) -> Any:
            try:
                FileLock(Path(loop._cache.cache_path) / "machine-code.lock").acquire(timeout=0)
            except Timeout:
                is_locked.append(True)
            else:
                is_locked.append(False)
            return step(*args)

        return observed

    for name in ("save", "load"):
        monkeypatch.setattr(files, name, observe(getattr(files, name)))
    assert loop(1.0, 2.0) == 3.0
    assert is_locked == [True, True]


def test_a_user_without_a_home_compiles_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container may run as a number that the system has no account of."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert kernels.compile_loop(lambda a: a + 1)(1) == 2
    assert not list(tmp_path.iterdir())


def test_without_a_folder_to_write_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def refuse(*, cache: bool = False, **flags: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function")
        return njit(**flags)

    monkeypatch.setattr(numba, "njit", refuse)
    assert kernels.compile_loop(lambda a: a + 1)(1) == 2


def test_a_client_does_not_depend_on_who_shares_its_chunk() -> None:
    layer = Layer((5, 6, 9, 10), np.float32, True, 1)
    whole, alone = layer.rows.copy(), layer.rows.copy()
    arguments = (layer.delta, layer.x, layer.factor)
    kernels.add_gradient(whole, 3, layer.bias, *arguments, np.float32(-0.1), layer.steady)
    for c in range(5):
        mine = slice(c, c + 1)
        some = [np.ascontiguousarray(a[mine]) for a in arguments]
        kernels.add_gradient(alone[mine], 3, layer.bias, *some, np.float32(-0.1), layer.steady[mine])
    np.testing.assert_array_equal(whole, alone)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only systems with fork have forked workers")
def test_a_forked_worker_compiles_after_its_parent(tmp_path: Path) -> None:
    with machine._lock_folder(str(tmp_path)):
        pass
    if (pid := os.fork()) == 0:
        code = 1
        try:
            with machine._lock_folder(str(tmp_path)):
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
