"""What a run is told about evaluation and about the machine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from fedloom.values import Value

Part = Literal["train", "validation", "test"]


class Evaluate(Value):
    """When and on what models are scored. Nothing here changes what is learned."""

    every: int = Field(5, ge=1, description="rounds between evaluations; the last round is always evaluated")
    select_on: Literal["validation", "test"] = Field(
        "validation", description="part on which the hybrid model chooses; 'test' is FLAME's protocol, and reported"
    )
    parts: tuple[Part, ...] = Field(
        ("train", "validation", "test"), description="parts of every client that are scored", min_length=1
    )
    personal_on_common: bool = Field(False, description="score personal models on the common test set as well")
    confusion: bool = Field(
        False, description="count predicted classes by true class on every client's test part, at the end"
    )
    tsne: tuple[NonNegativeInt, ...] = Field(
        (), description="clients whose test samples are laid out in the plane by t-SNE, at the end (FedSLR, Fig. 4)"
    )


class Engine(Value):
    """How a run is computed. Workers change no result; oracle, chunk and dtype change it by rounding only."""

    workers: int | Literal["auto"] = Field(
        1,
        description="processes of one thread each on this machine; under torchrun, its ranks are the workers",
        union_mode="left_to_right",
    )
    oracle: Literal["auto", "fused", "stacked", "looped"] = Field("auto", description="how gradients are computed")
    chunk: int | None = Field(None, ge=1, description="most clients of a chunk; a fixed rule when not given")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    dtype: Literal["float32", "float64"] = Field("float32", description="type of models and samples")
    checkpoint_every: float = Field(30.0, gt=0, description="seconds of work between checkpoints")
    store_budget: int = Field(1024, ge=0, description="MiB of client state kept in memory; beyond it, files")
    quorum: float = Field(0.5, gt=0, le=1, description="share of a cohort that must return a usable update")
    norm_bound: float | None = Field(None, gt=0, description="largest norm of an accepted upload")
