"""Federation: a data set divided among clients. It stores lists of indices instead of copies of samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.data.subjects.cut import find_shared_subject
from fedloom.errors import DataError, PartitionError, direction_in, write_singular
from fedloom.hints import unknown_name_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedloom.data.dataset import Dataset

DATA_PARTS = ("train", "validation", "test")


class Split(NamedTuple):
    """One split of all clients' samples, such as the training set: client i has ``index[offsets[i]:offsets[i + 1]]``.

    index: positions in the data set [total] (int64). offsets: boundaries between clients [n + 1] (int64).
    """

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients, each of which has a training, a validation and a test set.

    Args:
        data: data set that contains the samples of all clients.
        parts: one `Split` each for ``"train"``, ``"validation"`` and ``"test"``.
        names: names of the clients.
        test: positions of the samples in a common test set. None if the common test set is the union of the test sets
            of all clients.
        partition: description of the partition (its kind and fields), which is recorded.
        seed: seed of the split.
        groups: planted group of each client [n] (int64), if the partition creates groups.
        notes: notes on the split, which a report shows.
        dtype: data type of the values that `fetch` returns.
        noise: standard deviation [N, c] (for c channels, or 1 for all features) of Gaussian noise that is drawn again
            whenever a step uses a sample, in the units of `data.x`. None if there is no noise.

    Raises:
        PartitionError: a client has no training samples.
        DataError: positions are outside the data, offsets are inconsistent, `prepare` has not been applied to the data
            or to a sample in a part, or a subject is in two parts.
    """

    data: Dataset
    parts: Mapping[str, Split]
    names: tuple[str, ...]
    test: Tensor | None = None
    partition: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    groups: Tensor | None = None
    notes: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    noise: Tensor | None = None
    _flat: Tensor = field(init=False, repr=False)
    _affine: tuple[Tensor, Tensor] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.data.prepare is not None:
            raise DataError(
                f"{self.data.name}: its scaling is fitted per client. Use a partition to build the federation"
            )
        if disguised := direction_in(self.data.name, *self.names):
            raise DataError(f"clients: {disguised}")
        if absent := [part for part in DATA_PARTS if part not in self.parts]:
            raise DataError(
                f"parts lacks {' and '.join(map(repr, absent))}. Give every part a Split. A part without samples is "
                f"Split(torch.zeros(0, dtype=torch.long), torch.zeros({self.n + 1}, dtype=torch.long))"
            )
        for part in DATA_PARTS:
            index, offsets = self.parts[part]
            steps = offsets.diff()
            fits = len(offsets) == self.n + 1 and int(offsets[0]) == 0 and int(offsets[-1]) == len(index)
            if not fits or bool((steps < 0).any()):
                raise DataError(f"{part}: offsets must be {self.n + 1} values that increase from 0 to {len(index)}")
            held = index if index.stride(0) else index[:1]  # a broadcast number is checked once
            if len(held) and (int(held.min()) < 0 or int(held.max()) >= len(self.data)):
                raise DataError(f"{part}: positions must be from 0 to {len(self.data) - 1}")
            self._check_ready(part, held)
        if self.test is not None:
            self._check_ready("the common test set", self.test)
        self._check_subjects()
        empty: list[int] = (self.sizes("train") == 0).nonzero().flatten().tolist()
        if empty or self.n == 0:
            who = f"clients {empty[:8]} have no training samples" if empty else "there are no clients"
            raise PartitionError(
                f"{who}. Every client needs at least one training sample. Use fewer clients or more data"
            )
        object.__setattr__(self, "_flat", self.data.x.reshape(len(self.data), -1))
        object.__setattr__(self, "_affine", self._scale_and_shift())

    def _check_ready(self, part: str, index: Tensor) -> None:
        """Raise an error if a part contains samples whose features have not been prepared.

        Raises:
            DataError: there are such samples.
        """
        if self.data.ready is None:
            return
        bare = index[~self.data.ready.to(index.device)[index]]
        if len(bare):
            raise DataError(
                f"{self.data.name}: the columns of {len(bare)} samples in {part} are not scaled for any client (first: "
                f"sample {int(bare[0])}). Let the partition assign them to a client, in Draw.dealt or Draw.test"
            )

    def _check_subjects(self) -> None:
        """Raise an error if a subject is in two splits, even at different clients.

        The common test set is part of the test split here.

        Raises:
            DataError: a subject is in two parts.
        """
        design = self.data.design
        if design is None or design.subject is None:
            return
        parts = {part: self.parts[part].index.cpu().numpy() for part in DATA_PARTS}
        if self.test is not None:
            parts["test"] = np.concatenate([parts["test"], self.test.cpu().numpy()])
        if (mixed := find_shared_subject(design, parts)) is not None:
            first, second, row = mixed
            raise DataError(
                f"{self.data.name}: a subject ({design.subject_name!r}) is in both the {first} set and the "
                f"{second} set (row {row}). Keep each subject in the same split at all clients, mark all rows of "
                "a subject in "
                "the same way, or let a partition create the parts (pool = true for data with an official test set). "
                "If every client numbers its subjects from 1, put the client's name before the number"
            )

    @classmethod
    def create(cls, clients: Any, **options: Any) -> Federation:
        """Create a federation from clients with their samples (see `fedloom.data.clients.as_federation`).

        >>> import numpy as np
        >>> x = np.eye(4)
        >>> north, south = ((x, [0, 1, 0, 1]), (x, [1, 1, 0, 0])), ((x, [1, 0, 1, 0]), (x, [0, 0, 1, 1]))
        >>> fed = Federation.create({"north": north, "south": south})
        >>> fed.names, fed.sizes("test").tolist()
        (('north', 'south'), [4, 4])
        """
        if isinstance(clients, cls) and not options:
            return clients
        from fedloom.data.clients import as_federation  # imported here because clients imports Federation

        return as_federation(clients, **options)

    def __repr__(self) -> str:
        sizes = {part: self.sizes(part) for part in DATA_PARTS}
        held = ", ".join(f"{int(held.sum()):,} {part}" for part, held in sizes.items())
        least, most = int(sizes["train"].min()), int(sizes["train"].max())
        how = f" by {self.partition['kind']}" if "kind" in self.partition else ""
        each = f"{least} to {most} training samples each"
        return f"Federation({self.n:,} clients{how}, {held} samples, {each}, of {self.data!r})"

    @property
    def remarks(self) -> list[str]:
        """Notes for a run's report on the data and their split, without duplicates."""
        return list(dict.fromkeys(map(write_singular, (*self.notes, *self.data.notes))))

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.names)

    @property
    def device(self) -> torch.device:
        """Device that stores the samples."""
        return self.data.x.device

    def _split(self, part: str) -> Split:
        if part not in self.parts:
            raise unknown_name_error("part", part, DATA_PARTS)
        return self.parts[part]

    def sizes(self, part: str = "train") -> Tensor:
        """Return the number of samples of each client in a part, ``[n]`` (int64)."""
        return self._split(part).offsets.diff()

    def indices(self, part: str, client: int) -> Tensor:
        """Return the positions of a client's part in the data set, as a view [k] (int64)."""
        index, offsets = self._split(part)
        return index[int(offsets[client]) : int(offsets[client + 1])]

    def gather(self, part: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of several clients' parts, concatenated [total] (int64), and the part sizes [m]."""
        index, offsets = self._split(part)
        ids = ids.to(offsets.device)
        sizes = offsets[ids + 1] - offsets[ids]
        first = torch.repeat_interleave(offsets[ids] - sizes.cumsum(0) + sizes, sizes)
        return index[first + torch.arange(len(first), device=first.device)], sizes

    def owner(self, part: str) -> Tensor:
        """Return the client of each entry in ``parts[part].index``, [total] (int64)."""
        return torch.repeat_interleave(torch.arange(self.n, device=self.device), self.sizes(part))

    def fetch(self, index: Tensor) -> Tensor:
        """Return normalized samples ``[..., *shape]`` at the positions `index`, as `dtype` (tokens as int64)."""
        return self._scale(self._flat, index.reshape(-1)).view(*index.shape, *self.data.shape)

    def fetch_anew(self, index: Tensor, rng: torch.Generator) -> Tensor:
        """Return samples as `fetch` does, but with new random changes drawn with ``rng`` if the data reread samples."""
        if self.data.rereading is None:
            return self.fetch(index)
        x = self.data.x[index].cpu()
        self.data.rereading.read_into(x, index.cpu(), rng)
        rows = torch.arange(len(x), device=self.device)
        return self._scale(x.to(self.device).flatten(1), rows).view(-1, *self.data.shape)

    def _scale(self, flat: Tensor, where: Tensor) -> Tensor:
        """Return normalized rows ``[k, p]`` of the stored samples ``[N, p]``."""
        if self._affine is not None and flat.dtype == torch.uint8 and flat.device.type == "cpu":
            from fedloom import kernels

            out = torch.empty(len(where), flat.shape[1], dtype=self.dtype)
            kernels.gather(flat.numpy(), where.numpy(), *(part.numpy() for part in self._affine), out.numpy())
        else:
            out = torch.index_select(flat, 0, where)
            out = out.long() if self.data.vocabulary else out.to(self.dtype)
            if self._affine is not None:
                scale, shift = self._affine
                torch.addcmul(shift, out, scale, out=out)
        return out

    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all stored samples [N, p], and the scale and shift [p] that convert them to what `fetch` returns."""
        if self._affine is not None:
            return (self._flat, *self._affine)
        one = torch.ones(self._flat.shape[1], dtype=self.dtype, device=self.device)
        return self._flat, one, one * 0

    def spread(self, index: Tensor) -> Tensor | None:
        """Return the standard deviation ``[k, *shape]`` of the noise for samples `index` ``[k]``, or None if 0."""
        if self.noise is None:
            return None
        level = self.noise[index].to(self.dtype)
        level = level.repeat_interleave(self._flat.shape[1] // level.shape[1], 1)
        if self._affine is not None:
            level *= self._affine[0]
        return level.view(-1, *self.data.shape)

    def targets(self, index: Tensor) -> Tensor:
        """Return targets at positions `index` [..., b]: classes [..., b] (int64), or numbers [..., b, k] of `dtype`.

        If each position of a sequence has a label, the labels of all sequences are concatenated, [..., b * length],
        with -1 for positions without a label.
        """
        y = torch.index_select(self.data.y, 0, index.reshape(-1))
        if not self.data.classed:
            return y.to(self.dtype).view(*index.shape, y.shape[1])
        if self.data.each:
            return y.view(*index.shape[:-1], index.shape[-1] * y.shape[1])
        return y.view(index.shape)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Federation:
        """Return the federation with its samples and index lists on a different device.

        Its `fetch` method returns values of type `dtype`.
        """
        data, d = self.data, device
        moved = replace(
            data,
            x=data.x.to(d),
            y=data.y.to(d),
            mean=None if data.mean is None else data.mean.to(d),
            std=None if data.std is None else data.std.to(d),
            test=None if data.test is None else data.test.to(d),
            columns={k: v.to(d) for k, v in data.columns.items()},
            users=None if data.users is None else data.users.to(d),
            ready=None if data.ready is None else data.ready.to(d),
        )
        return replace(
            self,
            data=moved,
            parts={k: Split(s.index.to(d), s.offsets.to(d)) for k, s in self.parts.items()},
            test=None if self.test is None else self.test.to(d),
            groups=None if self.groups is None else self.groups.to(d),
            dtype=dtype or self.dtype,
            noise=None if self.noise is None else self.noise.to(d),
        )

    def pooled(self) -> Federation:
        """Return a federation for centralized training, with a single client that has the parts of all clients."""
        parts = {k: Split(s.index, s.offsets[[0, -1]]) for k, s in self.parts.items()}
        return replace(self, parts=parts, names=("all",), groups=None)

    def rarity(self) -> Tensor:
        """Return the rarity of each client's labels ``[n]``: the mean of -log p, where p is the frequency of a label.

        The result is 0 for clients without samples, and for all clients if there are no classes.
        """
        counts = self.class_counts().double().cpu()
        share = counts.sum(0) / counts.sum().clamp(min=1)
        rare = torch.where(share > 0, -share.clamp(min=1e-300).log(), 0.0)
        return (counts @ rare) / counts.sum(1).clamp(min=1)

    def class_counts(self, part: str = "train") -> Tensor:
        """Return the number of samples (or labeled positions) of each class at each client, ``[n, C]`` (int64).

        A sample with several labels is counted once for each label.
        """
        classes = len(self.data.classes)
        if not classes:
            return torch.zeros(self.n, 0, dtype=torch.int64)
        owner, y = self.owner(part), self.targets(self.parts[part].index)
        if not self.data.classed:
            return y.new_zeros(self.n, classes).index_add(0, owner, y.clamp(min=0)).long()
        if self.data.each:
            owner = owner.repeat_interleave(self.data.y.shape[1])[y >= 0]
            y = y[y >= 0]
        return torch.bincount(owner * classes + y, minlength=self.n * classes).view(self.n, classes)

    def label_counts(self, part: str = "train") -> Tensor:
        """Return the number of samples without and with each label at each client, ``[n, k, 2]``, in a multilabel task.

        Unknown labels are not counted.
        """
        owner, y = self.owner(part), self.targets(self.parts[part].index)
        values = torch.stack([y == 0, y == 1], -1).long()
        return values.new_zeros(self.n, *values.shape[1:]).index_add(0, owner, values)

    def skew(self, part: str = "train") -> dict[str, Any]:
        """Return measures of client heterogeneity. Each measure is a list with one value per client.

        The measure ``sizes`` always exists. If there are classes, each client's labels are compared with the labels of
        all clients: ``emd`` (sum of absolute differences, in [0, 2]; Zhao et al. 2018, Federated learning with non-IID
        data, Eq. 8), ``js`` (Jensen-Shannon divergence, base 2, in [0, 1]) and ``effective_classes`` (exponential of
        the entropy, in [1, C]). A value is NaN if a client has no samples in the part.
        """
        out: dict[str, Any] = {"part": part, "sizes": self.sizes(part).tolist()}
        if not self.data.classes:
            return out
        counts = self.class_counts(part).double()
        p, q = counts / counts.sum(1, keepdim=True), counts.sum(0) / counts.sum()
        middle = (p + q) / 2
        entropy = torch.special.entr
        js = (entropy(middle).sum(1) - (entropy(p).sum(1) + entropy(q).sum()) / 2) / torch.log(torch.tensor(2.0))
        out["emd"] = (p - q).abs().sum(1).tolist()
        out["js"] = js.clamp_min(0).tolist()
        out["effective_classes"] = entropy(p).sum(1).exp().tolist()
        return out

    def _scale_and_shift(self) -> tuple[Tensor, Tensor] | None:
        """Return the scale and shift [p] that normalize stored values, or None if stored values are used unchanged.

        They express (x [/ 255] - mean) / std as x * scale + shift, where bytes are divided by 255.

        """
        data = self.data
        unit = 1 / 255 if data.x.dtype == torch.uint8 else 1.0
        if data.vocabulary:
            return None
        if data.mean is None and data.std is None and unit == 1.0:
            return None
        one = torch.ones(1, dtype=torch.float64, device=self.device)
        mean = one * 0 if data.mean is None else data.mean.double()
        std = one if data.std is None else data.std.double()
        scale, shift = torch.broadcast_tensors(unit / std, -mean / std)
        repeat = self._flat.shape[1] // len(scale)
        return scale.repeat_interleave(repeat).to(self.dtype), shift.repeat_interleave(repeat).to(self.dtype)
