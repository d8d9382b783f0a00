"""Conversion of results to the integer vectors that sites mask, based on facts that the server and the site both know.

A vector contains an upload (its concatenated fields, followed by work counts), the site's scores, or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data import DATA_PARTS
from fedloom.engine.clients.chunk import ClientOutput
from fedloom.engine.clients.uploads import KeptField, make_upload_fields
from fedloom.engine.job import Job
from fedloom.engine.privacy import find_accounted_noise
from fedloom.seeds import generator
from fedloom_sites.deploy.noise import SharedMean
from fedloom_sites.deploy.protocol.lengths import is_absolute_model
from fedloom_sites.deploy.secure import integers
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.protocol import Integers, ProtocolBroken
from fedloom_sites.deploy.settings import NormBound, get_norm_bound
from fedloom_sites.transport.forms import score_names

WORK_COUNTS = 3
"""Number of work counts at the end of an upload."""
NUMBERS_PER_SCORE = 3
SCORE_BITS, MAX_SCORE_TOTAL = 16, 2.0**40
"""Scores times numbers of samples are summed as multiples of 2^-16, each of at most 2^40. The sum of 100 sites is below
2^63 steps."""
RATIO_STEP = 2.0**-3
"""Rounding step of a score times its number of samples, for scores that are not means over samples.

Such a score is a ratio of counts, or a root. With a finer step, a sum over few sites would determine the value of each
site.
"""
MEAN_SCORES = {"loss", "brier", "mae", "deviance"}
"""Scores that are means over samples, so that their sums are sums over all sites' samples."""
UNSUMMED_SCORES = {"calibration_slope", "calibration_intercept"}
"""Scores that a model can make undefined at some sites. They are never summed."""
SUMMED_MODELS = ("global", "personal")
"""Models whose scores are summed. The hybrid model of a site is one of these two, so the difference between the sum of
its scores and the sum of the global model's scores would cover only the sites that use their personal model."""
MIN_SCORED_CLASS_SAMPLES = 5
"""Minimum number of samples of a class that a site must have so that metrics of this class are summed.

The recall of a class with a single sample is 0 or 1. A sum over sites of different sizes, which weights each recall by
the size of its site, would then show the recall at every site.
"""
PROBE_DISTANCE = 2.0
"""Shift toward one prediction in the artificial outputs that probe a site's metrics. The outputs
themselves vary by less than 1."""


class UploadVector:
    """Upload encoded as integers: the concatenated fields, followed by the work counts.

    Args:
        job: run.
        idle: upload ``[1, .]`` that determines the widths of the fields.
    """

    def __init__(self, job: Job, idle: object) -> None:
        self._job, self._fields = job, make_upload_fields(job)
        self._whole = {name: getattr(idle, name).shape[1] for name in self._fields}
        masks = job.messages.masks
        self._widths = {n: int(masks[n].sum()) if n in masks else width for n, width in self._whole.items()}
        aggregator = job.setting.aggregator
        self.is_counted = (
            find_accounted_noise(job.setting.upload_transform, aggregator) is None
        )  # a counter has no noise
        self.length = sum(self._widths.values()) + WORK_COUNTS + self.is_counted
        self._noise = aggregator if isinstance(aggregator, SharedMean) and aggregator.sigma else None

    def encode(
        self, output: ClientOutput, share: float, mass: float, before: dict[str, Tensor] | None, *,
        is_neutral: bool = False, is_cut: bool = False,
    ) -> tuple[Integers, dict[str, Tensor], int]:  # fmt: skip
        """Return a site's vector, its rows in the server's sum after adding it, and the number of clipped values.

        Args:
            output: the site's output.
            share: the site's weight in the cohort's mean, from -1 to 1.
            mass: the site's weight in sums that are kept or accumulated over rounds, from 0 to 1.
            before: rows that the sum currently contains for the site, as integers. None before the site's first upload.
            is_neutral: True for a neutral upload. The site then keeps its state, so no quantity that depends on a state
                changes.
            is_cut: True if the upload was scaled down because its norm was too large.
        """
        work = output.work[0].numpy().view(np.uint64)
        if self._noise is not None:
            row = np.concatenate([self._select_sent(name, getattr(output.upload, name)[0]) for name in self._fields])
            counter = [np.array([is_cut], dtype=np.uint64)] if self.is_counted else []
            return np.concatenate([self._noise.share(row).view(np.uint64), work, *counter]), {}, 0
        parts, rows, clipped = [], dict[str, Tensor](), 0
        old = self.first_values(mass) if before is None else before
        weights = [torch.full((1, 1), factor, dtype=torch.float64) for factor in (share, mass)]
        for name, field in self._fields.items():
            if isinstance(field, KeptField):
                last = old[name].numpy().view(np.uint64)
                row = mass * self._select_sent(name, field.weighted(output.upload)[0])
                steps, cut = (last, 0) if is_neutral else integers.encode_integers(row)
                rows[name] = torch.from_numpy(steps.view(np.int64))
                parts.append(steps - last)
            elif field.kind.accumulates and is_neutral:
                parts.append(np.zeros(self._widths[name], dtype=np.uint64))
                cut = 0
            else:
                up = output.upload._replace(**{name: getattr(output.upload, name).double()})
                steps, cut = integers.encode_integers(self._select_sent(name, field.partial(up, None, *weights)))
                parts.append(steps)
            clipped += cut
        counter = [np.array([is_cut or clipped > 0], dtype=np.uint64)] if self.is_counted else []
        return np.concatenate([*parts, work, *counter]), rows, clipped

    def first_values(self, mass: float) -> dict[str, Tensor]:
        """Return a client's rows in the server's sum before the client's first upload, as integers for its ``mass``."""
        template, start_rows = self._job.kept.template, dict[str, Tensor]()
        for name, field in self._fields.items():
            if isinstance(field, KeptField):
                rows = type(template)(*[f[None] for f in template])
                steps, _ = integers.encode_integers(mass * self._select_sent(name, field.weighted(rows)[0]))
                start_rows[name] = torch.from_numpy(steps.view(np.int64))
        return start_rows

    def decode(self, total: Integers, count: int, scale: float) -> tuple[dict[str, Tensor], Tensor, int]:
        """Decode a sum into float64 fields ``[d]``, work counts ``[3]``, and the number of clipped uploads.

        Args:
            total: sum of the sites' vectors, without masks.
            count: number of sites in the sum.
            scale: divisor of the shares. Averaged fields are therefore multiplied by it.

        Raises:
            ProtocolBroken: the sum is out of range.
        """
        noise, clipped = self._noise, 0
        if self.is_counted:
            total, clipped = total[:-1], int(total[-1])
        numbers = (
            integers.decode_integers(total[:-WORK_COUNTS], count)
            if noise is None
            else noise.total(total[:-WORK_COUNTS], count)
        )
        work = torch.from_numpy(total[-WORK_COUNTS:].view(np.int64).copy())
        if bool((work < 0).any()):
            raise ProtocolBroken("the sum of work is negative: a mask was not removed")
        if clipped > count:
            raise ProtocolBroken(f"the counter of clipped uploads is out of range: {clipped} of {count} sites")
        sums = {}
        values = torch.from_numpy(numbers).split([*self._widths.values()])
        for (name, field), value in zip(self._fields.items(), values, strict=True):
            if noise is None and not isinstance(field, KeptField) and not field.kind.accumulates:
                value = value * scale
            mask = self._job.messages.masks.get(name)
            if mask is not None:
                value = torch.zeros(self._whole[name], dtype=torch.float64).masked_scatter(mask.cpu(), value)
            sums[name] = value
        return sums, work, clipped

    def _select_sent(self, name: str, value: Tensor) -> np.ndarray[Any, Any]:
        """Return the transmitted coordinates of a field."""
        masks = self._job.messages.masks
        numbers: np.ndarray[Any, Any] = (value[masks[name]] if name in masks else value).detach().cpu().double().numpy()
        return numbers


def check_length(job: Job, sums: Mapping[str, Tensor], count: int, scale: float, bound: NormBound | None) -> None:
    """Check that the norms of summed differences are within their bounds.

    For a change of a kept row, the bound is twice as large.

    Args:
        job: run on the server's side.
        sums: decoded fields of a sum.
        count: number of sites in the sum.
        scale: see `UploadVector.decode`.
        bound: agreed upper bound on the norm of one site's upload.

    Raises:
        ProtocolBroken: the norm of a summed difference exceeds its bound.
    """
    if isinstance(job.setting.aggregator, SharedMean):
        return
    for name, value in sums.items():
        kind, most = job.fields[name], count * get_norm_bound(bound, name)
        if is_absolute_model(kind, value.shape[0], job.oracle.layout.d) or not (kind.primary or value.shape[0] > 1):
            continue
        norm = float((value / (2 if kind.keeps else 1 if kind.accumulates else scale)).norm())
        if norm > most * (1 + 1e-6) + 1e-6:
            raise ProtocolBroken(
                f"the norm of the sum of {name} over {count} sites is {norm:.4g}, but it can be at most {most:.4g}"
            )


def count_earlier_bits(job: Job, groups: Sequence[str]) -> int:
    """Return the number of a site's bits for metrics and groups, which come before its bits for analyses."""
    return len(ScoreVector(job).figures) + len(groups)


class ScoreVector:
    """Scores encoded as three integers each: value times samples, 1 if present, and number of samples if present.

    All sums of scores use the same weights, namely the numbers of samples. A second sum with equal weights could
    isolate a site: for sites with 100, 200 and 200 samples, the two means determine the score of the first site.

    Args:
        job: run.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._parts = job, job.setting.evaluate.parts
        self._names = [key for key in score_names(job) if key[1] in ("", *self._parts) and key[0] in SUMMED_MODELS]
        self.figures = sorted({key[1:] for key in self._names if key[1]})
        self.length = NUMBERS_PER_SCORE * len(self._names)

    @property
    def parts(self) -> list[str]:
        """Part of the data whose samples weight each score, in the order of the vector."""
        return [part or "train" for _, part, _ in self._names]

    def find_definable_figures(self, client: int) -> int:
        """Return, as bits, which of the `figures` are defined by a site's samples for any model's predictions.

        Two artificial outputs are scored, one that predicts only the first class and one that predicts only the last
        class: AUROC needs both classes. A metric of one class needs `MIN_SCORED_CLASS_SAMPLES` samples of this class.
        The precision of a class depends on the predictions, so samples alone never define it.
        """
        job, task, bits = self._job, self._job.oracle.task, 0
        for part in self._parts:
            index, _ = job.eval_fed.gather(part, torch.tensor([client]))
            targets, owner = job.eval_fed.targets(index), torch.zeros(len(index), dtype=torch.long)
            draws = generator(0, purpose="definable")
            first = torch.rand(len(targets), task.outputs, generator=draws, dtype=torch.float64)
            last = first.clone()
            first[:, 0] += PROBE_DISTANCE if task.outputs > 1 else -PROBE_DISTANCE
            last[:, -1] += PROBE_DISTANCE
            probes = [task.metrics(outputs, targets, owner, 1) for outputs in (first, last)]
            rare = _find_rare_classes(targets, [*probes[0]])
            for k, (where, name) in enumerate(self.figures):
                is_summed = where == part and name not in UNSUMMED_SCORES and not name.endswith(rare)
                bits |= (is_summed and all(name in probe and bool(probe[name].isfinite()) for probe in probes)) << k
        return bits

    def encode(
        self, scores: Mapping[tuple[str, str], Mapping[str, Tensor]], sizes: Sequence[int], summed: Sequence[bool], *,
        weighs: bool = True,
    ) -> Integers:  # fmt: skip
        """Encode a site's scores as integers.

        A score that is not requested, missing or not finite is encoded as three zeros.

        Args:
            scores: values ``[1]``.
            sizes: numbers of training, validation and test samples.
            summed: for each of the `figures`, True if the metric is summed.
            weighs: True if a model's scores that do not belong to a part of the data are also summed. These scores are
                weighted by training samples.
        """
        columns, wanted = [], {key for key, of_enough in zip(self.figures, summed, strict=True) if of_enough}
        for model, part, name in self._names:
            value = float(scores.get((model, part), {}).get(name, torch.tensor(torch.nan)))
            has_score = ((part, name) in wanted if part else weighs) and np.isfinite(value)
            samples = self._samples(part, sizes)
            weighted = value * samples if has_score else 0.0
            if name not in MEAN_SCORES:
                weighted = np.rint(weighted / RATIO_STEP) * RATIO_STEP
            steps = int(np.rint(np.ldexp(weighted, SCORE_BITS)))
            columns.append(np.array([steps, *((1, samples) if has_score else (0, 0))], dtype=np.int64).view(np.uint64))
        return np.concatenate(columns)

    def is_whole(
        self, scores: Mapping[tuple[str, str], Mapping[str, Tensor]], sizes: Sequence[int], summed: Sequence[bool], *,
        weighs: bool = True,
    ) -> bool:  # fmt: skip
        """Return True if a site has scores, and all summed scores are finite and within the range of a sum.

        The arguments are the same as for `encode`. If a model could make a score constant, or not finite, at individual
        sites, the sum would reveal the score of the other sites.
        """
        wanted = {key for key, is_summed in zip(self.figures, summed, strict=True) if is_summed}
        return bool(scores) and all(
            bool((scores[model, part][name].abs() * self._samples(part, sizes) <= MAX_SCORE_TOTAL).all())
            for model, part, name in self._names
            if name in scores.get((model, part), {}) and ((part, name) in wanted if part else weighs)
        )

    def decode(self, total: Integers, count: int) -> dict[tuple[str, str, str], tuple[float, int]]:
        """Return every score that at least `MIN_SITES` sites have, as a mean over samples and a number of sites.

        Raises:
            ProtocolBroken: a sum is out of range.
        """
        rows = total.reshape(-1, NUMBERS_PER_SCORE).view(np.int64)
        values, counts = np.ldexp(rows[:, 0].astype(np.float64), -SCORE_BITS), rows[:, 1:]
        is_possible = (counts >= 0) & (counts[:, :1] <= count) & (np.abs(values) <= count * MAX_SCORE_TOTAL)[:, None]
        if not bool(is_possible.all()):
            raise ProtocolBroken("the sum of scores is out of range: a mask was not removed")
        return {
            key: (weighted / samples if samples else np.nan, int(sites))
            for key, weighted, (sites, samples) in zip(self._names, values, counts.tolist(), strict=True)
            if sites >= secure.MIN_SITES
        }

    def _samples(self, part: str, sizes: Sequence[int]) -> int:
        return sizes[DATA_PARTS.index(part)] if part in DATA_PARTS else sizes[0]


def _find_rare_classes(targets: Tensor, metrics: Sequence[str]) -> tuple[str, ...]:
    """Return the endings of metric names for classes with fewer than `MIN_SCORED_CLASS_SAMPLES` samples.

    Args:
        targets: classes ``[n]``, with -1 for none, or labels ``[n, c]``.
        metrics: names of all metrics. Metrics of one class, such as recall[ill], are in the order of the classes.
    """
    endings = [*dict.fromkeys(name[name.index("[") :] for name in metrics if "[" in name)]
    if not endings:
        return ()
    classes = targets[targets >= 0].long()
    counts = classes.bincount(minlength=len(endings)) if targets.dim() == 1 else (targets > 0).sum(0)
    return tuple(e for e, count in zip(endings, counts.tolist(), strict=False) if count < MIN_SCORED_CLASS_SAMPLES)
