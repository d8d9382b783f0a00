"""Checkpoints with a store, stopped at every moment: a whole generation comes back, the last one saved or newer."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedloom
from fedloom.errors import CheckpointError, RunDirError
from fedloom.storage import disk, journal
from fedloom.storage.checkpoint import Checkpoints, save_tensors
from fedloom.storage.store import Store

N = 6
TENSORS = {
    "float64": torch.tensor([0.1, float("nan"), -0.0, float("-inf")], dtype=torch.float64),
    "float32": torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(0)).transpose(0, 1),
    "half": torch.tensor([1.5], dtype=torch.float16),
    "int64": torch.tensor([[2**62, -1]]),
    "bool": torch.tensor([True, False, True]),
    "byte": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "flag": torch.tensor(False),
    "empty": torch.empty(0, 3),
    "bfloat": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
}
TENSORS["alias"] = TENSORS["int64"]
META = {"round": 3, "loss": 0.1 + 0.2, "nan": float("nan"), "list": [1, None, "ü"], "levels": {10: 1, 9: 2}}


@pytest.fixture(autouse=True)
def _no_hook():
    yield
    disk.hook = None


def same(a, b):
    """Equal bit for bit."""
    bits = [bytes(journal.raw(x.contiguous())) == bytes(journal.raw(y.contiguous())) for x, y in zip(a, b, strict=True)]
    return all(bits) and all(x.dtype == y.dtype and x.shape == y.shape for x, y in zip(a, b, strict=True))


# ---- a run ----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    w: Tensor
    seen_in: Tensor


TEMPLATE = Row(torch.full((4,), 0.5, dtype=torch.float64), torch.tensor([-1]))


class Round(NamedTuple):
    ids: list[int]
    save: bool


def step(rows, ids, number):
    """A round: new rows depend on the old ones, so that a row of another generation is never made good."""
    return Row(rows.w * 1.25 + number + ids[:, None], rows.seen_in * 3 + number)


class Run:
    """Rounds of touch, write and checkpoint in a folder, as a simulation does them."""

    def __init__(self, folder, plan, budget=0):
        self.folder, self.plan, self.budget, self.saved, self.warnings = folder, plan, budget, 0, []
        self.store = None

    def play(self):
        self.store = Store(N, TEMPLATE, path=self.folder / "rows", budget=self.budget)
        self.checkpoints = Checkpoints(self.folder / "checkpoints")
        loaded = self.checkpoints.resume("me", {"rows": self.store})
        self.start = loaded.generation if loaded else 0
        self.warnings = loaded.warnings if loaded else []
        self.x = loaded.tensors["x"] if loaded else torch.zeros(2, dtype=torch.float64)
        assert self.content() == expected(self.plan, self.start)
        for number in range(self.start + 1, len(self.plan) + 1):
            ids, save = torch.tensor(self.plan[number - 1].ids, dtype=torch.int64), self.plan[number - 1].save
            self.store.touch(ids)
            for half in (ids[::2], ids[1::2]):
                self.store.write(half, step(self.store.read(half), half, number))
            self.x = self.x * 1.5 + number
            if save:
                self.save(number)
        return self

    def save(self, number):
        self.checkpoints.save(number, {"x": self.x}, {"round": number}, fingerprint="me", stores={"rows": self.store})
        self.saved = number

    def content(self):
        rows = self.store.read(torch.arange(N))
        return digest(self.x, self.store.occupied, *rows)

    def close(self):
        if self.store is not None:
            self.store.close()


def digest(*tensors):
    return hashlib.sha256(b"".join(bytes(journal.raw(t.contiguous())) for t in tensors)).hexdigest()


def expected(plan, generation):
    """What a run holds after so many rounds, computed without a store."""
    rows, seen, x = (
        Row(*(field.expand(N, -1).clone() for field in TEMPLATE)),
        torch.zeros(N, dtype=torch.bool),
        torch.zeros(2, dtype=torch.float64),
    )
    for number in range(1, generation + 1):
        ids = torch.tensor(plan[number - 1].ids, dtype=torch.int64)
        new = step(Row(*(field[ids] for field in rows)), ids, number)
        for field, values in zip(rows, new, strict=True):
            field[ids] = values
        seen[ids] = True
        x = x * 1.5 + number
    return digest(x, seen, *rows)


PLAN = [
    Round([0, 1, 4], False),
    Round([1, 2], True),
    Round([0, 1, 5], False),
    Round([3, 1], True),
    Round([], True),
    Round([0, 5, 4], False),
    Round([0, 1, 2], False),
    Round([2, 3], True),
]


# ---- a disk that stops ----------------------------------------------------------------------------------------------


class Stopped(BaseException):
    pass


def stopping(stop):
    """Stops everything at the stop-th primitive."""

    def before(count):
        if count >= stop:
            raise Stopped

    return before


class Disk:
    """Hook that knows what is durable before each primitive, and calls `before` with its number.

    A power cut may lose or keep, block by block, whatever was not fsynced; names too, until their folder is fsynced.
    """

    def __init__(self, folder, before):
        self.folder, self.before, self.count, self.last = folder, before, 0, None
        self.content, self.names, self.handles = {}, {}, {}
        for path in sorted(folder.rglob("*")):
            if path.is_dir():
                self.names[path] = self.listing(path)
            else:
                self.content[path.stat().st_ino] = path.read_bytes()
        disk.hook = self

    def __call__(self, op, path):
        self.settle()
        self.count += 1
        self.before(self.count)
        self.last = (op, path)

    def settle(self):
        op, path = self.last or ("", None)
        self.last = None
        if op == "create" and path.is_file():
            self.content.setdefault(self.hold(path), b"")
        elif op == "fsync" and path.is_dir() and path != self.folder.parent:
            self.names[path] = self.listing(path)
        elif op == "fsync" and path.is_file():
            self.content[self.hold(path)] = path.read_bytes()

    def hold(self, path):
        """Keeps the file open, so that its number is never given to another."""
        number = path.stat().st_ino
        if number not in self.handles:
            self.handles[number] = os.open(path, os.O_RDONLY)
        return number

    def listing(self, folder):
        return {p.name: self.hold(p) for p in folder.iterdir() if p.is_file()}

    def cut_power(self, draw, copy=None):
        """Leaves on the disk, or in a copy of it, one of the states that a power cut allows."""
        for folder in [p for p in self.folder.rglob("*") if p.is_dir()]:
            now, durable = self.listing(folder), self.names.get(folder, {})
            left = {}
            for name in sorted(now.keys() | durable.keys()):
                number = (now if draw.random() < 0.5 else durable).get(name)
                if number is not None:
                    size = os.fstat(self.handles[number]).st_size
                    left[name] = self.mix(self.content.get(number, b""), os.pread(self.handles[number], size, 0), draw)
            target = folder if copy is None else copy / folder.relative_to(self.folder)
            for name in now:
                (target / name).unlink()
            for name, content in left.items():
                (target / name).write_bytes(content)

    @staticmethod
    def mix(durable, now, draw, block=16):
        choice = draw.random()
        if choice < 0.6 or durable == now:
            return durable if choice < 0.3 else now
        length = len(durable) if draw.random() < 0.5 else len(now)
        blocks = [(durable if draw.random() < 0.5 else now)[k : k + block] for k in range(0, length, block)]
        return b"".join(
            b.ljust(min(block, length - k * block), b"\0")[: length - k * block] for k, b in enumerate(blocks)
        )

    def close(self):
        disk.hook = None
        for handle in self.handles.values():
            os.close(handle)


def play_until(folder, plan, stop, power=None, budget=0):
    """Plays until the stop-th primitive. Returns (the run, whether it was stopped)."""
    folder.mkdir(exist_ok=True)
    run, disk = Run(folder, plan, budget), Disk(folder, stopping(stop))
    try:
        run.play()
        stopped = False
    except Stopped:
        stopped = True
    disk.hook = None
    if power is not None and stopped:
        disk.cut_power(power)
    disk.close()
    run.close()
    return run, stopped


def finish(folder, plan, least, budget=0):
    """Opens after a stop: the last generation that was saved, or a newer one, is there; then goes on to the end."""
    run = Run(folder, plan, budget).play()
    assert run.start >= least
    assert run.content() == expected(plan, len(plan))
    run.close()
    return run


@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["files", "memory"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_stopped_at_every_primitive(tmp_path, power, budget):
    """One run; what a stop before each of its primitives leaves is put aside, and gone on with."""
    run, left = Run(tmp_path / "run", PLAN, budget), []
    run.folder.mkdir()

    def put_aside(count):
        folder = shutil.copytree(run.folder, tmp_path / str(count))
        if power:
            disk.cut_power(np.random.default_rng(count), folder)
        left.append((folder, run.saved))

    disk = Disk(run.folder, put_aside)
    run.play().close()
    disk.close()
    assert len(left) > (90 if budget else 190)
    for folder, saved in [*left, (run.folder, run.saved)]:
        done = finish(folder, PLAN, saved, budget)
        assert done.warnings == [] or power
        kept = {f"checkpoint-{g}{end}" for g in (5, 8) for end in (".json", ".safetensors")}
        assert {p.name for p in (folder / "checkpoints").iterdir()} == kept or done.start == len(PLAN)
        shutil.rmtree(folder)


ROUNDS = st.builds(Round, st.lists(st.integers(0, N - 1), max_size=N, unique=True), st.booleans())


@given(
    plan=st.lists(ROUNDS, min_size=1, max_size=10),
    stops=st.lists(st.tuples(st.integers(1, 150), st.booleans()), max_size=5),
    seed=st.integers(0, 1000),
    in_memory=st.booleans(),
)
@settings(max_examples=150)
def test_stopped_again_and_again(tmp_path_factory, plan, stops, seed, in_memory):
    plan = [*plan, Round([], True)]
    folder, budget = tmp_path_factory.mktemp("run") / "a", (1 << 20) * in_memory
    draw, least = np.random.default_rng(seed), 0
    for stop, power in stops:
        run, stopped = play_until(folder, plan, stop, draw if power else None, budget)
        assert getattr(run, "start", least) >= least
        least = max(least, run.saved)
        if not stopped:
            break
    folder.mkdir(exist_ok=True)
    finish(folder, plan, least, budget)
    shutil.rmtree(folder)


@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["files", "memory"])
def test_a_disk_that_fills_up_at_any_moment(tmp_path, budget):
    step_, raised = 0, True
    while raised:
        step_ += 1
        folder = tmp_path / str(step_)
        folder.mkdir()
        run, raised, count = Run(folder, PLAN, budget), False, [0]

        def full(op, path, count=count, limit=step_):
            count[0] += 1
            if count[0] >= limit and op in {"create", "write", "tear", "fsync"}:
                raise OSError(errno.ENOSPC, "No space left on device")

        disk.hook = full
        try:
            run.play()
        except CheckpointError as error:
            raised = re.search("the disk is full. Free some space", str(error))
        disk.hook = None
        run.close()
        assert list(folder.rglob("*.tmp")) == []
        finish(folder, PLAN, run.saved, budget)
        shutil.rmtree(folder)


def test_a_save_that_failed_can_be_repeated(tmp_path):
    run = Run(tmp_path, PLAN).play()
    names = sorted(p.name for p in tmp_path.rglob("*"))
    ids = torch.tensor([0, 1])
    run.store.touch(ids)
    run.store.write(ids, step(run.store.read(ids), ids, 9))
    run.x = run.x * 1.5 + 9

    def full(op, path):
        if "checkpoint-9" in path.name and op == "tear" and "json" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    disk.hook = full
    for _ in range(2):
        with pytest.raises(CheckpointError):
            run.save(9)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.name != "journal-9") == names
    disk.hook = None
    run.save(9)
    with pytest.raises(AssertionError, match="checkpoint 9 after 9"):
        run.save(9)
    run.close()
    assert finish(tmp_path, [*PLAN, Round([0, 1], True)], 9).start == 9
    assert Checkpoints(tmp_path / "checkpoints").generations() == [8, 9]


# ---- processes that are killed --------------------------------------------------------------------------------------

LONG = [Round([k % N, (k * 5 + 1) % N] if k % N != (k * 5 + 1) % N else [k % N], k % 3 == 2) for k in range(600)]
LONG = [*LONG, Round([], True)]


def killed_at_random(folder, times, seed):
    """A process of its own: children play, each killed after a random time; what is there is checked by each child.

    There are ``times`` children, and more where the machine is so busy that they are killed before they have begun.
    """
    draw, starts = np.random.default_rng(seed), []
    while len(starts) < times or (len(set(starts)) < 4 and len(starts) < 20 * times):
        child = os.fork()
        if child == 0:
            Run(folder, LONG).play()
            os._exit(0)
        time.sleep(draw.uniform(0, 0.25))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        starts.append(max(Checkpoints(folder / "checkpoints").generations(), default=0))
    assert starts == sorted(starts)
    finish(folder, LONG, starts[-1])
    print(*starts)


def test_killed_at_random_moments(tmp_path):
    done = script("killed_at_random", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) > 2


def test_killed_by_the_environment(tmp_path):
    from tests.commands import in_a_fork  # this file is a program too, which does not find it

    done = script("play", tmp_path, FEDLOOM_CRASH_AT="40")
    assert done.returncode == 137, done.stderr
    assert in_a_fork(lambda: Run(tmp_path, LONG).play(), crash_at=300) == 137
    finish(tmp_path, LONG, max(Checkpoints(tmp_path / "checkpoints").generations()))


def script(what, folder, **environment):
    env = {**os.environ, "PYTHONPATH": str(Path(fedloom.__file__).parents[1]), **environment}
    command = [sys.executable, __file__, what, str(folder)]
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True)


# ---- the files ------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.load("me") is None
    assert checkpoints.resume("me") is None
    checkpoints.save(3, TENSORS, META, fingerprint="me")
    loaded = checkpoints.load("me")
    assert (loaded.generation, loaded.warnings) == (3, [])
    assert loaded.tensors.keys() == TENSORS.keys()
    assert same([loaded.tensors[name] for name in TENSORS], TENSORS.values())
    assert json.dumps(loaded.meta) == json.dumps(META)
    loaded.tensors["int64"].zero_()
    assert same([checkpoints.load("me").tensors["int64"]], [TENSORS["int64"]])


def test_what_is_resumed_lies_in_memory_as_torch_places_it(tmp_path):
    """The rounding of a product depends on where its factors begin; those of a file begin anywhere."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, TENSORS, META, fingerprint="me")
    resumed = checkpoints.resume("me").tensors
    assert {name: tensor.data_ptr() % 64 for name, tensor in resumed.items()} == dict.fromkeys(TENSORS, 0)
    assert same([resumed[name] for name in TENSORS], TENSORS.values())


def test_the_tensor_file_is_plain_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    sha = save_tensors(path, TENSORS, {"layout": '{"d": 3}'})
    assert sha == hashlib.sha256(path.read_bytes().replace(sha.encode(), b"0" * 64)).hexdigest()
    read = safetensors.torch.load(path.read_bytes())
    assert same([read[name] for name in TENSORS], TENSORS.values())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"layout": '{"d": 3}', "sha256": sha}
    assert save_tensors(path, {}) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert safetensors.torch.load_file(path) == {}


def test_two_generations_are_kept_and_nothing_else(tmp_path):
    (tmp_path / ".checkpoint-1.json.tmp").write_text("litter of a crash")
    (tmp_path / "checkpoint-7.safetensors").write_text("of a crash before its JSON")
    checkpoints = Checkpoints(tmp_path)
    for generation in (1, 2, 5, 9):
        checkpoints.save(generation, {"x": torch.ones(1) * generation}, {}, fingerprint="me")
    names = {f"checkpoint-{g}{end}" for g in (5, 9) for end in (".json", ".safetensors")}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert checkpoints.generations() == [5, 9]


def test_a_generation_is_there_only_when_all_of_it_is(tmp_path):
    stop, stopped = 0, True
    while stopped:
        stop += 1
        folder = tmp_path / str(stop)
        checkpoints, disk = two(folder), Disk(folder, stopping(stop))
        try:
            checkpoints.save(3, {"x": torch.ones(3) * 3}, {"round": 3}, fingerprint="me")
            stopped = False
        except Stopped:
            pass
        disk.close()
        assert len(checkpoints.generations()) >= 2
        for generation in checkpoints.generations():
            assert (folder / f"checkpoint-{generation}.safetensors").exists()


def two(folder):
    checkpoints = Checkpoints(folder)
    for generation in (1, 2):
        checkpoints.save(generation, {"x": torch.ones(3) * generation}, {"round": generation}, fingerprint="me")
    return checkpoints


def variants(good):
    yield from (good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :] for at in range(len(good)) for flip in (1, 0x80))
    yield from (good[:length] for length in range(len(good)))
    yield good + b"x"


@pytest.mark.parametrize("end", [".json", ".safetensors"])
def test_every_damaged_byte_falls_back_and_says_so(tmp_path, end):
    checkpoints = two(tmp_path)
    path = tmp_path / f"checkpoint-2{end}"
    for bad in variants(path.read_bytes()):
        path.write_bytes(bad)
        loaded = checkpoints.load("me")
        assert loaded.tensors["x"].tolist() == [loaded.generation] * 3
        assert loaded.meta == {"round": loaded.generation}
        if loaded.generation == 1:
            assert "checkpoint-2 is damaged" in loaded.warnings[0]
        else:
            assert end == ".json", "only white space of the JSON"
    path.unlink()
    assert checkpoints.load("me").generation == 1


def test_all_damaged_is_an_error_that_names_them(tmp_path):
    checkpoints = two(tmp_path)
    for generation in (1, 2):
        (tmp_path / f"checkpoint-{generation}.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read: .*checkpoint-2.*checkpoint-1.*--force"):
        checkpoints.load("me")


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"body": 1, "sha256": ""}', "[" * 100000, "\udcff", "null"])
def test_json_that_is_none_of_ours_is_damaged(tmp_path, text):
    checkpoints = two(tmp_path)
    (tmp_path / "checkpoint-2.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert checkpoints.load("me").generation == 1


def test_another_experiment_is_refused(tmp_path):
    with pytest.raises(
        RunDirError,
        match=r"of a different run: its fingerprint is me, but this run has you, so code or data differ. Choose",
    ):
        two(tmp_path).resume("you")
    assert Checkpoints(tmp_path).generations() == [1, 2]


@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["files", "memory"])
def test_a_damaged_newest_generation_takes_the_rows_of_the_one_before(tmp_path, budget):
    Run(tmp_path, PLAN, budget).play().close()
    path = tmp_path / "checkpoints" / "checkpoint-8.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    done = finish(tmp_path, PLAN, 5, budget)
    assert done.start == 5
    assert "checkpoint-8 is damaged" in done.warnings[0]
    assert finish(tmp_path, PLAN, 8, budget).warnings == []


def test_rows_cannot_move_between_files_and_memory(tmp_path):
    Run(tmp_path / "a", PLAN, 0).play().close()
    with pytest.raises(CheckpointError, match="Run with the earlier settings"):
        Run(tmp_path / "a", PLAN, 1 << 20).play()
    Run(tmp_path / "b", PLAN, 1 << 20).play().close()
    with pytest.raises(CheckpointError):
        Run(tmp_path / "b", PLAN, 0).play()


if __name__ == "__main__":
    if sys.argv[1] == "play":
        Run(Path(sys.argv[2]), LONG).play()
    else:
        killed_at_random(Path(sys.argv[2]), 10, 0)


def test_the_description_is_there_while_another_process_saves_and_deletes(tmp_path, monkeypatch):
    """Also where all generations of the list that was read have been deleted since."""
    checkpoints, generations = Checkpoints(tmp_path), Checkpoints.generations
    checkpoints.save(1, TENSORS, {"round": 1}, fingerprint="f")

    def then_saved(self):
        found = generations(self)
        monkeypatch.undo()
        for generation in (2, 3, 4):
            self.save(generation, TENSORS, {"round": generation}, fingerprint="f")
        return found

    monkeypatch.setattr(Checkpoints, "generations", then_saved)
    assert Checkpoints(tmp_path).meta() == {"round": 4}
