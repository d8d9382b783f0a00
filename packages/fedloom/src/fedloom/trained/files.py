"""Check whether a model file may be written to a path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from fedloom.outputs import FileKind, check_output_file
from fedloom.rundir import ADAPTED_FOLDER
from fedloom.storage.checkpoint import has_digest

FACTS_FILE = "facts.json"
"""Facts of the model's data in a torch program."""
FORMAT_KINDS = {"safetensors": "safetensors", "torch": "torch", "onnx": "ONNX"}
"""Kind of a file, by the name of its format."""
IN_ONNX = b"\x0a\x05facts\x12"
"""Entry ``facts`` in the metadata of an ONNX model, as Protocol Buffers write it."""


def check_model_file(
    path: Path | str, format: str = "safetensors", inputs: Iterable[object] = (), *, force: bool = False
) -> Path:
    """Raise if a model must not be written to a file. Adapted models may be in ``RUN/adapted``.

    Args:
        path: the file.
        format: one of `fedloom.trained.export.FORMATS`. That module rejects other names.
        inputs: files that the same call reads.
        force: True allows to replace a file of another kind.

    Raises:
        ConfigError: see `fedloom.outputs.check_output_file`.
    """
    kind = FileKind(FORMAT_KINDS.get(format, "safetensors"), "a file of a model", is_model_file)
    return check_output_file(
        path, kind, inputs, owns=lambda inside: inside.parts[:-1] == (ADAPTED_FOLDER,), force=force
    )


def is_model_file(path: Path) -> bool:
    """Return whether fedloom wrote a file as a model: as safetensors, as a torch program, or as an ONNX graph."""
    if has_digest(path):
        return True
    try:
        with ZipFile(path) as archive:
            return any(name.endswith(f"/{FACTS_FILE}") for name in archive.namelist())
    except (BadZipFile, ValueError, NotImplementedError):
        return IN_ONNX in path.read_bytes()
