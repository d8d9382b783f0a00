"""Any data set of the Hugging Face hub, through its own library (extra `hub`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from fedloom.data.dataset import Dataset, Task
from fedloom.data.sources._base import Source, scale
from fedloom.data.sources.archive import Rows
from fedloom.errors import ConfigError, DataError, nearest


class Hub(Source):
    """``hub:owner/name``: images or numbers with a label. Opens a connection, because it was asked for by name."""

    name: str = Field(min_length=1, description="owner/name on the hub")
    config: str | None = Field(default=None, description="configuration of the data set, where it has several")
    train: str = Field(default="train", description="split to train on")
    test: str | None = Field(default="test", description="split that is the official test set, if it exists")
    x: str | None = Field(default=None, description="column of the features; None: the first image or array column")
    y: str | None = Field(default=None, description="column of the target; None: label, labels or fine_label")
    users: str | None = Field(default=None, description="column that names the client of a sample (writer_id, ...)")
    task: Literal["classification", "regression"] = Field(default="classification", description="what y is")
    mean: tuple[float, ...] | None = Field(default=None, description="subtracted (from pixels in [0, 1], if images)")
    std: tuple[float, ...] | None = Field(default=None, description="divides after that")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Both splits; without a connection only what the library has kept from before."""
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(f"hub:{self.name}: needs the extra hub; run: pip install 'fedloom[hub]'") from error
        try:
            splits: Any = datasets.load_dataset(self.name, self.config)
        except Exception as error:  # the library raises its own, urllib's and httpx's errors
            raise DataError(
                f"hub:{self.name}: cannot be had ({type(error).__name__}: {error}); check name and connection, or "
                "run this once where there is one (the library keeps data sets in ~/.cache/huggingface)"
            ) from error
        if self.train not in splits:
            raise DataError(f"hub:{self.name}: no split {self.train!r}; {nearest(self.train, splits)}")
        sides = [splits[self.train]]
        if self.test is not None and self.test in splits:
            sides.append(splits[self.test])
        return self._read(sides)

    def _read(self, sides: list[Any]) -> Dataset:
        names: list[str] = list(sides[0].column_names)
        y_name = self.y or next((n for n in ("label", "labels", "fine_label", "target") if n in names), None)
        x_name = self.x or next((n for n in names if n not in (y_name, self.users)), None)
        for what in (x_name, y_name, self.users or y_name):
            if what not in names:
                raise DataError(
                    f"hub:{self.name}: no column {what!r} for x or y; its columns: {', '.join(names)}; set x, y"
                )
        x: Rows | None = None
        y: list[Any] = []
        users: list[str] = []
        for side in sides:
            for row in side:
                value = np.asarray(row[x_name])
                if value.dtype.kind not in "uifb":
                    raise DataError(
                        f"hub:{self.name}: column {x_name!r} holds {value.dtype}, only images and numbers work"
                    )
                planes = value.transpose(2, 0, 1) if value.ndim == 3 else value[None] if value.ndim == 2 else value
                x = x or Rows(planes.shape, np.uint8 if planes.dtype == np.uint8 else np.float32)
                room = x.room(1)[0]
                if planes.shape != room.shape:
                    raise DataError(
                        f"hub:{self.name}: sample {len(y)} has shape {planes.shape}, others {room.shape}; one size only"
                    )
                room[...] = planes
                y.append(row[y_name])
                if self.users is not None:
                    users.append(str(row[self.users]))
        if x is None:
            raise DataError(f"hub:{self.name}: no samples")
        target, task, classes = self._target(y, getattr(sides[0].features[y_name], "names", None))
        levels, codes = np.unique(np.array(users), return_inverse=True) if users else ((), None)
        return Dataset(
            self.name,
            torch.from_numpy(x.done()),
            target,
            task,
            classes,
            scale(self.mean),
            scale(self.std),
            torch.arange(len(sides[0]), len(y)) if len(sides) == 2 else None,
            users=None if codes is None else torch.from_numpy(codes),
            user_names=tuple(str(level) for level in levels),
        )

    def _target(self, y: list[Any], names: list[str] | None) -> tuple[torch.Tensor, Task, tuple[str, ...]]:
        if self.task == "regression":
            return torch.tensor(y, dtype=torch.float64).reshape(len(y), -1), "regression", ()
        if not all(isinstance(label, int) for label in y):
            raise DataError(f"hub:{self.name}: labels are not whole numbers; set task or y")
        labels = torch.tensor(y)
        return labels, "classification", tuple(names or (str(i) for i in range(int(labels.max()) + 1)))
