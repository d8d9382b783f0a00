"""Devices, presence and schedules: what they take, what they refuse, and what is known of their limits."""

from __future__ import annotations

import csv
import gzip
import math
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import fedloom as fl
from fedloom.algorithms import FIAELT, FedACS, FedAMP, FedAvg, HeurFedAMP
from fedloom.algorithms._base import Delta, Model
from fedloom.data.federation import Federation
from fedloom.errors import ConfigError, DataError, Refused
from fedloom.lab.cli import app
from fedloom.local import Ctx, Nothing, Work
from fedloom.schedule import Buffered, Classes, Deadline, Equal, LogNormal, OverSelection, Presence, Synchronous, Trace
from fedloom.testing import check_timing
from fedloom.testing.timing import TIME_LAWS, N, Speeds, federation, get_clock, run_rounds

NONE = torch.zeros(0)
KRUM = {"kind": "multi-krum", "f": 1}


@pytest.mark.parametrize("method", ["flame", "ifca", FedAMP(among="all")], ids=str)
def test_methods_obey_the_laws_of_time(method: Any) -> None:
    check_timing(method)


@pytest.mark.parametrize("method", [FedAMP, HeurFedAMP, FedACS])
def test_mixtures_among_all_are_those_of_a_whole_cohort_and_work_in_a_stream(method: Any) -> None:
    cohort, everyone = (run_rounds(method(among=among), None, Synchronous()) for among in ("cohort", "all"))
    torch.testing.assert_close(*(r.job.kept.read(torch.arange(N)).w for r in (cohort, everyone)), rtol=0, atol=1e-5)
    stream = run_rounds(method(among="all"), LogNormal(), Buffered(buffer=2, concurrency=4), rounds=12)
    assert max(stream.uploads()["staleness"].to_pylist()) > 0
    assert bool(stream.job.kept.read(torch.arange(N)).w.isfinite().all())


@pytest.mark.parametrize("schedule", [Buffered(buffer=2, concurrency=4), {"kind": "asynchronous"}], ids=str)
def test_a_method_that_sends_nothing_works_in_a_stream(schedule: Any) -> None:
    result = run_rounds("local", LogNormal(), schedule)
    start, models = result.job.clients.template, result.models.rows("personal")
    assert bool(models.isfinite().all())
    assert not torch.equal(models, start[0].expand_as(models))


def test_a_broken_law_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(method: Any) -> None:
        raise AssertionError("time stands still")

    monkeypatch.setitem(TIME_LAWS, "silence", broken)
    with pytest.raises(AssertionError, match=r"law silence, 'fedavg': time stands still"):
        check_timing("fedavg", without=set(TIME_LAWS) - {"silence"})


class Drifting(FedAvg):
    """Its uploads depend on how many clients have trained in this process."""

    trained: ClassVar[list[int]] = []

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        upload, rows = super().client(down, rows, work)
        self.trained.append(work.m)
        return upload._replace(dw=upload.dw * (1 + 0.1 * len(self.trained))), rows


class Whispering(FedAvg):
    """A client learns what those before it have sent."""

    whispered: ClassVar[list[Any]] = []

    def init(self, x0: torch.Tensor, ctx: Ctx) -> tuple[Model, Nothing, None]:
        self.whispered.clear()
        return super().init(x0, ctx)

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        upload, rows = super().client(down, rows, work)
        before = sum(self.whispered, torch.zeros_like(down.x))
        self.whispered.append(0.01 * upload.dw.sum(0))
        return upload._replace(dw=upload.dw + before), rows


class Numbered(FedAvg):
    """The first client takes another gradient, for its number."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        for i in [0] if 0 in work.ids.tolist() else []:
            place = work.ids.tolist().index(i)
            work.take(slice(place, place + 1)).full_grad(down.x)
        return super().client(down, rows, work)


class Uncounted(FedAvg):
    """Its work is reported below zero."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        answer = super().client(down, rows, work)
        work.counts.backward.neg_()
        return answer


@pytest.mark.parametrize(
    ("method", "law", "cure"),
    [
        (Drifting(), "a_clock_changes_no_bit", "store values for later rounds in the states"),
        (Drifting(), "whole_cohort", "store values for later rounds in the states"),
        (Drifting(), "scale_of_time", "store values for later rounds in the states"),
        (Whispering(), "nothing_later", "use only the download, the rows and the work"),
        (Whispering(), "silence", "use only the download, the rows and the work"),
        (Numbered(), "permutation_of_devices", "do not use the number of a client"),
        (Uncounted(), "conservation", "take samples, losses and gradients from work"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_whoever_breaks_a_law_of_time_reads_the_cure(method: Any, law: str, cure: str) -> None:
    with pytest.raises(AssertionError, match=f"law {law}, .*{cure}"):
        check_timing(method, without=set(TIME_LAWS) - {law})


@pytest.mark.parametrize("seed", range(20))
def test_the_end_of_work_is_where_as_much_presence_has_passed(seed: int) -> None:
    g = np.random.default_rng(seed)
    period = math.inf if seed % 3 == 0 else 10.0
    cuts = np.sort(g.uniform(0, 10, 6))
    there = Presence({0: [(cuts[k], cuts[k + 1]) for k in (0, 2, 4)]}, period)
    for start, busy in zip(g.uniform(0, 25, 20), g.exponential(2.0, 20), strict=True):
        end = there.end(0, start, busy)
        grid = np.linspace(start, min(end, 200.0), 20_001)
        inside = np.zeros(len(grid), bool)
        for k in (0, 2, 4):
            rest = grid % period if math.isfinite(period) else grid
            inside |= (rest >= cuts[k]) & (rest < cuts[k + 1])
        worked = inside.mean() * (grid[-1] - start)
        if math.isfinite(end):
            assert there.presence_seconds(0, end) - there.presence_seconds(0, start) == pytest.approx(busy, abs=1e-9)
            assert worked == pytest.approx(busy, abs=2e-3 * max(end - start, 1))
        else:
            assert math.isinf(period)
            assert worked < busy
        soon = there.next(0, start)
        assert soon >= start
        assert there.end(0, start, 1e-9) - soon < 1e-6 or math.isinf(soon)


def test_classes_have_their_shares_and_the_slowest_go_to_rare_labels() -> None:
    kinds = {"phone": {"share": 0.6, "speed": 20.0}, "laptop": {"share": 0.4, "speed": 200.0}}
    fleet = Classes(classes=kinds, slow="rare-labels").fleet(10, 0, torch.arange(10).double())
    assert fleet.member.tolist() == [1] * 4 + [0] * 6
    drawn = Classes(classes=kinds).fleet(1000, 0, NONE)
    assert torch.bincount(drawn.member).tolist() == [600, 400]
    assert not torch.equal(drawn.member, Classes(classes=kinds).fleet(1000, 1, NONE).member)
    with pytest.raises(ConfigError, match="shares must sum to 1"):
        Classes(classes={"phone": {"share": 0.5}})


def test_lognormal_speeds_have_their_spread() -> None:
    logs = LogNormal(speed=50, spread=0.7).fleet(20_000, 3, NONE).seconds.log()
    assert float(logs.mean()) == pytest.approx(-math.log(50), abs=0.02)
    assert float(logs.std()) == pytest.approx(0.7, abs=0.02)
    slow = LogNormal(slow="rare-labels").fleet(9, 0, torch.arange(9.0)).seconds
    assert (slow.diff() > 0).all()


def test_a_trace_is_read_and_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("client,speed,up,down,class,start,end\n0,10,1e6,1e6,old,0,5\n0,10,1e6,1e6,old,8,9\n1,0,1,1,new,,\n")
    fleet = Trace(file=str(file)).fleet(2, 0, NONE)
    assert fleet.seconds.tolist() == [0.1, math.inf]
    assert fleet.names == ("new", "old")
    assert fleet.ends(np.array([0, 0]), 1.0, np.array([4.5, 6.0])).tolist() == [8.5, math.inf]
    with pytest.raises(ConfigError, match=r"lists 2 devices for 3 clients"):
        Trace(file=str(file)).fleet(3, 0, NONE)
    with pytest.raises(ConfigError, match=r"set devices.draw = true"):
        Trace(file=str(file)).fleet(1, 0, NONE)
    file.write_text("client,speed\n0,1\n")
    with pytest.raises(DataError, match=r"lacks the columns \['up', 'down'\]"):
        Trace(file=str(file)).fleet(1, 0, NONE)
    with pytest.raises(DataError, match="does not exist"):
        Trace(file=str(tmp_path / "none.parquet")).fleet(1, 0, NONE)


SPANS = "client,speed,up,down,start,end\n"
RATES = "client,speed,up,down\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            SPANS + "0,1,1,1,0,5\n0,1,1,1,3,8\n",
            r"row 2: client 0 is present in \[3, 8\) s, but an earlier interval lasts until 5 s",
        ),
        (SPANS + "0,1,1,1,5,2\n", r"row 1: client 0 is present in \[5, 2\) s; end must be after start"),
        (SPANS + "0,1,1,1,-5,2\n", "The start must be at least 0"),
        (SPANS + "0,1,1,1,80000,90000\n", "within devices.period = 86400. Split an interval at its end into two rows"),
        (SPANS + "0,1,1,1,0,\n", "start and end must both be given or both be empty, got 0, nothing"),
        (SPANS + "0,1,1,1,a,b\n", "column start must contain numbers, got 'a'"),
        (SPANS + "0,1,1,1,0,3\n0,2,1,1,4,8\n", "row 2: client 0 has a different speed than in row 1"),
        (RATES + "0,1,1,1\n0,1,1,1\n", "row 2: client 0 also has row 1, but at least one of the two rows has no start"),
        (RATES + "0,nan,1,1\n", "row 1: speed must be a number at least 0, got nothing"),
        (RATES + "0,1,0,1\n", "up must be a number above 0, got 0"),
        (RATES + "0.5,1,1,1\n", "client must be a whole number of at least 0, got 0.5"),
        (RATES + "3,1,1,1\n", "client must be numbered from 0 to 0, got 3 instead of 0. Renumber the clients"),
        ("client,speed,speed,up,down\n0,1,2,1,1\n", "contains the column speed 2 times"),
        ("client,speed,up,down,start\n0,1,1,1,0\n", "contains only one of the columns start and end. Add"),
        ("", "cannot be read"),
    ],
)
def test_a_wrong_trace_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises((ConfigError, DataError), match=sentence) as error:
        Trace(file=str(file), period=86400.0).fleet(1, 0, NONE)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)


def test_an_odd_trace_is_read(tmp_path: Path) -> None:
    packed, odd = tmp_path / "trace.csv.gz", tmp_path / "trace.parquet"
    packed.write_bytes(gzip.compress((SPANS + "1,4,1,1,0,9\n0,2,1,1,6,8\n0,2,1,1,0,3\n").encode()))
    fleet = Trace(file=str(packed)).fleet(2, 0, NONE)
    assert fleet.seconds.tolist() == [0.5, 0.25]
    assert fleet.presence is not None
    assert [fleet.presence.presence_seconds(0, t) for t in (3.0, 6.0, 7.0)] == [3.0, 3.0, 4.0]
    columns = {name: pa.array([0.0, 1.0]).dictionary_encode() for name in ("client", "speed")}
    names = pa.array(["new", "old"]).dictionary_encode()
    pq.write_table(pa.table({**columns, "up": [1, 1], "down": [1.0, 1.0], "class": names}), odd)
    fleet = Trace(file=str(odd)).fleet(2, 0, NONE)
    assert fleet.seconds.tolist() == [math.inf, 1.0]
    assert fleet.names == ("new", "old")


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"schedule": Buffered()}, "requires simulated time, but the run has no devices. Set devices="),
        ({"schedule": Buffered(buffer=9), "devices": "equal"}, "schedule.buffer must be at most the number of clients"),
        ({"schedule": Deadline(seconds=1, partial=True), "devices": "equal"}, "use one of fednova, fedprox"),
        ({"schedule": Buffered(buffer=2), "devices": "equal", "aggregator": KRUM}, r"multi-krum needs m >= 2 f \+ 3"),
        ({"schedule": OverSelection(factor=4), "devices": "equal", "aggregator": KRUM}, r"got m = 2 rows"),
        ({"schedule": "asynchronous", "devices": "equal", "sampler": "power-of-choice"}, "cannot query candidates"),
        ({"schedule": "asynchronous", "devices": "equal", "attack": "alie"}, "a round's honest uploads"),
        (
            {"schedule": "asynchronous", "devices": "equal", "cohorts": [[0]] * 4},
            "cohorts are lists of clients per round",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(choices: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fl.simulate("fedavg", federation(), **{"rounds": 4, **choices})


@pytest.mark.parametrize(
    ("method", "cure"), [("fedamp", "Set among='all' in the method"), ("fedskip", "Omit schedule=")]
)
def test_methods_that_mix_a_cohort_are_refused_one_by_one(method: str, cure: str) -> None:
    with pytest.raises(Refused, match=rf"clients train one at a time with this schedule\. {cure}"):
        run_rounds(method, LogNormal(), Buffered(buffer=2))


def test_a_run_in_which_everyone_would_be_given_up_is_refused() -> None:
    with pytest.raises(Refused, match="no client answers within 0.1 s, because the fastest client takes") as refused:
        run_rounds("fedavg", Equal(speed=1.0), Buffered(buffer=2, timeout=0.1))
    assert refused.value.rule == "deadline-unmet"


def test_partial_work_ends_within_the_deadline() -> None:
    speeds = Speeds(speeds=(90.0, 50.0, 20.0, 70.0, 110.0, 40.0, 30.0, 60.0))
    local = {"lr": 0.1, "batch_size": 2, "steps": 6}
    whole = run_rounds("fedprox", speeds, Deadline(seconds=0.2), local=local)
    part = run_rounds("fedprox", speeds, Deadline(seconds=0.2, partial=True), local=local)
    for result, least in ((whole, 0), (part, N)):
        log = get_clock(result).history()
        taken = log[log[:, 6] == 0]
        assert (taken[:, 4] <= taken[:, 1] * 0.2 + 0.2 + 1e-9).all()
        assert least <= len(taken) // 4
    assert get_clock(whole).history().shape == get_clock(part).history().shape
    assert (get_clock(whole).history()[:, 6] != 0).any()


def test_a_deadline_has_the_rounds_of_fiaelt_shorter_which_reports_its_criterion() -> None:
    speeds, seconds = Speeds(speeds=(900.0, 500.0, 200.0, 700.0, 110.0, 90.0, 300.0, 60.0)), 0.8
    local, more = {"lr": 0.1, "batch_size": 2, "steps": 6}, {"evaluate": {"every": 1}}
    slow, fast = (
        run_rounds(FIAELT(passes=2, r=0.4), devices, Deadline(seconds=seconds, partial=True), local=local, **more)
        for devices in (speeds, Equal(speed=1e5))
    )
    log = get_clock(slow).history()
    assert (log[:, 6] == 0).all()
    assert (log[:, 4] <= log[:, 1] * seconds + seconds + 1e-9).all()
    assert float(slow.state.server.iterations) < float(fast.state.server.iterations)
    assert float(slow.state.server.met) < float(fast.state.server.met) <= 1
    with pytest.raises(Refused, match="set solver='sgd' in the method"):
        run_rounds(FIAELT(solver="gd", smooth=1.0), speeds, Deadline(seconds=seconds, partial=True))


def test_fast_clients_pull_the_model_by_how_often_they_answer() -> None:
    """f_i = (w - c_i)^2: with small steps, uploads at rates r_i settle at sum r_i c_i / sum r_i, not at the mean."""
    centres = (0.25, 4.25)
    clients = [((np.ones((3, 1)), np.full(3, c)), (np.ones((1, 1)), np.full(1, c))) for c in centres]
    result = fl.simulate(
        "fedavg", Federation.create(clients, validation=0.0), rounds=400, client_weights="uniform",
        local={"lr": 0.005, "batch_size": "full", "steps": 1}, evaluate={"every": 1000},
        devices=Speeds(speeds=(90.0, 30.0)), schedule=Buffered(buffer=1, discount="none"),
    )  # fmt: skip
    w = float(result.state.server.x.sum())
    assert w == pytest.approx(1.25, abs=0.1)  # (3 * 0.25 + 4.25) / 4; the mean is 2.25


def test_workers_change_no_bit() -> None:
    one, two = (
        run_rounds("flame", LogNormal(), Buffered(buffer=3), engine={"workers": w, "clients_per_batch": 2}, rounds=6)
        for w in (1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.state.server, two.state.server, strict=True))
    assert get_clock(one).now == get_clock(two).now


def test_results_have_uploads_and_the_time_to_a_target() -> None:
    result = run_rounds("fedavg", LogNormal(), Buffered(buffer=2), rounds=20, evaluate={"every": 2})
    table = result.uploads()
    assert table.num_rows == 40
    assert max(table["staleness"].to_pylist()) > 0
    by_client, overall = result.time_to(0.5, by="client"), result.time_to(0.5)["all"]
    assert len(by_client) == N
    assert min(by_client.values()) <= overall <= get_clock(result).now
    assert set(result.time_to(0.5, by="device")) == {"slow", "middle", "fast"}
    assert result.time_to(2.0) == {"all": math.inf}
    with pytest.raises(ConfigError, match="has no simulated clock"):
        run_rounds("fedavg", None, Synchronous()).uploads()


def test_a_report_has_the_classes_of_devices(tmp_path: Path) -> None:
    text = """
rounds = 30
seeds = [0, 1]
[data]
source = "digits"
[partition]
kind = "dirichlet"
alpha = 0.5
clients = 12
[sampler]
clients = 4
[devices]
kind = "lognormal"
speed = 50
[evaluate]
every = 3
[[method]]
algorithm = "ditto"
schedule = { kind = "buffered", buffer = 2 }
"""
    (tmp_path / "one.toml").write_text(text)
    assert CliRunner().invoke(app, ["run", str(tmp_path / "one.toml"), "--out", str(tmp_path / "run")]).exit_code == 0
    with (tmp_path / "run" / "report" / "devices.csv").open() as lines:
        table = {line["class"]: line for line in csv.DictReader(lines)}
    assert [*table] == ["slow", "middle", "fast"]
    records = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    for place, line in enumerate(table.values()):
        figures: dict[str, list[float]] = {"mean": [], "uploads": [], "seconds_to_target": []}
        for seed in (0, 1):
            rows = [r for r in records if r["seed"] == seed]
            ids = {r["client"] for r in rows if r["metric"] == "device_class" and r["value"] == place}
            now = {r["round"]: r["value"] for r in rows if r["metric"] == "simulated_seconds"}
            about = ("accuracy", "hybrid", "test")
            by_round = {
                t: fmean(
                    r["value"]
                    for r in rows
                    if (r["metric"], r["model"], r["part"], r["round"]) == (*about, t) and r["client"] in ids
                )
                for t in sorted(now)
            }
            figures["mean"].append(by_round[30])
            figures["uploads"].append(
                fmean(r["value"] for r in rows if (r["metric"], r["round"]) == ("heard", 30) and r["client"] in ids)
            )
            at = [now[t] for t, mean in by_round.items() if mean >= float(line["target"])]
            figures["seconds_to_target"] += at[:1]
        for name, values in figures.items():
            assert float(line[name] or "nan") == pytest.approx(fmean(values) if values else math.nan, nan_ok=True)
        assert int(float(line["clients"])) == 4
    assert any(line["seconds_to_target"] for line in table.values())


def test_presence_pauses_work_and_a_run_waits_for_clients() -> None:
    devices = LogNormal(present=0.1, period=40.0)
    result = run_rounds("fedavg", devices, Buffered(buffer=2), rounds=5, sampler={"kind": "uniform", "clients": 3})
    assert result.rounds == 5
    fleet = devices.fleet(N, 0, torch.zeros(N))
    log = get_clock(result).history()
    for client, start, end, busy in log[:, [0, 3, 4, 5]]:
        assert fleet.presence_seconds(int(client), start, end) == pytest.approx(busy, abs=1e-6)
        assert fleet.next(int(client), start) == pytest.approx(start)


@pytest.mark.parametrize(
    "choices",
    [
        {"aggregator": "median"},
        {"upload_transform": {"kind": "top-k"}},
        {"attack": {"kind": "sign-flip", "fraction": 0.25}},
        {"aggregation_weights": "fairfed"},
        {"sampler": {"kind": "clustered", "clients": 4, "by": "size"}},
        {"personalized_aggregation": {"kind": "attention", "among": "all"}},
        {"local": {"lr": 0.1, "batch_size": 2, "optimizer": "torch.optim:SGD", "optimizer_state": "persistent"}},
    ],
    ids=lambda choices: next(iter(choices)),
)
def test_parts_are_the_same_with_a_buffer_of_the_whole_cohort_and_run_with_a_small_one(choices: dict[str, Any]) -> None:
    size = 4 if "sampler" in choices else N
    plain = run_rounds("fedavg", None, Synchronous(), **choices)
    late = run_rounds("fedavg", Equal(), Deadline(seconds=1e9), **choices)
    assert all(torch.equal(a, b) for a, b in zip(plain.state.server, late.state.server, strict=True))
    if size == N:
        whole = run_rounds("fedavg", Equal(), Buffered(buffer=N), **choices)
        assert all(torch.equal(a, b) for a, b in zip(plain.state.server, whole.state.server, strict=True))
    small = run_rounds("fedavg", LogNormal(), Buffered(buffer=2, concurrency=4), **choices)
    assert small.rounds == plain.rounds
    assert bool(small.state.server.x.isfinite().all())
