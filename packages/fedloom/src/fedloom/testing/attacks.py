"""Laws of attacks, which forge models, poison labels or forge activations."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from fedloom.data.dataset import default_to_cpu
from fedloom.rows.attacks import Attack, Backdoor, Forgery, Poison
from fedloom.seeds import generator
from fedloom.testing.report import check_arguments, generators_untouched, hold
from fedloom.testing.scene import agree, demand

CLIENT_COUNT, CLASS_COUNT, ATTACK_SEED, ROW_WIDTH = 10, 4, 0, 6


class AttackScene(NamedTuple):
    """Input of a law: an attack, and the models of a round that `Forgery.forge` receives."""

    attack: Attack
    honest: Tensor
    base: Tensor
    benign: Tensor
    labels: Tensor

    @classmethod
    def create(cls, attack: Attack, h: int = 7, b: int = 3, dtype: torch.dtype = torch.float64) -> AttackScene:
        """Return an input with h honest clients and b attackers, all of whom received the same model."""
        g = generator(0, purpose="laws of attacks")
        base = torch.randn(1, ROW_WIDTH, generator=g, dtype=torch.float64)
        trained = base + torch.randn(h + b, ROW_WIDTH, generator=g, dtype=torch.float64)
        honest, received, benign = trained[:h], base.expand(b, -1).contiguous(), trained[h:].contiguous()
        return cls(attack, honest.to(dtype), received.to(dtype), benign.to(dtype), torch.arange(12) % CLASS_COUNT)

    def forged(self, *, informed: bool = True) -> Tensor:
        """Return the forged models of a round."""
        assert isinstance(self.attack, Forgery)
        honest = self.honest if informed else None
        return self.attack.forge(honest, self.base, self.benign, len(self.honest) + len(self.base), self._gens())

    def poisoned(self, classes: int = CLASS_COUNT) -> tuple[Tensor, Tensor]:
        """Return labels that cover every class, and the same labels after poisoning."""
        assert isinstance(self.attack, Poison)
        y = self.labels if classes == CLASS_COUNT else self.labels % classes
        return y, self.attack.poison(y, classes, self._gens()[0])

    def disguised(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return activations, a mask of the attackers, and the activations that are sent."""
        ids, attackers = torch.tensor([7, 2, 5, 0]), torch.tensor([1, 2, 7])
        activations = torch.arange(4.0 * ROW_WIDTH, dtype=self.base.dtype).view(4, ROW_WIDTH)
        return activations, torch.isin(ids, attackers), self.attack.disguised(activations, ids, attackers)

    def stamped(self) -> tuple[Tensor, Tensor]:
        """Return images (or rows of a table, if the attack names columns), and the same samples with the trigger."""
        assert isinstance(self.attack, Backdoor)
        columns, g = self.attack.columns, generator(0, purpose="laws of attacks")
        names = {name: (value,) if isinstance(value, str) else () for name, value in columns.items()}
        x = torch.rand(5, *([len(names)] if names else [1, 8, 8]), generator=g, dtype=self.base.dtype)
        before, got = x.clone(), self.attack.stamp(x, names)
        agree(x, before, "stamp changed its argument. Clone it first")
        return x, got

    def results(self) -> tuple[Tensor, ...]:
        """Return all results that the attack computes on this input."""
        forged = (self.forged(), self.forged(informed=False)) if isinstance(self.attack, Forgery) else ()
        poisoned = self.poisoned()[1:] if isinstance(self.attack, Poison) else ()
        stamped = self.stamped()[1:] if isinstance(self.attack, Backdoor) else ()
        return (*forged, *poisoned, *stamped, self.disguised()[2])

    def _gens(self) -> list[Generator]:
        return [generator(ATTACK_SEED, 1, i, "attack") for i in range(len(self.base))]


def _runs(s: AttackScene) -> None:
    """Check that the attack runs with and without knowledge of honest models, and with one client of each kind."""
    s.results()
    AttackScene.create(s.attack, h=1, b=1).results()


def attackers(s: AttackScene) -> None:
    """Check that the same seed gives the same attackers, and that their ids are sorted in ascending order."""
    got = s.attack.attackers(CLIENT_COUNT, ATTACK_SEED)
    fits = got.dtype == torch.int64 and got.ndim == 1 and bool((got.diff() > 0).all())
    inside = fits and (not len(got) or 0 <= int(got[0]) <= int(got[-1]) < CLIENT_COUNT)
    demand(inside, f"attackers must be ascending ids from 0 to {CLIENT_COUNT - 1}, got {got!r:.80}")
    agree(s.attack.attackers(CLIENT_COUNT, ATTACK_SEED), got, "the same seed gives different attackers")


def _shapes(s: AttackScene) -> None:
    """Check that forged models are finite rows [b, d] in the dtype of the honest models.

    Poisoned labels must be valid labels, and samples must keep their shape.
    """
    if isinstance(s.attack, Forgery):
        for dtype in (torch.float64, torch.float32):
            scene = AttackScene.create(s.attack, dtype=dtype)
            for informed in (True, False):
                got = scene.forged(informed=informed)
                demand(got.shape == scene.base.shape, f"forge must return {[*scene.base.shape]}, got {[*got.shape]}")
                demand(got.dtype == dtype, f"forged models must be {dtype}, got {got.dtype}")
                demand(got.isfinite().all(), "forged models are not finite, so the server would drop them")
    if isinstance(s.attack, Poison):
        for classes in (2, CLASS_COUNT):
            y, got = s.poisoned(classes)
            demand(got.shape == y.shape and got.dtype == y.dtype, f"poison must return {y.dtype} {[*y.shape]}")
            inside = int(got.min()) >= 0 and int(got.max()) < classes
            demand(inside, f"labels must be within 0..{classes - 1}, got {int(got.min())}..{int(got.max())}")
    if isinstance(s.attack, Backdoor):
        x, got = s.stamped()
        demand(got.shape == x.shape and got.dtype == x.dtype, f"stamp must return {x.dtype} {[*x.shape]}")
        demand(got.isfinite().all(), "samples with the trigger are not finite")
        demand(not torch.equal(got, x), "the trigger does not change any sample")
    activations, forges, sent = s.disguised()
    demand(sent.shape == activations.shape, f"disguised must return {[*activations.shape]}, got {[*sent.shape]}")
    agree(sent[~forges], activations[~forges], "disguised changed activations of clients that do not attack")


def _arguments_unmodified(s: AttackScene) -> None:
    """Check that the attack does not change its arguments, and that no result shares memory with them."""
    before = [t.clone() for t in s[1:]]
    for result in s.results()[:-1]:
        result.add_(1)
    for what, got, want in zip(AttackScene._fields[1:], s[1:], before, strict=True):
        agree(got, want, f"{what} changed, or shares memory with the result")


def repeatable(s: AttackScene) -> None:
    """Check that equal generators give bitwise equal results, and that the attack itself does not change."""
    before = s.attack.model_dump()
    with generators_untouched():
        first = s.results()
    agree(s.results(), first, "two identical calls give different results")
    other = s._replace(attack=s.attack.with_()).results()
    agree(other, first, "an attack with the same options gives different results")
    demand(s.attack.model_dump() == before, f"the attack changed from {before} to {s.attack.model_dump()}")


def knowledge(s: AttackScene) -> None:
    """Check that an attack uses honest models only with `sees_honest`, and its own training only with `trains`."""
    if not isinstance(s.attack, Forgery):
        return
    if not s.attack.sees_honest:
        other = s._replace(honest=7 * s.honest)
        agree(other.forged(), s.forged(), "sees_honest is False, but the result depends on honest models")
    if not s.attack.reads_own:
        other = s._replace(benign=7 * s.benign)
        sentence = "trains is False, but the result depends on the attackers' own training"
        agree(other.forged(informed=False), s.forged(informed=False), sentence)


ATTACK_LAWS: dict[Callable[[Any], None], str] = {
    _runs: "repair this line. In `forge`, honest is None if honest models are unknown. In `stamp`, names contains the "
    "keys of the option columns, so set this option to check a backdoor for tables, as in columns={'age': 90.0}",
    attackers: "do not override `attackers`, or draw ids with fl.seeds.generator(seed, purpose=...) and sort them",
    _shapes: "return one row for each row of base, in its dtype, and one label within 0..classes-1 for each label",
    _arguments_unmodified: "clone before an in-place operation, and return a new tensor",
    repeatable: "draw from the given generators, one per attacker, and do not store anything on self",
    knowledge: "set sees_honest: ClassVar[bool] = True if the attack reads honest, and trains if it reads benign",
}
"""All laws of an attack, each with advice on how a violation is usually fixed."""


@default_to_cpu()
def check_attack(attack: Attack, without: Collection[str] = ()) -> None:
    """Check that an attack satisfies all laws, on random models, labels and activations.

    Args:
        attack: a `Forgery`, a `Poison`, a `Backdoor`, or an `Attack` that disguises activations.
        without: names of laws that the attack violates on purpose.

    Raises:
        AssertionError: a law is violated. The message names the first such law, the attack, the problem and the usual
            fix. If the attack's code raised an error, the message contains the function, the error, the file and the
            line.
        ConfigError: the value is not an attack, or a name in ``without`` is not a law.
    """
    check_arguments(attack, Attack, "fl.attacks.ALIE(fraction=0.2)", ATTACK_LAWS, without)
    hold(ATTACK_LAWS, AttackScene.create(attack), attack, Attack, without)
