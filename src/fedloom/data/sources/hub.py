"""Any data set of the Hugging Face hub, through its own library (extra `hub`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import Source
from fedloom.data.sources.memory import as_dataset
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
        data = as_dataset(
            splits[self.train],
            self.y,
            task=self.task if self.task == "regression" else None,
            test=splits[self.test] if self.test is not None and self.test in splits else None,
            name=f"hub:{self.name}",
            **{
                k: v
                for k, v in (("features", self.x), ("users", self.users), ("mean", self.mean), ("std", self.std))
                if v
            },
        )
        return replace(data, name=self.name)
