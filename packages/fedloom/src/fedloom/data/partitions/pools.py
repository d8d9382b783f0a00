"""Samples that a partition can assign to clients, and the clients that the partition draws."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset
from fedloom.data.partitions.deal import Dealt, Ints, find_owners, group_by_owner
from fedloom.errors import Refused

CLIENT_FIELDS = ("noise", "anew", "relabel", "views", "groups")
"""Fields of a draw that contain one row per client, unless they are None."""


class Pool(NamedTuple):
    """Samples that a partition can assign to clients.

    Attributes:
        data: the complete data set.
        index: positions in the data set ``[k]`` (int64), excluding the official test set. If the data have subjects,
            only the last row of each subject is listed, and it represents all rows of this subject.
        y: class of each of these samples ``[k]``. None if the task is a regression, or if each position has its own
            label.
    """

    data: Dataset
    index: Ints  # type: ignore[assignment]
    y: Ints | None

    @classmethod
    def create(cls, data: Dataset, index: Ints) -> Pool:
        """Select the samples at the given positions."""
        return cls(data, index, None if data.labels is None else data.labels.numpy()[index])

    def __len__(self) -> int:
        return len(self.index)

    def labels(self, kind: str) -> Ints:
        """Return the classes of the samples, for a partition that needs them.

        Raises:
            ConfigError: the task is a regression, or each position has its own label.
        """
        if self.y is None:
            what = "has a label per position" if self.data.each else f"is a {self.data.task}"
            raise Refused(
                f"{kind} splits by class, but {self.data.name} {what}. Use iid, quantity-skew, "
                "by-column, or natural if the data have natural clients"
            )
        return self.y

    def group_by_class(self, kind: str, rng: np.random.Generator) -> list[Ints]:
        """Return the positions of each class's samples in the data set, in random order."""
        labels, order = self.labels(kind), rng.permutation(len(self))
        order = order[np.argsort(labels[order], kind="stable")]
        counts = np.bincount(labels, minlength=len(self.data.classes))
        return np.split(self.index[order], np.cumsum(counts)[:-1])


class Draw(NamedTuple):
    """Assignment of samples to n clients, as drawn by a partition.

    Attributes:
        dealt: samples that each client receives, before they are divided into parts.
        test: samples in the test set of each client, if the partition itself chooses them. In this case, the option
            ``test`` has no effect. These samples are changed, scaled and encoded in the same way as the samples in
            ``dealt``.
        common: positions ``[k]`` (int64) of a common test set for global models. These samples must
            not belong to any client, and their table columns are scaled as for a new client. If None, the data set's
            own test set is used.
        noise: standard deviation of Gaussian noise on the features of each client, ``[n, 1]`` or (per channel) ``[n,
            c]``.
        anew: mask ``[n]`` of the clients whose noise is drawn again in every step.
        relabel: new class for each class at each client, ``[n, C]``.
        views: number of quarter turns of each client's images, followed by 1 if the images are inverted, ``[n, 2]``.
        groups: planted group of each client ``[n]``.
        names: name of each client. If it is empty, the clients are named by numbers.
        notes: notes for the report.
    """

    dealt: Dealt
    test: Dealt | None = None
    common: Ints | None = None
    noise: NDArray[np.float64] | None = None
    anew: NDArray[np.bool_] | None = None
    relabel: Ints | None = None
    views: Ints | None = None
    groups: Ints | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def keep_trained(self, trains: NDArray[np.bool_]) -> Draw:
        """Return the draw restricted to the clients that have training rows, given by the mask ``trains [n]``.

        The rows of all other clients become a common test set.
        """
        owner, n, dealt = find_owners(self.dealt), len(trains), self.dealt.index
        number, of = np.cumsum(trains) - 1, int(trains.sum())
        kept = {name: None if (v := getattr(self, name)) is None else v[trains] for name in CLIENT_FIELDS}
        outside = dealt[~trains[owner]]
        shown = ", ".join(self.names[k] if self.names else str(k) for k in np.flatnonzero(~trains)[:8].tolist())
        note = (
            f"{n - of} of {n} clients have only test rows ({shown}). They do not train, and their {len(outside)} "
            "rows form the common test set for global models, with the scaling of a new client"
        )
        return self._replace(
            dealt=group_by_owner(dealt[trains[owner]], number[owner[trains[owner]]], of),
            common=outside if self.common is None else np.concatenate([self.common, outside]),
            names=tuple(name for name, train in zip(self.names, trains, strict=False) if train),
            notes=(*self.notes, note),
            **kept,
        )
