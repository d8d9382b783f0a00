"""Models of a run, read from the files in its directory.

All files are written at once. Models are read when needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedloom.algorithms import Algorithm
from fedloom.errors import ConfigError, LayoutError, RunDirError
from fedloom.local import Ctx, LocalSGD
from fedloom.models import ModelSpec
from fedloom.storage.checkpoint import save_tensors
from fedloom.storage.files import make_folder
from fedloom.tasks import Objective
from fedloom.trained.adapt import ServerSide
from fedloom.trained.model import ModelRecipe, check_layout, file_layout, open_tensors, read_facts
from fedloom.trained.model_source import MODEL_CHOICES, ModelSource

MODELS_PER_BATCH = 32
"""Number of personal models that are created, written and read at a time."""


def model_file_names(source: ModelSource) -> list[str]:
    """Return the names of the files that `write_models` writes: models, state for new clients, and column scaling."""
    kinds = source.kinds()
    server = ["server"] if "personal" in kinds else []
    lines = ["calibration"] if source.recipe.objective.line_part else []
    return [*kinds, *server, *([] if source.fitted is None else ["scaling"]), *lines]


def _calibrated_kinds(source: ModelSource) -> list[str]:
    """Kinds of models with stored recalibrations. A hybrid model is always one of these models."""
    return [kind for kind in source.kinds() if kind != "hybrid"]


def write_models(source: ModelSource, folder: Path) -> list[Path]:
    """Write every kind of model of a run to ``<kind>.safetensors``, and write the other files (see `Models.save`).

    Raises:
        CheckpointError: the disk is full or the write is rejected.
    """
    make_folder(folder)
    start = source.recipe.start()
    if start:
        _write_base(start, folder)
    header = source.recipe.header({**source.about, "clients": list(source.names)})
    for name in model_file_names(source):
        save_tensors(folder / f"{name}.safetensors", _read_tensors(source, name), header)
    return [folder / f"{name}.safetensors" for name in model_file_names(source)]


def _write_base(start: Mapping[str, Tensor], folder: Path) -> None:
    """Write the data that all of a run's models share, or link to an identical file in a neighboring model folder."""
    digest = blake2b(digest_size=8)
    for name, value in start.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    path = folder / f"base-{digest.hexdigest()}.safetensors"
    other = next(folder.parent.glob(f"*/{path.name}"), None)
    if path.exists():
        return
    try:
        if other is not None:
            os.link(other, path)
    except OSError:  # different file system, or no support for links
        other = None
    if other is None:
        save_tensors(path, start, {"kind": "base"})


def _read_tensors(source: ModelSource, name: str) -> Mapping[str, Tensor]:
    """Read all tensors of a file."""
    match name:
        case "global":
            row, statistics = source.shared()
            return {"rows": row, **({"statistics": statistics} if statistics.numel() else {})}
        case "personal":
            return _Pieces(source)
        case "hybrid":
            return {"takes_global": source.takes_global()}
        case "scaling":
            assert source.fitted is not None
            return {"fitted": source.fitted}
        case "calibration":
            lines = {kind: source.calibration(kind) for kind in _calibrated_kinds(source)}
            return {kind: line for kind, line in lines.items() if line is not None}
        case _:
            return _server_tensors(source.server())


class _Pieces(Mapping[str, Tensor]):
    """Lazy mapping from ``rows.<first client>`` to the personal models of a group of clients.

    Each model is created when it is read.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source, self._n = source, len(source.names)
        self._parts = ("rows", "statistics") if source.personal(torch.tensor([0]))[1].numel() else ("rows",)
        self._last: tuple[int, tuple[Tensor, Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        part, _, first = name.partition(".")
        start = int(first)
        if self._last is None or self._last[0] != start:
            self._last = (start, self._source.personal(torch.arange(start, min(start + MODELS_PER_BATCH, self._n))))
        return self._last[1][part == "statistics"]

    def __iter__(self) -> Iterator[str]:
        return (f"{part}.{first:08d}" for part in self._parts for first in range(0, self._n, MODELS_PER_BATCH))

    def __len__(self) -> int:
        return len(self._parts) * -(-self._n // MODELS_PER_BATCH)


def _server_tensors(side: ServerSide) -> dict[str, Tensor]:
    named = {"weight": side.weight, "sizes": side.sizes}
    for group, value in (("server", side.server), ("kept", side.kept)):
        named |= {} if value is None else {f"{group}.{n}": t for n, t in zip(value._fields, value, strict=True)}
    return named


class SavedModels:
    """`ModelSource` that reads the files written by `Models.save`.

    Args:
        folder: folder that contains the files.
        algorithm: the method. The caller specifies the method and the architecture, because a model file must not
            choose them.
        spec: the architecture.
        local: settings of local training in the run.
        seed: seed of the run.
        method: label of the method.
        objective: training objective and metrics of the models.

    Raises:
        RunDirError: the folder does not contain models.
        LayoutError: the files are damaged, or their models have a different architecture.
    """

    def __init__(
        self,
        folder: Path,
        algorithm: Algorithm,
        spec: ModelSpec,
        local: LocalSGD,
        seed: int,
        method: str,
        objective: Objective = Objective(),  # noqa: B008  # frozen
    ) -> None:
        self._folder, self._algorithm, self._local = folder, algorithm, local
        present_kinds = [kind for kind in MODEL_CHOICES if self._path(kind).is_file()]
        if not present_kinds:
            raise RunDirError(
                f"{folder} contains no models of {method}, seed {seed}. The models are written at the "
                "end of a run. Run the experiment again to finish it"
            )
        self._kinds = present_kinds
        for name in (*present_kinds, *(file.stem for file in folder.glob("base-*.safetensors"))):
            open_tensors(self._path(name))
        with open_tensors(self._path(present_kinds[0]), check=False) as file:
            facts, about = read_facts(file, self._path(present_kinds[0]))
            sample = next((k for k in file.keys() if k.startswith("rows")), None)  # noqa: SIM118 (no mapping)
            dtype = file.get_slice(sample)[:1].dtype if sample else torch.float32
        self.names: Sequence[str] = about.pop("clients", [])
        self.about: Mapping[str, Any] = {**about, "method": method}
        base = next((load_file(file) for file in folder.glob("base-*.safetensors")), None)
        self.recipe = ModelRecipe(spec, facts, seed, dtype, objective, base)
        for kind in present_kinds:
            check_layout(file_layout(self._path(kind)), self.recipe.layout, self._path(kind))

    def kinds(self) -> list[str]:
        return self._kinds

    @cached_property
    def fitted(self) -> Tensor | None:
        if not self._path("scaling").is_file():
            return None
        return self._read_tensor("scaling", "fitted", self._read("scaling").get("fitted"), len(self.names))

    def shared(self) -> tuple[Tensor, Tensor]:
        tensors = self._read("global")
        row = self._read_tensor("global", "rows", tensors.get("rows"), self.recipe.layout.d)
        return row, tensors.get("statistics", torch.zeros(0, dtype=self.recipe.dtype))

    def personal(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        client_rows = []
        with open_tensors(self._path("personal"), check=False) as file:  # the whole file was checked before
            for part in ("rows", "statistics"):
                has_part = f"{part}.{0:08d}" in set(file.keys())
                width = file.get_slice(f"{part}.{0:08d}").get_shape()[1] if has_part else 0
                client_rows.append(torch.zeros(len(ids), width, dtype=self.recipe.dtype))
                for k, i in enumerate(ids.tolist() if has_part else ()):
                    client_rows[-1][k] = file.get_slice(f"{part}.{i // MODELS_PER_BATCH * MODELS_PER_BATCH:08d}")[
                        i % MODELS_PER_BATCH
                    ]
        rows, statistics = client_rows
        return self._read_tensor("personal", "rows", rows, len(ids), self.recipe.layout.d), statistics

    def calibration(self, kind: str) -> Tensor | None:
        lines = self._read("calibration").get(kind) if self._path("calibration").is_file() else None
        return None if lines is None else self._read_tensor("calibration", kind, lines, len(self.names), 2)

    def takes_global(self) -> Tensor:
        return self._read_tensor("hybrid", "takes_global", self._read("hybrid").get("takes_global"), len(self.names))

    def server(self) -> ServerSide:
        algorithm, recipe = self._algorithm, self.recipe
        if not self._path("server").is_file():
            raise ConfigError(
                f"{self.about['method']} ({type(algorithm).__name__}) has no personal models: every client uses its "
                "global model"
            )
        tensors, n = self._read("server"), len(self.names)
        for name in ("weight", "sizes"):
            self._read_tensor("server", name, tensors.get(name), n)
        ids, shares, sizes, rounds = torch.arange(n), tensors["weight"], tensors["sizes"], int(self.about["rounds"])
        ctx = Ctx(0, n, n, ids, recipe.layout, shares, sizes, None, self._local, recipe.seed, rounds)
        algorithm = algorithm.derive_options(ctx)
        server, _, kept = algorithm.init(recipe.layout.vector(recipe.build()), ctx)
        fields = {"server": server, "kept": kept if algorithm.mixes else None}
        try:
            server_fields = {
                group: value and type(value)(*[tensors[f"{group}.{name}"] for name in value._fields])
                for group, value in fields.items()
            }
        except KeyError as error:
            raise LayoutError(
                f"{self._path('server')} belongs to a different method, because it contains no {error}"
            ) from None
        return ServerSide(
            algorithm, self._local, server_fields["server"], server_fields["kept"], shares, sizes, rounds, recipe.seed
        )

    def _read_tensor(self, file: str, name: str, tensor: Tensor | None, *shape: int) -> Tensor:
        """Read a tensor from a file, and check its first dimensions.

        Raises:
            LayoutError: the tensor is missing or has a different shape, for example because the file belongs to a
                different run.
        """
        if tensor is None or tuple(tensor.shape[: len(shape)]) != shape:
            got = "nothing" if tensor is None else [*tensor.shape]
            raise LayoutError(
                f"{self._path(file)}: {name} must have shape {[*shape]}, got {got}. Check that the file belongs to "
                f"this run"
            )
        return tensor

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _read(self, name: str) -> dict[str, Tensor]:
        with open_tensors(self._path(name), check=name not in MODEL_CHOICES) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
