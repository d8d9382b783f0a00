"""Small network on five clients with different classes, which gives the laws nonconvex local problems."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedloom.data.dataset import Dataset
from fedloom.data.federation import Federation, Split
from fedloom.errors import ConfigError
from fedloom.local.oracles import Network, make_oracle
from fedloom.rows.layout import Layout
from fedloom.seeds import as_global, generator
from fedloom.tasks import make_task

CLIENT_SIZES = (5, 2, 7, 4, 6)
"""Number of training samples at each client."""
INPUT_SHAPE, CLASS_COUNT = (4,), 3


@dataclass(frozen=True)
class Classifier:
    """Federation with a classification network, used for laws instead of a `fedloom.testing.Problem`.

    Attributes:
        module: the network. The initial model consists of the network's parameters.
        x: features ``[N, *shape]``. Each client's samples are stored consecutively. `CLIENT_SIZES` contains their
            numbers.
        y: classes ``[N]``.
        classes: number of classes.
        dtype: float64 or float32.
    """

    module: nn.Module
    x: Tensor
    y: Tensor
    classes: int
    dtype: torch.dtype = torch.float64

    @classmethod
    def create(cls, module: nn.Module | None = None, shape: Sequence[int] = INPUT_SHAPE) -> Classifier:
        """Create samples for a module, and return the federation.

        The default module has a body, and a head for three classes.

        Args:
            module: module that maps ``[b, *shape]`` to ``[b, c]``, with one number for each of c >= 2 classes.
            shape: shape of one sample.

        Raises:
            ConfigError: the module rejects such samples, or its outputs have a different shape.
        """
        g = generator(0, purpose="samples")
        x = torch.randn(sum(CLIENT_SIZES), *shape, generator=g, dtype=torch.float64)
        owner = torch.arange(len(CLIENT_SIZES)).repeat_interleave(torch.tensor(CLIENT_SIZES))
        net = _network() if module is None else module
        try:
            with torch.no_grad():
                outputs = deepcopy(net).double().eval()(x)
        except Exception as error:
            samples = f"samples of shape {list(shape)}"
            raise ConfigError(f"the module does not accept {samples}: {error}. Pass `shape`") from error
        if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
            got = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigError(
                f"the module must return a tensor of shape [samples, classes] with at least two classes, got {got}"
            )
        classes = outputs.shape[1]
        y = (owner + torch.randint(0, 2, (len(x),), generator=g)) % classes
        return cls(net, (x + owner.view(-1, *(1 for _ in shape))).float(), y, classes)

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(CLIENT_SIZES)

    @property
    def layout(self) -> Layout:
        """Names and shapes of the network's parameters."""
        return Layout.create(self.module)

    @property
    def d(self) -> int:
        """Number of parameters."""
        return self.layout.d

    @property
    def alpha(self) -> Tensor:
        """Clients' shares ``[n, 1]``, in proportion to their samples."""
        return torch.tensor(CLIENT_SIZES, dtype=self.dtype)[:, None] / sum(CLIENT_SIZES)

    @cached_property
    def x0(self) -> Tensor:
        """Initial model ``[d]``."""
        return self.layout.vector(self.module, self.dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that a method must not change."""
        return self.x, self.y, self.x0

    def to(self, dtype: torch.dtype) -> Classifier:
        """Return the same problem in another dtype."""
        return replace(self, dtype=dtype)

    def perturbed(self, draw: int) -> Classifier:
        """Return the same problem with each initial parameter changed by about 1e-6 of its value."""
        module, g = deepcopy(self.module).to(self.dtype), generator(draw, purpose="perturbation")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=g, dtype=self.dtype))
        return replace(self, module=module)

    def altered(self, client: int) -> Classifier:
        """Return the same problem, but with different samples at one client."""
        x, end = self.x.clone(), sum(CLIENT_SIZES[: client + 1])
        x[end - CLIENT_SIZES[client] : end] += 10
        return replace(self, x=x)

    def oracle(self, **_: object) -> Network:
        """Return the oracle of the local problems for `Work`, which computes them as in a run."""
        data = Dataset("laws", self.x, self.y, "classification", tuple(map(str, range(self.classes))))
        offsets = torch.tensor((0, *CLIENT_SIZES)).cumsum(0)
        none = Split(torch.zeros(0, dtype=torch.long), torch.zeros_like(offsets))
        parts = {"train": Split(torch.arange(len(self.x)), offsets), "validation": none, "test": none}
        fed = Federation(data, parts, tuple(map(str, range(self.n))), dtype=self.dtype)
        return make_oracle(deepcopy(self.module).to(self.dtype), make_task(data), fed)


def _network() -> nn.Module:
    with as_global(generator(0, purpose="model"), torch.device("cpu")):
        return nn.Sequential(
            OrderedDict(body=nn.Linear(*INPUT_SHAPE, 3), tanh=nn.Tanh(), head=nn.Linear(3, CLASS_COUNT))
        )
