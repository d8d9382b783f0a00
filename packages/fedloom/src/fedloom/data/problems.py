"""Synthetic problems with known solutions, in which all clients have the same number of samples.

The mean over clients is therefore also the mean over samples. The tests contain the solutions, and check them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedloom.data.dataset import Dataset, Task
from fedloom.data.sources._base import Source
from fedloom.seeds import numpy_generator

Floats = NDArray[np.float64]


class _EqualClientsSource(Source):
    """Base class of the problems, which creates clients of equal size from features and targets."""

    clients: int = Field(default=10, ge=1, description="number of clients m")
    samples: int = Field(default=20, ge=1, description="N, number of samples per client")
    features: int = Field(default=5, ge=1, description="features d")
    seed: int = Field(default=0, ge=0, description="seed of the problem")

    def _dataset(self, name: str, x: Floats, y: Floats, task: Task = "regression") -> Dataset:
        """Return features x [m, N, d] and targets y [m, N, k] as one data set whose users are the clients."""
        flat = torch.from_numpy(x.reshape(-1, x.shape[-1]))
        users = torch.arange(self.clients).repeat_interleave(self.samples)
        target = torch.from_numpy(y.reshape(len(flat), -1))
        return Dataset(
            name,
            flat,
            target if task == "regression" else target[:, 0].long(),
            task,
            () if task == "regression" else ("no", "yes"),
            users=users,
            user_names=tuple(str(i) for i in range(self.clients)),
        )


class LinearRegression(_EqualClientsSource):
    """Federated linear regression of FLAME, section V-D and appendix B: y = X_i theta_i + z with X_i' X_i = N b I.

    After one round of exact steps from 0, client i sends its least squares solution multiplied by q, where q = 1 for
    pFedMe and Ditto. The last `malicious` clients are attackers with strength gamma. The paper is corrected as follows:
    the variance of the least squares solution is sigma^2/(b N) throughout (Eq. 157 and 159 print b m), the sum in Eq.
    161 is over benign clients, and the thresholds in Proposition 2 are the derived minimizers of the losses (the
    printed ones lack a norm). Proposition 3 holds if all theta_i have the same norm (`equal_length`), which its proof
    requires. Otherwise, it may not hold.
    """

    b: float = Field(default=1.0, gt=0, description="scale b of the features")
    sigma: float = Field(default=1.0, ge=0, description="standard deviation of the noise in y")
    spread: float = Field(
        default=1.0, ge=0, description="standard deviation of the theta_i around their mean, a vector of ones"
    )
    equal_length: bool = Field(default=False, description="give all theta_i the same norm (condition of Proposition 3)")
    malicious: int = Field(default=0, ge=0, description="m_a, number of attackers, who are the last clients")
    gamma: float = Field(default=1.0, ge=0, description="strength of the attack")

    @model_validator(mode="after")
    def _sizes_fit(self) -> LinearRegression:
        if self.features > self.samples or self.malicious >= self.clients:
            raise ValueError(
                "features must be at most samples (so that X_i' X_i is invertible), and malicious must "
                "be less than clients"
            )
        return self

    def truth(self) -> tuple[Floats, Floats]:
        """Return the true parameters theta ``[m, d]`` and the features X ``[m, N, d]``."""
        rng = numpy_generator(self.seed, purpose="linear regression")
        theta = 1 + self.spread * rng.standard_normal((self.clients, self.features))
        if self.equal_length:
            theta *= np.sqrt(self.features) / np.linalg.norm(theta, axis=1, keepdims=True)
        basis = np.linalg.qr(rng.standard_normal((self.clients, self.samples, self.features)))[0]
        return theta, basis * np.sqrt(self.samples * self.b)

    def targets(self, draw: int) -> Floats:
        """Return targets y [m, N] with one random draw of the noise."""
        theta, x = self.truth()
        noise = numpy_generator(self.seed, draw, purpose="linear noise").standard_normal(x.shape[:2])
        return np.asarray(np.einsum("mnd,md->mn", x, theta) + self.sigma * noise)

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Return a float64 data set with the first random draw of the noise.

        The users in this data set are the clients.
        """
        return self._dataset("linear-regression", self.truth()[1], self.targets(0))


class SparseLogistic(_EqualClientsSource):
    """Sparse logistic regression: mean logistic loss + penalty * ||w||_1. A tenth of the features are relevant."""

    samples: int = Field(default=50, ge=1, description="N, number of samples per client")
    features: int = Field(default=30, ge=1, description="features d")
    penalty: float = Field(default=0.01, ge=0, description="weight of the L1 norm (FIAELT, Fig. 3: 0.01)")
    spread: float = Field(default=0.5, ge=0, description="standard deviation of each client's feature means")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Return a binary classification task with float64 features. The users in this data set are the clients."""
        rng = numpy_generator(self.seed, purpose="sparse logistic")
        shift = self.spread * rng.standard_normal((self.clients, 1, self.features))
        x = shift + rng.standard_normal((self.clients, self.samples, self.features))
        w = np.zeros(self.features)
        w[: max(1, self.features // 10)] = rng.choice([-2.0, 2.0], max(1, self.features // 10))
        y = rng.random((self.clients, self.samples)) < 1 / (1 + np.exp(-x @ w))
        return self._dataset("sparse-logistic", x, y.astype(np.float64), "binary")


class LowRank(_EqualClientsSource):
    """Low-rank matrix regression: mean squared error + penalty * ||W||_*, where y = W x + noise and W has low rank."""

    samples: int = Field(default=50, ge=1, description="N, number of samples per client")
    features: int = Field(default=12, ge=1, description="features")
    outputs: int = Field(default=8, ge=1, description="outputs k")
    rank: int = Field(default=2, ge=1, description="rank of the true matrix")
    penalty: float = Field(default=0.05, ge=0, description="weight of the nuclear norm")
    sigma: float = Field(default=0.1, ge=0, description="standard deviation of the noise in y")
    spread: float = Field(default=0.5, ge=0, description="standard deviation of each client's feature means")

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Return a float64 regression task. The users in this data set are the clients."""
        rng = numpy_generator(self.seed, purpose="low rank")
        shift = self.spread * rng.standard_normal((self.clients, 1, self.features))
        x = shift + rng.standard_normal((self.clients, self.samples, self.features))
        w = rng.standard_normal((self.outputs, self.rank)) @ rng.standard_normal((self.rank, self.features))
        y = x @ w.T + self.sigma * rng.standard_normal((self.clients, self.samples, self.outputs))
        return self._dataset("low-rank", x, y)
