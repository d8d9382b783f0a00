"""One upload of four is lost, or late, in one round: server and sites are as if that client had not been drawn for it.

The reference is a simulation in which it was not. Rounds 3 and 4 train from what round 2 left: duals, control variates,
heads and personal models of the client whose upload was lost are those of round 1, of all others those of round 2.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from fedloom.algorithms import PRESETS, REGISTRY
from fedloom.engine.result import Result
from fedloom.errors import Stop
from fedloom_sites.deploy.protocol.envelope import HEAD_RECORD
from fedloom_sites.deploy.site.state import latest_models
from tests.deploy.scene import FIRST, Scene, scene

LOST, CLIENTS, ROUND = 1, 4, 2
SMALL = {
    "partition": {"kind": "iid", "clients": CLIENTS, "max_train_per_client": 24},
    "local": {"lr": 0.05, "epochs": 2, "batch_size": 200},
    "evaluate": {"every": 4},
    "rounds": 4,
}
TABLE = [[int((t, i) != (ROUND, LOST)) for i in range(CLIENTS)] for t in range(1, 5)]
ABSENT = {"kind": "availability", "table": TABLE}
NEEDED: dict[str, dict[str, Any]] = {"fedbn": {"layers": ["head.bias"]}}
MIXING = {"fedacs", "fedamp", "fedskip", "heurfedamp"}
"""Methods whose downloads mix the models of a round's cohort, which is drawn before an upload is lost."""
DRAWING = {"clustered-sampling", "power-of-choice"}
"""Presets with a sampler of their own, in whose place the reference has another."""
QUICK = ["scaffold", "ditto", "flame", "fedrep", "fiaelt", "feddyn"]


class Outcome(NamedTuple):
    """The global model, None where there is none, and the personal ones by client, empty where there are none."""

    common: torch.Tensor | None
    personal: list[torch.Tensor]


def outcome(result: Result) -> Outcome:
    kinds = result.models.kinds()
    rows = [*result.models.rows("personal")] if "personal" in kinds else []
    return Outcome(result.models.rows("global") if "global" in kinds else None, rows)


def simulated(folder: Path, method: dict[str, Any], **changes: Any) -> Outcome:
    return outcome(scene(folder, method, **SMALL, **changes).simulate())


def losing(late: list[Message], *, arrives: bool) -> Callable[[int, Message, Message], Message | None]:
    """One upload that does not arrive in its round; perhaps in the next, after it was given up."""
    held: list[Message] = []

    def fault(node: int, message: Message, reply: Message) -> Message | None:
        head = message.content[HEAD_RECORD]
        if head["kind"] == "train" and head["round"] == ROUND + 1 and held and arrives:
            late.append(held.pop())
        if (node, head["kind"], head["round"]) == (FIRST + LOST, "train", ROUND):
            held.append(reply)
            return None
        return reply

    return fault


def deployed(here: Scene, *, arrives: bool) -> Outcome:
    grid = here.grid()
    grid.fault = losing(grid.late, arrives=arrives)
    assert here.serve(grid, quorum=CLIENTS - 1) is Stop.DONE
    assert [(x["round"], x["client"]) for x in here.audit("missed")] == [(ROUND, LOST)]
    assert len(here.audit("rejected")) == arrives  # its round is over
    common = here.folder / "results" / "global.safetensors"
    rows = [load_file(model.path)["rows"][0] for site in here.sites for model in latest_models(site.state)]
    return Outcome(load_file(common)["rows"] if common.exists() else None, rows)


def by_a_deadline(folder: Path, method: dict[str, Any]) -> Outcome:
    """In virtual time: the client's device goes away in round 2 and is back for round 3."""

    def devices(spans: list[tuple[float, float]]) -> dict[str, Any]:
        rows = [(i, *span) for i in range(CLIENTS) for span in (spans if i == LOST else [(0.0, 1e9)])]
        text = "".join(f"{i},10,1e12,1e12,{start},{end}\n" for i, start, end in rows)
        (folder / "trace.csv").write_text("client,speed,up,down,start,end\n" + text)
        return {"kind": "trace", "file": str(folder / "trace.csv")}

    folder.mkdir()
    whole = scene(folder / "whole", method, **SMALL, devices=devices([(0.0, 1e9)])).simulate().uploads().to_pylist()
    ends = [max(x["end"] for x in whole if x["round"] == t) for t in (1, 2)]
    first, second = ends[0], ends[1] - ends[0]
    deadline = 3 * max(first, second)
    spans = [(0.0, first + 0.3 * second), (first + 0.9 * deadline, 1e9)]
    schedule = {"kind": "deadline", "seconds": deadline}
    result = scene(folder / "cut", method, **SMALL, devices=devices(spans), schedule=schedule).simulate()
    assert [(x["round"], x["client"]) for x in result.uploads().to_pylist() if x["fate"] != "used"] == [(ROUND, LOST)]
    return outcome(result)


def named(name: str) -> dict[str, Any]:
    clusters = {"clusters": 2} if name in PRESETS and "clusters" in REGISTRY[name].options else {}
    return {"algorithm": name, **NEEDED.get(name, {}), **clusters}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in QUICK else pytest.mark.slow)
        for n in REGISTRY
        if n not in {"centralized", *MIXING, *DRAWING}
    ],
)
def test_a_lost_or_late_upload_is_as_if_its_client_had_not_been_drawn(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    method = named(name)
    reference = simulated(tmp_path / "reference", method, sampler=ABSENT)
    outcomes = [
        deployed(scene(tmp_path / f"{k}", method, **SMALL), arrives=arrives) for k, arrives in enumerate((0, 1))
    ]
    for common, personal in [*outcomes, by_a_deadline(tmp_path / "timed", method)]:
        close = {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(common, reference.common, **close) if common is not None else None
        if reference.personal:
            torch.testing.assert_close(torch.stack(personal), torch.stack(reference.personal), **close)
    whole = simulated(tmp_path / "whole", method)
    assert name == "fedbabu" or not same(whole, reference), "the loss makes no difference here"


def same(one: Outcome, two: Outcome) -> bool:
    pairs = [*zip(one.personal, two.personal, strict=True)]
    pairs += [(one.common, two.common)] if one.common is not None and two.common is not None else []
    return all(torch.equal(a, b) for a, b in pairs)
