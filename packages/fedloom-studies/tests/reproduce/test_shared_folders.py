"""Folders of studies that several processes use at the same time: nothing that one has written is lost by another."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from small_recipe import tiny

from fedloom_studies import store
from fedloom_studies.reproduce import execute, summary

KEY = ("recipe",)


def test_a_record_that_is_put_while_the_recorded_ones_are_copied_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, results = tmp_path / "recorded", tmp_path / "runs" / "results"
    recorded.mkdir()
    store.write_record(recorded / "papers.jsonl", {"recipe": "a", "minutes": 1}, KEY)
    names = {"RECORDS_FOLDER": recorded, "NEW_RESULTS_FOLDER": results, "CHECKOUT_FOLDER": tmp_path / "none"}
    for name, path in names.items():
        monkeypatch.setattr(store, name, path)

    def another() -> None:
        store.write_record(store.choose_folder(None) / "papers.jsonl", {"recipe": "b", "minutes": 2}, KEY)

    copy, threads = store.write_atomic, list[Thread]()

    def write_atomic(path: Path, content: bytes) -> None:
        if not threads:
            threads.append(Thread(target=another))
            threads[0].start()
            threads[0].join()
        copy(path, content)

    monkeypatch.setattr(store, "write_atomic", write_atomic)
    assert store.choose_folder(None) == results
    assert [record["recipe"] for record in store.read_records_of_file(results / "papers.jsonl")] == ["a", "b"]
    assert [path.name for path in results.parent.iterdir()] == ["results"]


def test_two_calls_of_a_recipe_keep_what_each_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in tiny().variants:
        (tmp_path / variant).mkdir()
    first, second = (tiny().make_documents("full", (), [method]) for method in ("flame", "fedavg"))
    read, threads = execute.read_document, list[Thread]()

    def read_document(*given: Any) -> dict[str, Any]:
        document = read(*given)
        if not threads:
            threads.append(Thread(target=execute._claim_folder, args=(tmp_path, second)))
            threads[0].start()
            threads[0].join(0.5)  # it waits for the first call to end
        return document

    monkeypatch.setattr(execute, "read_document", read_document)
    execute._claim_folder(tmp_path, first)
    threads[0].join()
    digests = read(tmp_path / execute.PROTOCOL_FILE, dict)
    assert all({"flame", "fedavg"} <= variant.keys() for variant in digests.values())


def test_the_time_of_two_processes_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(summary, "_processor_seconds", lambda: now[0])
    with summary.count_spent_time(tmp_path, "a"), summary.count_spent_time(tmp_path, "a"):
        now[0] = 3.0
    assert summary.spent_seconds(tmp_path) == {"a": 6.0}
