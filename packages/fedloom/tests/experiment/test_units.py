"""Units of work beside the processes that join: the share of the cores, grids, directories that are merged, status."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fedloom.engine import loop
from fedloom.errors import ConfigError, RunDirError
from fedloom.lab.experiment import Plan, parse, read
from fedloom.lab.experiment.events import Event
from fedloom.lab.experiment.units import shares
from fedloom.lab.experiment.units.merge import merge
from fedloom.lab.experiment.units.shares import ProcessShare, RunLoad, choose_share, decide_share
from fedloom.lab.experiment.units.status import list_status
from tests.commands import call

SMALL: dict[str, Any] = {
    "rounds": 3,
    "seeds": [0, 1],
    "data": {"source": "digits"},
    "partition": {"kind": "iid", "clients": 3, "max_train_per_client": 30, "validation": 0.2},
    "model": {"kind": "softmax"},
    "engine": {"workers": 1},
    "method": [{"algorithm": "fedavg"}, {"algorithm": "ditto"}],
}


def contents(out: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()}
    timed = ("timings.parquet", ".lock")
    return {n: p.read_bytes() for n, p in files.items() if n not in timed and not n.startswith(("checkpoints", "rep"))}


def results(out: Path) -> dict[str, bytes]:
    """What no number of workers changes; the settings name it."""
    return {name: content for name, content in contents(out).items() if name != "experiment.toml"}


def busy_workers(experiment: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Processor time of all processes of an experiment, divided by that of the busiest: workers that were busy."""
    place, step = mmap.mmap(-1, 4096), loop._RunLoop._trained

    def counted(self: Any, before: Any) -> Any:
        """Add the processor time of this process to its place."""
        start = time.process_time()
        try:
            return step(self, before)
        finally:
            slot = 8 * (os.getpid() % 512)
            (so_far,) = struct.unpack_from("d", place, slot)
            struct.pack_into("d", place, slot, so_far + time.process_time() - start)

    monkeypatch.setattr(loop._RunLoop, "_trained", counted)
    Plan(experiment, out).run(page=False)
    spent = [t for (t,) in struct.iter_unpack("d", place[:])]
    return sum(spent) / max(spent)


@pytest.mark.parametrize("clients", [5, 20, 40])
def test_as_many_runs_go_on_as_there_are_workers_where_a_cohort_is_one_chunk(
    clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {**SMALL, "rounds": 30, "seeds": [0, 1], "partition": {"kind": "iid", "clients": clients}}
    asked = parse({**document, "engine": {"workers": 2}})
    assert busy_workers(asked, tmp_path / "two", monkeypatch) > 1.02  # 1 if a worker is idle; a busy machine lowers 2
    Plan(parse(document), tmp_path / "one").run(page=False)
    assert results(tmp_path / "two") == results(tmp_path / "one")


def test_a_single_run_has_all_processes_and_several_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looped = {**SMALL, "partition": {"kind": "iid", "clients": 24}, "engine": {"workers": 4, "gradient_engine": "loop"}}
    one = parse({**looped, "seeds": [0], "method": SMALL["method"][:1]})
    feds = {0: one.partition(one.source.read(None), 0)}
    assert decide_share(one, feds) == (1, 4)
    monkeypatch.setattr(shares, "_estimate_load", lambda _setting, _fed, chunks: RunLoad(0.1, 1.0, chunks))
    alike = [{"algorithm": "fedavg", "label": label} for label in "ab"]
    assert decide_share(parse({**looped, "method": alike}), feds) == (4, 1)
    assert decide_share(parse({**looped, "engine": {"workers": 1}}), feds) == (1, 1)


loads = st.builds(RunLoad, st.floats(0, 10), st.floats(0.01, 100), st.integers(1, 40))


@given(st.lists(loads, min_size=1, max_size=12), st.integers(1, 16), st.integers(1, 16))
def test_no_other_share_of_the_processes_ends_sooner(queue: list[RunLoad], processes: int, most: int) -> None:
    share = choose_share(queue, processes, most)
    assert 1 <= share.runs <= min(most, len(queue), processes)
    assert share.runs * share.workers <= processes

    def end(runs: int, workers: int) -> float:
        free = [0.0] * runs
        for load in queue:
            free[free.index(min(free))] += load.seconds(workers)
        return max(free)

    for runs in range(1, min(most, len(queue), processes) + 1):
        assert end(*share) <= end(runs, processes // runs) * (1 + 1e-9)


def test_both_runs_and_chunks_where_both_pay() -> None:
    assert choose_share([RunLoad(0.0, 1.0, 40)] * 2, 8) == ProcessShare(2, 4)
    assert choose_share([RunLoad(0.0, 1.0, 1)] * 3, 2) == ProcessShare(2, 1)
    assert choose_share([RunLoad(0.0, 1.0, 40)] * 3, 2) == ProcessShare(1, 2)
    assert choose_share([RunLoad(1.0, 0.1, 40)] * 3, 2) == ProcessShare(2, 1)


def test_runs_with_workers_of_their_own_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        **SMALL,
        "partition": {"kind": "iid", "clients": 24},
        "engine": {"workers": 1, "gradient_engine": "loop"},
    }
    Plan(parse(document), tmp_path / "one").run(page=False)
    plan = Plan(parse({**document, "engine": {"workers": 4, "gradient_engine": "loop"}}), tmp_path / "both")
    plan.share = ProcessShare(2, 2)
    plan.run(page=False)
    assert results(tmp_path / "both") == results(tmp_path / "one")


def test_a_grid_is_every_combination_of_its_values(tmp_path: Path) -> None:
    grid = {"local": {"lr": [0.1, 0.3]}, "lam": [0.5, 1.0], "method": {"fedavg": {"rounds": [2, 3]}}}
    experiment = parse({**SMALL, "grid": grid})
    assert [method.label for method in experiment.methods] == [
        *(f"fedavg, local.lr = {lr}, rounds = {rounds}" for lr in (0.1, 0.3) for rounds in (2, 3)),
        *(f"ditto, local.lr = {lr}, lam = {lam}" for lr in (0.1, 0.3) for lam in (0.5, 1)),
    ]
    last = experiment.methods[-1].setting
    assert (last.local.lr, last.method.lam) == (0.3, 1.0)  # type: ignore[attr-defined]
    assert parse(experiment.settings()).settings() == experiment.settings()
    (tmp_path / "grid.toml").write_text(tomli_w.dumps({**SMALL, "grid": grid}))
    assert len(read(tmp_path / "grid.toml", methods=["ditto"]).methods) == 4


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"lamm": [1]}, "unknown key 'lamm'"),
        ({"lam": 1}, r"\[grid\] lam must be a list of values"),
        ({"lam": []}, r"\[grid\] lam must be a list of values"),
        ({"lam": [1, 1]}, "every value only once"),
        ({"partition": {"clients": [3, 4]}}, "all methods of an experiment share this key"),
        ({"method": {"flame": {"lam": [1]}}}, "unknown method 'flame'"),
        ({"lam": [-1.0]}, "lam"),
        ({"method": {"fedavg": {"lam": [1.0]}}}, "unknown key 'lam'"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(grid: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({**SMALL, "grid": grid})


@pytest.mark.parametrize("by", ["seeds", "method"])
def test_directories_of_parts_merge_into_that_of_the_whole(by: str, tmp_path: Path) -> None:
    for k in range(2):
        Plan(parse({**SMALL, by: SMALL[by][k : k + 1]}), tmp_path / str(k)).run(page=False)
    Plan(parse(SMALL), tmp_path / "whole").run(page=False)
    assert merge([tmp_path / "0", tmp_path / "1"], tmp_path / "merged") == []
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_what_no_directory_has_is_named_and_run_afterwards(tmp_path: Path) -> None:
    for name, change in (("a", {"seeds": [0]}), ("b", {"seeds": [1], "method": SMALL["method"][:1]})):
        Plan(parse({**SMALL, **change}), tmp_path / name).run(page=False)
    said = call("merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "merged")
    assert "no directory contains ditto, seed 1" in said
    call("run", tmp_path / "merged" / "experiment.toml", "--out", tmp_path / "merged")
    Plan(parse(SMALL), tmp_path / "whole").run(page=False)
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


def test_other_experiments_and_folders_do_not_merge(tmp_path: Path) -> None:
    Plan(parse({**SMALL, "seeds": [0]}), tmp_path / "a").run(page=False)
    Plan(parse({**SMALL, "seeds": [1], "local": {"lr": 0.2}}), tmp_path / "b").run(page=False)
    with pytest.raises(RunDirError, match=r"different experiments: .*local\.lr was"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    with pytest.raises(RunDirError, match=r"contains no experiment\.toml"):
        merge([tmp_path / "a", tmp_path], tmp_path / "out")
    with pytest.raises(RunDirError, match="is not empty"):
        merge([tmp_path / "a"], tmp_path / "b")
    (tmp_path / "link").symlink_to("a")
    for twice in (tmp_path / "b" / ".." / "a", tmp_path / "link"):
        with pytest.raises(RunDirError, match="is passed more than once"):
            merge([tmp_path / "a", twice], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_status_of_a_directory_names_who_works_on_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(event: Event) -> None:
        if (event.label, event.round) == ("ditto", 2) and not seen:
            while not any(row["so far"] for row in list_status(tmp_path / "out") if row["state"] == "working"):
                time.sleep(0.02)  # until this process has written it
            seen.extend(list_status(tmp_path / "out"))

    monkeypatch.setattr("fedloom.storage.claims.PULSE_SECONDS", 0.02)
    seen = list[dict[str, str]]()
    Plan(parse({**SMALL, "seeds": [0]}), tmp_path / "out").run(look, page=False, join=True)
    rows = {row["run"]: row for row in seen}
    assert (rows["fedavg, seed 0"]["state"], rows["ditto, seed 0"]["state"]) == ("done", "working")
    assert f"process {os.getpid()} on " in rows["ditto, seed 0"]["who"]
    assert rows["ditto, seed 0"]["so far"] in ("round 1", "round 2")
    assert {row["state"] for row in list_status(tmp_path / "out")} == {"done"}
    assert "fedavg, seed 0" in call("watch", tmp_path / "out", "--list")


@pytest.mark.parametrize("change", [{}, {"evaluate": {"every": 2}}, {"attack": {"kind": "gaussian", "fraction": 0.4}}])
@pytest.mark.parametrize("join", [False, True], ids=["alone", "joined"])
def test_more_rounds_follow_those_of_a_finished_run(change: dict[str, Any], join: bool, tmp_path: Path) -> None:
    """As if they had been asked for at once: evaluations that came only because a round was the last are gone."""
    document = {**SMALL, "rounds": 5, "method": [{"algorithm": "fedavg"}, {"algorithm": "ditto", "lam": 0.1}], **change}
    Plan(parse({**document, "rounds": 3}), tmp_path / "out").run(page=False)
    first = dict[tuple[str, int], int]()
    longer = Plan(parse(document), tmp_path / "out")
    longer.run(lambda e: first.setdefault((e.label, e.seed), e.round), page=False, join=join)
    assert set(first.values()) == {4}
    Plan(parse(document), tmp_path / "whole").run(page=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"method": [{"algorithm": "ditto"}]}, "lam"),
        ({"personalized_aggregation": {"kind": "proximity"}}, r"personalized_aggregation\.alpha"),
        ({"aggregation_weights": {"kind": "fairfed"}}, r"aggregation_weights\.beta"),
    ],
)
def test_more_rounds_are_refused_where_an_option_depends_on_their_number(
    change: dict[str, Any], option: str, tmp_path: Path
) -> None:
    document = {**SMALL, "seeds": [0], "method": [{"algorithm": "fedavg"}], **change}
    Plan(parse(document), tmp_path / "out").run(page=False)
    before = contents(tmp_path / "out")
    with pytest.raises(
        RunDirError, match=f"{option} depends on the number of rounds, so a run of 9 rounds is a different run"
    ):
        Plan(parse({**document, "rounds": 9}), tmp_path / "out").run(page=False)
    assert contents(tmp_path / "out") == before
