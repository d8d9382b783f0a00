"""Attacks by Byzantine clients, which send forged models or activations, or train on forged labels.

``ATTACKS`` lists the attacks by kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from fedloom.errors import ConfigError
from fedloom.rows.algebra import distances, norm
from fedloom.seeds import generator
from fedloom.values import Value, choose


class Attack(Value, ABC):
    """Attack, and the fraction of clients that carry it out. The attackers are the same in every round."""

    fraction: float = Field(0.2, ge=0, le=1, description="fraction of all clients that attack (FLAME, VI-A)")
    disguises: ClassVar[bool] = False
    """True if the attack forges the activations that describe clients, which requires a run that uses activations."""

    def attackers(self, n: int, seed: int) -> Tensor:
        """Return the attackers' ids in ascending order. There are ``fraction`` times n attackers, rounded."""
        order = torch.randperm(n, generator=generator(seed, purpose="attackers"))
        return order[: round(self.fraction * n)].sort().values

    def disguised(self, activations: Tensor, ids: Tensor, attackers: Tensor) -> Tensor:
        """Return the activations that clients send for clustering. By default, these are the true activations.

        Args:
            activations: mean activations [m, k] of all clients, including the attackers.
            ids: ids of the clients [m].
            attackers: ids of all attackers [b] in ascending order.

        Returns:
            [m, k]
        """
        return activations


class Poison(Attack, ABC):
    """Attack that changes the attackers' training labels.

    Otherwise, the attackers are honest.
    """

    @abstractmethod
    def poison(self, y: Tensor, classes: int, gen: Generator) -> Tensor:
        """Return new labels ``[k]`` for an attacker's labels ``y [k]``, which are integers from 0 to classes - 1.

        Raises:
            ConfigError: the labels are not classes.
        """


class Forgery(Attack, ABC):
    """Attack that replaces the attackers' trained models with forged models.

    The method encodes forged models in the same way as honest ones (`Algorithm.encode`).
    """

    sees_honest: ClassVar[bool] = False
    """True if the attack reads the rows of the cohort's honest clients, so the attackers are omniscient."""
    trains: ClassVar[bool] = False
    """True if the attack uses the rows that the attackers would send if they were honest."""

    @property
    def reads_own(self) -> bool:
        """True if the attackers must train for the attack with these options."""
        return self.trains

    @abstractmethod
    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        """Return the models that the attackers send.

        Args:
            honest: local models [h, d] of the honest clients, as contained in the uploads. None if they are not known.
                In this case, the attackers use their own honest rows instead (as in Baruch et al., section 3).
            base: models [b, d] that the attackers received.
            benign: models [b, d] that the attackers would send if they were honest.
            m: number of clients in the cohort, including attackers.
            gens: one random generator for each of the b attackers.

        Returns:
            Forged models [b, d].
        """


# ------------------------------------------------------------------------------------------------------------- labels


class RandomLabels(Poison):
    """Label poisoning with uniformly random labels (FLAME, VI-A; Bhagoji et al., ICML 2019)."""

    kind: Literal["random-labels"] = "random-labels"

    def poison(self, y: Tensor, classes: int, gen: Generator) -> Tensor:
        _class_labels(y, classes)
        return torch.randint(classes, y.shape, generator=gen).to(y)


class FlippedLabels(Poison):
    """Label poisoning in which label c of C classes becomes C - 1 - c (FLAME, VI-A).

    For two classes, see Biggio, Nelson and Laskov, ICML 2012.

    """

    kind: Literal["flipped-labels"] = "flipped-labels"

    def poison(self, y: Tensor, classes: int, gen: Generator) -> Tensor:
        _class_labels(y, classes)
        return classes - 1 - y


class Backdoor(Attack):
    """Backdoor: attackers train on samples with a trigger and the target class's label (Gu et al., BadNets, 2017).

    The metric ``attack_success`` is the fraction of the clients' test samples from other classes that a model assigns
    to the target class once the trigger has been added. With ``fraction = 0``, there are no attackers, and the metric
    shows the same fraction for a clean model.
    """

    kind: Literal["backdoor"] = "backdoor"
    target: int | str = Field(0, description="target class, by its number or its name", union_mode="left_to_right")
    share: float = Field(0.5, gt=0, le=1, description="fraction of an attacker's training samples that get the trigger")
    size: int = Field(
        3,
        ge=1,
        description="side length of the trigger in images, in pixels. The trigger is a square in the lower right "
        "corner",
    )
    value: float = Field(
        1.0, description="value of the trigger's pixels. Images stored as bytes are scaled to values from 0 to 1"
    )
    columns: dict[str, float | str] = Field(
        default_factory=dict, description="trigger in tables: for each changed column, its new value or level"
    )

    def stamp(self, x: Tensor, names: Mapping[str, tuple[str, ...]]) -> Tensor:
        """Return copies of the samples, with the trigger added. Override this method to use a different trigger.

        Args:
            x: images ``[k, channels, height, width]`` (bytes are scaled to 0 to 1), columns of a table ``[k, p]`` in
                their original units (with codes for levels, and NaN for missing cells), or other features ``[k,
                *shape]``.
            names: levels of each column, keyed by column name. A numeric column has no levels. The dict is empty if the
                data have no columns.

        Returns:
            New tensor with the shape and dtype of x.

        Raises:
            ConfigError: the data do not contain such columns, levels or pixels.
        """
        x = x.clone()
        if names:
            if not self.columns:
                name, levels = next(iter(names.items()))
                raise ConfigError(
                    "a backdoor in a table needs columns to change",
                    rule="backdoor-without-columns",
                    fix=f"set {{attack.columns = {{{name!r}: {levels[0] if levels else 1!r}}}}}, or name other columns",
                )
            for name, value in self.columns.items():
                place = choose("column", _name_positions(names), name, "attack.columns")
                x[:, place] = _trigger_value(name, value, names[name])
            return x
        if self.columns:
            raise ConfigError(
                "attack.columns names columns of a table, but these data have no columns",
                rule="backdoor-columns-missing",
                fix="omit {attack.columns}",
            )
        if x.ndim < 3 or self.size > min(x.shape[-2:]):
            raise ConfigError(
                f"samples {[*x.shape[1:]]} are smaller than a square of {self.size} x {self.size} pixels",
                rule="backdoor-too-large",
                fix="set a smaller {attack.size} for images, or override stamp in your own subclass",
            )
        x[..., -self.size :, -self.size :] = self.value
        return x

    def label(self, classes: Sequence[str]) -> int:
        """Return the index of the target class.

        Raises:
            ConfigError: the class does not exist.
        """
        if isinstance(self.target, int) and 0 <= self.target < len(classes):
            return self.target
        return choose("class", _name_positions(classes), str(self.target), "attack.target")


# ------------------------------------------------------------------------------------------- blind to the other rows


class SameValue(Forgery):
    """Vector whose entries all equal p, where p ~ N(0, variance) is drawn for each attacker and round.

    (FLAME, V-D; Li et al., RSA, AAAI 2019.)

    """

    kind: Literal["same-value"] = "same-value"
    variance: float = Field(0.1, gt=0, description="variance of the random number p (FLAME, VI-A)")

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return _normal_rows(base[:, :1], self.variance, gens).expand_as(base).clone()


class SignFlip(Forgery):
    """-|p| times the received model (or the attacker's own message), with p ~ N(0, variance) (FLAME, V-D)."""

    kind: Literal["sign-flip"] = "sign-flip"
    variance: float = Field(0.1, gt=0, description="variance of the random number p (FLAME, VI-A)")
    of: Literal["received", "own"] = Field(
        "received",
        description=(
            "vector to flip: the received model (FLAME's public code, whose attackers do not train), or "
            "the message that the attacker would send (the paper's text and Proposition 2)"
        ),
    )

    @property
    def reads_own(self) -> bool:
        return self.of == "own"

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return -_normal_rows(base[:, :1], self.variance, gens).abs() * (benign if self.reads_own else base)


class Gaussian(Forgery):
    """Random vector from N(0, variance I) (FLAME, V-D; Xu and Huang, 2022)."""

    kind: Literal["gaussian"] = "gaussian"
    variance: float = Field(0.1, gt=0, description="variance of every coordinate (FLAME, VI-A)")

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return _normal_rows(base, self.variance, gens)


class ModelReplacement(Forgery):
    """x + scale (w - x) for the received model x and the trained model w (Bagdasaryan et al., AISTATS 2020, Eq. 3)."""

    trains: ClassVar[bool] = True
    kind: Literal["model-replacement"] = "model-replacement"
    scale: float | None = Field(
        None,
        gt=0,
        description="factor that multiplies the trained change w - x (None: m, so that the forged model replaces "
        "the mean; Eq. 3)",
    )

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return base + (m if self.scale is None else self.scale) * (benign - base)


class Sybils(Forgery):
    """Sybil attack in which all attackers send the same vector: the negative of the model that the first one received.

    Since their directions are equal, they dominate the quantile in an attention mixer, so that honest clients no longer
    collaborate. As a defense, ``personalized_aggregation.copies`` counts equal models as a single client.
    """

    kind: Literal["sybils"] = "sybils"
    scale: float = Field(1.0, gt=0, description="norm of the sent vector, relative to the norm of the received model")

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return (-self.scale * base[:1]).expand_as(base).clone()


# ------------------------------------------------------------------------------------------- knowing the honest rows


class ALIE(Forgery):
    """A little is enough: coordinate-wise mean + z std of the honest rows (Baruch et al., NeurIPS 2019, Algorithm 3).

    Among m clients with b attackers, z is the largest value for which s = m // 2 + 1 - b honest rows are likely to be
    farther from the mean: Phi(z) = (m - b - s) / (m - b), and z = 0 if this probability is below 1/2.
    """

    sees_honest: ClassVar[bool] = True
    trains: ClassVar[bool] = True
    kind: Literal["alie"] = "alie"
    z: float | None = Field(
        None, description="number of standard deviations (default: computed from m clients and b attackers)"
    )

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        rows = benign if honest is None else honest
        return (rows.mean(0) + self.deviations(m, len(base)) * _row_std(rows)).expand_as(base).clone()

    def deviations(self, m: int, b: int) -> float:
        """Return z for m clients that include b attackers."""
        if self.z is not None:
            return self.z
        h = m - b
        likely = (h - (m // 2 + 1 - b)) / h if h else 0.0
        return NormalDist().inv_cdf(min(likely, 1 - 1e-6)) if likely > 0.5 else 0.0


class IPM(Forgery):
    """Inner product manipulation: x - epsilon mean(w_i - x) over honest w_i (Xie et al., UAI 2019, section 3)."""

    sees_honest: ClassVar[bool] = True
    trains: ClassVar[bool] = True
    kind: Literal["ipm"] = "ipm"
    epsilon: float = Field(
        0.1,
        gt=0,
        description="norm of the sent change, relative to the norm of the honest mean. Values above m / b - 1 (m "
        "clients, b attackers) reverse the mean",
    )

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return base - self.epsilon * ((benign if honest is None else honest).mean(0) - base)


class MinMax(Forgery):
    """mean - gamma p, whose distance to every honest row is at most the largest distance between honest rows.

    (Shejwalkar and Houmansadr, NDSS 2021, Eq. 7. Here, gamma is computed from the root of a quadratic for each honest
    row, whereas the paper searches for it.)
    """

    sees_honest: ClassVar[bool] = True
    trains: ClassVar[bool] = True
    kind: Literal["min-max"] = "min-max"
    direction: Literal["std", "unit", "sign"] = Field(
        "std", description="direction p of the perturbation: std, mean / ||mean|| or sign(mean) (IV-C)"
    )

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        rows = benign if honest is None else honest
        centre = rows.mean(0)
        mean = centre - base.mean(0)
        p = {"std": _row_std(rows), "unit": mean / norm(mean), "sign": mean.sign()}[self.direction].nan_to_num(0)
        a, far = centre - rows, distances(rows).max()
        half, square = (a @ p)[:, None], p @ p
        room = (half.square() + square * (far.square() - a.square().sum(1, keepdim=True))).clamp_min(0)
        gamma = ((half + room.sqrt()) / square).min() if square > 0 else square
        return (centre - gamma * p).expand_as(base).clone()


class Mimic(Forgery):
    """Copies of an honest row, sent by all attackers (Karimireddy, He and Jaggi, ICLR 2022, section 3.2, appendix B).

    The attackers copy the row that is farthest along the direction in which the honest rows vary most. In the paper,
    this direction is estimated over several rounds, and the same client is always copied afterwards. Here, the
    direction is recomputed in each round.
    """

    sees_honest: ClassVar[bool] = True
    trains: ClassVar[bool] = True
    kind: Literal["mimic"] = "mimic"

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        rows = benign if honest is None else honest
        centred = (rows - rows.mean(0)).nan_to_num()
        products = (centred @ centred.T).double().cpu()  # cuSOLVER fails for equal eigenvalues
        along = torch.linalg.eigh(products).eigenvectors[:, -1]
        return rows[int(along.abs().argmax())].expand_as(base).clone()


class ForgedDirection(Forgery):
    """Long vector in the direction of the round's first honest model, sent by all attackers.

    Cosines do not depend on length, so a mixer that compares directions includes this vector in that client's mixture.
    """

    sees_honest: ClassVar[bool] = True
    trains: ClassVar[bool] = True
    kind: Literal["forged-direction"] = "forged-direction"
    scale: float = Field(
        100.0, gt=0, description="norm of the sent vector, relative to the norm of the target client's model"
    )

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return (self.scale * (benign if honest is None else honest)[:1]).expand_as(base).clone()


# ------------------------------------------------------------------------------------------------------- activations


class ForgedActivations(Attack):
    """Attack in which clients train honestly, but send long vectors as the activations that determine the clusters.

    Equitable-FL gives all clusters the same weight (Eq. 7), so that a cluster of attackers determines 1/C of the model
    if there are C clusters. Attackers that send equal vectors form a single cluster. Attackers that send different
    vectors form separate clusters, up to the maximum number of clusters.
    """

    kind: Literal["forged-activations"] = "forged-activations"
    disguises: ClassVar[bool] = True
    send: Literal["same", "own"] = Field(
        "same",
        description="send the same vector from all attackers, or give each attacker its own coordinate "
        "(coordinates are reused if there are too few)",
    )
    length: float = Field(
        1000.0,
        gt=0,
        description="value of the nonzero entry in the sent activations. Mean activations after log-softmax also "
        "contain a few entries of this size",
    )

    def disguised(self, activations: Tensor, ids: Tensor, attackers: Tensor) -> Tensor:
        forges, k = torch.isin(ids, attackers), activations.shape[1]
        place = torch.searchsorted(attackers, ids[forges]) % k if self.send == "own" else torch.zeros_like(ids[forges])
        vectors = self.length * torch.eye(k, dtype=activations.dtype)[place]
        sent = activations.clone()
        sent[forges.to(sent.device)] = vectors.to(sent)
        return sent


ATTACKS: dict[str, type[Attack]] = {
    "random-labels": RandomLabels,
    "flipped-labels": FlippedLabels,
    "backdoor": Backdoor,
    "same-value": SameValue,
    "sign-flip": SignFlip,
    "gaussian": Gaussian,
    "sybils": Sybils,
    "model-replacement": ModelReplacement,
    "alie": ALIE,
    "ipm": IPM,
    "min-max": MinMax,
    "mimic": Mimic,
    "forged-direction": ForgedDirection,
    "forged-activations": ForgedActivations,
}
"""Attacks, keyed by kind."""


def _normal_rows(like: Tensor, variance: float, gens: Sequence[Generator]) -> Tensor:
    """Return samples [b, k] from N(0, variance), drawn by a separate generator for each row."""
    rows = [torch.randn(like.shape[1], generator=gen, dtype=like.dtype) for gen in gens]
    return torch.stack(rows).to(like.device) * float(variance**0.5)


def _row_std(rows: Tensor) -> Tensor:
    """Return the sample standard deviation [d] of rows [h, d], or 0 if there is a single row."""
    return rows.std(0) if len(rows) > 1 else torch.zeros_like(rows[0])


def _trigger_value(name: str, value: float | str, levels: tuple[str, ...]) -> float:
    """Return the number that a trigger writes to a column, which is the code of a level or the given number."""
    if levels:
        return float(choose("level", _name_positions(levels), str(value), f"attack.columns: {name!r}"))
    if isinstance(value, str):
        raise ConfigError(f"attack.columns: column {name!r} contains numbers, got {value!r}. Use a number")
    return value


def _name_positions(names: Iterable[str]) -> dict[str, int]:
    """Return the positions of the names."""
    return {name: place for place, name in enumerate(names)}


def _class_labels(y: Tensor, classes: int) -> None:
    if y.is_floating_point() or classes < 2:
        raise ConfigError(
            f"label attacks need class labels, got {y.dtype} labels of {classes} classes",
            rule="attack-needs-classes",
            fix="omit {attack}",
        )
