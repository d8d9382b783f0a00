"""Partitions with equal sizes, unequal sizes or label skew: iid, quantity skew, shards, FedProx, Dirichlet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fedloom.data.partitions._base import Sized
from fedloom.data.partitions.deal import (
    Dealt,
    Floats,
    Ints,
    choose_each,
    compute_offsets,
    counts_from_shares,
    deal,
    group_by_owner,
    redraw_until_min_size,
    split_evenly,
)
from fedloom.data.partitions.pools import Draw, Pool
from fedloom.errors import PartitionError
from fedloom.seeds import numpy_generator


class Iid(Sized):
    """Clients of equal size, whose samples are drawn uniformly from all samples."""

    kind: ClassVar[str] = "iid"
    shuffle: bool = Field(
        default=True,
        description=(
            "shuffle samples before the split. If false, clients get contiguous blocks in the "
            "source's order (FLAME's code; skews labels if the source is sorted)"
        ),
    )

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Divide a randomly permuted set of samples into equal parts."""
        self.fits(pool)
        order = numpy_generator(seed, purpose="iid").permutation(len(pool)) if self.shuffle else slice(None)
        return Draw(Dealt(pool.index[order], compute_offsets(split_evenly(len(pool), self.clients))))


class QuantitySkew(Sized):
    """Dirichlet sizes with equal label distributions (NIID-Bench, section 4.1, "q ~ Dir(alpha)"; FLAME)."""

    kind: ClassVar[str] = "quantity-skew"
    aliases: ClassVar[Mapping[str, str]] = {"beta": "alpha"}
    alpha: float = Field(
        default=0.5, gt=0, description="concentration parameter, called beta in FLAME (Table III: 0.5)"
    )
    overlap: bool = Field(
        default=False,
        description=(
            "draw each client's samples from the whole data set, so clients can share samples (FLAME's code, "
            "with min_size 100)"
        ),
    )

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Divide a randomly permuted set of samples according to Dirichlet shares."""
        self.fits(pool)
        rng, total = numpy_generator(seed, purpose="quantity"), np.array([len(pool)])
        order = pool.index[rng.permutation(len(pool))]
        sizes = redraw_until_min_size(
            lambda: counts_from_shares(rng.dirichlet(np.full(self.clients, self.alpha))[:, None], total),
            self.min_size,
            f"quantity-skew: {len(pool)} samples of {pool.data.name}, {self.clients} clients, alpha {self.alpha}",
            "use a larger alpha, fewer clients or a smaller min_size",
        )
        return Draw(choose_each([order], sizes, rng) if self.overlap else Dealt(order, compute_offsets(sizes[:, 0])))


class Shards(Sized):
    """Partition into clients with q labels each, also known as the pathological split.

    McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data, section 3.
    NIID-Bench (Li et al. 2022, arXiv 2102.02079), section 4.1, "#C = k". FLAME, section V-A, "# label = q".
    """

    kind: ClassVar[str] = "shards"
    labels_per_client: int = Field(
        default=2, ge=1, description="q, number of labels per client (FLAME, Table III: 2..6)"
    )
    assignment: Literal["labels", "mcmahan", "flame"] = Field(
        default="labels",
        description=(
            "assignment of labels to clients. labels: each client has exactly q classes, and each class is shared "
            "evenly among "
            "its clients (NIID-Bench). mcmahan: each client gets q of clients * q shards of the label-sorted samples. "
            "flame: each client gets q shards, and each class has ceil(q * clients / C) shards, so that a client's "
            "class may repeat and some shards stay unused"
        ),
    )

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Assign shards or classes to clients at random."""
        self.fits(pool)
        q, n, classes = self.labels_per_client, self.clients, len(pool.data.classes)
        rng = numpy_generator(seed, purpose="shards")
        lists = pool.group_by_class(self.kind, rng)
        if q > classes:
            raise PartitionError(
                f"shards: labels_per_client = {q}, but {pool.data.name} has {classes} classes. Use at most {classes}"
            )
        if self.assignment == "labels":
            return Draw(deal(lists, _shared_classes(lists, n, q, rng, pool)))
        if self.assignment == "flame":
            sizes = np.concatenate(
                [split_evenly(len(class_index), math.ceil(q * n / classes)) for class_index in lists]
            )
        else:
            sizes = split_evenly(len(pool), n * q)
        if sizes.min() == 0:
            raise PartitionError(
                f"shards: {len(sizes)} shards are more than the {len(pool)} samples can fill. Use fewer clients"
            )
        taker = np.full(len(sizes), n)
        taker[rng.permutation(len(sizes))[: n * q]] = np.repeat(np.arange(n), q)
        owner = np.repeat(taker, sizes)
        return Draw(group_by_owner(np.concatenate(lists)[owner < n], owner[owner < n], n))


def _shared_classes(lists: list[Ints], n: int, q: int, rng: np.random.Generator, pool: Pool) -> Ints:
    """Return counts ``[n, C]``, where each client gets the q least-used classes so far (ties are broken at random)."""
    held = np.array([len(class_index) for class_index in lists])
    open_ = np.flatnonzero(held)
    if q > len(open_):
        raise PartitionError(
            f"shards: labels_per_client = {q}, but only {len(open_)} classes of {pool.data.name} occur"
        )
    dealt = np.zeros(len(lists), np.int64)
    has = np.zeros((n, len(lists)), bool)
    for row in has:
        chosen = open_[np.lexsort((rng.random(len(open_)), dealt[open_]))[:q]]
        row[chosen] = True
        dealt[chosen] += 1
    if (dealt > held).any():
        c = int((dealt - held).argmax())
        raise PartitionError(
            f"shards: {dealt[c]} clients need samples of class {pool.data.classes[c]!r}, but there "
            f"are only {held[c]}. Use fewer clients"
        )
    counts = np.zeros((n, len(lists)), np.int64)
    for c in np.flatnonzero(dealt).tolist():
        counts[has[:, c], c] = split_evenly(int(held[c]), int(dealt[c]))
    return counts


class FemnistFedProx(Sized):
    """Clients with few classes and log-normal sizes, as in FedProx's FEMNIST (Li et al. 2020, arXiv 1812.06127).

    User i has ``max(2, floor((exp(mean + std z) + extra) / labels_per_client))`` samples of each of the classes i, i +
    1, ..., i + labels_per_client - 1 (mod C), where z is standard normal. Users do not share any samples. In the
    published code, an index is reset by mistake, so users share the first images of each class. The remaining samples
    belong to no client.
    """

    kind: ClassVar[str] = "femnist-fedprox"
    clients: int = Field(default=200, ge=1, description="number of clients (FedProx on FEMNIST: 200)")
    labels_per_client: int = Field(default=3, ge=1, description="number of classes per client (FedProx on FEMNIST: 3)")
    mean: float = Field(
        default=4.0,
        description="mean of the logarithm of client sizes (default: depends on the number of samples, and is lower "
        "for small data sets)",
    )
    std: float = Field(default=1.0, ge=0, description="standard deviation of the logarithm of client sizes")
    extra: int = Field(default=5, ge=0, description="number of additional samples for every client")

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Draw the number of samples of each user, and assign the next samples of the user's classes to the user."""
        rng = numpy_generator(seed, purpose="few")
        lists = pool.group_by_class(self.kind, rng)
        held = np.array([len(class_index) for class_index in lists])
        if self.labels_per_client > len(lists):
            raise PartitionError(
                f"femnist-fedprox: labels_per_client = {self.labels_per_client}, but {pool.data.name} has {len(lists)} "
                f"classes. Use at most {len(lists)}"
            )
        drawn = rng.lognormal(self.mean, self.std, self.clients)
        mean, notes, counts = self.mean, tuple[str, ...](), self._counts(len(lists), drawn)
        while "mean" not in self.model_fields_set and mean > 0 and (counts.sum(0) > held).any():
            mean -= 0.5
            counts = self._counts(len(lists), drawn * np.exp(mean - self.mean))
            notes = (f"femnist-fedprox: mean = {mean:g}, because the data have too few samples for {self.mean:g}",)
        wanted = counts.sum(0)
        if (wanted > held).any():
            c = int((wanted - held).argmax())
            raise PartitionError(
                f"femnist-fedprox: {self.clients} clients need {wanted.sum()} samples, {wanted[c]} of them of class "
                f"{pool.data.classes[c]!r}, but {pool.data.name} has only {held[c]}. Lower `clients` or `mean`"
            )
        return Draw(deal(lists, counts), notes=notes)

    def _counts(self, classes: int, drawn: Floats) -> Ints:
        q = self.labels_per_client
        each = np.maximum(np.floor((drawn + self.extra) / q).astype(np.int64), 2)
        counts = np.zeros((self.clients, classes), np.int64)
        users = np.arange(self.clients)[:, None]
        counts[users, (users + np.arange(q)) % classes] = each[:, None]
        return counts


class Dirichlet(Sized):
    """Label skew by shares from a Dirichlet distribution.

    By class (NIID-Bench, section 4.1; FLAME "Dir(0.5)"): the samples of class c are divided among clients in
    proportions p ~ Dir(alpha, ..., alpha). By client (Acar et al. 2021, used by FedSLR, section 5.1): clients have
    equal sizes, and the label distribution of each client is drawn from Dir(alpha, ..., alpha) over the classes. By
    prior (Hsu, Qi, Brown 2019, arXiv 1909.06335, section 3): like by client, but with Dir(alpha * p), where p is the
    label distribution of all samples. If no samples of a class remain, the client receives more samples of its other
    classes instead, in proportion.
    """

    kind: ClassVar[str] = "dirichlet"
    aliases: ClassVar[Mapping[str, str]] = {"beta": "alpha"}
    needs: ClassVar[Mapping[str, str]] = {**Sized.needs, "balanced": "by class", "size_std": "by client prior"}
    alpha: float = Field(
        default=0.5,
        gt=0,
        description="concentration parameter, called beta in FLAME and NIID-Bench (FLAME: 0.5, FedSLR: 0.1)",
    )
    by: Literal["class", "client", "prior"] = Field(
        default="class",
        description="role of each Dirichlet draw. class: how a class's samples are divided among the "
        "clients. client or prior: the class proportions of a client",
    )
    balanced: bool = Field(
        default=False,
        description="with by = class: stop adding samples to a client that has reached an even share "
        "(NIID-Bench's code)",
    )
    size_std: float = Field(
        default=0.0,
        ge=0,
        description="with by = client or prior: sigma of the log-normal client sizes (0: equal sizes, as in FedSLR)",
    )
    overlap: bool = Field(
        default=False,
        description="draw each client's samples from the whole data set, so clients can share samples (FLAME's code)",
    )

    def draw(self, pool: Pool, seed: int) -> Draw:
        """Draw the numbers of samples per client and class, and then assign random samples."""
        self.fits(pool)
        rng = numpy_generator(seed, purpose="dirichlet")
        lists = pool.group_by_class(self.kind, rng)
        held = np.array([len(class_index) for class_index in lists])
        if self.by == "class":
            what = f"dirichlet: {len(pool)} samples of {pool.data.name}, {self.clients} clients, alpha {self.alpha}"
            cure = "use a larger alpha, fewer clients or a smaller min_size"
            counts = redraw_until_min_size(lambda: self._deal_by_class(held, rng), self.min_size, what, cure)
        else:
            counts = self._draw_by_client(held, rng)
        return Draw(choose_each(lists, counts, rng) if self.overlap else deal(lists, counts))

    def _deal_by_class(self, held: Ints, rng: np.random.Generator) -> Ints:
        shares = rng.dirichlet(np.full(self.clients, self.alpha), len(held)).T
        if not self.balanced:
            return counts_from_shares(shares, held)
        counts = np.zeros(shares.shape, np.int64)
        for c in rng.permutation(len(held)):
            wants = shares[:, c] * (counts.sum(1) < held.sum() / self.clients)
            wants = wants if wants.sum() > 0 else np.ones(self.clients)
            counts[:, c] = counts_from_shares((wants / wants.sum())[:, None], held[c : c + 1])[:, 0]
        return counts

    def _draw_by_client(self, held: Ints, rng: np.random.Generator) -> Ints:
        n, total = self.clients, int(held.sum())
        concentration = self.alpha * (held / total if self.by == "prior" else np.ones(len(held)))
        prior = np.zeros((n, len(held)))
        prior[:, concentration > 0] = rng.dirichlet(concentration[concentration > 0], n)
        sizes = split_evenly(total, n)
        if self.size_std > 0:
            weights = rng.lognormal(0.0, self.size_std, n)
            spare = total - n * self.min_size
            sizes = self.min_size + counts_from_shares((weights / weights.sum())[:, None], np.array([spare]))[:, 0]
        if self.overlap:
            return np.minimum(rng.multinomial(sizes, _restricted_weights(prior, held > 0)), held)
        return _fill_in_turn(prior, sizes, held, rng)


def _restricted_weights(weights: Floats, open_: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Floats:
    """Return the rows of `weights` restricted to the classes in ``open_``, each normalized to sum to 1.

    If the weight of a row on these classes is zero, the row becomes uniform.
    """
    rows = weights * open_
    rows[rows.sum(1) <= 1e-12] = open_
    return np.asarray(rows / rows.sum(1, keepdims=True))


def _fill_in_turn(prior: Floats, sizes: Ints, held: Ints, rng: np.random.Generator) -> Ints:
    """Return counts ``[n, C]`` that have the given row sums, and column sums of at most `held`.

    The counts are distributed as if samples were drawn one by one, with clients in random order: if clients want more
    samples of a class than remain, some of these clients, chosen at random, draw from the other classes instead. In
    each pass, either all clients are served or the samples of a class are used up.
    """
    counts = np.zeros(prior.shape, np.int64)
    left = held.copy()
    while (missing := sizes - counts.sum(1)).any():
        demand = rng.multinomial(missing, _restricted_weights(prior, left > 0))
        for c in np.flatnonzero(demand.sum(0) > left):
            demand[:, c] = rng.multivariate_hypergeometric(demand[:, c], left[c], method="marginals")
        counts += demand
        left -= demand.sum(0)
    return counts
