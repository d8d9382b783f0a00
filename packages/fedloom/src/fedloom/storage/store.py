"""Store of the clients' rows between rounds. Rows are in memory or, above a budget, in a file.

A client for which no row was ever written has the template's row. Rows in files are read and written in
place, so that memory use grows only with the cohort. An undo journal can restore the rows at the most recent
checkpoints:

    store.touch(ids)        # once a round, before rows are overwritten
    store.write(ids, rows)  # by any process that shares the rows
    store.checkpoint(g)     # before the checkpoint file of generation g is written
    store.prune(oldest)     # after the file is written
    store.rollback(g)       # after a crash, or to take back a round
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import torch

from fedloom.errors import CheckpointError, LayoutError
from fedloom.storage.files import MAX_BUFFERS_PER_CALL, RowFile, make_folder
from fedloom.storage.journal import Journal, raw
from fedloom.storage.memory import Memory, allocate

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["Store", "StoreRow"]


class StoreRow(Protocol):
    """Row of one client, or rows of several clients, as a NamedTuple of tensors."""

    @property
    def _fields(self) -> tuple[str, ...]: ...
    def __iter__(self) -> Iterator[Any]: ...


T = TypeVar("T", bound=StoreRow)


class _InMemory:
    def __init__(self, n: int, like: Tensor, memory: Memory | None, large: bool) -> None:
        self.rows = allocate((n, len(like)), like.dtype, memory, large)

    def read(self, ids: Tensor, out: Tensor, places: Tensor) -> None:
        if len(ids) < len(out):
            out[places] = self.rows[ids]
        elif _neighbor_runs(ids):
            out.copy_(self.rows[ids[0] : ids[0] + len(ids)])
        else:
            torch.index_select(self.rows, 0, ids, out=out)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        if _neighbor_runs(ids):
            self.rows[ids[0] : ids[0] + len(ids)] = rows
        else:
            self.rows.index_copy_(0, ids, rows)


class _InFile:
    """Rows of all clients in a file. A client's fields are adjacent, so one access reads a row."""

    def __init__(self, path: Path, n: int, width: int, new: bool) -> None:
        self.file, self.width = RowFile(path, n * width, new), width

    def read(self, ids: Tensor, fields: Sequence[Tensor], places: Tensor) -> None:
        """Fill ``fields[k][places]``, each ``[m, w]``, with the rows of clients."""
        for buffers, at in self._pieces(ids, fields, places):
            self.file.read(buffers, at)

    def write(self, ids: Tensor, fields: Sequence[Tensor]) -> None:
        """Replace the rows of clients with ``fields[k]``, each ``[m, w]``."""
        self.file.write(self._pieces(ids, [field.contiguous() for field in fields], torch.arange(len(ids))))

    def old(self, ids: Tensor) -> Tensor:
        """Return the current rows of clients [k, bytes per row] uint8."""
        out = torch.empty(len(ids), self.width, dtype=torch.uint8)
        self.read(ids, [out], torch.arange(len(ids)))
        return out

    def _pieces(
        self, ids: Tensor, fields: Sequence[Tensor], places: Tensor
    ) -> Iterator[tuple[Sequence[memoryview], int]]:
        """Yield buffers of neighboring rows, each with the file position of its first row."""
        views = [(raw(field), field[0].numel() * field.element_size()) for field in fields if field.numel()]
        if len(views) == 1:
            (view, w), *_ = views
            for first, place, count in _memory_runs(ids, places):
                yield [view[place * w : (place + count) * w]], first * w
            return
        most = MAX_BUFFERS_PER_CALL // max(1, len(views))
        for first, place, count in _memory_runs(ids, places):
            for start in range(0, count, most):
                some = range(place + start, place + min(start + most, count))
                yield [view[p * w : (p + 1) * w] for p in some for view, w in views], (first + start) * self.width


def _neighbor_runs(ids: Tensor) -> bool:
    return len(ids) > 0 and bool((ids.diff() == 1).all())


def _memory_runs(ids: Tensor, places: Tensor) -> Iterator[tuple[int, int, int]]:
    """Return runs of rows that are adjacent in the file and in memory: (first id, its index, count), sorted by id."""
    order = ids.argsort(stable=True)
    ids, places = ids[order], places[order]
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[1:] = (ids.diff() != 1) | (places.diff() != 1)
    first = begins.nonzero().flatten()
    counts = torch.cat([first, first.new_tensor([len(ids)])]).diff()
    return zip(ids[first].tolist(), places[first].tolist(), counts.tolist(), strict=True)


class Store(Generic[T]):
    """Rows of n clients.

    Args:
        n: number of clients.
        template: row of a client without a written row, as a NamedTuple of tensors [w]. Each field has its own w
            and dtype.
        path: folder for the file and its journal. If None, rows are kept in memory, regardless of their size.
        budget: number of bytes. If all rows together need at most this much memory, they stay in memory.
        memory: memory that other processes use to read and write the same rows.

    Attributes:
        occupied: mask of the clients whose rows have been written, bool [n]. The mask is shared in the same way as the
            rows.
        in_files: True if the rows are stored in files. If the folder already contains a journal, the store must first
            be rolled back to a checkpoint or reset.

    Raises:
        CheckpointError: (any method) the disk is full, the write is rejected, or files are damaged.
    """

    def __init__(
        self, n: int, template: T, *, path: Path | None = None, budget: int = 1 << 30, memory: Memory | None = None
    ) -> None:
        fields: list[Tensor] = list(template)
        widths = [t.numel() * t.element_size() for t in fields]
        self.n, self.template = n, template
        self.occupied, self._touched = (allocate((n,), torch.bool, memory) for _ in range(2))
        self._file: _InFile | None = None
        self._memory: list[_InMemory] = []
        self._leads = memory is None or memory.leads
        self._ready = True
        large = n * sum(widths) > budget
        self.in_files = path is not None and large
        if memory is None:
            self._begin(torch.zeros(n, dtype=torch.bool))
        if path is None or not self.in_files:
            self._memory = [_InMemory(n, t, memory, large) for t in fields]
            return
        file, width = path / "rows", sum(widths)
        if not self._leads and memory is not None:
            memory.wait()
            self._file = _InFile(file, n, width, False)
            return
        make_folder(path)
        kinds = [f"{name} {len(t)} {t.dtype}" for name, t in zip(template._fields, fields, strict=True)]
        self._journal = Journal(path, f"{n} clients: {', '.join(kinds)}", width)
        self._ready = new = not self._journal.exists()
        self._file = _InFile(file, n, width, new)
        if new:
            self.reset()
        if memory is not None:
            memory.wait()

    def read(self, ids: Tensor) -> T:
        """Return the rows of clients.

        Args:
            ids: ids of the clients [m] int64. Rows are processed fastest if the ids are sorted.

        Returns:
            The template's NamedTuple with fields [m, w], which are copies.
        """
        self._check(ids)
        written_before = self.occupied[ids]
        places = written_before.nonzero().flatten()
        some = ids[places]
        fields = [torch.empty(len(ids), len(like), dtype=like.dtype) for like in self.template]
        if len(places) < len(ids):
            for out, like in zip(fields, self.template, strict=True):
                out[:] = like
        if self._file is not None:
            self._file.read(some, fields, places)
        for home, out in zip(self._memory, fields, strict=self._file is None):
            home.read(some, out, places)
        return cast(T, cast(Any, type(self.template))(*fields))

    def write(self, ids: Tensor, rows: T) -> None:
        """Replace the rows of clients. If rows are in files, `touch` must be called beforehand.

        Args:
            ids: ids [m] int64, each at most once.
            rows: fields [m, w] of the new rows.

        Raises:
            LayoutError: the shape or dtype of a field differs from the template.
        """
        self._check(ids)
        assert len(ids.unique()) == len(ids), "an id occurs twice"
        assert not self.in_files or bool(self._touched[ids].all()), "rows are overwritten before touch(ids)"
        for name, like, got in zip(self.template._fields, self.template, rows, strict=True):
            if got.shape != (len(ids), len(like)) or got.dtype != like.dtype:
                raise LayoutError(
                    f"state field {name!r}: rows must be [{len(ids)}, {len(like)}] {like.dtype}, "
                    f"got {list(got.shape)} {got.dtype}"
                )
        fields = [got.detach().cpu() for got in rows]
        if self._file is not None:
            self._file.write(ids, fields)
        for home, got in zip(self._memory, fields, strict=self._file is None):
            home.write(ids, got)
        self.occupied[ids] = True

    def touch(self, ids: Tensor) -> None:
        """Save rows of the last checkpoint to the journal before they are overwritten, with at most one fsync.

        Args:
            ids: ids of all clients in the round, [m] int64.
        """
        if self._file is not None and self._leads:
            self._check(ids)
            fresh = ids[~self._touched[ids]].unique()
            written_before = fresh[self.occupied[fresh]]
            if len(written_before):
                self._journal.append(written_before, self._file.old)
            self._touched[fresh] = True

    def checkpoint(self, generation: int) -> None:
        """Turn the current rows into a generation. `rollback` restores it.

        Args:
            generation: number of the generation, which must be greater than the previous one.
        """
        assert self._ready
        if self.in_files:
            self._sync()
            self._journal.next(generation, self.occupied)
            self._touched.fill_(False)

    def prune(self, oldest: int) -> None:
        """Delete all generations before ``oldest``."""
        if self.in_files:
            self._journal.prune(oldest)

    def rollback(self, generation: int) -> None:
        """Restore the rows of a generation bitwise. Newer generations are discarded.

        If a crash interrupts this function, it must be called again. Rows in memory need no action here, because
        `load_state` restores them.

        Raises:
            CheckpointError: the journal of this generation or of a newer generation is missing or damaged.
        """
        if self._file is None:
            return
        self._ready = False
        chain = self._journal.chain(generation)
        sealed = [newer.sealed for newer in chain[1:]]
        for header, length in reversed(list(zip(chain, [*sealed, None], strict=True))):
            for ids, rows in self._journal.undo(header, length):
                self._file.write(ids, [rows])
        self._sync()
        self._journal.restart(chain)
        self._begin(chain[0].occupied)

    def reset(self) -> None:
        """Discard all rows and generations. The empty store is generation 0."""
        unseen = torch.zeros(self.n, dtype=torch.bool)
        if self.in_files:
            self._journal.clear()
            self._journal.start(0, unseen, -1, 0)
        self._begin(unseen)

    def state(self) -> dict[str, Tensor]:
        """Return rows in memory for the checkpoint file: ``seen``, and for each field the rows that were written.

        If the rows are in files, the result is empty.

        The tensors may share memory with the store, so they must be saved before the next `write`.
        """
        if self.in_files:
            return {}
        every = bool(self.occupied.all())
        fields = zip(self.template._fields, self._memory, strict=True)
        return {"seen": self.occupied} | {
            f"rows.{k}": home.rows if every else home.rows[self.occupied] for k, home in fields
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Replace all rows with the rows in a result of `state`.

        Raises:
            CheckpointError: the state belongs to a different set of clients or fields, or to a store in files.
        """
        expected = {} if self.in_files else self._expected(state.get("seen"))
        got = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
        if got != expected:
            raise CheckpointError(
                f"the client rows of the checkpoint are {got or 'in files'}, but those of this run are "
                f"{expected or 'in files'}. Run with the earlier settings, or start over with --force"
            )
        if state:
            self.occupied.copy_(state["seen"])
            for name, home in zip(self.template._fields, self._memory, strict=True):
                home.rows[self.occupied] = state[f"rows.{name}"]

    def close(self) -> None:
        """Close the store's file in this process."""
        if self._file is not None:
            self._file.file.close()

    def _expected(self, occupied: Tensor | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        count = 0 if occupied is None else int(occupied.sum())
        fields = zip(self.template._fields, self.template, strict=True)
        rows = {f"rows.{name}": ((count, len(like)), like.dtype) for name, like in fields}
        return {"seen": ((self.n,), torch.bool), **rows}

    def _check(self, ids: Tensor) -> None:
        assert self._ready, "rollback(generation) or reset() first"
        assert ids.dtype == torch.int64, f"ids must be int64, got {ids.dtype}"
        assert bool(((ids >= 0) & (ids < self.n)).all()), "an id is out of range"

    def _sync(self) -> None:
        if self._file is not None:
            self._file.file.sync()

    def _begin(self, occupied: Tensor) -> None:
        self.occupied.copy_(occupied)
        self._touched.fill_(False)
        self._ready = True
