"""The engine against the plain reference driver, against itself on other workers and chunks, and after a resume."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Generator, Tensor, nn

from fedloom.algorithms import (
    FLAME,
    IFCA,
    REGISTRY,
    SCAFFOLD,
    Algorithm,
    Delta,
    FedADMM,
    FedAvg,
    FedDyn,
    FedSkip,
    LocalOnly,
    Model,
    PresetMethod,
    fedskip,
    upload_fields,
)
from fedloom.choose import (
    Availability,
    Bernoulli,
    FairFedWeigher,
    PowerOfChoice,
    RoundRobin,
    Sampler,
    SamplesWeigher,
    SharesWeigher,
    SizeWeighted,
    Uniform,
    UniformWeigher,
)
from fedloom.data import load
from fedloom.data.dataset import Dataset
from fedloom.data.federation import Federation
from fedloom.data.partitions import Clusters, Dirichlet, Iid, Natural
from fedloom.engine.result import Result
from fedloom.engine.setting import Engine, Evaluate, Setting
from fedloom.engine.setup import check, make_job
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, FedloomError, Refused, RunDirError, Stop
from fedloom.local import Ctx, LocalSGD, Nothing, Work
from fedloom.local.oracles import make_oracle
from fedloom.models import MLP, Dropout, make_spec
from fedloom.rows.aggregators import FLTrust, GeometricMedian, Krum, Median, PrivateMean
from fedloom.rows.attacks import ATTACKS, Attack, Backdoor, FlippedLabels, Forgery, Gaussian, SameValue
from fedloom.rows.channels import CHANNELS
from fedloom.tasks import make_task
from fedloom.testing.federate import ReferenceFederation as Plain
from fedloom.testing.federate import begin
from fedloom.testing.federate import play as play_plainly

LOCAL = LocalSGD(lr=0.05, epochs=1, batch_size=8)
SIGNED = FairFedWeigher(floor=False)


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Dirichlet(clients=20, alpha=0.5, min_size=2)(load("digits"), seed=0)


NEEDED: dict[str, dict[str, Any]] = {"fedbn": {"layers": ("head.bias",)}}  # softmax has no normalisation layer


def composed(name: str) -> PresetMethod:
    made: Any = REGISTRY[name](**NEEDED.get(name, {}))
    return made if isinstance(made, PresetMethod) else PresetMethod(made)


def run(fed: Federation, method: Any = None, **changes: Any) -> Result:
    settings: dict[str, Any] = {
        "rounds": 4,
        "local": LOCAL,
        "sampler": Uniform(fraction=0.9),
        "evaluate": Evaluate(every=2),
        **changes,
    }
    return simulate(method or FedAvg(), fed, "softmax", **settings)


def same(a: pa.Table, b: pa.Table) -> bool:
    """Equal bits, not-a-number included."""
    return a.schema == b.schema and all(
        x == y or (isinstance(x, float) and math.isnan(x) and math.isnan(y))
        for name in a.column_names
        for x, y in zip(a[name].to_pylist(), b[name].to_pylist(), strict=True)
    )


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), Dropout(0.1), nn.Flatten(), nn.Linear(72, 10))


def rows(result: Result) -> torch.Tensor:
    ids = torch.arange(result.job.n)
    return torch.cat([f.double() for f in result.job.clients.read(ids)], 1) if len(result.job.clients.template) else ids


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - {"centralized"}))
def test_engine_equals_the_plain_reference(fed: Federation, name: str) -> None:
    check_against_the_plain_reference(fed, composed(name)._replace(sampler=None))


def test_weights_below_zero_are_those_of_the_plain_reference(fed: Federation) -> None:
    weigher = FairFedWeigher(beta=0.6, metric="loss", floor=False)
    result = check_against_the_plain_reference(fed, PresetMethod(FedAvg(), weigher=weigher))
    assert float(result.state.weigher.omega.min()) < 0


def check_against_the_plain_reference(fed: Federation, preset: PresetMethod) -> Result:
    """Chunks, stores, sums and commits compute what the equations say: sampled cohorts, ragged clients, float64."""
    got = run(fed, preset, rounds=3, engine=Engine(dtype="float64", clients_per_batch=3, gradient_engine="compiled"))
    job = got.job
    weigher = job.setting.aggregation_weights  # constants derived from the run are settled in it, as in the method
    wide = fed.to("cpu", torch.float64)
    module = make_spec("softmax").build(tuple(fed.data.shape), make_task(fed.data).outputs, 0)
    oracle = make_oracle(module, make_task(fed.data), wide, "loop")
    plain = Plain(oracle, job.alpha, LOCAL, 0, rounds=3)
    state = begin(job.algorithm, plain, oracle.layout.vector(module, torch.float64), weigher)
    for t in range(1, 4):
        cohort = job.setting.sampler.apply(None, None, job.ctx(t))[0]
        order = cohort[torch.argsort(job.train_sizes[cohort, 0], descending=True, stable=True)]
        state = play_plainly(job.algorithm, plain, state, order.tolist(), weigher=weigher)
    for want, have in zip(state.server, got.state.server, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
    if len(job.clients.template):
        for want, have in zip(state.rows, job.clients.read(torch.arange(job.n)), strict=True):
            torch.testing.assert_close(have, want.expand_as(have), rtol=1e-9, atol=1e-9)
    return got


UNWEIGHED = {
    "local": "no mean",
    **dict.fromkeys(("fedacs", "fedamp", "heurfedamp"), "the server mixes by likeness"),
    **dict.fromkeys(("clustered-sampling", "power-of-choice"), "the draws are by samples"),
    **dict.fromkeys(("equitable-fl", "fairfed"), "the weigher takes their place"),
    "fedfomo": "clients mix by losses",
    "fedskip": "clients count by the samples that they have seen",
}
"""Methods whose runs do not depend on the clients' shares, and why."""


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - {"centralized"}))
def test_every_method_weighs_by_the_same_shares(name: str) -> None:
    fed = Dirichlet(clients=4, alpha=0.5, min_size=2)(load("digits"), seed=0)
    options: dict[str, Any] = {"model": MLP(hidden=(8,)), "rounds": 2, "local": LOCAL, "evaluate": Evaluate(every=2)}
    numbers = tuple(fed.sizes("train").double().tolist())
    plain, uniform, given = (
        simulate(composed(name), fed, **options, client_weights=w) for w in ("samples", "uniform", numbers)
    )
    assert same(simulate(composed(name), fed, **options).table(), plain.table())
    assert same(plain.table(), given.table())
    assert same(plain.table(), uniform.table()) == (name in UNWEIGHED)
    assert any("has no effect with FedSkip" in note for note in uniform.notes) == (name == "fedskip")
    chosen = re.escape(f"client_weights = {numbers!r}")
    unread = f"{chosen} has no effect|replaces {chosen}"
    assert any(re.search(unread, note) for note in given.notes) == (name in UNWEIGHED)


def test_groups_count_the_same() -> None:
    fed = Clusters(classes=(5, 5), sizes=(4, 2))(load("digits"), seed=0)
    job, _ = make_job(Setting.create("fedavg", client_weights="groups"), fed)
    assert fed.groups is not None
    sums = torch.zeros(2, dtype=torch.float64).index_add(0, fed.groups, job.alpha[:, 0].double())
    torch.testing.assert_close(sums, torch.tensor([0.5, 0.5], dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ("groups", "requires groups of clients"),
        ([1.0], "one number for each of the 20 clients"),
        ([0.0] * 20, "at least one of them must be positive"),
        ([-1.0] * 20, "greater than or equal to 0"),
        ("sample", "'samples'"),
    ],
)
def test_shares_that_cannot_be(fed: Federation, weights: Any, sentence: str) -> None:
    with pytest.raises(FedloomError, match=sentence):
        run(fed, client_weights=weights)


def test_what_the_caller_has_set_in_torch_changes_no_bit(set_in_torch: Callable[[], Any]) -> None:
    def run() -> list[torch.Tensor]:
        fed = Iid(clients=4, validation=0.2, max_train_per_client=80)(load("digits"), seed=0)
        short: Any = {"rounds": 2, "local": {"lr": 0.05, "optimizer": "adam"}, "augment": {"flip": 0.5, "crop": 1}}
        results = [simulate("fedas", fed, model, **short) for model in (MLP(hidden=(16,)), small_cnn)]
        adapted = [result.models.adapt(fed.data, holdout=0.9).row for result in results]
        return [
            *adapted,
            *(r.models.rows("personal") for r in results),
            *(r.final("personal", "loss") for r in results),
        ]

    want = run()
    with set_in_torch():
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "flame", "fedacs", "equitable-fl", "ditto"])
def test_two_workers_equal_one_bit_for_bit(fed: Federation, name: str) -> None:
    one, two = (run(fed, composed(name), engine=Engine(workers=w, clients_per_batch=2)) for w in (1, 2))
    assert same(one.table(), two.table())
    assert torch.equal(rows(one), rows(two))


class Tracked(nn.Module):
    """Subtracts a moving average, which it keeps in a buffer, from its samples."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().flatten(1).mean(0), alpha=0.1)
        return self.last(x.flatten(1) - self.mean)


class Assigned(Tracked):
    """The same with an attribute, in the place of which a new tensor comes in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.mean = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(1).mean(0)
        return self.last(x.flatten(1) - self.mean)


class Counted(Tracked):
    """Divides its samples by the number of passes, an attribute that the first of them makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes = getattr(self, "passes", 0) + 1
        return self.last(x.flatten(1) / self.passes)


class Listed(Tracked):
    """Centres its samples by the mean of all that came before, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.past: Any = [torch.zeros(64)]
        self.shape = [1, 64]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shape = [1, self.shape[1]]  # another list of the same values
        self.past.append(x.detach().flatten(1).mean(0))
        return self.last(x.flatten(1) - torch.stack([*self.past]).mean(0))


class Queued(Listed):
    def __init__(self) -> None:
        super().__init__()
        self.past = deque([torch.zeros(64)], maxlen=3)


class Nested(Listed):
    """The same in a list of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.past = {"means": [torch.zeros(64)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.past["means"].append(x.detach().flatten(1).mean(0))
        return self.last(x.flatten(1) - torch.stack(self.past["means"]).mean(0))


class Within(Listed):
    """The same in the tensor that a list holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.past[0].mul_(0.9).add_(x.detach().flatten(1).mean(0), alpha=0.1)
        return self.last(x.flatten(1) - self.past[0])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Tracked, "mean"), (Assigned, "mean"), (Counted, "passes"),
        *((kind, "past") for kind in (Listed, Queued, Nested, Within)),
    ],
)  # fmt: skip
def test_a_value_that_training_changes_passes_from_no_client_to_another(
    fed: Federation, kind: type[Tracked], name: str
) -> None:
    model, short = kind(), {"rounds": 2, "local": LOCAL}
    one, two, beside = (
        simulate(name, fed, model, engine=Engine(workers=workers), **short)
        for name, workers in (("fedavg", 1), ("fedavg", 2), ("ditto", 1))  # Ditto trains personal models as well
    )
    assert any(f"training changes buffers or attributes of the model ({name})" in note for note in one.job.notes)
    for other in (two, beside):
        assert torch.equal(other.models.rows("global"), one.models.rows("global"))
    assert not bool(model.mean.any())
    past: Any = getattr(model, "past", [])
    assert [bool(value.any()) for value in (past["means"] if isinstance(past, dict) else past)] in ([], [False])
    with pytest.raises(Refused, match="buffers or attributes that training changes"):
        simulate("fedavg", fed, model, engine=Engine(gradient_engine="vmap"), **short)


def test_chunks_and_oracles_change_rounding_only(fed: Federation) -> None:
    whole = run(fed, engine=Engine(dtype="float64")).models.rows("global")
    for engine in (Engine(dtype="float64", clients_per_batch=1), Engine(dtype="float64", gradient_engine="loop")):
        torch.testing.assert_close(run(fed, engine=engine).models.rows("global"), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["flame", "scaffold", "fedacs"])
@pytest.mark.parametrize("budget", [1024, 0], ids=["memory", "files"])
def test_resume_equals_the_uninterrupted_run(fed: Federation, tmp_path: Path, name: str, budget: int) -> None:
    class Stopped(BaseException):
        pass

    def stop(state: Any) -> None:
        if state.round == 3:
            raise Stopped

    engine = Engine(checkpoint_every=1e-9, state_memory_mib=budget)
    with pytest.raises(Stopped):
        run(fed, composed(name), engine=engine, folder=tmp_path / "broken", callbacks=[stop])
    resumed = run(fed, composed(name), engine=engine, folder=tmp_path / "broken")
    whole = run(fed, composed(name), engine=engine, folder=tmp_path / "whole")
    assert same(resumed.table(), whole.table())
    assert torch.equal(rows(resumed), rows(whole))
    again = run(fed, composed(name), engine=engine, folder=tmp_path / "whole")
    assert same(again.table(), whole.table())


def test_the_method_comes_first(fed: Federation) -> None:
    with pytest.raises(ConfigError, match=r"the method must be the first argument: fl.simulate\(method, fed\)"):
        simulate(fed, "fedavg")  # type: ignore[arg-type]


def test_folder_of_another_run_is_refused(fed: Federation, tmp_path: Path) -> None:
    run(fed, folder=tmp_path)
    with pytest.raises(RunDirError, match="another"):
        run(fed, FedDyn(), folder=tmp_path)


def test_seeds_differ_and_repeat(fed: Federation) -> None:
    a, b, c = (run(fed, seed=s).models.rows("global") for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_work_and_traffic_are_counted(fed: Federation) -> None:
    result = run(fed, rounds=2, sampler=Uniform(), local=LocalSGD(lr=0.1, epochs=3, batch_size=8))
    samples = int(fed.sizes("train").sum())
    totals = dict(zip(("backward", "forward", "steps"), result.state.totals.tolist(), strict=False))
    assert totals["backward"] == 2 * 3 * samples
    assert totals["forward"] == 0
    assert totals["steps"] == 2 * 3 * sum(-(-n // 8) for n in fed.sizes("train").tolist())
    paper_up = result.state.records.last("", "", "bytes_up_paper")
    assert paper_up is not None
    assert paper_up[0] == 2 * 20 * 4 * 650


def test_centralized_is_one_client_scored_on_the_original_ones(fed: Federation) -> None:
    result = run(fed, REGISTRY["centralized"](), sampler=Uniform(fraction=0.5), aggregation_weights=SamplesWeigher())
    assert result.job.n == 1
    assert len(result.final("global")) == fed.n


def test_divergence_ends_the_run_with_a_sentence(fed: Federation) -> None:
    result = run(fed, local=LocalSGD(lr=1e30, steps=5))
    assert result.stop is Stop.DIVERGED
    assert "round" in result.detail


class Broken(FedAvg):
    """FedAvg whose client 3 uploads something that is not finite."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        up, rows = super().client(down, rows, work)
        return Delta(torch.where(work.ids[:, None] == 3, torch.nan, up.dw)), rows


class Without(Sampler):
    """Everyone but client 3."""

    kind: ClassVar[str] = "without"

    def apply(self, state: Any, info: Any, ctx: Ctx) -> tuple[torch.Tensor, Any]:
        return ctx.ids[ctx.ids != 3], state


class Boaster(FedSkip):
    """FedSkip whose client 3 claims a number of samples below zero."""

    def client(self, down: fedskip.Down, rows: Nothing, work: Work) -> tuple[fedskip.Up, Nothing]:
        up, rows = super().client(down, rows, work)
        return fedskip.Up(up.w, torch.where(work.ids[:, None] == 3, -1.0, up.seen)), rows


def test_a_client_with_a_weight_below_zero_is_dropped(fed: Federation) -> None:
    result = run(fed, Boaster(skip=1), sampler=Uniform())
    assert [note for note in result.notes if "[3]" in note] == result.notes
    assert len(result.notes) == 1
    assert "(and in 3 more rounds, the last of them 4)" in result.notes[0]
    without = run(fed, FedSkip(skip=1), sampler=Without())
    torch.testing.assert_close(result.models.rows("global"), without.models.rows("global"))


def test_a_dropped_client_is_as_if_not_sampled_and_named(fed: Federation) -> None:
    engine = Engine(dtype="float64", clients_per_batch=3)
    dropped = run(fed, Broken(), sampler=Uniform(), engine=engine)
    without = run(fed, sampler=Without(), engine=engine)
    torch.testing.assert_close(dropped.models.rows("global"), without.models.rows("global"), rtol=1e-10, atol=1e-12)
    assert [note for note in dropped.notes if "[3]" in note] == dropped.notes
    assert len(dropped.notes) == 1
    assert dropped.stop is Stop.DONE


def test_too_few_usable_uploads_end_the_run(fed: Federation) -> None:
    result = run(fed, engine=Engine(norm_bound=1e-9))
    assert result.stop is Stop.DIVERGED
    assert "0 of 18" in result.detail


def test_attackers_are_fixed_and_metrics_are_of_the_others(fed: Federation) -> None:
    result = run(fed, attack=SameValue(fraction=0.25, variance=100.0), rounds=2)
    clean = run(fed, rounds=2)
    bad = result.job.malicious
    assert int(bad.sum()) == 5
    values = result.final("global", "loss")
    mean = result.state.records.last("global", "test", "loss/mean")
    assert mean is not None
    assert mean[0] == pytest.approx(float(values[~bad].nanmean()))
    assert float(values.nanmean()) > float(clean.final("global", "loss").nanmean())


@pytest.mark.parametrize("kind", sorted(ATTACKS))
def test_no_attack_of_nobody(fed: Federation, kind: str) -> None:
    choices: dict[str, Any] = {"client_weights": "clusters-2"} if ATTACKS[kind].disguises else {}
    quiet = run(fed, rounds=1, attack=ATTACKS[kind](fraction=0.0), **choices)
    assert torch.equal(quiet.models.rows("global"), run(fed, rounds=1, **choices).models.rows("global"))


def test_the_success_of_a_backdoor_is_the_share_of_marked_test_samples_that_become_the_target(fed: Federation) -> None:
    attack = Backdoor(fraction=0.5, target=3, size=2)
    data = fed.data
    shift, scale = (0.0 if v is None else float(v) for v in (data.mean, data.std))
    result = run(fed, rounds=8, attack=attack)
    reached = result.final("global", "attack_success")
    for i in range(fed.n):
        x, y = fed.fetch(fed.indices("test", i)).clone(), fed.data.y[fed.indices("test", i)]
        x[..., -2:, -2:] = (attack.value - shift) / (scale or 1.0)
        taken = result.models.module("global")(x[y != 3]).argmax(1) == 3
        assert float(reached[i]) == pytest.approx(float(taken.double().mean()), nan_ok=True)
    benign = ~result.job.malicious
    assert float(reached[benign].nanmean()) > 0.9
    quiet, clean = run(fed, rounds=8, attack=Backdoor(fraction=0.0, target=3, size=2)), run(fed, rounds=8)
    assert float(quiet.final("global", "attack_success").nanmean()) < 0.3
    added = pa.array(["attack_success" not in name for name in quiet.table()["metric"].to_pylist()])
    assert same(quiet.table().filter(added), clean.table())


def test_the_trigger_of_a_table_is_written_before_each_client_scales_its_columns() -> None:
    rng = np.random.default_rng(0)
    frame = {"age": rng.normal(60, 10, 300), "lab": rng.normal(1, 0.2, 300), "ill": rng.integers(0, 2, 300)}
    table = pa.table({**frame, "site": np.arange(300) % 3})
    federation = Natural()(Dataset.create(table, target="ill", client_column="site"), seed=0)
    attack = Backdoor(fraction=0.34, target="0", columns={"lab": 9.0})
    got = simulate("fedavg", federation, rounds=1, attack=attack).job
    for i in range(3):
        lab = frame["lab"][federation.indices("train", i)]
        for part, features in (("triggered test", got.eval_fed), ("train", got.fed)):
            x = features.fetch(features.indices(part, i))[:, 1]
            marked = (9.0 - lab.mean()) / lab.std()
            assert float((x - marked).abs().min()) < 1e-3 * marked or (part == "train" and i not in got.attackers)
        ill = federation.data.y[federation.indices("test", i)]
        assert len(got.eval_fed.indices("triggered test", i)) == int((ill == 1).sum())
    marked = (got.fed.data.x[:300] != got.eval_fed.data.x[:300]).any(1)
    assert int(marked.sum()) == round(attack.share * int(federation.sizes("train")[got.attackers].sum()))
    assert bool((got.fed.data.y[:300][marked] == 0).all())


@pytest.mark.parametrize("attack", [Gaussian, FlippedLabels])
def test_it_is_said_that_nobody_or_everybody_attacks(fed: Federation, attack: type[Attack]) -> None:
    """Of 20 clients, up to half a client is nobody, and from there on somebody; nobody is what was asked for with 0."""
    said = {
        f: " ".join(check(Setting.create("fedavg", attack=attack(fraction=f)), fed)) for f in (0.0, 0.02, 0.03, 0.98, 1)
    }
    assert [f for f, notes in said.items() if "has no effect, because a fraction" in notes] == [0.02]
    assert [f for f, notes in said.items() if "all 20 clients" in notes] == [0.98, 1]


def test_it_is_said_that_no_attacker_took_part(fed: Federation) -> None:
    attack = Gaussian(fraction=0.2)
    bad = attack.attackers(fed.n, 0).tolist()
    honest = [i for i in range(fed.n) if i not in bad]
    for cohorts, unmet in (([honest, honest[:3]], True), ([honest, bad[:1]], False)):
        result = run(fed, attack=attack, rounds=2, cohorts=cohorts, sampler=None)
        assert ("no attacker took part" in " ".join(result.notes)) == unmet


def test_a_trusted_client_is_there_is_honest_and_is_in_every_round(fed: Federation) -> None:
    """Nothing is said of one who is; one who is not there is refused."""
    attack = Gaussian(fraction=0.2)
    bad = attack.attackers(fed.n, 0).tolist()
    good = next(i for i in range(fed.n) if i not in bad)
    everyone, some = Uniform(fraction=1.0), Uniform(fraction=0.9)

    def said(root: int, sampler: Sampler) -> str:
        rule = {"aggregator": FLTrust(root=root), "attack": attack, "client_weights": "uniform"}
        return " ".join(check(Setting.create("fedavg", sampler=sampler, **rule), fed))

    assert not said(good, everyone)
    assert "which is an attacker" in said(bad[0], everyone)
    with pytest.raises(ConfigError, match=f"fltrust trusts client {good}, which is not in this cohort"):
        said(good, some)
    with pytest.raises(Refused, match="clients are numbered 0 to 19"):
        said(20, everyone)


class Echo(Forgery):
    """The received model, sent back."""

    kind: Literal["echo"] = "echo"

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return base.clone()


@pytest.mark.parametrize("method", [FedAvg(), FLAME(), SCAFFOLD(), FedADMM(), FedSkip(), IFCA(clusters=3)], ids=repr)
def test_models_that_are_sent_back_move_no_model_of_the_server(fed: Federation, method: Algorithm) -> None:
    """An attacker receives the model that it would start from: of a clustered method, that of its own cluster."""
    still, begun = (
        run(fed, method, attack=Echo(fraction=1.0)).state.server,
        make_job(Setting.create(method, "softmax"), fed),
    )
    for after, before in zip(still, begun[1], strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


def test_robust_rule_keeps_attackers_out(fed: Federation) -> None:
    attack = Gaussian(fraction=0.2, variance=1e4)
    held = run(fed, attack=attack, aggregator=Median()).final("global", "loss")
    lost = run(fed, attack=attack).final("global", "loss")
    assert float(held.nanmean()) < float(lost.nanmean()) / 10


def test_refusals_follow_from_the_kinds() -> None:
    fed = Iid(clients=9)(load("digits"), seed=0)
    for method, rule, sentence in (
        (FedDyn(), {"aggregator": PrivateMean()}, "accumulates uploads"),
        (FedDyn(), {"aggregation_weights": SamplesWeigher()}, "accumulates uploads over rounds"),
        (composed("flame"), {"aggregation_weights": SamplesWeigher()}, "stores every client"),
        (composed("fedskip"), {"aggregator": Median()}, "mixes individual models"),
        (LocalOnly(), {"aggregator": Median()}, "does not upload anything"),
        (composed("scaffold"), {"local": LocalSGD(momentum=0.5)}, "momentum"),
        (FedAvg(), {"aggregation_weights": SIGNED, "aggregator": GeometricMedian()}, "allows negative weights"),
        (FedAvg(), {"aggregation_weights": SIGNED, "sampler": SizeWeighted(clients=3)}, "may sum to zero"),
    ):
        with pytest.raises(Refused, match=sentence):
            run(fed, method, **rule)
    with pytest.raises(ConfigError, match="2 f \\+ 3"):
        run(fed, aggregator=Krum(f=4))
    with pytest.raises(ConfigError, match="at most the number of clients"):
        run(fed, sampler=Uniform(clients=10))


@pytest.mark.parametrize(
    "sampler", [Uniform(clients=4), RoundRobin(clients=4), PowerOfChoice(clients=4), Availability(period=3, on=1)]
)
def test_a_cohort_too_small_for_the_rule_is_refused_before_the_run(sampler: Sampler) -> None:
    fed = Iid(clients=9)(load("digits"), seed=0)
    with pytest.raises(ConfigError, match="krum needs m >= 2 f \\+ 3, got m = [34] rows and f = 1"):
        run(fed, sampler=sampler, aggregator=Krum(f=1))
    assert run(fed, sampler=sampler, aggregator=Krum(f=0), rounds=1).stop is Stop.DONE


def test_a_cohort_that_is_too_small_for_the_rule_is_refused_before_the_first_round(fed: Federation) -> None:
    with pytest.raises(ConfigError, match=r"round 1 of 4 has 1 client: krum needs m >= 2 f \+ 3, got m = 1 row"):
        run(fed, sampler=Bernoulli(probability=0.01), aggregator=Krum(f=1))


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"schedule": "cosine", "decay_rounds": 3}, r'local=\{"decay_rounds": 4\}, or more'),
        ({"schedule": "exponential", "decay": 1e-200}, "local.decay"),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_refused(
    fed: Federation, settings: dict[str, Any], way_out: str
) -> None:
    local = LocalSGD(lr=0.1, **settings)
    with pytest.raises(ConfigError, match=f"the learning rate to 0 by round 4, the last round. .*{way_out}"):
        run(fed, local=local)
    assert run(fed, local=local, rounds=2).stop is Stop.DONE


@pytest.mark.parametrize("schedule", ["exponential", "inverse-sqrt", "cosine"])
def test_the_models_before_the_first_round_are_made_with_its_step_size(fed: Federation, schedule: str) -> None:
    """Ditto's personal model of a client never seen takes local steps before round 1 too, where the file asks."""

    def before(local: LocalSGD, asked: bool) -> list[float]:
        evaluate = Evaluate(every=2, personal_at_start=asked)
        table = run(fed, composed("ditto"), local=local, rounds=1, evaluate=evaluate).table()
        return [r["value"] for r in table.to_pylist() if r["round"] == 0 and r["model"] == "personal"]

    plain = before(LOCAL, True)
    assert len(plain) > fed.n
    assert plain == before(LOCAL.with_(schedule=schedule, decay=0.5), True)
    assert plain != before(LOCAL, False)


@pytest.mark.parametrize("asked", [False, True])
def test_clients_train_before_the_first_round_only_where_the_file_asks(
    fed: Federation, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    client = FLAME.client

    def noted(self: FLAME, down: Any, rows: Any, work: Work) -> Any:
        rounds.append(work.round)
        return client(self, down, rows, work)

    monkeypatch.setattr(FLAME, "client", noted)
    run(fed, FLAME(), rounds=1, evaluate=Evaluate(every=1, personal_at_start=asked))
    assert (0 in rounds) == asked
    assert 1 in rounds


def test_it_is_said_that_a_client_drawn_twice_counts_once_where_uploads_add_up(fed: Federation) -> None:
    for method, sampler, said in (
        (FedDyn(), SizeWeighted(clients=5), True),
        (composed("flame"), SizeWeighted(clients=5), True),
        (FedDyn(), SizeWeighted(clients=5, replacement=False), False),
        (FedAvg(), SizeWeighted(clients=5), False),
    ):
        notes = run(fed, method, sampler=sampler, rounds=1).notes
        assert any(re.search("may draw a client twice, but .* counts it once in", note) for note in notes) == said


def test_it_is_said_that_a_mean_with_absent_clients_moves_little_and_it_does(fed: Federation) -> None:
    def moved(method: str, clients: int) -> tuple[list[str], float]:
        result = run(fed, composed(method), sampler=Uniform(clients=clients), rounds=1, initial=torch.zeros(650))
        return [n for n in result.notes if "absent clients" in n], float(result.state.server.x.norm())

    for method in ("fedpd", "fedadmm", "fedadmm-composite", "fedsplit", "flame"):
        (few, some), (none, all_) = moved(method, 1), moved(method, fed.n)
        assert few
        assert f"With 1 of {fed.n} in a round" in few[0]
        assert none == []
        assert some < all_ / 2
    assert moved("feddyn", 1)[0] == []


def test_it_is_said_that_one_step_of_fedprox_is_fedavg_and_it_is(fed: Federation) -> None:
    for local, said in ((LOCAL.with_(batch_size="full", epochs=1), True), (LOCAL.with_(batch_size=2), False)):
        prox, plain = run(fed, composed("fedprox"), local=local), run(fed, local=local)
        assert any("one local step is the same as FedAvg" in note for note in prox.notes) == said
        assert torch.allclose(prox.state.server.x, plain.state.server.x, rtol=0, atol=1e-6) == said


def test_it_is_said_that_a_rule_reads_no_weights(fed: Federation) -> None:
    for rule, weigher, said in (
        (Median(), SamplesWeigher(), "aggregation_weights 'samples'"),
        (Median(), SharesWeigher(), "client_weights = 'samples'"),
        (PrivateMean(clip=1e6, sigma=0.0), SamplesWeigher(), "aggregation_weights 'samples'"),
        (GeometricMedian(), SamplesWeigher(), ""),
        (Median(), UniformWeigher(), ""),
    ):
        notes = run(fed, aggregator=rule, aggregation_weights=weigher, rounds=1).notes
        assert any(f"weights all clients equally, so {said} has no effect" in note for note in notes) == bool(said)
    replaced = run(fed, aggregation_weights=UniformWeigher(), rounds=1).notes
    assert any("aggregation_weights 'uniform' replaces client_weights = 'samples'" in note for note in replaced)
    assert not any("replaces" in note for note in run(fed, sampler=SizeWeighted(), rounds=1).notes)
    assert any(
        "'uniform' has no effect with FLAME" in n for n in run(fed, "flame", aggregation_weights=UniformWeigher()).notes
    )


@pytest.mark.parametrize("common", [None, torch.arange(1500, 1797)])
def test_personal_models_of_all_chunks_are_scored_on_the_common_test_set(common: torch.Tensor | None) -> None:
    fed = Iid(clients=17)(replace(load("digits"), test=common), seed=0)
    evaluate = Evaluate(every=1, personal_on_common=True)
    result = run(fed, composed("ditto"), rounds=1, evaluate=evaluate, engine=Engine(clients_per_batch=2))
    assert len(result.final("personal", "accuracy", "common")) == 17
    own, judge = result.models.personal[16], result.job.eval_fed
    where = torch.cat([judge.indices("test", i) for i in range(17)]) if common is None else common
    right = own(judge.fetch(where)).argmax(1) == judge.targets(where)
    assert float(result.final("personal", "accuracy", "common")[16]) == pytest.approx(float(right.double().mean()))


@pytest.mark.parametrize("kind", sorted(CHANNELS))
def test_a_channel_passes_an_upload_of_nothing(fed: Federation, kind: str) -> None:
    """FedPer shares what is not the head, which of a model that is all head is nothing."""
    result = run(fed, composed("fedper"), upload_transform=CHANNELS[kind](), rounds=2)
    assert result.stop is Stop.DONE


@pytest.mark.parametrize("kind", sorted(CHANNELS))
def test_counts_that_weigh_models_pass_no_channel(fed: Federation, kind: str) -> None:
    """Clipped with the model a count would take its place, and noise would make it negative, an upload to drop."""
    noise = {"clip": 1e-3, "sigma": 10.0} if kind == "gaussian-noise" else {}
    exact, sent = (
        run(fed, "fedskip", upload_transform=channel, rounds=4) for channel in (None, CHANNELS[kind](**noise))
    )
    seen = [result.job.kept.read(torch.arange(fed.n)).seen for result in (exact, sent)]
    assert torch.equal(*seen)
    assert not any("dropped" in note for note in sent.notes)


def test_every_upload_field_declares_its_kind() -> None:
    for name in REGISTRY:
        kinds = upload_fields(type(composed(name).algorithm))
        assert sum(kind.primary for kind in kinds.values()) == (1 if kinds else 0), name


def test_models_are_modules_that_predict(fed: Federation, tmp_path: Path) -> None:
    result = run(fed, composed("flame"))
    assert result.models.kinds() == ["global", "personal", "hybrid"]
    assert [kind for kind in ("global", "personal", "hybrid", "other") if kind in result.models] == [*result.models]
    index = fed.indices("test", 0)
    x, y = fed.fetch(index), fed.targets(index)
    with torch.no_grad():
        hit = (result.models.module("personal", 0)(x).argmax(1) == y).double().mean()
    assert hit == pytest.approx(float(result.final("personal")[0]))
    takes_global = result.final("hybrid") == result.final("global")
    takes_personal = result.final("hybrid") == result.final("personal")
    assert bool((takes_global | takes_personal | result.final("hybrid").isnan()).all())
    assert {p.name for p in result.models.save(tmp_path)} == {
        "global.safetensors",
        "personal.safetensors",
        "hybrid.safetensors",
        "server.safetensors",
    }
    with pytest.raises(ConfigError, match="no 'global' model"):
        run(fed, LocalOnly()).models.rows("global")
