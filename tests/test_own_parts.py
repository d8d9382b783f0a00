"""Partitions, aggregators and attacks: the built-in ones keep every law, and each law finds its mistake."""

from __future__ import annotations

import dataclasses
import inspect
import random  # noqa: TID251  # a mistake that a law finds
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

import fedloom as fl
from fedloom.data.partitions import PARTITIONS, Dealt, Draw, Partition, Pool, Sized, group_by_owner
from fedloom.errors import CodeError, ConfigError, DataError, FedloomError, PartitionError, Refused
from fedloom.rows.aggregators import AGGREGATORS, Aggregator, Median
from fedloom.rows.attacks import ALIE, ATTACKS, Attack, Forgery, Poison
from fedloom.testing import aggregators, attacks, check_aggregator, check_attack, check_partition, partitions
from fedloom.testing.report import name_law

OPTIONS: dict[str, dict[str, Any]] = {
    "by-column": {"column": "site"},
    "femnist-fedprox": {"clients": 6, "labels_per_client": 2, "mean": 1.0},
}
VARIANTS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *((kind, OPTIONS.get(kind, {}), ()) for kind in PARTITIONS),
    ("natural", {"test_from": "clients"}, ()),
    ("iid", {"test_from": "ratio", "test_count": 50}, ()),
    ("iid", {"pool": True, "clients": 3}, ()),
    ("dirichlet", {"folds": 4}, ()),
    ("feature-noise", {"sigma_unit": "std", "noise_draws": "per-batch"}, ()),
    ("quantity-skew", {"max_train_per_client": 5, "min_size": 9}, ()),
    ("mixed", {"overlap": True}, ("disjoint", "tested_apart")),
]


@pytest.mark.parametrize(("kind", "options", "without"), VARIANTS)
def test_every_partition_keeps_the_laws(kind: str, options: dict[str, Any], without: tuple[str, ...]) -> None:
    check_partition(PARTITIONS[kind](**options), without=without)


@pytest.mark.parametrize("kind", AGGREGATORS)
def test_every_aggregator_keeps_the_laws(kind: str) -> None:
    check_aggregator(AGGREGATORS[kind](), without=["agreement"] if kind == "private-mean" else [])


@pytest.mark.parametrize("pre", ["clip", "bucketing", "nnm"])
def test_every_step_before_a_rule_keeps_the_laws(pre: str) -> None:
    rule = fl.aggregators.WeightedMean(pre=({"kind": pre},))
    check_aggregator(rule, without=["permutation"] if pre == "bucketing" else ["agreement"] if pre == "clip" else [])


@pytest.mark.parametrize("kind", ATTACKS)
def test_every_attack_keeps_the_laws(kind: str) -> None:
    check_attack(ATTACKS[kind]())


# --------------------------------------------------------------------------------------------------------- partitions


class Stripes(Sized):
    """Sample k of the pool goes to client k mod n."""

    kind: ClassVar[str] = "stripes"

    def draw(self, pool: Pool, seed: int) -> Draw:
        return Draw(group_by_owner(pool.index, np.arange(len(pool)) % self.clients, self.clients))


class Later(Sized):
    """A temporal split: the last third of the rows is the test part of the client that has them."""

    kind: ClassVar[str] = "later"

    def draw(self, pool: Pool, seed: int) -> Draw:
        time = pool.data.columns["time"].numpy()[pool.index]
        owner, late = np.arange(len(pool)) % self.clients, time >= 2 * len(pool.data) // 3
        early = group_by_owner(pool.index[~late], owner[~late], self.clients)
        return Draw(early, test=group_by_owner(pool.index[late], owner[late], self.clients))


class Crash(Stripes):
    def draw(self, pool: Pool, seed: int) -> Draw:
        return super().draw(pool, seed)._replace(names=pool.data.columns["hospital"])


class NoDraw(Stripes):
    def draw(self, pool: Pool, seed: int) -> Any:
        return super().draw(pool, seed).dealt


class ManyNames(Stripes):
    def draw(self, pool: Pool, seed: int) -> Draw:
        return super().draw(pool, seed)._replace(groups=np.zeros(self.clients - 1, np.int64))


class FloatIndex(Stripes):
    def draw(self, pool: Pool, seed: int) -> Draw:
        dealt = super().draw(pool, seed).dealt
        return Draw(Dealt(dealt.index.astype(np.int32), dealt.offsets))


class PlacesInThePool(Stripes):
    """Right only while the pool is the whole data set."""

    def draw(self, pool: Pool, seed: int) -> Draw:
        return Draw(group_by_owner(np.arange(len(pool)), np.arange(len(pool)) % self.clients, self.clients))


class Twice(Stripes):
    def draw(self, pool: Pool, seed: int) -> Draw:
        index = pool.index[np.arange(len(pool)) // 2 * 2]
        return Draw(group_by_owner(index, np.arange(len(pool)) % self.clients, self.clients))


class NeighboursTest(Stripes):
    def draw(self, pool: Pool, seed: int) -> Draw:
        owner = np.arange(len(pool)) % self.clients
        return Draw(
            group_by_owner(pool.index, owner, self.clients),
            group_by_owner(pool.index, (owner + 1) % self.clients, self.clients),
        )


class FromNumpy(Stripes):
    def draw(self, pool: Pool, seed: int) -> Draw:
        return Draw(group_by_owner(pool.index, np.random.randint(self.clients, size=len(pool)), self.clients))  # noqa: NPY002


class FromRandom(Stripes):
    def draw(self, pool: Pool, seed: int) -> Draw:
        random.random()
        return super().draw(pool, seed)


COUNT = [0]


class Counts(Stripes):
    def draw(self, pool: Pool, seed: int) -> Draw:
        COUNT[0] += 1
        return super().draw(pool, seed)._replace(notes=(f"draw {COUNT[0]}",))


class Shuffles(Stripes):
    def draw(self, pool: Pool, seed: int) -> Draw:
        fl.seeds.numpy_generator(seed, purpose="shuffle").shuffle(pool.index)
        return super().draw(pool, seed)


class Zeroes(Stripes):
    """Writes into the data, which are the same after every further draw."""

    def draw(self, pool: Pool, seed: int) -> Draw:
        pool.data.x[:] = 0
        return super().draw(pool, seed)


class ScalesItself(Stripes):
    """Writes into the data, so that clients are scaled by numbers that are not their own."""

    def __call__(self, data: object, seed: int = 0) -> fl.Federation:
        fed = super().__call__(data, seed)
        return (
            fed
            if fed.data.fitted is None
            else type(fed)(
                **{k: getattr(fed, k) for k in ("parts", "names")},
                data=type(fed.data)(**{**vars(fed.data), "x": fed.data.x + 1e-3}),
            )
        )


BROKEN_PARTITIONS = [
    ("runs", Crash), ("runs", NoDraw), ("runs", ManyNames), ("declared", FloatIndex),
    ("pool_only", PlacesInThePool),
    ("disjoint", Twice), ("tested_apart", NeighboursTest), ("tested_apart", Twice), ("seeded", FromNumpy),
    ("seeded", Counts), ("seeded", FromRandom), ("arguments_unmodified", Shuffles), ("arguments_unmodified", Zeroes),
    ("prepared", ScalesItself),
]  # fmt: skip


@pytest.mark.parametrize(("law", "broken"), BROKEN_PARTITIONS)
def test_a_law_of_partitions_finds_the_mistake(law: str, broken: type[Partition]) -> None:
    without = [name for name in law_names(partitions) if name != law] if law not in ("runs",) else []
    with pytest.raises(AssertionError, match=rf"(?s)law {law} on (a table|images), {broken.__name__}\(.*: .*; \w+"):
        check_partition(broken(clients=4), without=without)


# -------------------------------------------------------------------------------------------------------- aggregators


class Trimmed(Aggregator):
    """A rule of a user: the mean without the largest and the smallest entry of every coordinate."""

    def require(self, m: int) -> None:
        if m < 3:
            raise ConfigError(f"trimmed needs 3 rows, got {m}; take more clients per round")

    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        return {name: (r.sum(0) - r.amax(0) - r.amin(0)) / (len(r) - 2) for name, r in rows.items()}, state


class CrashingRule(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        return rows["model"].mean(0), state


class ZeroesRows(Trimmed):
    """Rows that are zero already do not change when they are set to zero."""

    def combine(self, state: Any, rows: Any, weights: Any, primary: str, ctx: Any) -> Any:
        return {name: value.zero_().mean(0) for name, value in rows.items()}, state


class KeepsRows(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        return {name: r[:1] for name, r in rows.items()}, state


class WritesRows(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        return {name: r.sort(0).values.copy_(r.sub_(0.1)).mean(0) for name, r in rows.items()}, state


class GivesAView(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        best = int(rows[primary].square().sum(1).argmin())
        return {name: r[best] for name, r in rows.items()}, state


class GlobalNoiseRule(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        return {name: r.mean(0) + torch.randn(r.shape[1], dtype=r.dtype) for name, r in rows.items()}, state


CALLS = [0]


class RemembersElsewhere(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        CALLS[0] += 1
        return {name: r.mean(0) + CALLS[0] for name, r in rows.items()}, state


class ForgetsDtype(Trimmed):
    """State whose identity matters is lost with a checkpoint."""

    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        mark = state.get("mark")
        shift = 1.0 if mark is not None and mark is MARK else 0.0
        return {name: r.mean(0) + shift for name, r in rows.items()}, {"mark": MARK}


MARK = torch.zeros(1)


class FirstCounts(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        return {name: r.mean(0) + r[0] / 10 for name, r in rows.items()}, state


class SecretlyWeighted(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        return {name: (weights.to(r) / weights.sum().to(r) * r).sum(0) for name, r in rows.items()}, state


class SaysWeighted(Trimmed):
    weighted: ClassVar[bool] = True


class PlainSum(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        return {name: r.sum(0) for name, r in rows.items()}, state


class SaysLinear(Median):
    @property
    def linear(self) -> bool:
        return True


class RoundsToHalf(Trimmed):
    def combine(self, state: Any, rows: Any, weights: Tensor, primary: str, ctx: Any) -> Any:
        return {name: (r.mean(0) if r.dtype == torch.float64 else 1.001 * r.mean(0)) for name, r in rows.items()}, state


class NeedsThree(Trimmed):
    def require(self, m: int) -> None:
        pass


BROKEN_RULES = [
    ("runs", CrashingRule), ("repeatable", GlobalNoiseRule), ("shapes", KeepsRows),
    ("arguments_unmodified", WritesRows), ("arguments_unmodified", ZeroesRows),
    ("arguments_unmodified", GivesAView), ("repeatable", RemembersElsewhere), ("resume", ForgetsDtype),
    ("permutation", FirstCounts), ("weighted", SecretlyWeighted), ("weighted", SaysWeighted),
    ("agreement", PlainSum), ("linear", SaysLinear), ("precision", RoundsToHalf), ("small_cohorts", NeedsThree),
]  # fmt: skip


@pytest.mark.parametrize(("law", "broken"), BROKEN_RULES)
def test_a_law_of_aggregators_finds_the_mistake(law: str, broken: type[Aggregator]) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)law {law}, {broken.__name__}\(.*: .*; \w+"):
        check_aggregator(broken())


# ------------------------------------------------------------------------------------------------------------ attacks


class Doubled(Forgery):
    """An attack of a user: away from the received model, twice as far as the attacker would have gone."""

    trains: ClassVar[bool] = True

    def forge(self, honest: Any, base: Tensor, benign: Tensor, m: int, gens: Any) -> Tensor:
        return base - 2 * (benign - base)


class OneUp(Poison):
    def poison(self, y: Tensor, classes: int, gen: Any) -> Tensor:
        return (y + 1) % classes


class CrashingAttack(Doubled):
    def forge(self, honest: Any, base: Tensor, benign: Tensor, m: int, gens: Any) -> Tensor:
        return honest.mean(0).expand_as(base).clone()  # None where they are not known


class Everyone(Doubled):
    def attackers(self, n: int, seed: int) -> Tensor:
        return torch.arange(n, -1, -1)


class OneModel(Doubled):
    def forge(self, honest: Any, base: Tensor, benign: Tensor, m: int, gens: Any) -> Tensor:
        return -base[0]


class OneTooMany(OneUp):
    def poison(self, y: Tensor, classes: int, gen: Any) -> Tensor:
        return y + 1


class DisguisesOthers(Attack):
    disguises: ClassVar[bool] = True

    def disguised(self, activations: Tensor, ids: Tensor, attackers: Tensor) -> Tensor:
        return 0 * activations


class WritesBase(Doubled):
    def forge(self, honest: Any, base: Tensor, benign: Tensor, m: int, gens: Any) -> Tensor:
        return base.mul_(-1)


class WritesLabels(OneUp):
    def poison(self, y: Tensor, classes: int, gen: Any) -> Tensor:
        return y.mul_(0)


class GlobalNoiseAttack(Doubled):
    def forge(self, honest: Any, base: Tensor, benign: Tensor, m: int, gens: Any) -> Tensor:
        return torch.randn_like(base)


class CountingAttack(Doubled):
    def forge(self, honest: Any, base: Tensor, benign: Tensor, m: int, gens: Any) -> Tensor:
        CALLS[0] += 1
        return base + CALLS[0]


class KnowsTooMuch(Doubled):
    def forge(self, honest: Any, base: Tensor, benign: Tensor, m: int, gens: Any) -> Tensor:
        return (benign if honest is None else honest).mean(0).expand_as(base).clone()


class SecretlyTrains(Doubled):
    trains: ClassVar[bool] = False


BROKEN_ATTACKS = [
    ("runs", CrashingAttack), ("repeatable", GlobalNoiseAttack), ("attackers", Everyone), ("shapes", OneModel),
    ("shapes", OneTooMany), ("shapes", DisguisesOthers), ("arguments_unmodified", WritesBase),
    ("arguments_unmodified", WritesLabels), ("repeatable", CountingAttack), ("knowledge", KnowsTooMuch),
    ("knowledge", SecretlyTrains),
]  # fmt: skip


@pytest.mark.parametrize(("law", "broken"), BROKEN_ATTACKS)
def test_a_law_of_attacks_finds_the_mistake(law: str, broken: type[Attack]) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)law {law}, {broken.__name__}\(.*: .*; \w+"):
        check_attack(broken())


def law_names(module: Any) -> list[str]:
    return [name_law(law) for law in getattr(module, next(name for name in vars(module) if name.endswith("_LAWS")))]


def test_every_law_can_fail() -> None:
    assert {law for law, _ in BROKEN_PARTITIONS} == {*law_names(partitions)}
    assert {law for law, _ in BROKEN_RULES} == {*law_names(aggregators)}
    assert {law for law, _ in BROKEN_ATTACKS} == {*law_names(attacks)}


def test_parts_of_a_user_keep_the_laws() -> None:
    check_partition(Stripes(clients=5))
    check_partition(Later(clients=5))
    check_aggregator(Trimmed())
    check_attack(Doubled())
    check_attack(OneUp())


@pytest.mark.parametrize(
    ("check", "broken", "stage", "error"),
    [
        (check_partition, Crash, "draw", "KeyError: 'hospital'"),
        (check_aggregator, CrashingRule, "combine", "KeyError: 'model'"),
        (check_attack, CrashingAttack, "forge", "AttributeError: .* 'mean'"),
    ],
)
def test_a_crash_names_its_function_its_file_and_its_line(check: Any, broken: Any, stage: str, error: str) -> None:
    line = inspect.getsourcelines(broken)[1]
    with pytest.raises(AssertionError, match=f"{stage} stopped with {error}") as caught:
        check(broken())
    place = re.search(r"\(test_own_parts.py, line (\d+)\); repair this line", str(caught.value))
    assert place
    assert line < int(place[1]) < line + 4


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="partition must be a value such as"):
        check_partition(ALIE())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="aggregator must be a value such as"):
        check_aggregator("median")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'knowledge'"):
        check_attack(ALIE(), without=["knowlege"])
    with pytest.raises(ConfigError, match=r"no column 'hospital'.*Pass a suitable data set as data="):
        check_partition(fl.partitions.by_column(column="hospital"))
    with pytest.raises(ConfigError, match="rejects every cohort of up to 30 rows.*smaller f"):
        check_aggregator(fl.aggregators.Krum(f=20))


# -------------------------------------------------------------------------------------------- a test part of one's own


def table(rows: int = 400, sites: int = 4) -> fl.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3)) * [1, 10, 100] + [5, 50, 500]
    y = (x[:, 0] - 5 + (x[:, 1] - 50) / 10 + 0.5 * rng.normal(size=rows) > 0).astype(int)
    columns = {"age": x[:, 0], "dose": x[:, 1], "weight": x[:, 2], "ill": y}
    frame = pd.DataFrame({**columns, "site": [f"s{i % sites}" for i in range(rows)]})
    return fl.Dataset.create(frame, target="ill", client_column="site")


class LaterAtSites(Partition):
    """Rows from a place on are the test part of the site that they are from."""

    kind: ClassVar[str] = "later"
    start: int = 300
    relabel: bool = False

    def draw(self, pool: Pool, seed: int) -> Draw:
        assert pool.data.users is not None
        owner, late = pool.data.users.numpy()[pool.index], pool.index >= self.start
        n = len(pool.data.user_names)
        early = group_by_owner(pool.index[~late], owner[~late], n)
        flips = np.tile([1, 0], (n, 1)) if self.relabel else None
        return Draw(early, group_by_owner(pool.index[late], owner[late], n), relabel=flips)


def test_a_test_part_of_the_partition_is_scaled_as_by_hand() -> None:
    data = table()
    fed = LaterAtSites()(data, seed=0)
    assert [len(fed.parts[part].index) for part in ("train", "validation", "test")] == [268, 32, 100]
    assert fed.notes == ()
    raw = data.x.numpy()
    for client in range(fed.n):
        train, test = (fed.indices(part, client).numpy() for part in ("train", "test"))
        assert test.tolist() == list(range(300 + client, 400, 4))
        want = (raw[test] - raw[train].mean(0)) / raw[train].std(0)
        np.testing.assert_allclose(fed.fetch(torch.from_numpy(test)).numpy(), want, atol=1e-5)


def test_a_temporal_split_scores_as_clients_that_were_prepared_by_hand() -> None:
    data = table()
    fed = LaterAtSites(validation=0)(data, seed=0)
    raw, y, clients = data.x.numpy(), data.y.numpy(), {}
    for client, name in enumerate(fed.names):
        train, test = (fed.indices(part, client).numpy() for part in ("train", "test"))
        scaled = (raw - raw[train].mean(0)) / raw[train].std(0)
        clients[name] = tuple((scaled[rows].astype(np.float32), y[rows]) for rows in (train, test))
    by_hand = fl.Federation.create(clients, task="binary", validation=0)
    runs = [fl.simulate("fedavg", f, rounds=3, local={"lr": 0.1, "batch_size": "full"}) for f in (fed, by_hand)]
    scores = [run.final(metric="auroc") for run in runs]
    torch.testing.assert_close(*scores, atol=1e-3, rtol=0)
    assert scores[0].min() > 0.8


def test_a_part_with_rows_that_nobody_prepared_is_refused() -> None:
    fed = LaterAtSites(start=300)(table(), seed=0)
    assert fed.data.ready is None
    some = fl.partitions.natural(clients=2, per_client=1)(table(), seed=0)
    bare = int((~some.data.ready).nonzero()[0, 0])
    assert torch.isnan(some.data.x[bare]).all()
    parts = {**some.parts, "test": type(some.parts["test"])(torch.tensor([bare]), torch.tensor([0, 1, 1]))}
    for change in ({"parts": parts}, {"test": torch.tensor([bare])}):
        with pytest.raises(
            DataError, match=rf"the columns of 1 sample .* are not scaled for any client .*sample {bare}"
        ):
            dataclasses.replace(some, **change)


class Shared(LaterAtSites):
    def draw(self, pool: Pool, seed: int) -> Draw:
        drawn = super().draw(pool, seed)
        n = len(pool.data.user_names)
        late = np.arange(self.start, len(pool.data))
        return drawn._replace(test=group_by_owner(np.tile(late, n), np.repeat(np.arange(n), len(late)), n))


class Leaks(LaterAtSites):
    def draw(self, pool: Pool, seed: int) -> Draw:
        drawn = super().draw(pool, seed)
        return drawn._replace(test=drawn.dealt)


class TooFewClients(LaterAtSites):
    def draw(self, pool: Pool, seed: int) -> Draw:
        drawn = super().draw(pool, seed)
        return drawn._replace(test=group_by_owner(np.array([399]), np.array([0]), 1))


class OtherSites(Partition):
    """Every client is tested on all samples of the other clients, which train on them."""

    kind: ClassVar[str] = "other-sites"

    def draw(self, pool: Pool, seed: int) -> Draw:
        assert pool.data.users is not None
        site, n = pool.data.users.numpy()[pool.index], len(pool.data.user_names)
        others = np.flatnonzero(np.arange(n)[:, None] != site)
        return Draw(
            group_by_owner(pool.index, site, n),
            group_by_owner(pool.index[others % len(site)], others // len(site), n),
        )


class Bootstrap(Partition):
    """Every client draws its samples with replacement from all samples."""

    kind: ClassVar[str] = "bootstrap"

    def draw(self, pool: Pool, seed: int) -> Draw:
        drawn = fl.seeds.numpy_generator(seed, purpose="bootstrap").choice(pool.index, 4 * 60)
        return Draw(group_by_owner(drawn, np.arange(4 * 60) % 4, 4))


@pytest.mark.parametrize("options", [{}, {"folds": 3}, {"max_train_per_client": 20}])
def test_a_user_s_partition_may_share_and_repeat_samples(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    data = fl.Dataset.create(
        (rng.normal(size=(100, 3)), np.arange(100) % 2), clients=[f"s{i // 25}" for i in range(100)]
    )
    fed = Bootstrap(**options)(data)
    for client in range(4):
        parts = [{*fed.indices(part, client).tolist()} for part in ("train", "validation", "test")]
        assert sum(map(len, parts)) == len(set.union(*parts))
        assert len(fed.indices("train", client)) <= options.get("max_train_per_client", 60)
    assert any(note.startswith("clients have duplicate samples: ") for note in fed.notes)
    if not options:
        tested = OtherSites()(data).parts["test"].index.tolist()
        assert sorted(tested) == sorted([*range(100)] * 3)


def test_a_built_in_partition_accepts_every_name_of_the_data() -> None:
    data = fl.Dataset(
        "d", torch.rand(8, 2), torch.arange(8) % 2, classes=("x", "y"), users=torch.arange(8) % 2, user_names=("", "b")
    )
    assert fl.partitions.natural()(data).names == ("", "b")


def test_test_parts_that_cannot_be_are_refused_with_a_sentence() -> None:
    with pytest.raises(Refused, match="two versions of the sample; assign every sample to one client, and to one part"):
        Shared()(table())
    with pytest.raises(Refused, match="assign every sample to one client, and to one part, and only once"):
        Bootstrap()(table())
    with pytest.raises(
        CodeError, match="partition Leaks failed in draw.*300 test samples are also training samples of the same"
    ):
        Leaks()(table())
    with pytest.raises(CodeError, match="`test` covers 1 client, but `dealt` covers 4"):
        TooFewClients()(table())
    with pytest.raises(PartitionError, match="defines the test sets itself, so folds = 3 has no effect"):
        LaterAtSites(folds=3)(table())
    assert any("test = 0.5 has no effect" in note for note in LaterAtSites(test=0.5)(table()).notes)


WRONG_DRAWS: dict[str, tuple[Any, str]] = {
    "no draw": (lambda d: d.dealt, "draw must return fl.partitions.Draw, got Dealt"),
    "nothing": (lambda d: None, "draw must return fl.partitions.Draw, got NoneType"),
    "a tuple": (lambda d: d._replace(dealt=tuple(d.dealt)), r"dealt must be a result of fl.partitions.*got tuple"),
    "floats": (lambda d: d._replace(dealt=d.dealt._replace(index=d.dealt.index / 1)), "index must be an integer numpy"),
    "a tensor": (lambda d: d._replace(common=torch.arange(3)), "common must be an integer numpy array .* got Tensor"),
    "a common sample twice": (lambda d: d._replace(test=None, common=np.array([399, 399])), "`common` lists 1 sample"),
    "equal names": (lambda d: d._replace(names=("a", "a", "b", "c")), "names must be 4 different names"),
    "too few names": (lambda d: d._replace(names=("a", "b")), "names must be 4 different names"),
    "numbers as names": (lambda d: d._replace(names=(1, 2, 3, 4)), "names must be a tuple of non-empty texts"),
    "a note": (lambda d: d._replace(notes="a note"), "notes must be a tuple of sentences, got 'a note'"),
    "flat noise": (lambda d: d._replace(noise=np.ones(4)), r"noise must be a numpy array of numbers .* \[4, c\]"),
    "negative noise": (lambda d: d._replace(noise=-np.ones((4, 1))), "`noise` must contain standard deviations of at"),
    "few groups": (lambda d: d._replace(groups=np.arange(2)), r"groups must be a numpy array of integers .* \[4\]"),
    "classes as floats": (lambda d: d._replace(relabel=np.ones((4, 2))), r"relabel must be .* integers .* \[4, 2\]"),
    "classes beyond": (lambda d: d._replace(relabel=np.full((4, 2), 2)), "`relabel` must contain classes from 0 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_DRAWS)
def test_a_wrong_field_of_a_draw_is_named_before_any_work(case: str) -> None:
    change, words = WRONG_DRAWS[case]

    class Wrong(LaterAtSites):
        def draw(self, pool: Pool, seed: int) -> Draw:
            return change(super().draw(pool, seed))  # type: ignore[no-any-return]

    with pytest.raises(CodeError, match=f"partition Wrong failed in draw, seed 0: ValueError: .*{words}"):
        Wrong(start=300)(table(), seed=0)


WRONG_RESULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "arrays": ("combine", lambda s, r: ({k: v.mean(0).numpy() for k, v in r.items()}, s), "the aggregates must be"),
    "one tensor": ("combine", lambda s, r: (next(iter(r.values())).mean(0), s), "the aggregates must be"),
    "whole numbers": ("combine", lambda s, r: ({k: v.mean(0).long() for k, v in r.items()}, s), "floating-point dtype"),
    "no state": ("combine", lambda s, r: ({k: v.mean(0) for k, v in r.items()}, None), "the state must be a"),
    "a count": ("combine", lambda s, r: ({k: v.mean(0) for k, v in r.items()}, {"n": 3}), "of tensors, got {'n'"),
    "a numpy model": ("forge", lambda base: base.numpy() + 1, "and floating-point dtype, got float32"),
    "no model": ("forge", lambda base: None, "and floating-point dtype, got NoneType"),
    "whole models": ("forge", lambda base: base.long(), "and floating-point dtype, got torch.int64"),
    "no labels": ("poison", lambda y, c: None, "`poison` must return a tensor .* got NoneType"),
    "few labels": ("poison", lambda y, c: y[:2], r"`poison` must return a tensor .* got torch.int64 \[2\]"),
    "labels as floats": ("poison", lambda y, c: y.float(), "`poison` must return a tensor .* got torch.float32"),
    "labels of no class": ("poison", lambda y, c: y + c, "labels must be from 0 to 1, got"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_RESULTS)
def test_a_wrong_result_of_a_user_s_part_is_named(case: str) -> None:
    where, give, words = WRONG_RESULTS[case]

    class Rule(Aggregator):
        def combine(self, state: Any, rows: Any, weights: Any, primary: str, ctx: Any) -> Any:
            return give(state, rows)

    class Forged(Forgery):
        def forge(self, honest: Any, base: Tensor, benign: Tensor, m: int, gens: Any) -> Any:
            return give(base)

    class Poisoned(Poison):
        def poison(self, y: Tensor, classes: int, gen: Any) -> Any:
            return give(y, classes)

    part: Any = {"combine": Rule, "forge": Forged, "poison": Poisoned}[where]
    options = {"aggregator": part()} if where == "combine" else {"attack": part(fraction=0.5)}
    fed = fl.partitions.iid(clients=4)(table(80), 0)
    with pytest.raises(FedloomError, match=rf"(?s){part.__name__} failed in [\w ]+: ValueError: .*{words}"):
        fl.simulate("fedavg", fed, rounds=1, **options)


def test_global_generators_in_a_partition_depend_on_the_seed() -> None:
    feds = [FromNumpy(clients=4)(table(), seed=seed) for seed in (0, 0, 1)]
    indices = [fed.parts["train"].index.tolist() for fed in feds]
    assert indices[0] == indices[1] != indices[2]


def test_samples_of_a_test_part_belong_to_their_clients() -> None:
    x, y = torch.rand(8, 3), torch.arange(8) % 2
    assert not [note for note in fl.Federation.create([((x, y), (x, y))] * 2).notes if "belong to no client" in note]
    some = fl.partitions.natural(clients=2, per_client=1)(table())
    assert [note for note in some.notes if "200 of 400 samples belong to no client" in note]


def test_changes_of_a_client_reach_its_own_test_part() -> None:
    data = table()
    fed = LaterAtSites(relabel=True)(data)
    for part in ("train", "test"):
        index = fed.parts[part].index
        assert torch.equal(fed.data.y[index], 1 - data.y[index])


KINDS_OF_DATA = {
    "tokens": lambda: fl.Dataset(
        "tokens", 1 + torch.arange(1200 * 5).view(1200, 5) % 7, torch.arange(1200) % 10, classes=tuple("abcdefghij"),
        vocabulary=tuple("_ABCDEFG"), users=torch.arange(1200) % 12, user_names=tuple("abcdefghijkl"),
        columns={"site": torch.arange(1200) % 12}, levels={"site": tuple("abcdefghijkl")},
    ),
    "numbers": lambda: fl.Dataset(
        "numbers", torch.arange(1200.0 * 3).view(1200, 3), torch.arange(1200.0)[:, None], "regression",
        users=torch.arange(1200) % 12, user_names=tuple("abcdefghijkl"),
        columns={"site": torch.arange(1200) % 12}, levels={"site": tuple("abcdefghijkl")},
    ),
}  # fmt: skip


BY_CLASS = ("clusters", "label-swap", "dirichlet", "femnist-fedprox", "mixed", "shards")
REFUSALS: dict[str, dict[str, str]] = {
    "tokens": {"feature-noise": "needs numeric samples, but", "rotated": "needs images"},
    "numbers": {"rotated": "needs images", **dict.fromkeys(BY_CLASS, "splits by class")},
}


@pytest.mark.parametrize("data", KINDS_OF_DATA)
@pytest.mark.parametrize("kind", PARTITIONS)
def test_no_sample_of_a_part_is_unprepared_whatever_the_data(kind: str, data: str) -> None:
    partition, refusal = PARTITIONS[kind](**OPTIONS.get(kind, {})), REFUSALS[data].get(kind)
    with nullcontext() if refusal is None else pytest.raises(ConfigError, match=refusal):
        check_partition(partition, data=KINDS_OF_DATA[data]())


class LateRows(Sized):
    """A temporal split with one test part for all: the last third of the rows, which no client has."""

    kind: ClassVar[str] = "late-rows"

    def draw(self, pool: Pool, seed: int) -> Draw:
        late = pool.index >= 2 * len(pool.data) // 3
        owner = np.arange(int((~late).sum())) % self.clients
        return Draw(group_by_owner(pool.index[~late], owner, self.clients), common=pool.index[late])


def _probabilities(scores: Any, classes: int) -> Any:
    if classes > 2:
        return scores.double().softmax(1).numpy()
    chance = scores.double().sigmoid()
    return torch.cat([1 - chance, chance], 1).numpy()


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("task", ["binary", "classification", "regression"])
def test_a_common_test_part_is_scored_as_scikit_learn_scores_its_rows(task: str, scale: bool) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"age": rng.normal(0, 1, 240), "crp": rng.gamma(2, 1, 240)})
    risk = table.age + 0.4 * table.crp + rng.normal(0, 0.7, 240)
    codes = np.digitize(risk, [0.8] if task == "binary" else [0.3, 1.4])
    table["outcome"] = risk if task == "regression" else codes
    data = fl.Dataset.create(table, target="outcome", task=task, scale=scale)
    fed = LateRows(clients=3, test=0.0, validation=0.1)(data, seed=0)
    result = fl.simulate("fedavg", fed, "softmax", rounds=4, local={"lr": 0.1})
    assert fed.test is not None
    rows = fed.test.numpy()
    assert sorted(rows) == [*range(160, 240)]
    raw, x = table[["age", "crp"]].to_numpy()[rows], fed.data.x[fed.test]
    if scale:  # by the medians over the clients of their training parts' means and deviations
        trained = [table[["age", "crp"]].to_numpy()[fed.indices("train", k).numpy()] for k in range(3)]
        centre, unit = (np.median([f(part, 0) for part in trained], 0) for f in (np.mean, np.std))
        raw = (raw - centre) / unit
    np.testing.assert_allclose(x.numpy(), raw, atol=1e-5)
    with torch.no_grad():
        scores = result.models["global"](x)
    truth, shown = table.outcome.to_numpy()[rows], result.to_pandas()
    shown = shown[(shown["round"] == 4) & (shown.part == "common")].set_index("metric").value
    if task == "regression":
        guess = scores.squeeze(1).numpy()
        wanted = {"mae": sk.mean_absolute_error(truth, guess), "rmse": sk.root_mean_squared_error(truth, guess),
                  "r2": sk.r2_score(truth, guess)}  # fmt: skip
    else:
        chances = _probabilities(scores, len(data.classes))
        guess = chances.argmax(1)
        wanted = {"accuracy": sk.accuracy_score(truth, guess), "loss": sk.log_loss(truth, chances.astype(np.float64))}
        if task == "binary":
            wanted |= {"auroc": sk.roc_auc_score(truth, chances[:, 1]), "f1": sk.f1_score(truth, guess),
                       "auprc": sk.average_precision_score(truth, chances[:, 1])}  # fmt: skip
        else:
            wanted |= {"macro_f1": sk.f1_score(truth, guess, average="macro")}
    for name, value in wanted.items():
        assert shown[name] == pytest.approx(value, abs=1e-5), name
