"""Checkpoints, which contain everything that is needed to resume a run exactly, as safetensors and JSON.

No part of a checkpoint is ever executed as code.

Checkpoint number G, called generation G, consists of ``checkpoint-G.safetensors`` and ``checkpoint-G.json``. The JSON
file contains the checksums of both files. The JSON file is renamed last, so that a generation exists only if it is
complete. If a store keeps its rows in files, its journal determines which rows belong to a generation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedloom.errors import CheckpointError, DamagedCheckpoint, LayoutError, RunDirError
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import delete_files, make_folder, write_atomic
from fedloom.storage.journal import raw
from fedloom.values import find_difference

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from fedloom.storage.files import FileSink
    from fedloom.storage.store import Store

__all__ = ["Checkpoints", "LoadedCheckpoint", "check_file_digest", "save_tensors"]

_CHECKPOINT_FORMAT = 1
_DIGEST_KEY, _BLANK_DIGEST = "sha256", "0" * 64
_MAX_HEADER_BYTES = 100_000_000
"""Maximum length of a header in bytes, which the safetensors library defines."""
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class LoadedCheckpoint(NamedTuple):
    """Generation that was loaded.

    Attributes:
        generation: number of the generation.
        tensors: saved tensors, bitwise identical. If the generation was loaded by `Checkpoints.resume`, the tensors of
            the stores are omitted.
        meta: saved metadata, after conversion to JSON and back.
        warnings: messages about newer generations that could not be used.
    """

    generation: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    warnings: list[str]


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file atomically, keeping only one tensor in memory at a time.

    Args:
        path: the file.
        tensors: tensors by name, which may have any shape and be on any device.
        metadata: texts to store in the header. If metadata is given, the header also contains the SHA-256 of the file
            (see `check_file_digest`).

    Returns:
        SHA-256 of the file as hexadecimal digits. For the computation of the digest, the bytes of the digest itself are
        replaced with zeros.

    Raises:
        CheckpointError: the disk is full or the write is rejected.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {_DIGEST_KEY: _BLANK_DIGEST, **metadata}} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    digest = hashlib.sha256()

    def fill(file: FileSink) -> None:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            file.write(piece)
        for name in names:
            view = raw(tensors[name].detach().cpu().contiguous())
            digest.update(view)
            file.write(view)
        if metadata:
            file.replace(digest.hexdigest().encode(), 8 + text.index(_BLANK_DIGEST.encode()))

    write_atomic(path, fill)
    return digest.hexdigest()


def has_digest(path: Path) -> bool:
    """Return True if a file is a safetensors file whose header contains a digest from `save_tensors`."""
    with (
        suppress(OSError, ValueError, KeyError, TypeError, RecursionError),
        check_regular_file(path).open("rb") as file,
    ):
        length = int.from_bytes(file.read(8), "little")
        return _DIGEST_KEY in json.loads(file.read(min(length, _MAX_HEADER_BYTES)))["__metadata__"]
    return False


def check_file_digest(path: Path) -> None:
    """Raise an error if a safetensors file that `save_tensors` wrote with metadata has changed since then.

    A file without a digest is accepted.

    Raises:
        LayoutError: the file is damaged or is not a safetensors file.
    """
    with suppress(OSError, ValueError, AttributeError, RecursionError), check_regular_file(path).open("rb") as file:
        length = file.read(8)
        text = file.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES))
        recorded = json.loads(text).get("__metadata__", {}).get(_DIGEST_KEY)
        if recorded is None:
            return
        digest = hashlib.sha256(length + text.replace(str(recorded).encode(), _BLANK_DIGEST.encode(), 1))
        while piece := file.read(1 << 20):
            digest.update(piece)
        if digest.hexdigest() == recorded:
            return
    raise LayoutError(
        f"{path} is damaged: its content does not match its SHA-256. If the file belongs to a run "
        "directory, run the experiment again to rewrite the file"
    )


class Checkpoints:
    """Generations of checkpoints in one folder.

    Args:
        folder: folder of the checkpoints. The first call of `save` creates the folder.
        keep: number of generations to keep.
        update_numbers: function that replaces old names with current names in the ``numbers`` of a generation written
            by an earlier version.
    """

    def __init__(
        self, folder: Path, keep: int = 2, update_numbers: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    ) -> None:
        self.folder, self.keep, self._update_numbers = folder, keep, update_numbers

    def generations(self) -> list[int]:
        """List the generations from the oldest to the newest, including damaged ones."""
        names = [p.stem.removeprefix("checkpoint-") for p in self.folder.glob("checkpoint-*.json")]
        return sorted(int(name) for name in names if name.isdigit())

    def save(
        self,
        generation: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, object],
        *,
        fingerprint: str,
        stores: Mapping[str, Store[Any]] | None = None,
    ) -> None:
        """Durably store a generation with the stores' rows, and delete all but the newest `keep` generations.

        Args:
            generation: number of the generation, which must be greater than the newest one.
            tensors: tensors by name.
            meta: metadata that can be represented in JSON.
            fingerprint: fingerprint of the experiment.
            stores: stores of rows by name.

        Raises:
            CheckpointError: the disk is full or the write is rejected. Earlier generations remain intact.
        """
        stores, generations = stores or {}, self.generations()
        assert not generations or generation > generations[-1], f"checkpoint {generation} after {generations[-1]}"
        make_folder(self.folder)
        everything = dict(tensors)
        for name, store in stores.items():
            store.checkpoint(generation)
            everything |= {f"{name}/{key}": tensor for key, tensor in store.state().items()}
        data, text = self._paths(generation)
        body: dict[str, Any] = {
            "format": _CHECKPOINT_FORMAT,
            "generation": generation,
            "fingerprint": fingerprint,
            "sha256": save_tensors(data, everything),
            "meta": dict(meta),
        }
        body = json.loads(json.dumps(body))
        try:
            write_atomic(text, json.dumps({"sha256": _digest_body(body), "body": body}, indent=1).encode())
        except CheckpointError:
            with suppress(CheckpointError):
                delete_files(text, data)
            raise
        kept = [*generations, generation][-self.keep :]
        self._delete_old_generations(kept)
        for store in stores.values():
            store.prune(kept[0])

    def load(self, fingerprint: str, numbers: Mapping[str, object] | None = None) -> LoadedCheckpoint | None:
        """Load the newest intact generation without changing anything. Return None if there are no generations.

        Args:
            fingerprint: fingerprint of the experiment.
            numbers: values of the experiment, keyed by dotted key. If the generation belongs to a different experiment,
                the error lists the values in the generation's metadata that differ from ``numbers``.

        Raises:
            DamagedCheckpoint: all generations are damaged.
            RunDirError: the generation belongs to a different experiment, or it was written by a different version.
        """
        warnings: list[str] = []
        for generation in reversed(self.generations()):
            read = self._read(generation)
            if read is None:
                warnings.append(f"{self.folder}/checkpoint-{generation} is damaged (.json or .safetensors): not used")
                continue
            body, tensors = read
            if (body["format"], body["fingerprint"]) != (_CHECKPOINT_FORMAT, fingerprint):
                before = self._update_numbers(body["meta"].get("numbers") or {})
                changed = find_difference(before, json.loads(json.dumps(numbers))) if before and numbers else ""
                changed = changed or (
                    f"its fingerprint is {body['fingerprint']}, but this run has {fingerprint}, so code or data differ"
                )
                raise RunDirError(
                    f"{self.folder} contains checkpoints of a different run: {changed}. Choose "
                    "another --out folder, or start over with --force"
                )
            return LoadedCheckpoint(generation, tensors, body["meta"], warnings)
        if warnings:
            raise DamagedCheckpoint(f"no checkpoint can be read: {'; '.join(warnings)}")
        return None

    def meta(self) -> dict[str, Any] | None:
        """Read the metadata of the newest generation, without its tensors. If there is no generation, return None.

        This function may be called while another process saves a generation.
        """
        while True:
            generations = self.generations()
            for generation in reversed(generations):
                try:
                    content = json.loads(check_regular_file(self._paths(generation)[1]).read_bytes())
                    if content["sha256"] == _digest_body(content["body"]):
                        meta: dict[str, Any] = content["body"]["meta"]
                        return meta
                except (OSError, ValueError, KeyError, TypeError, RecursionError):
                    continue
            if self.generations() == generations:  # otherwise, newer generations have replaced them
                return None

    def resume(
        self,
        fingerprint: str,
        stores: Mapping[str, Store[Any]] | None = None,
        numbers: Mapping[str, object] | None = None,
    ) -> LoadedCheckpoint | None:
        """Load the newest generation as `load` does, and restore the stores to it.

        If there is no generation, the stores become empty.

        Rows that are newer than the generation are discarded.

        Tensors are copied so that they are aligned in memory as torch aligns them, rather than as in the file.

        Raises:
            DamagedCheckpoint: all generations are damaged, or the rows of a store are damaged.
            RunDirError: the generation belongs to a different experiment.
        """
        stores = stores or {}
        loaded = self.load(fingerprint, numbers)
        if loaded is None:
            for store in stores.values():
                store.reset()
            return None
        self._delete_old_generations([g for g in self.generations() if g <= loaded.generation])
        tensors = dict(loaded.tensors)
        for name, store in stores.items():
            prefix = f"{name}/"
            state = {key.removeprefix(prefix): tensors.pop(key) for key in loaded.tensors if key.startswith(prefix)}
            store.rollback(loaded.generation)
            store.load_state(state)
        placed = {name: tensor.clone() for name, tensor in tensors.items()}  # rounding depends on the alignment
        return loaded._replace(tensors=placed)

    def copy_newest(self, folder: Path) -> None:
        """Copy the newest intact generation to another folder.

        Other processes may save generations at the same time.
        """
        for generation in reversed(self.generations()):
            make_folder(folder)
            copy = Checkpoints(folder)
            for source, target in zip(self._paths(generation), copy._paths(generation), strict=True):
                with suppress(OSError):
                    write_atomic(target, check_regular_file(source).read_bytes())
            if copy._read(generation) is not None:
                return
            delete_files(*copy._paths(generation))

    def _paths(self, generation: int) -> tuple[Path, Path]:
        stem = self.folder / f"checkpoint-{generation}"
        return stem.with_suffix(".safetensors"), stem.with_suffix(".json")

    def _read(self, generation: int) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the body and the tensors of a generation, or None if one of its files is damaged."""
        data, text = self._paths(generation)
        try:
            content: dict[str, Any] = json.loads(check_regular_file(text).read_bytes())
            body: dict[str, Any] = content["body"]
            with check_regular_file(data).open("rb") as file:
                sums = (_digest_body(body), hashlib.file_digest(file, "sha256").hexdigest())
            intact = sums == (content["sha256"], body["sha256"]) and body["generation"] == generation
            return (body, load_file(data)) if intact else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError):
            return None

    def _delete_old_generations(self, kept: list[int]) -> None:
        names = {path.name for generation in kept for path in self._paths(generation)}
        extra = [p for p in self.folder.iterdir() if "checkpoint-" in p.name and p.name not in names]
        delete_files(*sorted(extra, key=lambda p: (p.suffix != ".json", p.name)))


def _digest_body(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
