"""The model and the samples. This module does not use fedloom."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

LABELS = 4
"""Number of different labels at each node."""


class Net(nn.Module):
    """Small network for images with 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the ten digits."""
        return self.head(self.body(x))


def load_data(partition: int) -> tuple[Dataset, Dataset]:
    """Return the training and the test samples of a node, which has four of the ten labels."""
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    labels = (torch.arange(LABELS) + 3 * partition) % 10
    own = torch.isin(y, labels).nonzero().flatten()
    own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(partition))][:200]
    samples = TensorDataset(x, y)
    return Subset(samples, own[:150].tolist()), Subset(samples, own[150:].tolist())
