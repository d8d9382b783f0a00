from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedloom
from fedloom.errors import CheckpointError, LayoutError, RunDirError
from fedloom.storage import disk, journal
from fedloom.storage.memory import ForkedMemory
from fedloom.storage.store import Store
from tests.commands import end, fork

SOURCE = str(Path(fedloom.__file__).parents[1])
N = 9


class Row(NamedTuple):
    w: Tensor
    c: Tensor
    k: Tensor
    on: Tensor
    none: Tensor


class Other(NamedTuple):
    w: Tensor


class Nothing(NamedTuple):
    pass


TEMPLATE = Row(
    torch.arange(5.0),
    torch.tensor([0.1, -0.0, float("nan")], dtype=torch.float64),
    torch.tensor([-(2**60)]),
    torch.tensor([True, False]),
    torch.empty(0),
)


@pytest.fixture(autouse=True)
def _no_hook():
    yield
    disk.hook = None


def rows(m, seed):
    gen = torch.Generator().manual_seed(seed)
    return Row(
        torch.randn(m, 5, generator=gen),
        torch.randn(m, 3, generator=gen, dtype=torch.float64) * float(10.0 ** (seed % 600 - 300)),
        torch.randint(-(2**62), 2**62, (m, 1), generator=gen),
        torch.rand(m, 2, generator=gen) < 0.5,
        torch.empty(m, 0),
    )


def same(a, b):
    """Equal bit for bit, NaN and the sign of zero included."""
    return all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and bytes(journal.raw(x.contiguous())) == bytes(journal.raw(y.contiguous()))
        for x, y in zip(a, b, strict=True)
    )


def on_disk(folder, n=N, template=TEMPLATE):
    return Store(n, template, path=folder, budget=0)


def everything(store):
    return (store.occupied.clone(), *store.read(torch.arange(store.n)))


class Model:
    """What a store must do: a dict of rows, a copy of it per generation."""

    def __init__(self):
        self.rows = {}
        self.kept = {0: {}}

    def write(self, ids, block):
        for place, i in enumerate(ids.tolist()):
            self.rows[i] = [field[place].clone() for field in block]

    def everything(self):
        seen = torch.tensor([i in self.rows for i in range(N)])
        fields = [torch.stack([self.rows.get(i, list(TEMPLATE))[k] for i in range(N)]) for k in range(len(TEMPLATE))]
        return (seen, *fields)


IDS = st.lists(st.integers(0, N - 1), max_size=N, unique=True).map(lambda ids: torch.tensor(ids, dtype=torch.int64))
ACTIONS = st.one_of(
    st.tuples(st.just("round"), IDS, st.integers(0, 10**6)),
    st.tuples(st.just("touch"), IDS),
    st.tuples(st.just("checkpoint")),
    st.tuples(st.just("prune"), st.integers(0, 3)),
    st.tuples(st.just("rollback"), st.integers(0, 3)),
    st.tuples(st.just("reopen"), st.integers(0, 3)),
    st.tuples(st.just("reset")),
)


@given(actions=st.lists(ACTIONS, max_size=30))
@settings(max_examples=200)
def test_files_are_the_model_through_any_sequence(tmp_path_factory, actions):
    folder = tmp_path_factory.mktemp("store")
    store, model, generation = on_disk(folder), Model(), 0
    for name, *rest in actions:
        back = (
            sorted(model.kept)[-1 - min(rest[-1], len(model.kept) - 1)]
            if name in {"prune", "rollback", "reopen"}
            else 0
        )
        if name == "round":
            ids, block = rest[0], rows(len(rest[0]), rest[1])
            store.touch(ids)
            store.write(ids, block)
            model.write(ids, block)
        elif name == "touch":
            store.touch(rest[0])
        elif name == "checkpoint":
            generation += 3
            store.checkpoint(generation)
            model.kept[generation] = dict(model.rows)
        elif name == "prune":
            store.prune(back)
            model.kept = {g: kept for g, kept in model.kept.items() if g >= back}
        elif name == "reset":
            store.reset()
            model = Model()
            generation = 0
        else:
            if name == "reopen":
                store.close()
                store = on_disk(folder)
            store.rollback(back)
            model.rows = dict(model.kept[back])
            model.kept = {g: kept for g, kept in model.kept.items() if g <= back}
            generation = back
        assert same(everything(store), model.everything())
    store.close()


@given(
    blocks=st.lists(st.tuples(IDS, st.integers(0, 10**6)), max_size=6),
    asked=st.lists(st.integers(0, N - 1), max_size=20),
    shared=st.booleans(),
)
def test_memory_is_the_model_and_its_state_brings_it_back(blocks, asked, shared):
    store, model = Store(N, TEMPLATE, memory=ForkedMemory() if shared else None), Model()
    for ids, seed in blocks:
        block = rows(len(ids), seed)
        store.touch(ids)
        store.write(ids, block)
        model.write(ids, block)
    expected = model.everything()
    assert same(everything(store), expected)
    some = torch.tensor(asked, dtype=torch.int64)
    assert same(store.read(some), [field[some] for field in expected[1:]])
    assert isinstance(store.read(some), Row)
    state = {name: tensor.clone() for name, tensor in store.state().items()}
    again = Store(N, TEMPLATE)
    again.write(torch.arange(N), rows(N, 5))
    again.load_state(state)
    assert same(everything(again), expected)


@given(asked=st.lists(st.integers(0, N - 1), max_size=20), written=IDS)
def test_any_order_and_repetition_of_ids_is_read(tmp_path_factory, asked, written):
    store = on_disk(tmp_path_factory.mktemp("store"))
    store.touch(written)
    store.write(written, rows(len(written), 1))
    every, some = store.read(torch.arange(N)), torch.tensor(asked, dtype=torch.int64)
    assert same(store.read(some), [field[some] for field in every])
    store.close()


def test_neighbours_are_one_read_and_one_write(tmp_path, monkeypatch):
    store = on_disk(tmp_path, 100, Other(torch.zeros(3)))
    ids = torch.tensor([3, 4, 5, 10, 11, 40])
    writes = []
    disk.hook = lambda op, path: writes.append(op)
    store.touch(ids)
    assert writes == [], "rows never written need no journal"
    store.write(ids, Other(torch.rand(6, 3)))
    assert writes.count("write") == 3
    reads, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: reads.append(at) or preadv(fd, buffers, at))
    store.read(ids)
    assert reads == [36, 120, 480]


@pytest.mark.parametrize("most", [1, 7, 1 << 20], ids=["a byte at a time", "seven", "all at once"])
def test_all_fields_of_a_client_are_one_visit_also_where_the_system_takes_less_at_once(tmp_path, monkeypatch, most):
    many = 300 if most > 7 else 20
    store, ids, new = on_disk(tmp_path, many), torch.arange(many), rows(many, 1)
    calls = []

    def short(call):
        def some(fd, buffers, at):
            calls.append(at)
            first = buffers[0][:most] if most < len(buffers[0]) else None
            return call(fd, [first] if first is not None else buffers, at)

        return some

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    store.touch(ids)
    store.write(ids, new)
    if most > 7:
        assert calls == [0, 256 * 54]  # four fields of 54 bytes
    assert same(store.read(ids), list(new))
    back = ids.flip(0)
    assert same(store.read(back), [field[back] for field in new])


def test_touch_syncs_once_a_call_and_saves_a_row_once(tmp_path):
    store = on_disk(tmp_path, 100, Other(torch.zeros(3)))
    ids = torch.arange(0, 100, 2)
    store.touch(ids)
    store.write(ids, Other(torch.rand(50, 3)))
    store.checkpoint(1)
    ops = []
    disk.hook = lambda op, path: ops.append(op)
    store.touch(ids)
    assert ops.count("fsync") == 1
    size = (tmp_path / "journal-1").stat().st_size
    store.touch(ids)
    store.touch(torch.arange(100))
    assert ops.count("fsync") == 1
    assert (tmp_path / "journal-1").stat().st_size == size


def test_rows_are_not_overwritten_before_they_are_touched(tmp_path):
    store = on_disk(tmp_path)
    with pytest.raises(AssertionError, match="touch"):
        store.write(torch.tensor([1]), rows(1, 0))


def test_an_existing_store_wants_a_rollback_first(tmp_path):
    on_disk(tmp_path).close()
    store = on_disk(tmp_path)
    for action in (store.read, store.touch):
        with pytest.raises(AssertionError, match="rollback"):
            action(torch.tensor([0]))
    store.rollback(0)
    assert not store.occupied.any()


@pytest.mark.parametrize("make", [lambda folder: Store(N, TEMPLATE), on_disk])
def test_reading_gives_copies(tmp_path, make):
    store = make(tmp_path)
    ids = torch.arange(3)
    store.touch(ids)
    store.write(ids[:2], Row(*(field[:2] for field in rows(3, 1))))
    before = everything(store)
    for field in store.read(ids):
        field.zero_()
    assert same(everything(store), before)
    assert same(store.template, TEMPLATE)


def test_rows_of_another_shape_or_type_are_refused():
    store = Store(N, Other(torch.zeros(3)))
    for bad in (torch.zeros(2, 4), torch.zeros(3), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(1, 3)):
        with pytest.raises(LayoutError, match=r"state field 'w': rows must be \[2, 3\] torch.float32, got"):
            store.write(torch.tensor([0, 1]), Other(bad))
    assert not store.occupied.any()


def test_a_template_without_fields_remembers_who_was_seen():
    store = Store(3, Nothing(), budget=0)
    store.write(torch.tensor([2]), Nothing())
    assert store.read(torch.tensor([1, 2])) == Nothing()
    assert store.state()["seen"].tolist() == [False, False, True]


def test_the_budget_decides_where_rows_live(tmp_path):
    template = Other(torch.zeros(10))
    assert Store(100, template, path=tmp_path, budget=3999).in_files
    assert not Store(100, template, path=tmp_path / "b", budget=4000).in_files
    assert not Store(100, template, budget=0).in_files
    assert not (tmp_path / "b").exists()


def test_a_state_of_another_store_is_refused(tmp_path):
    store = Store(N, TEMPLATE)
    store.write(torch.tensor([1]), rows(1, 0))
    state = store.state()
    wrong = [
        {},
        Store(N + 1, TEMPLATE).state(),
        Store(N, Other(torch.zeros(5))).state(),
        {**state, "rows.w": state["rows.w"].double()},
    ]
    for bad in wrong:
        with pytest.raises(CheckpointError, match="Run with the earlier settings"):
            Store(N, TEMPLATE).load_state(bad)
    with pytest.raises(CheckpointError, match="those of this run are in files"):
        on_disk(tmp_path).load_state(state)


def test_the_files_of_another_store_are_refused_and_left_alone(tmp_path):
    store = on_disk(tmp_path)
    store.touch(torch.arange(N))
    store.write(torch.arange(N), rows(N, 3))
    store.checkpoint(1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for n, template in ((N + 1, TEMPLATE), (N, Other(torch.zeros(5))), (N, TEMPLATE._replace(w=torch.zeros(6)))):
        with pytest.raises(RunDirError, match=rf"{N} clients: w 5 torch.float32.*\. Choose another --out"):
            on_disk(tmp_path, n, template)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    (tmp_path / "rows").unlink()
    with pytest.raises(CheckpointError, match=r"rows is missing"):
        on_disk(tmp_path)


def history(folder):
    """Journals 0, 1 and 2 with two records each; what the store held at 0, 1 and 2."""
    store, held = on_disk(folder), {}
    held[0] = everything(store)
    for generation in (1, 2, 3):
        for ids in (torch.tensor([0, 1, 5]), torch.tensor([2, 3])):
            store.touch(ids)
            store.write(ids, rows(len(ids), generation))
        if generation < 3:
            store.checkpoint(generation)
            held[generation] = everything(store)
    store.close()
    return held


@pytest.mark.parametrize(("missing", "generation"), [(0, 0), (1, 0), (1, 1), (2, 2)])
def test_a_missing_journal_is_an_error(tmp_path, missing, generation):
    history(tmp_path)
    (tmp_path / f"journal-{missing}").unlink()
    with pytest.raises(CheckpointError, match=f"checkpoint {generation} cannot be restored.*--force"):
        on_disk(tmp_path).rollback(generation)


@pytest.mark.parametrize(("missing", "generation"), [(0, 1), (0, 2), (1, 2)])
def test_a_journal_from_before_is_not_needed(tmp_path, missing, generation):
    held = history(tmp_path)
    (tmp_path / f"journal-{missing}").unlink()
    store = on_disk(tmp_path)
    store.rollback(generation)
    assert same(everything(store), held[generation])


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("generation", [0, 1])
def test_a_rollback_stopped_at_any_primitive_is_done_by_the_next(tmp_path, generation):
    stop, stopped = 0, True
    while stopped:
        stop += 1
        folder = tmp_path / str(stop)
        held, steps = history(folder), []

        def stopping(op, path, steps=steps, limit=stop):
            steps.append(op)
            if len(steps) >= limit:
                raise Stopped

        disk.hook = stopping
        try:
            on_disk(folder).rollback(generation)
            stopped = False
        except Stopped:
            pass
        disk.hook = None
        for _ in range(2):
            store = on_disk(folder)
            store.rollback(generation)
            assert same(everything(store), held[generation])
            store.close()
    assert stop > 20


def test_every_damaged_byte_of_a_journal_is_noticed(tmp_path):
    held = history(tmp_path)
    record = 24 + 3 * (8 + 20 + 24 + 8 + 2) + 4
    for name, generation in (("journal-1", 1), ("journal-2", 2)):
        path = tmp_path / name
        good = path.read_bytes()
        torn = good[-(24 + 2 * 62 + 4) :]  # the last record of the newest journal may be torn, as far as one can see
        assert good.endswith(torn)
        sure = len(good) if name == "journal-1" else len(good) - len(torn)
        assert sure > record
        for at in range(sure):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
            with pytest.raises((CheckpointError, RunDirError)):
                on_disk(tmp_path).rollback(generation)
        path.write_bytes(good)
    store = on_disk(tmp_path)
    store.rollback(1)
    assert same(everything(store), held[1])


def test_a_sealed_journal_cut_short_is_an_error(tmp_path):
    history(tmp_path)
    path = tmp_path / "journal-1"
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            on_disk(tmp_path).rollback(1)


@pytest.mark.parametrize("fill", ["cut", "zeros", "noise"])
def test_a_torn_end_of_the_newest_journal_is_left_out(tmp_path, fill):
    store = on_disk(tmp_path)
    ids = torch.tensor([1, 2, 6])
    store.touch(ids)
    store.write(ids, rows(3, 1))
    store.checkpoint(1)
    start = (tmp_path / "journal-1").stat().st_size
    store.touch(ids)
    expected = everything(store)
    good = (tmp_path / "journal-1").read_bytes()
    for length in range(start, len(good)):
        rest = {"cut": b"", "zeros": bytes(len(good) - length), "noise": os.urandom(len(good) - length)}[fill]
        (tmp_path / "journal-1").write_bytes(good[:length] + rest)
        again = on_disk(tmp_path)
        again.rollback(1)
        assert same(everything(again), expected)
        again.touch(ids)
        again.write(ids, rows(3, 2))
        again.rollback(1)
        assert same(everything(again), expected)
        again.close()


class Wide(NamedTuple):
    w: Tensor


@pytest.mark.parametrize("where", ["memory", "files"])
def test_forked_processes_share_the_rows(tmp_path, where):
    path = tmp_path if where == "files" else None
    store = Store(1000, Wide(torch.zeros(1000)), path=path, budget=0, memory=ForkedMemory())
    assert store.in_files == (path is not None)

    def work(ids):
        store.write(ids, Wide(store.read(ids).w + ids[:, None] + 1))

    for round in range(3):
        store.touch(torch.arange(round * 100, 1000))
        workers = [fork(partial(work, torch.arange(round * 100, 1000)[worker::4])) for worker in range(4)]
        assert [end(pid) for pid in workers] == [0] * 4
        store.checkpoint(round + 1)
    times = (torch.arange(1000) // 100 + 1).clamp(max=3)
    expected = (times * (torch.arange(1000) + 1)).float()
    assert store.occupied.all()
    assert torch.equal(store.read(torch.arange(1000)).w, expected[:, None].expand(1000, 1000))
    store.close()


BIG = """
import os, sys, time, torch
from pathlib import Path
from typing import NamedTuple
from fedloom.storage.memory import ForkedMemory
from fedloom.storage.store import Store
torch.set_num_threads(1)
class Row(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    y: torch.Tensor
def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) / 1024
d, clients = 199_210, int(sys.argv[2])
base, peak, total = anonymous(), 0.0, clients * d * 12 / 1e6
store = Store(1000, Row(*(torch.zeros(d) for _ in range(3))), path=Path(sys.argv[1]))
assert store.in_files
def sweep(what, use):
    global peak
    start = time.perf_counter()
    for k in range(0, clients, 10):
        use(torch.arange(k, k + 10))
        peak = max(peak, anonymous() - base)
    print(f"{what} {total / (time.perf_counter() - start):.0f} MB/s")
def write(ids):
    store.write(ids, Row(*(torch.full((10, d), float(ids[0]) + k) for k in range(3))))
def read(ids):
    rows = store.read(ids)
    assert all(float(rows[k][-1, -1]) == float(ids[0]) + k for k in range(3))
store.touch(torch.arange(1000))
sweep("write", write)
start = time.perf_counter()
store.checkpoint(1)
print(f"checkpoint {time.perf_counter() - start:.2f} s")
sweep("read", read)
start = time.perf_counter()
store.touch(torch.arange(clients))
peak = max(peak, anonymous() - base)
print(f"touch {total / (time.perf_counter() - start):.0f} MB/s")
sweep("rewrite", lambda ids: store.write(ids, Row(*(torch.full((10, d), -1.0) for _ in range(3)))))
start = time.perf_counter()
store.rollback(1)
peak = max(peak, anonymous() - base)
print(f"rollback {total / (time.perf_counter() - start):.0f} MB/s")
sweep("read", read)
print(f"anonymous +{peak:.0f} MB")
assert peak < 100, peak
"""


def run(command):
    env = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", *command], env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("clients", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_anonymous_memory_does_not_grow_with_the_clients(clients):
    with tempfile.TemporaryDirectory() as folder:  # on a disk, for it takes gigabytes
        print(run([BIG, folder, str(clients)]))


def test_reading_small_rows_is_not_slow(tmp_path):
    store = on_disk(tmp_path, 10_000, Other(torch.zeros(8)))
    ids = torch.arange(0, 10_000, 2)
    start = time.process_time()  # not that of other processes
    store.touch(ids)
    store.write(ids, Other(torch.rand(5000, 8)))
    store.read(ids)
    assert time.process_time() - start < 2
