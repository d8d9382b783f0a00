"""Patient groups at sites: sums for the metrics over all sites, and each site's own metrics.

A site publishes a group only if its published numbers do not reveal any set of rows smaller than the agreed-upon
minimum (`fedloom.data.groups.publishable_groups`). With secure sums, the server receives sums over all sites, but no
individual site's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.analyses import Bounds
from fedloom.analyses.patients import GroupScore
from fedloom.data import Federation
from fedloom.data.groups import get_subjects, group_names, make_group_masks, publishable_groups, row_kind_counts
from fedloom.data.input_spec import InputSpec
from fedloom.engine.clients.scores import Pass
from fedloom.engine.job import Job
from fedloom.errors import ConfigError
from fedloom.lab.experiment import Experiment
from fedloom.rundir import FEDERATION_CLIENT, SAMPLES_FIGURE
from fedloom.tasks.sums import compute_metrics, compute_sums, metric_names, sum_count
from fedloom_sites.deploy.analyses import AnswerForm
from fedloom_sites.deploy.protocol.envelope import MAX_FIGURES
from fedloom_sites.deploy.secure.protocol import MIN_SITES, Integers, ProtocolBroken
from fedloom_sites.deploy.secure.vectors import SUMMED_MODELS

SCORED_MODELS = ("global", "hybrid", "personal")
SUM_STEP, MAX_SUM = 2.0**-24, 2.0**64
"""Sums are sent under masks, as multiples of the step. A site with a larger sum sends none of its scores."""
Group = tuple[str, str]
"""Kind of a model, together with the name of a group."""
Cells = Mapping[Group, tuple[Tensor, Mapping[str, float]]]
"""Sums ``[S]`` and metrics of one site, keyed by group."""


def agreed_groups(experiment: Experiment, samples: InputSpec) -> list[tuple[str, str]]:
    """Return the column or threshold that defines each group, and the group's name, the same on all machines.

    Raises:
        ConfigError: no levels were agreed on for a column.
    """
    levels = {} if samples.table is None else {c.name: c.names for c in samples.table.columns if c.names}
    agreement = getattr(experiment.source, "agreement", None)
    levels |= {} if agreement is None else agreement.levels
    choice = experiment.find("groups")
    return [] if choice is None else group_names(choice.by, levels)


def min_rows(experiment: Experiment) -> int:
    """Return the minimum number of rows, and of rows per class or event, for a published group."""
    choice = experiment.find("groups")
    return 0 if choice is None else int(choice.min_rows)


def check_groups(job: Job, names: Sequence[tuple[str, str]]) -> None:
    """Raise an error if the groups do not fit in a message.

    Raises:
        ConfigError: there are too many groups. The message states the number.
    """
    if (count := len(GroupSums(job, names, 0).names)) > MAX_FIGURES // 2:
        raise ConfigError(
            f"the analysis groups has {len(names)} groups, and their {count} numbers do not fit in a message. Use "
            "bounds, or choose columns with fewer levels"
        )


class GroupSums:
    """Sums and metrics of a run's groups.

    Args:
        job: the run.
        names: column or threshold that defines each group, and the name of the group.
        least: see `min_rows`.
    """

    def __init__(self, job: Job, names: Sequence[tuple[str, str]], least: int) -> None:
        self._task, self._least = job.oracle.task, least
        self.groups = [name for _, name in names]
        choices = list(dict.fromkeys(choice for choice, _ in names))
        self._choices, self._part = choices, [choices.index(choice) for choice, _ in names]
        self._width = sum_count(self._task) if names else 0
        self._keys = [(kind, group) for kind in SCORED_MODELS for group in self.groups]
        self._summed = [key for key in self._keys if key[0] in SUMMED_MODELS]
        largest = torch.full((len(self._summed) * self._width,), MAX_SUM)
        self._form = AnswerForm(Bounds.between(-largest, largest, SUM_STEP), job.n)
        self.length = self._form.length if names else 0

    @property
    def names(self) -> set[str]:
        """Names of all numbers that `as_metrics` returns."""
        figures = [*(f"{k}" for k in range(self._width)), *metric_names(self._task)] if self.groups else []
        return {
            _figure_name(kind, k, figure)
            for kind in SCORED_MODELS
            for k in range(len(self.groups))
            for figure in figures
        }

    def members(self, fed: Federation, client: int) -> dict[str, Tensor]:
        """Return a bool ``[N]`` mask of a site's test samples for each group that the site may publish.

        A group that the site is not allowed to publish is omitted.

        Raises:
            ConfigError: the data lack a column of the groups.
        """
        index = fed.indices("test", client)
        here = make_group_masks(fed.data, self._choices)
        nobody = torch.zeros(len(index), dtype=torch.bool)
        inside = torch.stack([here[name][index] if name in here else nobody for name in self.groups])
        units = get_subjects(fed.data)
        units = None if units is None else units[index]
        counts = row_kind_counts(fed.data.task, fed.targets(index), self._task.outputs, units)
        is_open = publishable_groups(inside, self._part, counts, self._least)
        return {name: rows for name, rows, shown in zip(self.groups, inside, is_open, strict=True) if shown}

    def site(self, passes: Mapping[str, Pass], members: Mapping[str, Tensor], fed: Federation) -> Cells:
        """Return the sums ``[S]`` and metrics of every model and group with samples at this site.

        If an output of the model is not finite, the sums are NaN and there are no metrics.

        Args:
            passes: outputs of each kind of model for the site's test part.
            members: see `members`.
            fed: samples of the site.
        """
        cells = dict[Group, tuple[Tensor, Mapping[str, float]]]()
        for kind, (outputs, index, _) in passes.items():
            y = fed.targets(index)
            for name, inside in members.items():
                z, owner = outputs[inside], torch.zeros(int(inside.sum()), dtype=torch.long)
                if not len(z):
                    continue
                cells[kind, name] = (torch.full((self._width,), torch.nan, dtype=torch.float64), {})
                if bool(z.isfinite().all()):
                    figures = self._task.metrics(z, y[inside], owner, 1)
                    cells[kind, name] = (
                        compute_sums(self._task, z, y[inside]),
                        {metric: float(value) for metric, value in figures.items() if bool(value.isfinite())},
                    )
        return cells

    # ----------------------------------------------------------------------------------------------- site by site

    def as_metrics(self, cells: Cells) -> dict[str, float]:
        """Convert a site's sums and metrics to the values in a message."""
        numbers = dict[str, float]()
        for (kind, group), (sums, figures) in cells.items():
            if bool(sums.isnan().any()):
                continue
            place = self.groups.index(group)
            named = {**{f"{k}": float(number) for k, number in enumerate(sums)}, **figures}
            numbers |= {_figure_name(kind, place, name): number for name, number in named.items()}
        return numbers

    def scores(self, replies: Mapping[int, Mapping[str, float]]) -> Iterator[GroupScore]:
        """Yield the scores of every group, for all sites together and for each site, from numbers keyed by client."""
        for kind, group in self._keys:
            place, total = self.groups.index(group), torch.zeros(self._width, dtype=torch.float64)
            rows: list[GroupScore] = []
            for client, numbers in replies.items():
                sums = [numbers.get(_figure_name(kind, place, f"{k}"), np.nan) for k in range(self._width)]
                if not np.isfinite(sums).all() or sums[0] < self._least:
                    continue
                total += torch.tensor(sums, dtype=torch.float64)
                rows.append((client, kind, group, SAMPLES_FIGURE, sums[0]))
                names = metric_names(self._task)
                figures = {name: numbers[key] for name in names if (key := _figure_name(kind, place, name)) in numbers}
                rows += [(client, kind, group, name, number) for name, number in figures.items()]
            yield from self._merge_sites(kind, group, total)
            yield from rows

    # ------------------------------------------------------------------------------------------------ under masks

    def bits(self, members: Mapping[str, Tensor]) -> int:
        """Encode as bits which groups a site publishes.

        A group without rows is treated as published, and its sums are zero.
        """
        return sum((name in members) << k for k, name in enumerate(self.groups))

    def summed(self, bits: Sequence[int], threshold: int) -> list[bool]:
        """Return a flag for each group: True if the group is summed.

        For any set of at least ``threshold`` sites, every sum over a group must cover at least `MIN_SITES` sites. The
        same holds for the difference between the total and the sums over all groups of a column.

        Args:
            bits: bit fields sent by the requested sites.
            threshold: minimum number of sites in a sum.
        """
        lacking = [sum(not one >> k & 1 for one in bits) for k in range(len(self.groups))]
        is_summed = [threshold - lack >= MIN_SITES for lack in lacking]
        for part in {*self._part}:
            places = [k for k, choice in enumerate(self._part) if choice == part]
            with_rest = sum(any(not one >> k & 1 for k in places) for one in bits)
            if all(is_summed[k] for k in places) and 0 < with_rest < MIN_SITES + len(bits) - threshold:
                # without this group, the difference to the total may contain samples of every site
                is_summed[max(places, key=lambda k: lacking[k])] = False
        return is_summed

    def encode(self, cells: Cells, summed: Sequence[bool]) -> Integers | None:
        """Return a site's sums as integers, or None if a sum is NaN or too large.

        The sums are zero for a group that is not summed or has no sample at this site. No sum is clipped: if a model
        could clip the sums of all sites except one, the total would reveal the sums of that site.
        """
        if not self.length:
            return np.zeros(0, dtype=np.uint64)
        wanted = {name for name, is_summed in zip(self.groups, summed, strict=True) if is_summed}
        nothing = torch.zeros(self._width, dtype=torch.float64)
        rows = [cells[key][0] if key in cells and key[1] in wanted else nothing for key in self._summed]
        values = torch.stack(rows).flatten()
        return self._form.encode(values, 0, 0) if bool((values.abs() <= MAX_SUM).all()) else None

    def decode(self, total: Integers, count: int) -> list[GroupScore]:
        """Return the scores by group, over all sites together.

        Raises:
            ProtocolBroken: a sum is out of range.
        """
        if not self.length:
            return []
        values = self._form.decode(total, count)[0].view(len(self._summed), self._width)
        if bool((values[:, :1] < 0).any()):
            raise ProtocolBroken("the number of samples in a group is negative: a mask was not removed")
        rows = zip(self._summed, values, strict=True)
        return [score for (kind, group), sums in rows for score in self._merge_sites(kind, group, sums)]

    def _merge_sites(self, kind: str, group: str, sums: Tensor) -> Iterator[GroupScore]:
        figures = compute_metrics(self._task, sums)
        if figures or float(sums[0]) > 0:
            yield FEDERATION_CLIENT, kind, group, SAMPLES_FIGURE, float(sums[0])
        yield from ((FEDERATION_CLIENT, kind, group, name, figure) for name, figure in figures.items())


def _figure_name(kind: str, place: int, figure: str) -> str:
    return f"group:{kind}:{place}:{figure}"
