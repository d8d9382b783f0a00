"""Files that a site keeps on its disk between rounds. Every file is written completely and contains a checksum.

A generation is the state after a round, together with the reply that the site sent: ``round-000012.state``. A
generation is pending until the next message from the server names it as accepted. ``accepted.json`` stores the accepted
generation and the previously accepted one, so that the site can follow a server that went back by one generation. If a
round is requested again, the site sends the stored reply, so nothing is trained again, no noise is added again, and
nothing is released again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from fedloom.errors import CheckpointError
from fedloom.local.rows import select_group
from fedloom.storage import lock, make_folder, write_atomic
from fedloom.storage.checkpoint import save_tensors
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import convert_write_errors, delete_files

DIGEST_BYTES = hashlib.sha256().digest_size
MODEL_FILE = "model.safetensors"
ACCEPTED_FILE, SAMPLES_FILE = "accepted.json", "samples.json"
"""Files that store the rounds named as accepted by the server, and the digest of the samples."""
T = TypeVar("T")


class ServerRewound(CheckpointError):
    """Error: a message comes from a server that has gone back too far for a site to follow."""


class StateGeneration(NamedTuple):
    """A site's state after a round.

    Attributes:
        round: round that produced the state.
        base: accepted round that the state was computed from. 0 means the initial state.
        digest: digest of the download that the state was computed from.
        tensors: ``rows.<field>``, ``residue.<field>`` and ``optimizer.<field>`` ``[.]``, and ``reply``, the bytes that
            were sent.
        reply: plain fields of the reply.
    """

    round: int
    base: int
    digest: str
    tensors: Mapping[str, Tensor]
    reply: Mapping[str, Any]

    def group(self, name: str) -> dict[str, Tensor]:
        """Return the tensors named ``<name>.<field>``, keyed by field."""
        return select_group(self.tensors, name)


class SiteState:
    """State of one site in one experiment.

    Args:
        folder: folder with the site's state.
        experiment: fingerprint of the experiment. The state of a different experiment is never read.
        client: number of the site.

    Attributes:
        notes: sentences about files found damaged or missing since the object was created.

    Raises:
        CheckpointError: (raised by any method) the disk is full or cannot be written to.
    """

    def __init__(self, folder: Path, experiment: str, client: int) -> None:
        self.folder, self._key = folder / experiment[:16], {"experiment": experiment, "client": client}
        self.notes: list[str] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lock the folder so that no other process can use it while a message is being answered."""
        with lock(self.folder):
            yield

    def settle(self, accepted: int) -> StateGeneration | None:
        """Return the generation that the server accepted, or None (for the initial state) if none was accepted.

        The accepted generation becomes the site's state. The site ignores all other pending generations. If the
        accepted generation is missing (because of a damaged file or a lost disk), the last accepted generation that is
        available replaces it, otherwise the initial state. In both cases, a sentence about it is added to `notes`. The
        newest accepted state that is available stays on the disk together with its model.

        Raises:
            ServerRewound: the server went back, but not to the previously accepted round.
        """
        current, previous, held = self._accepted_rounds()
        if accepted < current and accepted != previous:
            raise ServerRewound(
                f"this site accepted round {current}, but the server names round {accepted}, which is too far back. "
                "The site keeps its state and model. Start a new experiment, or restore the server's checkpoints"
            )
        state = self.read(accepted) if accepted else None
        if accepted and state is None:
            state = next((s for r in (held, current, previous) if 0 < r < accepted and (s := self.read(r))), None)
            instead = "begins anew" if state is None else f"resumes from round {state.round}"
            self.notes.append(f"the state of round {accepted} is not on this disk, so the site {instead}")
            if state is None:
                self._set_model_aside()
        if accepted != current:
            if accepted < current:
                self.notes.append(
                    f"the server went back: this site accepted round {current}, but the server now names {accepted}"
                )
            before = current if accepted > current else 0
            held = held if state is None else state.round
            self._write_note(ACCEPTED_FILE, accepted=accepted, previous=before, held=held)
        return state

    def accepted(self) -> tuple[int, int]:
        """Return the last accepted round and the accepted round before it, or 0 if there is no such round."""
        return self._accepted_rounds()[:2]

    def oldest_round(self) -> int:
        """Return the oldest round that the server can still go back to or request scores for."""
        accepted, previous = self.accepted()
        return (previous or accepted) - 1

    def releases(self) -> int:
        """Return the number of releases under differential privacy in the newest generation."""
        newest = max((int(p.stem.partition("-")[2]) for p in self.folder.glob("round-*.state")), default=None)
        state = None if newest is None else self.read(newest)
        return 0 if state is None else int(state.reply.get("releases", 0))

    def _accepted_rounds(self) -> tuple[int, int, int]:
        """Return the last two accepted rounds and the last one with a stored state, with 0 for a missing round."""
        accepted, previous, held = self._read_note(ACCEPTED_FILE, int, "accepted", "previous", "held") or (0, 0, 0)
        return accepted, previous, held

    def _write_note(self, name: str, **facts: object) -> None:
        """Write a small file to the folder, with a reference to its experiment and client."""
        make_folder(self.folder)
        write_atomic(self.folder / name, json.dumps({**self._key, **facts}).encode())

    def _read_note(self, name: str, kind: Callable[[Any], T], *facts: str) -> tuple[T, ...] | None:
        """Return the content of a `_write_note` file, or None if it is missing, damaged or from another experiment."""
        try:
            entry = json.loads(check_regular_file(self.folder / name).read_bytes())
            return tuple(kind(entry[k]) for k in facts) if {k: entry[k] for k in self._key} == self._key else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _set_model_aside(self) -> None:
        """Keep the model of a lost state, which the next state would otherwise overwrite."""
        path = self.folder / MODEL_FILE
        if path.exists() and not (aside := path.with_suffix(".lost")).exists():
            with convert_write_errors(path):
                path.replace(aside)
            self.notes.append(f"the model of the lost state is saved as {aside.name}")

    def changed(self, samples: str) -> str | None:
        """Return the stored digest of the site's samples if it differs from the new digest, otherwise None.

        If no digest is stored yet, this one is stored.
        """
        noted = self._read_note(SAMPLES_FILE, str, "samples")
        if noted is None:
            self.note_samples(samples)
        return None if noted in (None, (samples,)) else noted[0]

    def note_samples(self, samples: str, days: Sequence[str] = ()) -> None:
        """Store the digest of the site's samples for `changed`, and the days when the samples changed."""
        self._write_note(SAMPLES_FILE, samples=samples, days=[*days])

    def list_change_days(self) -> list[str]:
        """Return the days when the samples changed, with one entry per change."""
        noted = self._read_note(SAMPLES_FILE, list[str], "days")
        return [] if noted is None else noted[0]

    def answered(self, round: int, base: int, digest: str) -> StateGeneration | None:
        """Return the generation that was computed for the same round, download and state, or None if none exists."""
        generation = self.read(round)
        return generation if generation is not None and (generation.base, generation.digest) == (base, digest) else None

    def keep(self, new: StateGeneration) -> None:
        """Store a pending generation durably.

        All generations are then deleted, except those that may still be needed.
        """
        make_folder(self.folder)
        about = {**self._key, "round": new.round, "base": new.base, "digest": new.digest, "reply": dict(new.reply)}
        data = save({k: t.contiguous() for k, t in new.tensors.items()}, {"about": json.dumps(about)})

        def fill(file: Any) -> None:
            file.write(data)
            file.write(hashlib.sha256(data).digest())

        write_atomic(self._path(new.round), fill)
        keep = {self._path(r).name for r in (new.round, *self._accepted_rounds())}
        delete_files(*(p for p in self.folder.glob("round-*.state") if p.name not in keep))

    def read(self, round: int) -> StateGeneration | None:
        """Return the generation of a round, or None if it is missing, damaged or from a different experiment."""
        path = self._path(round)
        try:
            content = check_regular_file(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. Check the disk") from error
        data, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            with convert_write_errors(path):
                path.replace(path.with_suffix(".damaged"))
            self.notes.append(f"{path} is damaged: set aside")
            return None
        about = _read_state_metadata(data)
        if about is None or {k: about.get(k) for k in self._key} != self._key or about["round"] != round:
            self.notes.append(f"{path} belongs to another experiment, so it is not used")
            return None
        return StateGeneration(round, about["base"], about["digest"], load(data), about["reply"])

    def keep_model(self, row: Tensor, header: Mapping[str, str], round: int, kind: str) -> None:
        """Store the site's latest model ``rows [1, d]`` durably, in the format of ``models/personal.safetensors``."""
        make_folder(self.folder)
        about = {**self._key, "round": round, "kind": kind}
        save_tensors(self.folder / MODEL_FILE, {"rows": row[None]}, {**header, "about": json.dumps(about)})

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.state"


class SiteModel(NamedTuple):
    """The latest model on a site's disk.

    Attributes:
        experiment: fingerprint of the experiment.
        client: number of the site.
        round: last round before the model was created.
        kind: "personal" or "global".
        path: safetensors file with ``rows [1, d]`` and with the layout in its header.
    """

    experiment: str
    client: int
    round: int
    kind: str
    path: Path


def latest_models(state: Path) -> list[SiteModel]:
    """Return the latest model of every experiment whose state is in a site's folder.

    Raises:
        CheckpointError: a file is damaged.
    """
    newest = []
    for path in sorted(state.glob(f"*/{MODEL_FILE}")):
        try:
            with safe_open(check_regular_file(path), framework="pt") as file:
                about = json.loads(file.metadata()["about"])
            newest.append(SiteModel(about["experiment"], about["client"], about["round"], about["kind"], path))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}). The site writes it again after the next round"
            ) from error
    return newest


def _read_state_metadata(data: bytes) -> dict[str, Any] | None:
    """Return the metadata in the header of a state file in safetensors format, or None if the header is damaged."""
    try:
        length = int.from_bytes(data[:8], "little")
        about: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
    except (ValueError, KeyError, TypeError):
        return None
    return about
