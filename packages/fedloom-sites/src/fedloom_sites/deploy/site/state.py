"""Memory: what a site keeps on its own disk between rounds. Every file is written whole, with its checksum.

A generation is the state after one round, with the reply that was sent: ``round-000012.state``. It is pending until
the server's next message names it as accepted. ``accepted.json`` has which generation that is and which one was
before, so that the site follows a server that went back by one. A second request for a round gets the reply
that is kept, so nothing is trained, noised or released twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from fedloom.errors import CheckpointError
from fedloom.local.rows import group_of
from fedloom.storage import lock, make_folder, write_atomic
from fedloom.storage.checkpoint import save_tensors
from fedloom.storage.disk import regular
from fedloom.storage.files import discard, explained

DIGEST_BYTES = hashlib.sha256().digest_size
MODEL_FILE = "model.safetensors"
ACCEPTED_FILE, SAMPLES_FILE = "accepted.json", "samples.json"
"""Files with the rounds that the server has named as accepted, and with the digest of the samples."""
T = TypeVar("T")


class Rewound(CheckpointError):
    """A message of a server that is further behind than a site can follow."""


class Generation(NamedTuple):
    """A site's state after a round.

    Attributes:
        round: the round that made it.
        base: the accepted round that it was made from. 0 is the template.
        digest: of the download that it was made from.
        tensors: ``rows.<field>``, ``residue.<field>`` and ``optimizer.<field>`` ``[.]``, and ``reply``, the bytes that
            were sent.
        reply: the plain fields of the reply.
    """

    round: int
    base: int
    digest: str
    tensors: Mapping[str, Tensor]
    reply: Mapping[str, Any]

    def group(self, name: str) -> dict[str, Tensor]:
        """Return the tensors ``<name>.<field>`` by field."""
        return group_of(self.tensors, name)


class SiteState:
    """The state of one site in one experiment.

    Args:
        folder: of the site's state.
        experiment: fingerprint of the experiment. The state of another is never read.
        client: number of the site.

    Attributes:
        notes: sentences on files that were damaged or missing, since the object was made.

    Raises:
        CheckpointError: (any method) the disk is full or refuses.
    """

    def __init__(self, folder: Path, experiment: str, client: int) -> None:
        self.folder, self._key = folder / experiment[:16], {"experiment": experiment, "client": client}
        self.notes: list[str] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep other processes out while a message is answered."""
        with lock(self.folder):
            yield

    def settle(self, accepted: int) -> Generation | None:
        """Return the generation that the server accepted, or None, the template, for a client never accepted.

        It becomes the site's state. Whatever was pending beside it is as if it had not been computed. Where it is not
        there (a damaged file, a lost disk), the last one that was stands in, and without that the template. Both are
        noted. The last accepted state that was there, and its model, stay on the disk.

        Raises:
            Rewound: the server went back by more than the round before.
        """
        current, previous, held = self._accepted_rounds()
        if accepted < current and accepted != previous:
            raise Rewound(
                f"round {current} was accepted here, the server names {accepted}, which is too far back to follow; the "
                "site keeps its state and model: begin a new experiment, or put the server's checkpoints back"
            )
        state = self.read(accepted) if accepted else None
        if accepted and state is None:
            state = next((s for r in (held, current, previous) if 0 < r < accepted and (s := self.read(r))), None)
            instead = "begins anew" if state is None else f"resumes from round {state.round}"
            self.notes.append(f"the state of round {accepted} is not on this disk: the site {instead}")
            if state is None:
                self._set_model_aside()
        if accepted != current:
            if accepted < current:
                self.notes.append(f"the server went back: round {current} was accepted here, now it is {accepted}")
            before = current if accepted > current else 0
            held = held if state is None else state.round
            self._note(ACCEPTED_FILE, accepted=accepted, previous=before, held=held)
        return state

    def accepted(self) -> tuple[int, int]:
        """Return the last accepted round and the accepted round before it, or 0 stands for none."""
        return self._accepted_rounds()[:2]

    def first(self) -> int:
        """Return the oldest round that the server can still return to or have scored."""
        accepted, previous = self.accepted()
        return (previous or accepted) - 1

    def releases(self) -> int:
        """Releases under differential privacy in the newest generation."""
        newest = max((int(p.stem.partition("-")[2]) for p in self.folder.glob("round-*.state")), default=None)
        state = None if newest is None else self.read(newest)
        return 0 if state is None else int(state.reply.get("releases", 0))

    def _accepted_rounds(self) -> tuple[int, int, int]:
        """Return the last two accepted rounds, and the last accepted round with a state, or 0 stands for none."""
        accepted, previous, held = self._noted(ACCEPTED_FILE, int, "accepted", "previous", "held") or (0, 0, 0)
        return accepted, previous, held

    def _note(self, name: str, **facts: object) -> None:
        """Write a small file of the folder, with the experiment and the client that it is of."""
        make_folder(self.folder)
        write_atomic(self.folder / name, json.dumps({**self._key, **facts}).encode())

    def _noted(self, name: str, kind: Callable[[Any], T], *facts: str) -> tuple[T, ...] | None:
        """Read a file that `_note` wrote, or None if it is missing, damaged or of another experiment."""
        try:
            entry = json.loads(regular(self.folder / name).read_bytes())
            return tuple(kind(entry[k]) for k in facts) if {k: entry[k] for k in self._key} == self._key else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _set_model_aside(self) -> None:
        """Keep the model of a state that is lost, which the next one would take the place of."""
        path = self.folder / MODEL_FILE
        if path.exists() and not (aside := path.with_suffix(".lost")).exists():
            with explained(path):
                path.replace(aside)
            self.notes.append(f"the model of the state that is lost is kept as {aside.name}")

    def changed(self, samples: str) -> str | None:
        """Return the noted digest of the site's samples if it differs from the new one. Note the first digest."""
        noted = self._noted(SAMPLES_FILE, str, "samples")
        if noted is None:
            self.note_samples(samples)
        return None if noted in (None, (samples,)) else noted[0]

    def note_samples(self, samples: str) -> None:
        """Store the digest of the site's samples for `changed`."""
        self._note(SAMPLES_FILE, samples=samples)

    def answered(self, round: int, base: int, digest: str) -> Generation | None:
        """Find the generation of an earlier request for the same round with the same download and state."""
        generation = self.read(round)
        return generation if generation is not None and (generation.base, generation.digest) == (base, digest) else None

    def keep(self, new: Generation) -> None:
        """Store a pending generation durably. Delete all generations but those that may still be needed."""
        make_folder(self.folder)
        about = {**self._key, "round": new.round, "base": new.base, "digest": new.digest, "reply": dict(new.reply)}
        data = save({k: t.contiguous() for k, t in new.tensors.items()}, {"about": json.dumps(about)})

        def fill(file: Any) -> None:
            file.write(data)
            file.write(hashlib.sha256(data).digest())

        write_atomic(self._path(new.round), fill)
        keep = {self._path(r).name for r in (new.round, *self._accepted_rounds())}
        discard(*(p for p in self.folder.glob("round-*.state") if p.name not in keep))

    def read(self, round: int) -> Generation | None:
        """Load the generation of a round, or None if it is missing, damaged or of another experiment."""
        path = self._path(round)
        try:
            content = regular(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; check the disk") from error
        data, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            with explained(path):
                path.replace(path.with_suffix(".damaged"))
            self.notes.append(f"{path} is damaged: set aside")
            return None
        about = _about(path, data)
        if about is None or {k: about.get(k) for k in self._key} != self._key or about["round"] != round:
            self.notes.append(f"{path} is of another experiment: not used")
            return None
        return Generation(round, about["base"], about["digest"], load(data), about["reply"])

    def keep_model(self, row: Tensor, header: Mapping[str, str], round: int, kind: str) -> None:
        """Store the site's newest model ``rows [1, d]`` durably, in the format of ``models/personal.safetensors``."""
        make_folder(self.folder)
        about = {**self._key, "round": round, "kind": kind}
        save_tensors(self.folder / MODEL_FILE, {"rows": row[None]}, {**header, "about": json.dumps(about)})

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.state"


class SiteModel(NamedTuple):
    """A site's newest model on its disk.

    Attributes:
        experiment: fingerprint of the experiment.
        client: number of the site.
        round: round after which it was made.
        kind: "personal" or "global".
        path: safetensors file with ``rows [1, d]`` and the layout in its header.
    """

    experiment: str
    client: int
    round: int
    kind: str
    path: Path


def models(state: Path) -> list[SiteModel]:
    """List the newest model of every experiment in a site's state folder.

    Raises:
        CheckpointError: a file is damaged.
    """
    newest = []
    for path in sorted(state.glob(f"*/{MODEL_FILE}")):
        try:
            with safe_open(regular(path), framework="pt") as file:
                about = json.loads(file.metadata()["about"])
            newest.append(SiteModel(about["experiment"], about["client"], about["round"], about["kind"], path))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); it is written anew after the next round") from error
    return newest


def _about(path: Path, data: bytes) -> dict[str, Any] | None:
    """Read the metadata of a state file: the safetensors header is JSON behind its length."""
    try:
        length = int.from_bytes(data[:8], "little")
        about: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
    except (ValueError, KeyError, TypeError):
        return None
    return about
