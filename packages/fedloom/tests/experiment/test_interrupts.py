"""Ctrl-C at any moment of an experiment: what runs is finished or saved, and nothing further is begun."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fedloom.data import Federation
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.engine.simulate import simulate
from fedloom.errors import FedloomError
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.events import Event, EventQueue
from fedloom.processes.pool import WorkerPool
from fedloom.processes.signals import interruptible

SMALL = {
    "rounds": 3,
    "seeds": [0, 1],
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30},
    "model": {"kind": "softmax"},
    "engine": {"workers": 1},
    "method": [{"algorithm": "fedavg"}, {"algorithm": "local"}],
}


@pytest.mark.parametrize("at", [1, 3])
def test_nothing_is_begun_after_an_interrupt(at: int, tmp_path: Path) -> None:
    def tell(event: Event) -> None:
        if event.status:
            ended[event.label, event.seed] = event.status
            return
        begun.add((event.label, event.seed))
        if (event.label, event.seed, event.round) == ("fedavg", 0, at):
            signal.raise_signal(signal.SIGINT)

    begun: set[tuple[str, int]] = set()
    ended: dict[tuple[str, int], str] = {}
    outcomes = Plan(parse(SMALL, "small"), tmp_path / "out").run(tell, page=False)
    assert begun == {("fedavg", 0)}
    assert [o.status for o in outcomes] == ["done" if at == 3 else "interrupted", *["interrupted"] * 3]
    assert ended == {(o.label, o.seed): o.status for o in outcomes}
    outcomes = Plan(parse(SMALL, "small"), tmp_path / "out").run(page=False)
    assert {o.status for o in outcomes} == {"done"}


@pytest.mark.needs("fedloom_clinic")
def test_scores_of_clients_left_out_are_made_anew_where_their_file_is_damaged(tmp_path: Path) -> None:
    def scores() -> bytes:
        document = {**SMALL, "seeds": [0], "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30}}
        document["analysis"] = [{"kind": "left-out"}]
        Plan(parse({**document, "method": [{"algorithm": "fedavg"}]}, "small"), tmp_path / "out").run(page=False)
        return file.read_bytes()

    file = tmp_path / "out" / "left_out.parquet"
    whole = scores()
    for content in (b"", whole[: len(whole) // 2], whole.replace(b"PAR1", b"PAR2")):
        file.write_bytes(content)
        assert scores() == whole


@pytest.mark.parametrize("ended", [1, 3, 4])
@pytest.mark.needs("fedloom_clinic")
def test_an_interrupt_loses_the_clients_left_out_of_one_run_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    """Two seeds of three clients: after three of the six trainings the first seed's scores are in the file."""
    trained = list[str]()

    def train(setting: Setting, fed: Federation, **options: object) -> Result:
        if "folder" not in options:
            if len(trained) == ended:
                trained.append("interrupted")
                raise KeyboardInterrupt
            trained.append(fed.names[0])
        return simulate(setting, fed, **options)  # type: ignore[arg-type]

    partition = {"kind": "iid", "clients": 3, "max_train_per_client": 30}
    document = {**SMALL, "seeds": [0, 1], "partition": partition, "method": [{"algorithm": "fedavg"}],
                "analysis": [{"kind": "left-out"}]}  # fmt: skip
    Plan(parse(document, "small"), tmp_path / "whole").run(page=False)
    monkeypatch.setattr("fedloom.lab.experiment.execute.simulate", train)
    with pytest.raises(KeyboardInterrupt):
        Plan(parse(document, "small"), tmp_path / "out").run(page=False)
    Plan(parse(document, "small"), tmp_path / "out").run(page=False)
    assert len(trained) == 1 + ended + 6 - ended // 3 * 3
    whole, resumed = (
        pq.read_table(tmp_path / name / "left_out.parquet").sort_by([("seed", "ascending"), ("client", "ascending")])
        for name in ("whole", "out")
    )
    assert resumed.equals(whole)


def test_a_process_that_is_killed_while_it_sends_an_event_holds_nothing_up() -> None:
    def dies(_shared: None, _task: int) -> None:
        queue.send(Event("a", 0, 1, 0))
        threading.Thread(target=queue.send, args=(Event("a" * 2**20, 0, 1, 0),), daemon=True).start()
        time.sleep(0.5)  # it has the queue now, and no room, since nobody reads
        os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        with (
            pytest.raises(FedloomError, match="a worker process died"),
            WorkerPool([dies], 2) as pool,
            queue.listening(lambda _event: time.sleep(1.0)),
        ):
            list(pool.map(dies, None, [0]))
        ended.set()

    queue, ended = EventQueue(), threading.Event()
    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(600)


def test_what_is_around_hears_of_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as outer:
        with interruptible() as inner:
            signal.raise_signal(signal.SIGINT)
            assert inner()
            assert not outer()
        assert outer()
        with interruptible() as later:  # a request before a run begins stops that run too
            assert later()
    with interruptible() as next_program:
        assert not next_program()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.processes.signals.REPEAT_SECONDS", 0.0)
    with interruptible() as asked, interruptible():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not asked()
