"""Ranks of a run started by torchrun. They exchange data with gloo between CPUs and with NCCL between GPUs.

    torchrun --nproc-per-node 4 -m fedloom.lab.cli run FILE.toml

Without the environment variables of torchrun, no process group is opened and there is a single rank.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedloom.errors import CheckpointError, ConfigError, FedloomError
from fedloom.processes import rank_messages as parcel
from fedloom.processes.heartbeat import RESUME_HINT, RankWatch
from fedloom.processes.ranks import SINGLE_RANK, Move, Ranks
from fedloom.storage.memory import Memory

TORCHRUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for each process, in addition to WORLD_SIZE."""

RANK_WAIT_TIME = timedelta(days=365)
"""Maximum time to wait for another rank. It is very long, because the other rank may be busy computing.
`RankWatch` checks whether the other rank is alive."""


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the ranks that were started by torchrun. Without torchrun, a single rank is yielded.

    All ranks leave the block together, because torchrun kills all other ranks when a rank ends with an error. The first
    rank that fails logs the cause of the failure. The other ranks end without a message.

    Raises:
        FedloomError: another rank has died or cannot be reached, or this rank has received a termination signal.
        SystemExit: this rank has failed after a different rank, which logs the cause.
    """
    size = _started_rank_count()
    if size == 1:
        yield SINGLE_RANK
        return
    watch = RankWatch(int(os.environ["RANK"]), size)
    try:
        with _raise_on_signal():
            group = _join_group(watch)
            yield group
            group.combine_flags()
            with _translate_errors(watch.rank):
                dist.destroy_process_group()
    except Exception as error:
        if watch.first_to_fail():
            _write_error_file(error)
            raise
        raise SystemExit(1) from None
    finally:
        watch.close()


def check_alone(what: str) -> None:
    """Raise an error if there are several ranks, because each would do all the work and write the same files.

    Raises:
        ConfigError: torchrun has started several ranks.
    """
    size = _started_rank_count()
    if size > 1:
        raise ConfigError(
            f"torchrun has started {size} ranks, but {what} does not divide its work among ranks. Each rank would do "
            "all the work and write the same files. Start the command without torchrun, with --workers"
        )


def _started_rank_count() -> int:
    """Return the number of ranks started by torchrun, or 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if all(name in os.environ for name in TORCHRUN_VARIABLES) else 1


def _write_error_file(error: Exception) -> None:
    """Write the error that ends this rank to a file. torchrun reports it after all ranks have ended."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": f"{error}", "timestamp": int(time.time())}))


def _join_group(watch: RankWatch) -> Group:
    """Connect to the other ranks."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(local % gpus)
    own_gpu = dist.is_nccl_available() and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus
    with _translate_errors(watch.rank):
        dist.init_process_group("gloo", timeout=RANK_WAIT_TIME)
        return Group(watch.rank, watch.size, int(os.environ["GROUP_RANK"]), own_gpu)


@contextmanager
def _translate_errors(rank: int) -> Iterator[None]:
    """Replace torch's message about a broken connection with a message that users can understand."""
    try:
        yield
    except RuntimeError as error:
        cause = re.sub(r"^(\[\S+:\d+\] )+", "", str(error)).splitlines()[0].split(". ")[0][:200]
        raise FedloomError(
            f"rank {rank} lost contact with another rank, which crashed or was killed ({cause}). {RESUME_HINT}"
        ) from error


@contextmanager
def _raise_on_signal() -> Iterator[None]:
    """Raise an error when torchrun sends a termination signal because another rank has died.

    After an error, the signal is ignored, because the process is about to end and must first report the error.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise FedloomError(f"torchrun has ended the ranks: one of them died, or a signal stopped it. {RESUME_HINT}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Exception:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)


class Group:
    """Ranks of a torch process group (see `fedloom.processes.ranks.Ranks`).

    Args:
        rank: number of this process.
        size: number of ranks.
        machine: number of this machine.
        own_gpu: True if this rank does not share its GPU with another rank. If it is True for all ranks, tensors are
            sent directly between GPUs. Otherwise, they are sent through the CPU.
    """

    def __init__(self, rank: int, size: int, machine: int, own_gpu: bool) -> None:
        self.rank, self.size = rank, size
        all_own = not self.combine_flags(not own_gpu)[0]
        self._nccl = dist.new_group(backend="nccl", timeout=RANK_WAIT_TIME) if all_own else None
        machines = self._numbers(machine)
        self.machines = [sorted(set(machines)).index(m) for m in machines]
        here = self.machines[rank]
        neighbours = [[r for r, m in enumerate(self.machines) if m == k] for k in range(max(self.machines) + 1)]
        groups = [dist.new_group(ranks, timeout=RANK_WAIT_TIME) for ranks in neighbours]
        first = [ranks[0] for ranks in neighbours]
        self._here, self._first = (
            (neighbours[here], groups[here]),
            (first, dist.new_group(first, timeout=RANK_WAIT_TIME)),
        )
        name = self.share(f"fedloom-{secrets.token_hex(8)}")
        self.memory: Memory = _Memory(rank, neighbours[here][0], groups[here], f"{name}-{here}")

    def combine_flags(self, *flags: bool) -> list[bool]:
        flags_by_rank = self._numbers(sum(flag << k for k, flag in enumerate(flags)))
        return [any(number >> k & 1 for number in flags_by_rank) for k in range(len(flags))]

    def wait(self) -> None:
        self.memory.wait()

    def share(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """See `fedloom.processes.ranks.Ranks`.

        Between two machines, each byte is sent only once, from the first rank on one machine to the first rank on the
        other machine.
        """
        text, tensors = parcel.encode_value(value)
        packed = parcel.pack_tensors(text, [t for t in tensors if not self._uses_gpu(t.device.type)])
        packed = self._exchange(*self._here, packed)
        if len(self._first[0]) > 1:
            packed = self._exchange(*self._first, packed) if self.rank in self._first[0] else packed[:0]
            packed = self._exchange(*self._here, packed)
        values = []
        for r, (forms, data) in enumerate(parcel.unpack_tensors(packed)):
            received = self._receive_tensors(r, forms, data, tensors)
            values.append(value if r == self.rank else parcel.decode_value(forms, received))
        return values

    def move(self, moves: Sequence[Move]) -> None:
        """See `fedloom.processes.ranks.Ranks`."""
        operations = []
        for tensors, source, target in moves:
            way, other = (dist.isend, target) if self.rank == source else (dist.irecv, source)
            operations += [dist.P2POp(way, t.view(-1).view(torch.uint8), other) for t in tensors if t.numel()]
        self._send(operations)

    def _numbers(self, number: int) -> list[int]:
        """Return one number from each rank."""
        numbers = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        with _translate_errors(self.rank):
            dist.all_gather(numbers, torch.tensor([number]))
        return [int(n) for n in numbers]

    def _exchange(self, ranks: list[int], group: Any, data: Tensor) -> Tensor:
        """Return the bytes of all given ranks, one after another.

        All of these ranks must call this method, and they must send at the same time.
        """
        if len(ranks) == 1:
            return data
        sizes = [torch.zeros(1, dtype=torch.long) for _ in ranks]
        with _translate_errors(self.rank):
            dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
            received = torch.empty(int(sum(sizes)), dtype=torch.uint8)
            parts = dict(zip(ranks, received.split([int(size) for size in sizes]), strict=True))
            parts[self.rank].copy_(data)
            other_ranks = [r for r in ranks if r != self.rank]
            moves = [dist.P2POp(dist.irecv, parts[r], r) for r in other_ranks if parts[r].numel()]
            moves += [dist.P2POp(dist.isend, data, r) for r in other_ranks if data.numel()]
        self._send(moves)
        return received

    def _send(self, moves: list[Any]) -> None:
        """Send and receive at the same time.

        If two ranks exchange data with each other, they must call this method in the same order.
        """
        with _translate_errors(self.rank):
            for work in dist.batch_isend_irecv(moves) if moves else []:
                work.wait()

    def _receive_tensors(self, source: int, text: bytes, data: Tensor, own_tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of a message from another rank.

        The tensors that are sent directly between GPUs are received now.
        """
        forms = parcel.tensor_forms(text)
        linked = iter(parcel.cut_tensors(data, [f for f in forms if not self._uses_gpu(f.place)]))
        direct = iter(self._broadcast(source, [f for f in forms if self._uses_gpu(f.place)], own_tensors))
        return [next(direct) if self._uses_gpu(f.place) else next(linked).to(f.place) for f in forms]

    def _broadcast(self, source: int, forms: list[parcel.TensorForm], own_tensors: list[Tensor]) -> list[Tensor]:
        if not forms:
            return []
        if source == self.rank:
            data = parcel.fill_bytes([t for t in own_tensors if t.is_cuda], forms, "cuda")
        else:
            data = torch.empty(sum(f.bytes for f in forms), dtype=torch.uint8, device="cuda")
        with _translate_errors(self.rank):
            dist.broadcast(data, source, group=self._nccl)
        return parcel.cut_tensors(data, forms)

    def _uses_gpu(self, place: str) -> bool:
        """Return True if tensors on this kind of device are sent directly between GPUs."""
        return self._nccl is not None and place == "cuda"


class _Memory:
    """Memory for rows, shared by the ranks on a machine: an unnamed file, kept in memory if there is enough space.

    Args:
        rank: number of this process.
        maker: number of the first rank on this machine.
        here: process group of the ranks on this machine. Ranks on different machines may make different calls.
        name: name for the files of this machine, which is used until the files are removed from their folder.
    """

    def __init__(self, rank: int, maker: int, here: Any, name: str) -> None:
        self._rank, self._here, self._name, self._allocations = rank, here, name, 0
        self._used: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self.leads, self._makes = rank == 0, rank == maker

    def allocate(self, size: int, large: bool) -> mmap.mmap:
        self._allocations += 1
        places = [Path(folder, f"{self._name}-{self._allocations}") for folder in ("/dev/shm", tempfile.gettempdir())]
        try:
            if self._makes:
                self._create(places, size, large)
            self.wait()
            path = next(p for p in places if p.exists())
            with path.open("r+b") as file:
                mapping = mmap.mmap(file.fileno(), size)
            self._used.add(mapping)
            self.wait()
        finally:
            if self._makes:
                for path in places:
                    path.unlink(missing_ok=True)
        return mapping

    def wait(self) -> None:
        with _translate_errors(self._rank):
            dist.barrier(self._here)

    def _create(self, places: list[Path], size: int, large: bool) -> None:
        wanted = size + sum(map(len, self._used))  # earlier files may still be sparse
        for path in places[1:] if large else places:
            if path.parent.is_dir() and shutil.disk_usage(path.parent).free > wanted:
                with path.open("xb") as file:
                    file.truncate(size)
                return
        raise CheckpointError(
            f"{places[-1].parent} is too small for {wanted >> 20} MiB of client rows, which the ranks "
            "of this machine share. Free some space, or set TMPDIR to a larger folder"
        )
