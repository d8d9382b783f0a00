"""Model that accepts unscaled samples and returns probabilities or values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.data.input_spec import InputSpec
from fedloom.errors import ConfigError, DataError
from fedloom.tasks.calibration import recalibrate


class RawModel(nn.Module):
    """Trained module with its input and output steps, which form a single graph that can be exported.

    For a table, the module accepts raw columns ``[b, p]`` float64, with codes for levels and NaN for missing cells.
    Otherwise it accepts samples ``[b, *shape]``, which are int64 tokens for sequences and floats for other data. A
    model trained on bytes also accepts bytes.

    If a model was trained on a table without imputation, its outputs for rows with missing cells or unknown levels are
    NaN.

    The module returns class probabilities ``[b, C]`` or, if there is a label per position, ``[b, L, C]``. If samples
    have several labels, it returns the probability of each label, ``[b, k]``. For numeric targets, it returns the
    predicted values ``[b, k]`` of a regression in the targets' units, or the predicted mean ``[b, 1]`` of a count. For
    a survival task, it returns the probability ``[b, 1]`` that the event occurs by the horizon. If there is no horizon,
    it returns the log of the hazard relative to the baseline.

    Args:
        module: trained module.
        facts: facts about the module's training data.
        fitted: values for preparing a table's columns ``[p, .]`` (see `fedloom.data.tables.Table.fit`).
        dtype: dtype of the module.
        calibration: slope and intercept ``[2]`` that recalibrate the module's logits. If None, logits are unchanged.
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
        self.complete = facts.table is not None and not facts.table.impute
        if facts.table is not None:
            assert fitted is not None
            self.before: nn.Module = facts.table.encoder(fitted)
        else:
            self.before = nn.Identity() if facts.vocabulary else Scaling(facts, dtype)
        self.takes = torch.int64 if facts.vocabulary else dtype

    def forward(self, samples: Tensor) -> Tensor:
        """Return probabilities or predicted values for raw samples."""
        return self.convert_outputs(self.outputs(samples))

    def outputs(self, samples: Tensor) -> Tensor:
        """Compute the module's outputs ``[b, k]`` for raw samples (or ``[b, L, k]`` with a label per position)."""
        out: Tensor = self.module(self.before(samples).to(self.takes))
        if self.complete:
            out = torch.where(samples.isnan().any(1, keepdim=True), torch.nan, out)
        return out if self.line is None else recalibrate(out, self.line)

    def convert_outputs(self, out: Tensor) -> Tensor:
        """Convert the module's outputs to probabilities or values."""
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
    """Layer that divides bytes by 255 and leaves floats unchanged.

    The layer then subtracts the mean and divides by the standard deviation.
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
        """Scale samples ``[b, *shape]`` as the model expects.

        Raises:
            DataError: the samples are bytes but the model was trained on floats, or the samples are other integers but
                it was trained on bytes.
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


def decide_labels(facts: InputSpec, scores: NDArray[np.float64], threshold: float | None = None) -> NDArray[Any]:
    """Return predictions for rows ``[N]``, or for positions ``[N, L]``, given probabilities or values.

    If rows have several labels, each label's prediction is 1 or 0, ``[N, k]``.

    Args:
        facts: facts about the data.
        scores: probabilities or values, as `RawModel` returns them.
        threshold: minimum probability for predicting the second of two classes, or a label. If None, predict the more
            probable class, or labels with a probability of at least 0.5.
    """
    if facts.task == "multilabel":
        return (scores >= (0.5 if threshold is None else threshold)).astype(int)
    if not facts.classed:
        return scores[:, 0] if scores.shape[1] == 1 else scores
    places = scores.argmax(-1) if threshold is None else (scores[..., 1] >= threshold).astype(int)
    labels: NDArray[Any] = np.array(facts.classes)[places]
    return labels


def check_threshold(facts: InputSpec, threshold: float | None) -> None:
    """Raise an error if a threshold has no effect or is not a probability.

    Raises:
        ConfigError: the threshold is not between 0 and 1, or the task is neither binary nor multilabel.
    """
    if threshold is not None and facts.task not in ("binary", "multilabel"):
        raise ConfigError(f"a threshold decides between two classes, but this is a {facts.task} task. Omit `threshold`")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ConfigError(f"threshold must be a probability from 0 to 1, got {threshold}")
