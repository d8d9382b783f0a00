"""Rules for the files to which a model may be written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from fedloom.outputs import FileKind, check_output_file
from fedloom.rundir import ADAPTED_FOLDER
from fedloom.storage.checkpoint import has_digest

FACTS_FILE = "facts.json"
"""Name of the entry in a torch program with the facts about the model's data."""
FORMAT_KINDS = {"safetensors": "safetensors", "torch": "torch", "onnx": "ONNX"}
"""Kind of file for each format name."""
ONNX_FACTS_MARK = b"\x0a\x05facts\x12"
"""Entry ``facts`` in the metadata of an ONNX model, in the encoding of Protocol Buffers."""


def check_model_file(
    path: Path | str, format: str = "safetensors", inputs: Iterable[object] = (), *, force: bool = False
) -> Path:
    """Raise an error if a model must not be written to a file.

    Models adapted to a client may be written to ``RUN/adapted``.

    Args:
        path: the file.
        format: one of `fedloom.trained.export.EXPORT_FORMATS`. Other names are rejected by that module.
        inputs: files that the same call reads, which are never overwritten.
        force: True to also replace files of a different kind.

    Raises:
        ConfigError: see `fedloom.outputs.check_output_file`.
    """
    kind = FileKind(FORMAT_KINDS.get(format, "safetensors"), "a model file", is_model_file)
    return check_output_file(
        path, kind, inputs, owns=lambda inside: inside.parts[:-1] == (ADAPTED_FOLDER,), force=force
    )


def is_model_file(path: Path) -> bool:
    """Return True if fedloom wrote the file as a model in safetensors, torch or ONNX format."""
    if has_digest(path):
        return True
    try:
        with ZipFile(path) as archive:
            return any(name.endswith(f"/{FACTS_FILE}") for name in archive.namelist())
    except (BadZipFile, ValueError, NotImplementedError):
        return ONNX_FACTS_MARK in path.read_bytes()
