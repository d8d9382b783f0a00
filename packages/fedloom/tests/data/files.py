"""Small files in the formats of the sources, sound ones; tests spoil them."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def idx(array: np.ndarray) -> bytes:
    magic = {3: 0x803, 1: 0x801}[array.ndim]
    return struct.pack(f">{array.ndim + 1}I", magic, *array.shape) + array.astype(np.uint8).tobytes()


def idx_files(seed: int = 0, train: int = 7, test: int = 3, side: int = 28) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    return {
        "train-images-idx3-ubyte": idx(rng.integers(0, 256, (train, side, side))),
        "train-labels-idx1-ubyte": idx(np.arange(train) % 10),
        "t10k-images-idx3-ubyte": idx(rng.integers(0, 256, (test, side, side))),
        "t10k-labels-idx1-ubyte": idx(np.arange(test) % 10),
    }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def as_tar(path: Path, files: dict[str, bytes], mode: str) -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(f"top/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def as_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zip_:
        for name, content in files.items():
            zip_.writestr(f"top/{name}", content)
    return path


WRAPPINGS: dict[str, Callable[[Path, dict[str, bytes]], Path]] = {
    "plain": write,
    "gz": lambda at, files: write(at, {f"{k}.gz": gzip.compress(v) for k, v in files.items()}),
    "xz": lambda at, files: write(at, {f"{k}.xz": lzma.compress(v) for k, v in files.items()}),
    "zip": lambda at, files: as_zip(at / "all.zip", files),
    "tar": lambda at, files: as_tar(at / "all.tar", files, "w"),
    "tar.gz": lambda at, files: as_tar(at / "all.tar.gz", files, "w:gz"),
    "tar.xz": lambda at, files: as_tar(at / "all.tar.xz", files, "w:xz"),
    "folder with a tar": lambda at, files: as_tar(at / "all.tar.xz", files, "w:xz").parent,
}


def records(labels: list[int], prefix: bytes = b"", seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    return b"".join(prefix + bytes([label]) + rng.integers(0, 256, 3072, dtype=np.uint8).tobytes() for label in labels)


def png(value: int, size: tuple[int, int] = (6, 4), mode: str = "L") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(buffer, "PNG")
    return buffer.getvalue()


def leaf(data: dict[str, tuple[list[Any], list[Any]]], **changes: Any) -> bytes:
    content = {
        "users": list(data),
        "num_samples": [len(y) for _, y in data.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in data.items()},
    }
    return json.dumps({**content, **changes}).encode()
