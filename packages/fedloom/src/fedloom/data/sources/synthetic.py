"""Synthetic data set synthetic(alpha, beta) from the FedProx paper.

Li et al. 2020, Federated optimization in heterogeneous networks, arXiv 1812.06127, section 5.1 and appendix C.1,
following the authors' generator. The FIAELT paper uses (0, 0), (0.5, 0.5) and (1, 1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from fedloom.data.dataset import Dataset
from fedloom.data.sources._base import Source
from fedloom.data.sources.archive import GrowingRows
from fedloom.seeds import numpy_generator


class Synthetic(Source):
    """Users who each have a separate linear model and separate feature means. The users are the natural clients.

    User k has n_k = int(lognormal(4, 2)) + 50 samples x ~ N(mean_k, diag(j^-1.2)) with labels y = argmax(W_k x + b_k).
    The entries of mean_k are drawn from N(B_k, 1), and the entries of W_k and b_k from N(u_k, 1), where u_k ~ N(0,
    alpha) and B_k ~ N(0, beta). Users also differ if (alpha, beta) = (0, 0). In the iid variant, all users share one W,
    b ~ N(0, 1) and the mean 0. The last tenth of each user's samples is its official test set. pFedMe's variant uses
    users = 100, factor = 5, test = 0.25.
    """

    alpha: float = Field(
        default=0.0, ge=0, description="size of the differences between the clients' models (FedProx: 0, 0.5, 1)"
    )
    beta: float = Field(
        default=0.0, ge=0, description="size of the differences between the clients' features (FedProx: 0, 0.5, 1)"
    )
    iid: bool = Field(default=False, description="use the same model and feature distribution for all clients")
    spread_unit: Literal["std", "variance"] = Field(
        default="std",
        description="meaning of alpha and beta. std: standard deviations (authors' code). variance: variances "
        "(the paper's text)",
    )
    clients: int = Field(default=30, ge=1, description="number of natural clients (FedProx: 30, pFedMe: 100)")
    factor: int = Field(
        default=1, ge=1, description="factor by which each client's number of samples is multiplied (pFedMe: 5)"
    )
    test: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="fraction of each user's samples held out as the official test set (pFedMe: 0.25)",
    )
    features: int = Field(default=60, ge=1, description="number of features per sample")
    classes: int = Field(default=10, ge=2, description="number of classes")
    seed: int = Field(
        default=0, ge=0, description="seed of the generated data (the authors' generator has no seed option)"
    )

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Generate the data set with its seed."""
        d, c = self.features, self.classes
        shared = numpy_generator(self.seed, purpose="synthetic")
        one_w, one_b = shared.standard_normal((d, c)), shared.standard_normal(c)
        spread = np.arange(1, d + 1) ** -0.6
        power = 0.5 if self.spread_unit == "variance" else 1.0
        x_all, ys, sizes = GrowingRows((d,), np.float32), [], []
        for k in range(self.clients):
            rng = numpy_generator(self.seed, 0, k, "synthetic")
            n = (int(rng.lognormal(4.0, 2.0)) + 50) * self.factor
            u, mean_of_means = rng.standard_normal(2) * (self.alpha**power, self.beta**power)
            mean, w, b = rng.normal(mean_of_means, 1.0, d), rng.normal(u, 1.0, (d, c)), rng.normal(u, 1.0, c)
            if self.iid:
                mean, w, b = np.zeros(d), one_w, one_b
            x = mean + spread * rng.standard_normal((n, d))
            x_all.room(n)[:] = x
            ys.append((x @ w + b).argmax(1))
            sizes.append(n)
        users = np.repeat(np.arange(self.clients), sizes)
        place = np.concatenate([np.arange(n) for n in sizes])
        test = np.flatnonzero(place >= np.repeat([int((1 - self.test) * n) for n in sizes], sizes))
        return Dataset(
            "synthetic-iid" if self.iid else f"synthetic({self.alpha:g}, {self.beta:g})",
            torch.from_numpy(x_all.trim()),
            torch.from_numpy(np.concatenate(ys)),
            "classification",
            tuple(str(i) for i in range(c)),
            test=torch.from_numpy(test),
            users=torch.from_numpy(users),
            user_names=tuple(f"f_{k:05d}" for k in range(self.clients)),
        )
