"""Replay: given values replace a run's random draws, so that the run can reproduce other code step by step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm
from fedloom.choose import Sampler, Uniform
from fedloom.errors import ConfigError, Refused
from fedloom.hints import suggest_nearest
from fedloom.local.batches import FixedBatches
from fedloom.rows.layout import Layout


@dataclass(frozen=True)
class Replay:
    """Given values. The run draws every value that is None.

    Attributes:
        initial: initial model, as a vector ``[d]`` in the order of the model's ``named_parameters()``, or as tensors
            keyed by name (a state dict).
        cohorts: ids of the clients in each round. A client that is listed twice counts twice in a mean.
        batches: training batches of each client (a list with n entries, or a dict keyed by client id). A client's entry
            contains one item per round. Each item is a list of steps, and each step is a list of positions in the
            client's training set. The batches are used for the stream "local". If a method uses more than one stream,
            the item is a dict of such lists, keyed by stream. An unknown stream raises an error that lists the known
            streams. A client takes one step per batch, unless ``local.steps`` is given. (In Per-FedAvg, a step uses two
            or three batches.) If a round has streams other than "local", they are also used to train personal models
            during evaluation.
        projection: matrix ``[dim, d]`` of a method that works in a subspace (Lp-Proj, ADMM-Lp-Proj).
    """

    initial: Tensor | Mapping[str, Tensor] | None = None
    cohorts: Sequence[Sequence[int] | Tensor] | None = None
    batches: Sequence[Any] | Mapping[int, Any] | None = None
    projection: Tensor | None = None
    _read: dict[int, dict[int, FixedBatches]] = field(default_factory=dict, init=False, repr=False)

    def start(self, default: Tensor, layout: Layout) -> Tensor:
        """Return the initial model ``[d]``, or ``default`` if none is given.

        Raises:
            ConfigError: the initial model is incompatible with the run's model, or is not finite.
        """
        if self.initial is None:
            return default
        if isinstance(self.initial, Mapping):
            shapes = dict(zip(layout.names, layout.shapes, strict=True))
            more = [str(name) for name in self.initial if name not in shapes]
            if more:
                buffers = "remove buffers, which start with the module's values: pass dict(MODULE.named_parameters())"
                cure = buffers if shapes.keys() <= self.initial.keys() else suggest_nearest(more[0], shapes)
                raise ConfigError(f"initial: the model has no parameter {more[0]!r}; {cure}")
            values = {
                name: _convert_to_tensor(f"initial: parameter {name!r} must consist of numbers", value)
                for name, value in self.initial.items()
            }
            for name, shape in shapes.items():
                got = values.get(name)
                if got is None or got.shape != shape:
                    size = "nothing" if got is None else [*got.shape]
                    raise ConfigError(f"initial: parameter {name!r} must have shape {[*shape]}, got {size}")
            start = layout.flatten({name: values[name] for name in layout.names})
        else:
            start = _convert_to_tensor(f"initial must be a vector [{layout.d}] or a state dict", self.initial)
        if start.shape != default.shape:
            raise ConfigError(f"initial must be a vector [{layout.d}] or a state dict, got shape {[*start.shape]}")
        start = start.detach().to(default)
        if not bool(start.isfinite().all()):
            raise ConfigError("initial must be finite, got NaN or infinity")
        return start

    def cohort(self, round: int) -> Tensor | None:
        """Return the client ids given for a round (counted from 1), or None if no cohorts are given."""
        return None if self.cohorts is None else torch.as_tensor(self.cohorts[round - 1], dtype=torch.long)

    def fixed_batches(self, round: int, ids: Tensor) -> list[FixedBatches] | None:
        """Return the given batches of clients in a round (from 1), keyed by stream, or None if no batches are given."""
        return None if self.batches is None else [self._read[i][round] for i in ids.tolist()]

    def evaluation_batches(self, round: int, ids: Tensor) -> list[FixedBatches] | None:
        """Return the batches that were given (or None) for the evaluation after a round, counted from 0.

        They cover all streams except "local".
        """
        tuning = {
            i: {stream: table for stream, table in of.get(round, {}).items() if stream != "local"}
            for i, of in self._read.items()
        }
        return [tuning.get(i, {}) for i in ids.tolist()] if any(tuning.values()) else None

    def check(self, algorithm: Algorithm, sampler: Sampler, rounds: int, sizes: Tensor) -> None:
        """Check the cohorts and batches that were given.

        Args:
            algorithm: the method.
            sampler: sampler of the run.
            rounds: number of rounds in the run.
            sizes: number of training samples of each client ``[n, 1]``.

        Raises:
            ConfigError: a length, an id or a position is invalid, a client in a cohort has no batches, a given value
                has no effect, or cohorts are given with a sampler other than the default.
        """
        if self.cohorts is not None and sampler != Uniform():
            raise Refused(f"cohorts and sampler {sampler.kind!r} both choose the clients of a round. Omit one of them")
        if self.projection is not None and not algorithm.projects:
            raise Refused(
                f"projection has no effect with {type(algorithm).__name__}, which uses no matrix. Omit `projection`"
            )
        n = len(sizes)
        if self.cohorts is not None:
            _check_entries("cohorts", "rounds", self.cohorts, rounds)
            for t, ids in enumerate(self.cohorts, 1):
                _check_integers(f"cohorts: round {t}", "client ids", ids, n)
        if self.batches is None:
            return
        if not isinstance(self.batches, Mapping):
            _check_entries("batches", "clients", self.batches, n)
        clients = self.batches if isinstance(self.batches, Mapping) else dict(enumerate(self.batches))
        _check_integers("batches", "client ids", list(clients), n)
        for i, rounds_of in clients.items():
            _check_entries(f"batches: client {i}", "rounds", rounds_of, rounds)
            size = int(sizes[i, 0])
            self._read[i] = {t: _batch_streams(i, t, ids, size) for t, ids in enumerate(rounds_of, 1)}
        for t in range(1, rounds + 1):
            cohort = self.cohort(t)
            missing = sorted(set(range(n) if cohort is None else cohort.tolist()) - set(self._read))
            if missing:
                raise ConfigError(
                    f"batches: round {t} contains client {missing[0]}, but no batches are given for this client"
                )

    def marks(self) -> dict[str, str]:
        """Return a digest of every given value, keyed by name.

        A run can only resume from a checkpoint with the same digests.
        """
        digests = {}
        for name in ("initial", "cohorts", "batches", "projection"):
            if getattr(self, name) is not None:
                digest = hashlib.blake2b(digest_size=8)
                _update_digest(digest, self._read if name == "batches" else getattr(self, name))
                digests[f"replay.{name}"] = digest.hexdigest()
        return digests


def _batch_streams(client: int, round: int, batches: Any, size: int) -> FixedBatches:
    """Return a client's batches in one round as arrays ``[steps, b]``, padded with -1 and keyed by stream."""
    named = batches if isinstance(batches, Mapping) else {"local": () if batches is None else batches}
    tables = {}
    for stream, steps in named.items():
        where = f"batches: client {client}, round {round}" + (f", stream {stream!r}" if stream != "local" else "")
        drawn = [_check_integers(f"{where}, step {k}", "positions", b, size) for k, b in enumerate(steps, 1)]
        table = torch.full((len(drawn), max(map(len, drawn), default=1)), -1)
        for row, batch in zip(table, drawn, strict=True):
            row[: len(batch)] = batch
        tables[stream] = table
    return tables


def _convert_to_tensor(rule: str, value: Any) -> Tensor:
    """Convert a value to a tensor.

    Raises:
        ConfigError: the value does not consist of numbers. The message contains ``rule``, which describes the required
            value.
    """
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{rule}, got {type(value).__name__}") from None


def _check_entries(where: str, what: str, entries: object, wanted: int) -> None:
    got = len(entries) if isinstance(entries, Sized) and getattr(entries, "shape", None) != () else f"{entries!r:.60}"
    if got != wanted:
        raise ConfigError(f"{where}: must have one entry for each of the {wanted} {what}, got {got}")


def _check_integers(where: str, what: str, numbers: object, below: int) -> Tensor:
    """Check that ``numbers`` is a nonempty list of integers between 0 and ``below`` - 1."""
    try:
        integers = torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError):
        integers = torch.empty(0)
    whole = not (integers.is_floating_point() or integers.is_complex() or integers.dtype == torch.bool)
    if integers.dim() != 1 or not len(integers) or not whole:
        raise ConfigError(
            f"{where}: must be a nonempty list of {what} from 0 to {below - 1}, got {_short_repr(numbers)}"
        )
    out = (integers < 0) | (integers >= below)
    if bool(out.any()):
        raise ConfigError(f"{where}: {what} must be from 0 to {below - 1}, got {int(integers[out][0])}")
    return integers.long()


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _update_digest(digest: Any, value: Any) -> None:
    """Add ``value`` to a digest."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            digest.update(repr(key).encode())
            _update_digest(digest, part)
    elif isinstance(value, Tensor) or not isinstance(value, Sequence) or not value or not hasattr(value[0], "__len__"):
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        digest.update(f"{tensor.dtype}{[*tensor.shape]}".encode())
        digest.update(tensor.numpy().tobytes())
    else:
        digest.update(f"[{len(value)}]".encode())
        for part in value:
            _update_digest(digest, part)
