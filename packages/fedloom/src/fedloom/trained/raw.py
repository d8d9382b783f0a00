"""Model that accepts unscaled samples and returns probabilities or values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.data.input_spec import InputSpec
from fedloom.errors import ConfigError, DataError
from fedloom.tasks.calibration import recalibrated


class RawModel(nn.Module):
    """Module with its input and output steps. Together they are one graph that can be exported.

    The module accepts raw columns ``[b, p]`` float64 of a table (codes for levels, NaN for missing cells), or samples
    ``[b, *shape]``: tokens of sequences as int64, else floats. A model trained on bytes also accepts bytes.

    It returns class probabilities ``[b, C]``, or ``[b, L, C]`` with a label per position. If a sample has several
    labels, it returns the probability of each, ``[b, k]``. For numeric targets, it returns values ``[b, k]`` of a
    regression in the units of its label, or the mean ``[b, 1]`` of a count. For a survival task, it returns the
    probability ``[b, 1]`` of the event by the horizon, or without a horizon the log of the hazard relative to the
    baseline.

    Args:
        module: trained module.
        facts: facts about the module's training data.
        fitted: preparation of a table's columns ``[p, .]`` (see `fedloom.data.tables.Table.fit`).
        dtype: dtype of the module.
        calibration: slope and intercept for the module's logits ``[2]``. None: the logits stay unchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        facts: InputSpec,
        fitted: Tensor | None,
        dtype: torch.dtype = torch.float32,
        calibration: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.line: Tensor | None
        self.register_buffer("line", calibration)
        self.module, self.task, self.dtype = module, facts.task, dtype
        self.centre, self.unit = facts.centre, facts.unit
        if facts.table is not None:
            assert fitted is not None
            self.before: nn.Module = facts.table.encoder(fitted)
        else:
            self.before = nn.Identity() if facts.vocabulary else Scaling(facts, dtype)
        self.takes = torch.int64 if facts.vocabulary else dtype

    def forward(self, samples: Tensor) -> Tensor:
        """Probabilities or values."""
        return self.convert_outputs(self.outputs(samples))

    def outputs(self, samples: Tensor) -> Tensor:
        """Compute outputs of the module: ``[b, k]``, or ``[b, L, k]`` with a label per position."""
        out: Tensor = self.module(self.before(samples).to(self.takes))
        return out if self.line is None else recalibrated(out, self.line)

    def convert_outputs(self, out: Tensor) -> Tensor:
        """Return probabilities or values from the module's outputs."""
        if self.task == "survival":
            return out.double() if self.line is None else -torch.expm1(-out.double().exp())
        if self.task == "count":
            return out.double().exp()
        if self.task == "regression":
            return out.double() * self.unit + self.centre
        if self.task == "multilabel":
            return out.double().sigmoid()
        if self.task == "binary":
            out = torch.cat([-out / 2, out / 2], -1)
        return out.double().softmax(-1)


class Scaling(nn.Module):
    """Divides bytes by 255 and leaves floats unchanged.

    The mean is then subtracted, and the result is divided by the standard deviation.
    """

    def __init__(self, facts: InputSpec, dtype: torch.dtype) -> None:
        super().__init__()
        width = facts.shape[0] if facts.shape else 1
        places = [width, *[1] * (len(facts.shape) - 1)]
        one = torch.ones(1, dtype=torch.float64)
        mean = one * 0 if facts.mean is None else torch.tensor(facts.mean, dtype=torch.float64)
        std = one if facts.std is None else torch.tensor(facts.std, dtype=torch.float64)
        self.dtype = dtype
        self.scale: Tensor
        self.scale_of_bytes: Tensor | None
        self.shift: Tensor
        of_bytes = ((1 / 255) / std).expand(width).reshape(places).to(dtype)
        self.register_buffer("scale", (1.0 / std).expand(width).reshape(places).to(dtype))
        self.register_buffer("scale_of_bytes", of_bytes if facts.pixels else None)
        self.register_buffer("shift", (-mean / std).expand(width).reshape(places).to(dtype))

    def forward(self, samples: Tensor) -> Tensor:
        """Scale samples ``[b, *shape]`` for the model.

        Raises:
            DataError: the samples are bytes but the model was trained on floats, or they are integers but it was
                trained on bytes.
        """
        scale = self.scale_of_bytes if samples.dtype == torch.uint8 else self.scale
        if scale is None:
            raise DataError(
                "samples are bytes (uint8), but the model was trained on floats. Pass floats as in training"
            )
        if self.scale_of_bytes is not None and not (scale is self.scale_of_bytes or samples.is_floating_point()):
            raise DataError(
                f"samples are {samples.dtype}, but the model was trained on bytes. Pass uint8, or floats from 0 to 1"
            )
        return samples.to(self.dtype) * scale + self.shift


def labels_of(facts: InputSpec, scores: NDArray[np.float64], threshold: float | None = None) -> NDArray[Any]:
    """Return the prediction for each row, or for each position ``[N, L]``, from its probabilities or values.

    If a row has several labels, the result is 1 or 0 for each, ``[N, k]``.

    Args:
        facts: facts about the data.
        scores: see `RawModel`.
        threshold: probability from which on the second of two classes, or a label, is predicted. None: the more
            probable class, or 0.5.
    """
    if facts.task == "multilabel":
        return (scores >= (0.5 if threshold is None else threshold)).astype(int)
    if not facts.classed:
        return scores[:, 0] if scores.shape[1] == 1 else scores
    places = scores.argmax(-1) if threshold is None else (scores[..., 1] >= threshold).astype(int)
    labels: NDArray[Any] = np.array(facts.classes)[places]
    return labels


def check_threshold(facts: InputSpec, threshold: float | None) -> None:
    """Raise if a threshold would have no effect.

    Raises:
        ConfigError: the threshold is not between 0 and 1, or the task is neither binary nor multilabel.
    """
    if threshold is not None and facts.task not in ("binary", "multilabel"):
        raise ConfigError(f"a threshold decides between two classes, but this is a {facts.task}. Leave threshold out")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ConfigError(f"threshold must be a probability from 0 to 1, got {threshold}")
