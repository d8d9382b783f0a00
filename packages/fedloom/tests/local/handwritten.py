"""Local training written by hand over plain modules and `torch.optim.SGD`; shares no code with ``fedloom.local``.

Batches come from `fedloom.data.order.plan_batches`, random draws from `fedloom.seeds`, as documented.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedloom.data.dataset import Dataset
from fedloom.data.federation import Federation, Split
from fedloom.data.order import plan_batches
from fedloom.models import Dropout
from fedloom.seeds import generator

SIZES = (1, 7, 20, 53)
CLASSES = 4


def federation(
    sizes: Sequence[int] = SIZES,
    shape: tuple[int, ...] = (6,),
    task: str = "classification",
    dtype: torch.dtype = torch.float64,
) -> Federation:
    """Clients of the sizes given, with random samples that lie scattered in the data set."""
    total = sum(sizes)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(total, *shape, dtype=torch.float64, generator=g)
    classes = {"classification": CLASSES, "binary": 2, "regression": 0}[task]
    if task == "regression":
        y = torch.randn(total, 2, dtype=torch.float64, generator=g)
    else:
        y = torch.randint(0, classes, (total,), generator=g)
    data = Dataset("random", x, y, task=task, classes=tuple(str(c) for c in range(classes)))  # type: ignore[arg-type]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    empty = Split(torch.empty(0, dtype=torch.long), torch.zeros(len(sizes) + 1, dtype=torch.long))
    parts = {"train": Split(torch.randperm(total, generator=g), offsets), "validation": empty, "test": empty}
    return Federation(data, parts, names=tuple(f"c{i}" for i in range(len(sizes))), dtype=dtype)


def samples(fed: Federation, client: int) -> tuple[Tensor, Tensor]:
    """All training samples of a client, read straight from the data set."""
    where = fed.parts["train"].index[fed.parts["train"].offsets[client] : fed.parts["train"].offsets[client + 1]]
    return fed.data.x[where].to(fed.dtype), fed.data.y[where]


def mean_loss(outputs: Tensor, y: Tensor, task: str = "classification") -> Tensor:
    """The task's loss by torch's own functions, mean over the samples."""
    match task:
        case "classification":
            return functional.cross_entropy(outputs, y)
        case "binary":
            return functional.binary_cross_entropy_with_logits(outputs[:, 0], y.to(outputs.dtype))
        case _:
            return functional.mse_loss(outputs, y.to(outputs.dtype))


def positions(
    size: int, batch_size: int | str, steps: int, client: int, stream: Any = "local", seed: int = 0, round: int = 1
) -> list[Tensor]:
    """The batches of a client as lists of positions without padding."""
    b = None if batch_size == "full" else int(batch_size)
    return [row[row >= 0] for row in plan_batches(size, b, steps, generator(seed, round, client, stream))]


def steps_of(size: int, batch_size: int | str, epochs: int) -> int:
    """Steps of some epochs."""
    return epochs if batch_size == "full" else epochs * math.ceil(size / int(batch_size))


def use_masks(
    module: nn.Module, shapes: dict[str, tuple[int, ...]], count: int, client: int, k: int, seed: int, round: int
) -> None:
    """The dropout masks of step ``k`` of the stream "local"."""
    for name, shape in shapes.items():
        layer = module.get_submodule(name)
        assert isinstance(layer, Dropout)
        layer.mask = layer.draw((count, *shape), generator(seed, round, client, ("local", k, name)))


def slopes(module: nn.Module) -> Tensor:
    """Gradients of all parameters in one vector; 0 where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in module.parameters()])


def sgd(
    module: nn.Module,
    fed: Federation,
    client: int,
    start: Tensor,
    *,
    lr: float,
    batch_size: int | str = 20,
    steps: int | None = None,
    epochs: int = 1,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    pulls: Sequence[tuple[float, Tensor]] = (),
    shift: Tensor | None = None,
    mask: Tensor | None = None,
    soft: tuple[float, Tensor] | None = None,
    stream: Any = "local",
    seed: int = 0,
    round: int = 1,
    task: str = "classification",
    features: dict[str, tuple[int, ...]] | None = None,
    make: Callable[..., torch.optim.Optimizer] | None = None,
) -> Tensor:
    """One client's local training by SGD or what ``make`` makes, one parameter vector in, one out."""
    module = copy.deepcopy(module).to(start.dtype).train()
    vector_to_parameters(start.clone(), module.parameters())
    given = {"momentum": momentum} if make is None else {}
    groups = [{"params": [p]} for p in module.parameters()]
    optimiser = (make or torch.optim.SGD)(groups, lr=lr, weight_decay=weight_decay, **given)  # type: ignore[arg-type]
    x, y = samples(fed, client)
    count = steps_of(len(x), batch_size, epochs) if steps is None else steps
    for k, batch in enumerate(positions(len(x), batch_size, count, client, stream, seed, round)):
        use_masks(module, features or {}, len(batch), client, k, seed, round)
        optimiser.zero_grad()
        mean_loss(module(x[batch]), y[batch], task).backward()
        for group in optimiser.param_groups:
            group["weight_decay"] = 0.0 if group["params"][0].grad is None else weight_decay
        gradient = slopes(module)
        if clip is not None and gradient.norm() > clip:
            gradient = gradient * clip / gradient.norm()
        w = parameters_to_vector(module.parameters()).detach()
        for mu, centre in pulls:
            gradient = gradient + mu * (w - centre)
        if shift is not None:
            gradient = gradient + shift
        for p, g in zip(module.parameters(), gradient.split([p.numel() for p in module.parameters()]), strict=True):
            p.grad = g.view_as(p).clone()
        optimiser.step()
        moved = parameters_to_vector(module.parameters()).detach()
        if soft is not None:
            bound, centre = soft
            gap = moved - centre
            moved = centre + gap.sign() * (gap.abs() - lr * bound).clamp(min=0)
        if mask is not None:
            moved = torch.where(mask, moved, w)
        vector_to_parameters(moved, module.parameters())
    return parameters_to_vector(module.parameters()).detach()


def gradient_at(
    module: nn.Module, x: Tensor, y: Tensor, row: Tensor, task: str = "classification", decay: float = 0.0
) -> Tensor:
    """Gradient of the mean loss plus decay/2 ||w||^2 at a parameter vector."""
    module = copy.deepcopy(module).to(row.dtype).train()
    vector_to_parameters(row.clone(), module.parameters())
    mean_loss(module(x), y, task).backward()
    g = slopes(module)
    return g + decay * row
