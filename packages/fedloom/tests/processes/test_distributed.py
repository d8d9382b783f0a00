"""Ranks of torchrun, real processes on loopback: the same bits as one process, and an end when one of them dies."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from typer.testing import CliRunner

from fedloom.engine.checkpoints import check_ranks
from fedloom.engine.simulate import simulate
from fedloom.errors import CheckpointError, ClientError, ConfigError, FedloomError
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, read
from fedloom.local.oracles.precision import has_bf16
from fedloom.processes import rank_messages as parcel
from fedloom.processes.clients import ChunkResult
from fedloom.processes.distributed import TORCHRUN_VARIABLES, _write_error_file, join_ranks
from fedloom.processes.rank_pool import RankPool, rank_of_task
from fedloom.processes.ranks import SINGLE_RANK, Move
from fedloom.processes.row_locations import RowLocations
from fedloom.storage.store import Store
from tests import commands
from tests.processes import rank_program

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

HEAD = """
rounds = 4
data = {source = "digits"}
partition = {kind = "dirichlet", clients = 18, alpha = 0.5, min_size = 2}
local = {lr = 0.05, batch_size = 8}
sampler = {kind = "uniform", fraction = 0.6}
evaluate = {every = 2}
"""

METHODS = """
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "scaffold"
[[method]]
algorithm = "flame"
[[method]]
algorithm = "fedacs"
[[method]]
algorithm = "fiaelt"
[[method]]
algorithm = "equitable-fl"
[[method]]
algorithm = "power-of-choice"
[[method]]
label = "rows gathered"
algorithm = "fedavg"
aggregator = {kind = "median"}
[[method]]
label = "kept rows gathered"
algorithm = "flame"
aggregator = {kind = "median"}
[[method]]
label = "errors fed back"
algorithm = "fedavg"
upload_transform = {kind = "top-k"}
[[method]]
label = "mixtures"
algorithm = "flame"
personalized_aggregation = {kind = "attention", among = "seen"}
[[method]]
label = "mixtures of sent models"
algorithm = "fedavg"
personalized_aggregation = {kind = "attention", among = "seen"}
[[method]]
label = "sums gathered"
algorithm = "fedadmm"
aggregator = {kind = "median"}
[[method]]
label = "clusters found again"
algorithm = "feddyn"
client_weights = "clusters-3 every 2"
"""

EVERYTHING = (
    HEAD
    + 'attack = {kind = "alie", fraction = 0.2}\nengine = {clients_per_batch = 3, checkpoint_every = 0.01}'
    + METHODS
)
"""Means, sums that accumulate, kept rows, a server that mixes, probes, queries, gathered rows, residues,
mixers over the models of all, gathered sums, shares that change, forgers."""

SHORT = (
    HEAD
    + "engine = {clients_per_batch = 3, checkpoint_every = 1e-9}"
    + '[[method]]\nalgorithm = "scaffold"\n[[method]]\n'
)
SHORT = SHORT.replace("}[[", "}\n[[") + 'algorithm = "flame"\n'
"""Client state, and kept rows."""


def written(folder: Path, text: str) -> Path:
    file = folder / "experiment.toml"
    file.write_text(text)
    return file


def alone(file: Path, out: Path) -> dict[str, str]:
    Plan(read(file), out).run(page=False)
    return files(out)


def files(out: Path) -> dict[str, str]:
    """Digests of what must be the same: metrics and models."""
    paths = [out / "metrics.parquet", *sorted(out.glob("models/*/*.safetensors"))]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def start(*arguments: Any, ranks: int = 2, cwd: Path | None = None, machine: tuple[int, int] | None = None, **env: str):
    """torchrun on this machine, or as one of two machines: (number, port)."""
    place = ["--standalone"]
    if machine is not None:
        place = ["--nnodes=2", f"--node-rank={machine[0]}", "--master-addr=127.0.0.1", f"--master-port={machine[1]}"]
    command = [*TORCHRUN, *place, f"--nproc-per-node={ranks}", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def end(process: subprocess.Popen[str], seconds: float = 800) -> tuple[int, str]:
    """Exit code and what was said."""
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        pytest.fail(f"still running after {seconds} s. It said:\n{said}")
    return process.returncode, said


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_two_machines(file: Path, out: Path, *more: Any, **env: str) -> list[tuple[int, str]]:
    """One rank on the machine that has the run directory, two on another."""
    port, other = free_port(), out.parent / "other machine"
    other.mkdir(exist_ok=True)
    second = start(PROGRAM, file, "out", *more, ranks=2, cwd=other, machine=(1, port), **env)
    first = start(PROGRAM, file, out, *more, ranks=1, machine=(0, port), **env)
    try:
        ended = [end(first), end(second)]
    finally:
        second.kill()
        second.wait()
    assert not list(other.iterdir())
    return ended


def in_forks(file: Path, out: Path) -> None:
    """The same, with what torchrun tells the ranks, but without its processes and without importing torch anew."""
    other, port = out.parent / "other machine", free_port()
    other.mkdir()

    def play(rank: int, machine: int, local: int) -> None:
        told = {"RANK": rank, "GROUP_RANK": machine, "LOCAL_RANK": local, "WORLD_SIZE": 3, "MASTER_PORT": port}
        told |= {"LOCAL_WORLD_SIZE": 1 + machine, "TORCHELASTIC_RUN_ID": "forks", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({name: str(value) for name, value in told.items()})
        if machine:
            os.chdir(other)
        rank_program.main(str(file), "out" if machine else str(out))

    said = [out.parent / f"rank-{rank}.txt" for rank in range(3)]
    places = [(0, 0), (1, 0), (1, 1)]
    ranks = [psutil.Process(commands.fork(partial(play, k, *place), said[k])) for k, place in enumerate(places)]

    def ended(rank: psutil.Process) -> None:
        for other in ranks if rank.returncode else ():
            with suppress(psutil.NoSuchProcess):
                other.kill()  # as torchrun does

    psutil.wait_procs(ranks, callback=ended)
    assert [rank.returncode for rank in ranks] == [0, 0, 0], [file.read_text() for file in said]
    assert not list(other.iterdir())


def slow(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(test)


def test_three_ranks_on_two_machines_equal_one_process(tmp_path: Path) -> None:
    file = written(tmp_path, EVERYTHING.replace("clients_per_batch = 3", "clients_per_batch = 3, state_memory_mib = 0"))
    want = alone(file, tmp_path / "one")
    in_forks(file, tmp_path / "out")
    assert files(tmp_path / "out") == want
    assert len({Path(name).parent for name in want if name.startswith("models")}) == METHODS.count("[[method]]")


def test_ranks_give_the_same_bits_under_a_schedule(tmp_path: Path) -> None:
    text = (
        HEAD.replace("fraction = 0.6", "clients = 9")
        + 'devices = {kind = "lognormal"}\nengine = {clients_per_batch = 3}\n'
    )
    text += 'schedule = {kind = "buffered", buffer = 3}\n[[method]]\nalgorithm = "flame"\n'
    text += '[[method]]\nalgorithm = "fedprox"\nschedule = {kind = "deadline", seconds = 1.0, partial = true}\n'
    file = written(tmp_path, text)
    want = alone(file, tmp_path / "one")
    in_forks(file, tmp_path / "out")
    assert files(tmp_path / "out") == want


def test_a_rank_that_dies_ends_the_run_with_a_sentence_and_another_number_of_ranks_resumes(tmp_path: Path) -> None:
    file = written(tmp_path, SHORT)
    want = alone(file, tmp_path / "one")
    code, said = end(start(PROGRAM, file, tmp_path / "out", 1, "flame", 3, FEDLOOM_RANK_TIMEOUT="3600"))
    assert code != 0  # by the connection that closes: nobody waits for a sign of life
    sentences = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, said
    assert "Saved results are intact. Start the ranks again to continue" in sentences[0]
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir()) == ["flame-0", "scaffold-0"]
    assert not (tmp_path / "out" / "metrics.parquet").exists()
    assert alone(file, tmp_path / "out") == want


def test_a_rank_that_torchrun_ends_while_an_error_leaves_it_still_says_the_error() -> None:
    program = """
import os, signal, sys
from fedloom.processes.distributed import _raise_on_signal
try:
    with _raise_on_signal():
        raise RuntimeError("lost contact")
except RuntimeError as error:
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(f"error: {error}")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: lost contact\n")


@slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("budget", [1024, 0], ids=["memory", "files"])
def test_ranks_of_one_machine_equal_one_process(tmp_path: Path, ranks: int, budget: int) -> None:
    file = written(
        tmp_path, EVERYTHING.replace("clients_per_batch = 3", f"clients_per_batch = 3, state_memory_mib = {budget}")
    )
    want = alone(file, tmp_path / "one")
    code, said = end(start(PROGRAM, file, tmp_path / "out", ranks=ranks))
    assert code == 0, said
    assert files(tmp_path / "out") == want


@pytest.mark.skipif(
    not has_bf16(torch.device("cpu")), reason="this processor has no bfloat16 instructions, so bfloat16"
)
def test_ranks_equal_one_process_in_bfloat16(tmp_path: Path) -> None:
    how = 'model = {kind = "cnn", channels = [4], kernel = 3, hidden = [8]}\n'
    how += 'engine = {precision = "bf16", clients_per_batch = 3}\n'
    file = written(tmp_path, HEAD.replace("rounds = 4", "rounds = 2") + how + SHORT[SHORT.index("[[method") :])
    want = alone(file, tmp_path / "one")
    in_forks(file, tmp_path / "out")
    assert files(tmp_path / "out") == want


@slow
@pytest.mark.parametrize("budget", [1024, 0], ids=["memory", "files"])
@pytest.mark.parametrize("victim", ["0", "1", "2"])
def test_two_machines_resume_after_a_death(tmp_path: Path, victim: str, budget: int) -> None:
    file = written(
        tmp_path, SHORT.replace("clients_per_batch = 3", f"clients_per_batch = 3, state_memory_mib = {budget}")
    )
    want = alone(file, tmp_path / "one")
    ended = on_two_machines(file, tmp_path / "out", victim, "flame", 3)
    assert all(code != 0 for code, _ in ended)
    assert sum(said.count("error: ") for _, said in ended) >= 1
    for code, said in on_two_machines(file, tmp_path / "out"):
        assert code == 0, said
    assert files(tmp_path / "out") == want


@slow
def test_a_rank_that_is_stopped_is_noticed(tmp_path: Path) -> None:
    file = written(tmp_path, SHORT)
    run = start(PROGRAM, file, tmp_path / "out", 1, "flame", 3, VICTIM_GETS="SIGSTOP", FEDLOOM_RANK_TIMEOUT="20")
    code, said = end(run)
    assert code != 0
    assert "rank 1 of 2 has not responded for 20 s" in said


@slow
def test_the_command_line_prints_once_and_stops_when_asked(tmp_path: Path) -> None:
    file = written(tmp_path, SHORT.replace("rounds = 4", "rounds = 2000"))
    run = start("-m", "fedloom.lab.cli", "run", file, "--out", tmp_path / "out")
    while not list((tmp_path / "out").glob("checkpoints/*/checkpoint-3.json")):
        time.sleep(0.1)
    for rank in psutil.Process(run.pid).children():
        rank.send_signal(signal.SIGINT)
    code, said = end(run)
    assert code != 0
    assert said.count("report: ") == 1
    assert said.count("scaffold, seed 0: interrupted") == 1
    short = written(tmp_path, SHORT)
    again = start("-m", "fedloom.lab.cli", "run", short, "--out", tmp_path / "new", "--workers", "1")
    code, said = end(again)
    assert code == 0, said
    assert files(tmp_path / "new") == alone(short, tmp_path / "one")


@slow
def test_a_refusal_is_one_sentence(tmp_path: Path) -> None:
    file = written(tmp_path, SHORT.replace("clients = 18", "clients = 18000"))
    code, said = end(start("-m", "fedloom.lab.cli", "run", file, "--out", tmp_path / "out"))
    assert code != 0
    assert sum(line.startswith("error: ") for line in said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_without_torchrun_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    for given in ({}, {"RANK": "1", "WORLD_SIZE": "4"}, {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with join_ranks() as ranks:
            assert ranks is SINGLE_RANK
            assert not dist.is_initialized()


def test_a_search_and_a_recipe_are_refused_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would do all of it, into the same files."""
    file = written(tmp_path, SHORT)
    commands = (["tune", str(file), "--out", str(tmp_path / "tune")],)
    if find_spec("fedloom_studies") is not None:
        recipe = next(iter(import_module("fedloom_studies.reproduce").read_recipes()))
        commands += (["reproduce", recipe, "--out", str(tmp_path / "runs"), "--results", str(tmp_path)],)
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in commands:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2, done.output
        assert "torchrun has started 2 ranks" in done.output
        assert "files. Start the command without torchrun" in done.output
    assert list(tmp_path.iterdir()) == [file]


def test_why_a_rank_ends_is_left_for_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    _write_error_file(FedloomError("clients must be fewer"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert failure.message == "clients must be fewer"


def test_parcels_come_back_as_they_were() -> None:
    g = torch.Generator().manual_seed(0)
    tensors = {
        "rows/w": torch.randn(3, 5, generator=g),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(3.0, dtype=torch.float64),
        "strided": torch.randn(4, 6, generator=g)[::2, ::3],
        "expanded": torch.ones(1).expand(4),
        "nan": torch.tensor([torch.nan, torch.inf], dtype=torch.bfloat16),
    }
    ids, share, counts = torch.arange(3), torch.ones(3, 1), torch.arange(21).view(3, 7)
    trained = ChunkResult(ids, share, torch.tensor([True, False, True]), tensors, {}, 0.1 + 0.2, counts)
    value = [trained, {("global", "test"): {"loss": torch.arange(3.0)}}, (None, "text", 2**60, float("inf"))]
    text, sent = parcel.encode_value(value)
    packed = torch.cat(
        [
            parcel.pack_tensors(b"other", []),
            parcel.pack_tensors(text, sent),
            parcel.pack_tensors(b"ones", [torch.ones(3)]),
        ]
    )
    (other, nothing), (text, data), (_, ones) = parcel.unpack_tensors(packed)
    assert (other, len(nothing), len(ones)) == (b"other", 0, parcel.ALIGNMENT_BYTES)
    back = parcel.decode_value(text, parcel.cut_tensors(data, parcel.tensor_forms(text)))
    assert back[0].total == trained.total
    assert back[2] == value[2]
    assert torch.equal(back[0].accepted, trained.accepted)
    assert torch.equal(back[1]["global", "test"]["loss"], torch.arange(3.0))
    for name, tensor in tensors.items():
        assert back[0].parts[name].dtype == tensor.dtype
        assert torch.equal(back[0].parts[name].nan_to_num(), tensor.nan_to_num()), name
        assert back[0].parts[name].shape == tensor.shape


@pytest.mark.parametrize(
    "error", [ClientError("client step", 3, [1, 2], "boom"), ConfigError("no"), CheckpointError("full"), FedloomError()]
)
def test_errors_travel_with_their_kind_and_text(error: FedloomError) -> None:
    back = parcel.decode_value(parcel.encode_value(error)[0], [])
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_only_known_kinds_travel() -> None:
    with pytest.raises(TypeError, match="a set cannot be sent"):
        parcel.encode_value({1, 2})
    odd = b'[{"error": ["TYPE_CHECKING", ["x"]]}, []]'
    assert type(parcel.decode_value(odd, [])) is FedloomError


class Row(tuple[torch.Tensor, ...]):
    """One field."""

    _fields = ("w",)

    def __new__(cls, w: torch.Tensor) -> Row:
        return super().__new__(cls, (w,))


class Several:
    """Ranks on machines, played by this process: what moves is written down."""

    memory = None

    def __init__(self, machines: list[int], rank: int = 0) -> None:
        self.machines, self.rank, self.size = machines, rank, len(machines)
        self.moved: list[tuple[int, int]] = []

    def move(self, moves: Sequence[Move]) -> None:
        for tensors, source, target in moves:
            self.moved += [(source, target)] * len(tensors[0])

    def combine_flags(self, *flags: bool) -> list[bool]:
        return list(flags)

    def share(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def wait(self) -> None:
        pass


def test_a_row_moves_only_when_its_chunk_is_trained_elsewhere() -> None:
    ranks = Several([0, 0, 1], rank=2)
    stores: Mapping[str, Store[Any]] = {"clients": Store(6, Row(torch.zeros(2)))}  # type: ignore[type-var]
    homes = RowLocations(ranks, stores)
    homes.fetch({0: torch.tensor([0, 1, 2]), 1: torch.tensor([3, 4, 5])})
    assert ranks.moved == []  # nobody was seen: all have the template
    homes.mark_written(torch.tensor([0, 1, 2]), 0)
    homes.mark_written(torch.tensor([3, 4]), 1)
    homes.fetch({0: torch.tensor([0, 1, 2]), 1: torch.tensor([3, 4, 5])})
    assert ranks.moved == []
    homes.fetch({1: torch.tensor([1, 3])})
    assert ranks.moved == [(0, 2)]
    homes.fetch({1: torch.tensor([1])})
    homes.fetch({0: torch.tensor([1])})
    assert ranks.moved == [(0, 2)]  # both have it until one is trained
    homes.collect()
    assert ranks.moved == [(0, 2), (2, 0), (2, 0)]


def test_every_rank_has_its_part_of_the_chunks() -> None:
    for ranks in (2, 3, 5):
        for chunks in (4, 12, 20):
            parts = [[k for k in range(chunks) if rank_of_task(k, ranks) == r] for r in range(ranks)]
            assert sorted(k for part in parts for k in part) == list(range(chunks))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            if chunks % (2 * ranks) == 0:
                assert len({sum(part) for part in parts}) == 1  # long and short ones alike


def test_the_order_and_the_number_of_results_do_not_depend_on_the_waves() -> None:
    class Task:
        def __init__(self, k: int) -> None:
            self.k, self.ids = k, torch.tensor([k])

    stores: Mapping[str, Store[Any]] = {"clients": Store(20, Row(torch.zeros(2)))}  # type: ignore[type-var]
    for room in (1, 1 << 20, 1 << 40):
        pool = RankPool(SINGLE_RANK, RowLocations(SINGLE_RANK, stores), room)
        assert list(pool.map(lambda by, task: by * task.k, 2, [Task(k) for k in range(20)])) == [
            2 * k for k in range(20)
        ]
    broken = RankPool(SINGLE_RANK, RowLocations(SINGLE_RANK, stores), 1)
    with pytest.raises(FedloomError, match="no"):
        list(broken.map(lambda *_: FedloomError("no"), 2, [Task(0)]))


def test_ranks_with_other_data_are_refused(tmp_path: Path) -> None:
    class Unequal(Several):
        def gather(self, value: Any) -> list[Any]:
            return [value, {**value, "torch": "1.0"}]

    plan = Plan(read(written(tmp_path, SHORT)), tmp_path / "out")
    method, seed = plan.runs[0]
    job = simulate(method.setting.with_(seed=seed), plan.federations[seed], rounds=1).job
    check_ranks(job)
    object.__setattr__(job, "ranks", Several([0, 0]))
    check_ranks(job)
    object.__setattr__(job, "ranks", Unequal([0, 0]))
    with pytest.raises(ConfigError, match="rank 1 differs from rank 0 in torch: 1.0 there"):
        check_ranks(job)
