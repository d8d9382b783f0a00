"""Runs under secure aggregation on a grid: equal to the plain run, whoever drops out, and nothing to be read."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from fedloom.algorithms import PRESETS, REGISTRY
from fedloom.choose import MIXERS
from fedloom.engine.checkpoints import RunCheckpoints
from fedloom.engine.job import Job
from fedloom.engine.privacy import epsilon
from fedloom.engine.setup import make_job
from fedloom.errors import ConfigError, Refused, Stop
from fedloom.lab.experiment import parse
from fedloom.rows.aggregators import PrivateMean
from fedloom.version import __version__
from fedloom_sites.deploy.noise import SharedMean
from fedloom_sites.deploy.ops.check import check_site
from fedloom_sites.deploy.ops.status import read_status, status_lines
from fedloom_sites.deploy.protocol.envelope import (
    COMMON_FIELDS,
    PROTOCOL_VERSION,
    REQUEST_FIELDS,
    Kind,
    digest_arrays,
    seal_message,
)
from fedloom_sites.deploy.secure import integers, opened, shares, vectors
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.counters import counters_bytes
from fedloom_sites.deploy.secure.member import check_maskable
from fedloom_sites.deploy.secure.protocol import ProtocolBroken
from fedloom_sites.deploy.secure.sums import MAX_ATTEMPTS
from fedloom_sites.deploy.secure.terms import SessionTerms, check_summands, read_terms
from fedloom_sites.deploy.secure.vectors import (
    MEAN_SCORES,
    MIN_SCORED_CLASS_SAMPLES,
    NUMBERS_PER_SCORE,
    ScoreVector,
    UploadVector,
)
from fedloom_sites.deploy.settings import SecureSettings
from fedloom_sites.deploy.site.state import latest_models
from fedloom_sites.deploy.site.trainer import Trainer
from fedloom_sites.transport import node as node_module
from tests.deploy.grid import Clock, FakeGrid
from tests.deploy.scene import FIRST, Scene, changed, document, scene
from tests.deploy.sessions import EQUAL, SMALL, TERMS, Steps, arrays_of, kind_of, losing, secured


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


STEPS = ("keys", "shares", "masked", "count", "unmask")
METHODS = ["fedavg", "flame", "ditto", "fedslr", "scaffold", "pfedme"]
FURTHER = ["fedrep", "feddyn", "fedpd", "fednova"]


@pytest.mark.parametrize("name", [*METHODS, *(pytest.param(n, marks=pytest.mark.slow) for n in FURTHER)])
def test_masked_is_plain(name: str, tmp_path: Path) -> None:
    """Global and personal models after several rounds are those of the run without masks, to the resolution."""
    here = secured(tmp_path, name)
    assert here.serve() is Stop.DONE
    result = here.simulate()
    close = {"rtol": 0, "atol": 1e4 * 2.0**-integers.RESOLUTION_BITS}
    if "global" in result.models.kinds():
        torch.testing.assert_close(here.model(), result.models.rows("global"), **close)
    if "personal" in result.models.kinds():
        rows = result.models.rows("personal")
        for site in here.sites:
            [mine] = latest_models(site.state)
            torch.testing.assert_close(load_file(mine.path)["rows"][0], rows[site.client], **close)
    assert not here.audit("rejected")


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_weights_and_samples(weights: str, tmp_path: Path) -> None:
    here = secured(tmp_path, "fedavg", client_weights=weights)
    assert here.serve() is Stop.DONE
    found = here.simulate().models.rows("global")
    torch.testing.assert_close(here.model(), found, rtol=0, atol=1e4 * 2.0**-integers.RESOLUTION_BITS)


GONE = (0, 2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Scene]:
    """A finished run without masks, in round 2 of which sites drop out or none does."""

    @cache
    def run(name: str, drop: bool) -> Scene:
        here = scene(tmp_path_factory.mktemp("plain"), name, **{**SMALL, "rounds": 3})
        here = here._replace(server=here.server.with_(quorum=3))
        assert here.serve(here.grid(losing({(2, "train"): GONE} if drop else {}))) is Stop.DONE
        return here

    return run


@pytest.mark.parametrize("name", ["fedavg", "flame"])
@pytest.mark.parametrize("step", STEPS)
def test_drop_outs(name: str, step: str, tmp_path: Path, plain: Callable[[str, bool], Scene]) -> None:
    """n - threshold sites drop at a step of round 2: the round is that of the sites whose vector arrived."""
    here, wanted = secured(tmp_path, name, rounds=3), plain(name, step not in ("count", "unmask"))
    assert here.serve(here.grid(losing({(2, step): GONE}))) is Stop.DONE
    torch.testing.assert_close(here.model(), wanted.model(), rtol=0, atol=1e4 * 2.0**-integers.RESOLUTION_BITS)
    for mine, theirs in zip(here.sites, wanted.sites, strict=True):
        for a, b in zip(latest_models(mine.state), latest_models(theirs.state), strict=True):
            torch.testing.assert_close(load_file(a.path)["rows"], load_file(b.path)["rows"], rtol=0, atol=1e-6)


def drops(n: int, most: int) -> list[dict[str, set[int]]]:
    """All ways in which up to ``most`` of n sites drop out, each at one of the steps."""
    found = []
    for count in range(most + 1):
        for gone in itertools.combinations(range(n), count):
            for steps in itertools.product(STEPS, repeat=count):
                found.append({step: {c for c, s in zip(gone, steps, strict=True) if s == step} for step in STEPS})
    return found


@pytest.mark.parametrize(
    ("name", "every"), [("fedavg", 7), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in ("fedavg", "flame"))]
)
def test_any_sites_up_to_the_threshold_may_drop_at_any_step(
    name: str, every: int, tmp_path: Path, clock: Clock
) -> None:
    """A round for each of 276 ways, or some: its model is that of the plain run without the sites that dropped."""
    ways = drops(5, 2)[::every]
    changes = {**SMALL, "rounds": len(ways) + 1, "evaluate": {"every": 10**6}}
    method = {"algorithm": name, **({"lam": 1.0} if name == "flame" else {})}
    seen: dict[str, dict[int, torch.Tensor]] = {"masked": {}, "train": {}}
    asked: dict[int, set[frozenset[int]]] = {}

    def run(here: Scene, lost: dict[tuple[int, str], Collection[int]], **settings: Any) -> None:
        clients, lose = here.clients(), losing(lost)

        def look(node: int, message: Message, reply: Message) -> Message | None:
            kind, t = kind_of(message), int(message.content["head"]["round"])
            if kind in seen:
                seen[kind][t] = torch.cat(
                    [f.flatten() for f in clients[0].trainer.forms.read_down(arrays_of(message)[0])]
                )
            if kind == "unmask":
                asked.setdefault(t, set()).add(
                    frozenset(secure.split_parts(arrays_of(message)[0], secure.SIGNATURE_BYTES))
                )
            return lose(node, message, reply)

        assert here.serve(here.grid(look, clients), **settings) is Stop.DONE

    here = secured(tmp_path / "masked", method, agreed={"changes": 2 * len(ways), "steady": 0}, **changes)
    run(here, {(t, step): gone for t, way in enumerate(ways, 1) for step, gone in way.items()})
    plain = scene(tmp_path / "plain", method, **changes)
    before = [set().union(*(way[step] for step in STEPS[:3])) for way in ways]
    run(plain, {(t, "train"): gone for t, gone in enumerate(before, 1)}, quorum=3)
    assert seen["masked"].keys() == seen["train"].keys() == set(range(1, len(ways) + 2))
    for t, model in seen["masked"].items():
        torch.testing.assert_close(model, seen["train"][t], rtol=0, atol=1e-6)
    for t, gone in enumerate(before, 1):
        assert asked[t] == {frozenset(range(5)) - gone}  # one set of sites per round


@pytest.mark.parametrize("step", STEPS)
def test_a_site_that_falls_mute_at_a_step_costs_one_deadline(step: str, tmp_path: Path, clock: Clock) -> None:
    here, gone = secured(tmp_path, "fedavg", rounds=3), [False]

    def delay(node: int, message: Message) -> float:
        gone[0] |= kind_of(message) == step and message.content["head"]["round"] == 2
        return math.inf if gone[0] and node == FIRST + 1 else 0.0

    grid = FakeGrid({FIRST + c.site.client: c.answer for c in here.clients()}, None, clock, delay)
    assert here.serve(grid, deadline=600.0, ttl=1200.0, patience=600.0) is Stop.DONE
    assert gone[0]
    assert clock.now <= 631  # the patience, and before it the time that others take where the step waits for nobody
    assert [(x["kind"], x["site"]) for x in here.audit("mute")] == [(step, "site-1")]


@pytest.mark.parametrize("step", STEPS)
def test_too_many_drop_outs_stop_the_round_and_it_can_go_on(step: str, tmp_path: Path) -> None:
    """With three of five gone the run stops; when they are back it ends as if nothing had been."""
    here = secured(tmp_path, "flame")
    assert here.serve(here.grid(losing({(2, step): [0, 1, 2]}))) is Stop.TOO_FEW
    assert here.summary()["runs"][0]["rounds"] == 1
    assert here.serve() is Stop.DONE
    found = here.simulate().models.rows("global")
    torch.testing.assert_close(here.model(), found, rtol=0, atol=1e4 * 2.0**-integers.RESOLUTION_BITS)


def test_a_round_is_summed_over_one_set_of_sites_only(tmp_path: Path) -> None:
    """Two sums of a round over different sites would tell their difference: the vector of a site."""
    here = secured(tmp_path, "fedavg")
    assert here.serve(here.grid(losing({(2, "unmask"): [0, 1, 2]}))) is Stop.TOO_FEW
    (here.server.checkpoints / "unmasked.json").unlink()  # a server that does not keep to it: the sites do
    here.serve(here.grid(losing({(2, "masked"): [4]})))
    refused = [x for x in here.audit("rejected") if "summed over different sites. The" in x["reason"]]
    assert {x["client"] for x in refused} == {0, 1, 2, 3}


def never_told(here: Scene, t: int, more: dict[tuple[int, str], Collection[int]] | None = None) -> None:
    """The answers of the last step are lost as often as they are asked for; the sites have told all the same."""
    for _ in range(MAX_ATTEMPTS):
        assert here.serve(here.grid(losing({(t, "unmask"): range(5), **(more or {})}))) is Stop.TOO_FEW


def test_a_sum_that_was_asked_for_is_told_by_a_threshold_of_its_sites(tmp_path: Path) -> None:
    """A site is lost after its vector arrived: the sum has it, and no other session of the round is begun."""
    here = secured(tmp_path / "masked", "flame")
    assert here.serve(here.grid(losing({(2, "unmask"): [0, 1, 2]}))) is Stop.TOO_FEW
    grid = here.grid(losing({(t, kind): [4] for t in (2, 3, 4) for kind in ("keys", "unmask")}))
    assert here.serve(grid) is Stop.DONE
    assert {kind_of(m) for m in grid.sent if m.content["head"]["round"] == 2} == {"unmask"}
    assert not here.audit("given up")
    plain = scene(tmp_path / "plain", "flame", **{**SMALL, "rounds": 4})
    plain = plain._replace(server=plain.server.with_(quorum=3))
    assert plain.serve(plain.grid(losing({(3, "train"): [4], (4, "train"): [4]}))) is Stop.DONE
    torch.testing.assert_close(here.model(), plain.model(), rtol=0, atol=1e4 * 2.0**-integers.RESOLUTION_BITS)
    assert [s["accepted"] for s in read_status(here.server)["sites"]] == [4, 4, 4, 4, 2]


def test_a_server_that_was_killed_after_a_sum_asks_no_site_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, save = secured(tmp_path, "flame", evaluate={"every": 1}), RunCheckpoints.save

    def killed(self: RunCheckpoints, state: Any, *more: Any, **extras: Any) -> None:
        if state.round == 2:
            raise KeyboardInterrupt
        save(self, state, *more, **extras)

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoints, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            here.serve()
    grid = here.grid()
    assert here.serve(grid) is Stop.DONE
    assert not [m for m in grid.sent if m.content["head"]["round"] == 2 and kind_of(m) in (*STEPS, "tally")]
    found = here.simulate().models.rows("global")
    torch.testing.assert_close(here.model(), found, rtol=0, atol=1e4 * 2.0**-integers.RESOLUTION_BITS)


def test_a_sum_that_is_never_told_is_given_up_after_some_attempts(tmp_path: Path) -> None:
    here = secured(tmp_path, "fedavg", evaluate={"every": 1})
    never_told(here, 2)
    assert here.serve() is Stop.DONE
    [line] = here.audit("given up")
    assert (line["round"], line["sites"]) == (2, [f"site-{k}" for k in range(5)])
    assert "the difference between the two sums would reveal individual uploads" in line["reason"]
    assert read_status(here.server)["sites"][0]["accepted"] == 3
    assert [w for w in here.summary()["warnings"] if "round 2 was abandoned" in w]
    scored = figures(pq.read_table(here.server.results / "metrics.parquet"), total=True)
    assert {k[0] for k in scored} == {0, 3, 4}  # those of round 1 are lost with the round, those of 2 would be the same


@pytest.mark.parametrize(("step", "gone"), [("masked", [4]), ("masked", [3, 4]), ("keys", [4]), ("keys", [3, 4])])
def test_after_a_given_up_sum_none_is_told_that_hardly_differs(step: str, gone: list[int], tmp_path: Path) -> None:
    """Both are of one model: with full batches they would tell what these sites sent, if the first arrived late."""
    here = secured(tmp_path, "flame", rounds=5)
    never_told(here, 2)
    grid = here.grid(losing({(3, step): gone}))
    assert here.serve(grid) is Stop.TOO_FEW
    names = ", ".join(f"site-{c}" for c in gone)
    assert f"a sum without {names} and the sum of round 2" in here.summary()["detail"] or (
        "another sum would reveal the upload of a single site" in here.summary()["detail"]
    )
    assert not [m for m in grid.sent if kind_of(m) == "unmask"]
    assert here.serve() is Stop.DONE


def test_after_a_given_up_sum_a_further_site_waits_for_a_round(tmp_path: Path) -> None:
    here = secured(tmp_path, "fedavg", rounds=4)
    never_told(here, 2, {(2, "masked"): [4]})
    grid = here.grid()
    assert here.serve(grid) is Stop.DONE
    asked = {t: {m.content["head"]["client"] for m in grid.sent if m.content["head"]["round"] == t} for t in (3, 4)}
    assert asked == {3: {0, 1, 2, 3}, 4: {0, 1, 2, 3, 4}}


def test_a_given_up_round_costs_privacy(tmp_path: Path) -> None:
    """Its sum may still become known: epsilon is that of all rounds, at the sites and in the server's figures."""
    here = secured(tmp_path, "fedavg", rounds=3, aggregator=PRIVATE)
    never_told(here, 2)
    assert here.serve() is Stop.DONE
    assert here.audit("given up", round=2)
    three = pytest.approx(epsilon(PrivateMean(**{**PRIVATE, "accountant": "rdp"}), 3))
    assert read_status(here.server)["epsilon"] == three
    [ledger] = here.sites[0].state.rglob("ledger.jsonl")
    assert json.loads(ledger.read_text().splitlines()[-1])["epsilon"] == three


def test_a_given_up_round_changes_no_model(tmp_path: Path) -> None:
    """The last round is given up: the model is that of the run with one round less."""
    flame = {"algorithm": "flame", "lam": 1.0}  # by default it depends on the number of rounds
    here = secured(tmp_path / "more", flame, rounds=3)
    never_told(here, 3)
    assert here.serve() is Stop.DONE
    less = secured(tmp_path / "less", flame, rounds=2)
    assert less.serve() is Stop.DONE
    assert torch.equal(here.model(), less.model())
    assert read_status(here.server)["rounds"] == 3


def test_what_a_site_remembers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sums it remembers the newest, and has no part in an older one."""
    monkeypatch.setattr(opened, "MAX_REMEMBERED_SUMS", 2)
    here = secured(tmp_path, "fedavg", rounds=6)
    clients = here.clients()
    assert here.serve(here.grid(None, clients)) is Stop.DONE
    for site in here.sites:
        [file] = site.state.rglob("opened.json")
        known = opened.read_checked(file)
        assert known is not None
        [experiment] = known["experiments"].values()
        assert [*experiment["opened"]["uploads"]] == ["5", "6"]
        assert len(experiment["past"]) <= 2
    with pytest.raises(ProtocolBroken, match="too long ago: fedloom no longer knows"):
        opened.OpenedSums(clients[0]._memory.folder, here.sites[0].memory_folder).reveal(
            "another", {"uploads": 4}, {"uploads": ""}, {"0": 3, "1": 3, "2": 3}, 3
        )


def test_what_arrives_is_uniform_and_holds_no_upload(tmp_path: Path) -> None:
    """Every vector that reaches the server, beside the upload that it hides; scores and work do not come at all."""
    here = secured(tmp_path, "flame")
    clients = here.clients()
    seen: list[tuple[np.ndarray, np.ndarray]] = []  # of the vectors, what hides the upload
    everything: list[bytes] = []
    plain: list[bytes] = []

    def look(node: int, message: Message, reply: Message) -> Message:
        everything.extend(arrays_of(reply))
        head = reply.content["head"]
        assert not set(head) & {"work", "loss"}
        assert not dict(reply.content.get("metrics", {}))
        if kind_of(message) == "masked":
            site = clients[node - FIRST]
            kept = site._memory.read(int(head["round"]))
            assert kept is not None
            upload = kept.tensors["reply"].numpy().view(np.uint64)
            seen.append((np.frombuffer(arrays_of(reply)[0], dtype="<u8", offset=64)[: len(upload)], upload))
            plain.append(upload[:-4].tobytes())
        return reply

    assert here.serve(here.grid(look, clients)) is Stop.DONE
    assert len(seen) == 20
    sent, hidden = (np.concatenate(x) for x in zip(*seen, strict=True))
    counts = np.bincount(sent.view(np.uint8), minlength=256)
    expected = 8 * len(sent) / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * (2 * 255) ** 0.5
    same = np.unpackbits(sent.view(np.uint8)) == np.unpackbits(hidden.view(np.uint8))
    assert abs(same.mean() - 0.5) < 6 * 0.5 / len(same) ** 0.5
    log = b"".join(everything) + here.server.audit.read_bytes()
    for file in [*here.server.checkpoints.rglob("*"), *here.server.results.rglob("*")]:
        log += file.read_bytes() if file.is_file() else b""
    for upload in plain:
        assert all(upload[a : a + 64] not in log for a in range(0, len(upload) - 64, 64) if any(upload[a : a + 64]))


def test_the_server_learns_no_more_of_shares_than_the_step_says(tmp_path: Path) -> None:
    """Of a site whose vector arrived it gets shares of the seed only, of another of the masking key only."""
    here = secured(tmp_path, "fedavg", rounds=1)
    clients, secrets, told = here.clients(), dict[int, Any](), list[tuple[int, bytes]]()

    def look(node: int, message: Message, reply: Message) -> Message | None:
        if told and len(told) == 4:  # the session of the scores comes after that of the round
            return reply
        file = next(clients[node - FIRST]._memory.folder.glob("session/session.json"), None)
        if kind_of(message) == "keys":
            assert file is not None
            known = opened.read_checked(file)
            assert known is not None
            secrets[node - FIRST] = known["secrets"]
        if kind_of(message) == "unmask":
            told.append((node - FIRST, arrays_of(reply)[0]))
            assert file is not None
            assert "secrets" not in (opened.read_checked(file) or {})
        return None if kind_of(message) == "masked" and node - FIRST == 3 else reply

    assert here.serve(here.grid(look, clients)) is Stop.DONE
    parts = [(c + 1, secure.split_parts(m, 32)) for c, m in told]
    for owner in range(5):
        found = shares.combine_shares([(k, p[owner]) for k, p in parts[:3]])
        _, masking, seed, _ = secrets[owner]
        assert found.hex() == (masking if owner == 3 else seed)


def test_forged_and_replayed_keys_are_refused(tmp_path: Path) -> None:
    """The server puts keys of its own, or of an earlier session, in the place of a site's."""
    here = secured(tmp_path, "fedavg", rounds=2)
    old: dict[int, bytes] = {}
    forger = secure.new_secrets()

    class Between(FakeGrid):
        def push_messages(self, messages: Any) -> list[str]:
            messages = list(messages)
            for message in messages:
                if kind_of(message) == "shares":
                    self.edit(message)
            return super().push_messages(messages)

        def edit(self, message: Message) -> None:
            from fedloom_sites.deploy.protocol.envelope import digest_arrays, seal_message

            adverts = secure.read_adverts(arrays_of(message)[0])
            if int(message.content["head"]["round"]) == 1:
                old.setdefault(0, secure.write_adverts(adverts[:1]))
                return
            for_replay = secure.read_adverts(old[0])[0]
            forged = adverts[0]._replace(
                sealing=secure.derive_public_key(forger.sealing), masking=secure.derive_public_key(forger.masking)
            )
            data = secure.write_adverts([for_replay if self.replays else forged, *adverts[1:]])
            head = dict(message.content["head"]) | {"digest": digest_arrays([data])}
            message.content = seal_message(head, [data])

        replays = False

    for replays in (True, False):
        grid = Between({FIRST + c.site.client: c.answer for c in here.clients()})
        grid.replays = replays
        assert here.serve(grid) is Stop.TOO_FEW
        reasons = [x["reason"] for x in here.audit("rejected") if x["kind"] == "shares"]
        assert len(reasons) == 5 * (1 if replays else 2)
        assert all("not signed by that client for this session" in r or "own keys are missing" in r for r in reasons)
        assert not [m for m in grid.sent if kind_of(m) == "masked" and int(m.content["head"]["round"]) == 2]


def spoiling(t: int, place: slice, add: int) -> Any:
    """A fault: the first site adds a number to its masked vector in a round."""

    def spoil(node: int, message: Message, reply: Message) -> Message:
        if kind_of(message) != "masked" or node != FIRST or message.content["head"]["round"] != t:
            return reply
        data = arrays_of(reply)[0]
        end = len(data) - counters_bytes(5)
        vector = np.frombuffer(data[64:end], dtype="<u8").copy()
        vector[place] += np.uint64(add)
        return changed(reply, 0, arrays=[data[:64] + vector.tobytes() + data[end:]])

    return spoil


@pytest.mark.parametrize("power", [58, 60, 62, 63])
def test_a_vector_out_of_range_costs_its_round_only(power: int, tmp_path: Path) -> None:
    """The sum makes no sense: it is not kept as told, the round is lost, and the run goes on to its end."""
    here = secured(tmp_path, "fedavg")
    assert here.serve(here.grid(spoiling(2, slice(None), 1 << power))) is Stop.DONE
    [line] = here.audit("given up")
    assert "out of range" in line["reason"] or "below zero" in line["reason"]
    assert [s["accepted"] for s in read_status(here.server)["sites"]] == [3] * 5
    less = secured(tmp_path / "less", "fedavg", rounds=3)
    assert less.serve() is Stop.DONE
    assert torch.equal(here.model(), less.model())  # with full batches, one round less


def test_the_bound_holds_at_the_sites_and_for_the_sum(tmp_path: Path) -> None:
    """A site whose upload is longer sends its neutral one; a counter shows how many have."""
    here = secured(tmp_path / "sites", "fedavg", rounds=1, agreed={"norm_bound": 1e-3})
    assert here.serve() is Stop.NEUTRAL
    assert not here.audit("rejected")
    assert (
        "5 of 5 sites with samples sent a neutral upload, because their upload was not finite, too long"
        in (here.summary()["detail"])
    )
    raised = secured(tmp_path / "raised", "fedavg", rounds=1, agreed={"norm_bound": 1e3})
    assert raised.serve() is Stop.DONE
    assert not raised.audit("neutral uploads")
    here = secured(tmp_path / "sum", "fedavg", agreed={"norm_bound": 100.0})
    assert here.serve(here.grid(spoiling(2, slice(0, 1), 1000 << integers.RESOLUTION_BITS))) is Stop.DONE
    [line] = here.audit("given up")
    assert "the norm of the sum of dw over 5 sites is 1000, but it can be at most 500" in line["reason"]


@pytest.mark.parametrize("every", [1, 2])
def test_a_masked_run_that_changed_nothing_ends_as_in_simulation(every: int, tmp_path: Path) -> None:
    """The server has only means of the loss over the sites, but a mean that never changes is enough."""
    lazy: dict[str, Any] = {"lr": 1e-30, "epochs": 1, "batch_size": 200}
    here = secured(tmp_path, "fedavg", rounds=2, local=lazy, evaluate={"every": every})
    assert here.serve() is Stop.UNCHANGED
    [run] = here.summary()["runs"]
    result = here.simulate()
    assert (run["status"], here.summary()["detail"]) == (result.status, result.detail)
    assert result.stop is Stop.UNCHANGED


def test_a_site_refuses_a_weight_below_zero_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else can: the server sees sums."""
    here = secured(tmp_path, "flame", rounds=1)
    monkeypatch.setattr(Job, "weights", lambda _self, _up: [-torch.ones(1, 1)])
    assert here.serve() is Stop.NEUTRAL
    assert "5 of 5 sites with samples sent a neutral upload" in here.summary()["detail"]
    assert not here.audit("rejected")


def test_a_site_without_its_last_row_is_left_out(tmp_path: Path) -> None:
    """The server's sum has its last row; a change from another one would be wrong for ever."""
    here = secured(tmp_path, "flame")
    assert here.serve(here.grid(losing({(3, "keys"): [0, 1, 2]}))) is Stop.TOO_FEW
    for file in here.sites[1].state.rglob("round-*.state"):
        file.unlink()
    assert here.serve() is Stop.DONE
    assert {x["client"] for x in here.audit("rejected")} == {1}
    assert all("cannot take part in this run again" in x["reason"] for x in here.audit("rejected"))


def test_sides_that_do_not_agree_refuse_each_other(tmp_path: Path) -> None:
    here = secured(tmp_path / "a", "fedavg")
    plain = here._replace(server=here.server.with_(secure=None))
    assert plain.serve() is Stop.TOO_FEW
    assert any("does not answer messages of kind train" in x["reason"] for x in here.audit("rejected"))
    here = secured(tmp_path / "b", "fedavg")
    open_ = here._replace(sites=[s.with_(secure=None) for s in here.sites])
    assert open_.serve() is Stop.TOO_FEW
    assert any("the agreement has no secure aggregation" in x["reason"] for x in here.audit("rejected"))
    here = secured(tmp_path / "c", "fedavg")
    assert here.server.secure is not None
    other = here._replace(server=here.server.with_(secure=here.server.secure.with_(threshold=4), quorum=4))
    assert other.serve() is Stop.TOO_FEW
    assert any("not signed by that client for this session" in x["reason"] for x in here.audit("rejected"))


def figures(result: Any, *, total: bool) -> dict[tuple[Any, ...], float]:
    """Rounds, models, parts and names of figures of the federation, or of sites, with their values."""
    rows = result.to_pylist()
    keys = ("round", "model", "part", "metric", "client")
    found = {tuple(r[k] for k in keys): r["value"] for r in rows if (r["client"] < 0) == total and r["model"]}
    return {key: value for key, value in found.items() if value == value}


def test_scores_stay_unless_agreed(tmp_path: Path) -> None:
    for name in ("off", "per-site", "masked"):
        here = secured(tmp_path / name, "fedavg", rounds=1, agreed={"scores": name})
        assert here.serve() is Stop.DONE
        table = pq.read_table(here.server.results / "metrics.parquet")
        assert bool(figures(table, total=False)) == (name == "per-site")
        assert bool(figures(table, total=True)) == (name != "off")


@pytest.mark.parametrize("sampler", [None, {"kind": "uniform", "fraction": 0.6}])
@pytest.mark.parametrize("name", ["fedavg", "flame"])
def test_masked_scores_are_the_weighted_means_of_the_plain_run(name: str, sampler: Any, tmp_path: Path) -> None:
    """The sums ride along where all sites train, and have a session of their own where not, and at the end."""
    changes = {"evaluate": {"every": 1}, "rounds": 2, **({"sampler": sampler} if sampler else {})}
    agreed = {"changes": 9, "steady": 0} if sampler else {}  # sums of other sites in each round
    here = secured(tmp_path, name, agreed=agreed, **changes)
    grid = here.grid()
    assert here.serve(grid) is Stop.DONE
    sessions = [(kind_of(m), int(m.content["head"]["round"])) for m in grid.sent if kind_of(m) in ("masked", "tally")]
    alone = [t for kind, t in sessions if kind == "tally"]
    assert alone == [t for t in ((2,) if sampler is None else (0, 1, 2)) for _ in range(5)]
    assert not [m for m in grid.sent if kind_of(m) == "score"]
    mine = figures(pq.read_table(here.server.results / "metrics.parquet"), total=True)
    known = figures(here.simulate().table(), total=True)
    same = [k for k in mine if k[3].endswith("/weighted")]
    for key in same:
        coarse = 0.0 if key[3].partition("/")[0] in MEAN_SCORES else 5e-3  # an eighth of a sample at every site
        assert mine[key] == pytest.approx(known[key], abs=1e-5 + coarse), key
        if key[3].startswith("accuracy"):
            assert mine[key] == pytest.approx(known[key], abs=1e-9), "an accuracy is a sum of hits"
    wanted = {k for k in known if k[3] in ("loss/weighted", "accuracy/weighted") and k[2] != "common"}
    assert {k for k in wanted if k[1] != "hybrid"} <= set(same)
    assert not [k for k in mine if k[3].endswith("/mean")], "two means with different weights isolate a site"
    assert {mine[k] for k in mine if k[3] == "loss/sites" and k[2] == "train"} == {5.0}
    found = read_status(here.server)
    assert {row["model"] for row in found["means"]} == {k[1] for k in same}
    assert [row for row in found["means"] if row["sites"] == 5]
    assert any("of 5 sites" in line for line in status_lines(found))


SIZES = (8, 8, 40)


def test_the_score_of_a_model_that_is_one_of_two_others_isolates_the_sites_that_chose_one(
    five: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three sites uses its personal model: with the hybrid's sum, a difference would be of this site alone."""
    job, personal, shared = five.clients()[0].trainer.job, (0.25, 0.5, 0.75), (0.5, 0.75, 0.25)

    def summed() -> dict[str, float]:
        vector, total = ScoreVector(job), np.zeros(0, dtype=np.uint64)
        for g, p in zip(shared, personal, strict=True):
            values = {"global": g, "personal": p, "hybrid": max(g, p)}
            scores = {(kind, "test"): {"accuracy": torch.tensor([value])} for kind, value in values.items()}
            one = vector.encode(scores, SIZES, [True] * len(vector.figures))
            total = total + one if len(total) else one
        return {kind: mean for (kind, _, _), (mean, _) in vector.decode(total, 3).items()}

    assert {*summed()} == {"global", "personal"}
    monkeypatch.setattr(vectors, "SUMMED_MODELS", ("global", "hybrid", "personal"))
    found = summed()
    assert found["hybrid"] - found["global"] == pytest.approx((0.75 - 0.25) / 3)  # of the last site


def test_a_score_is_in_one_sum_only(five: Scene) -> None:
    """A second sum with other weights would isolate the one of three sites whose size differs from the others."""
    vector = ScoreVector(five.clients()[0].trainer.job)
    everything = [True] * len(vector.figures)

    def encoded(value: float) -> Any:
        scores = {("global", "test"): {"accuracy": torch.tensor([value], dtype=torch.float64)}}
        return vector.encode(scores, SIZES, everything)

    assert int((encoded(0.25) != encoded(0.75)).sum()) == 1
    assert (encoded(0.25) == encoded(0.25 + 2.0**-12)).all(), "a finer sum would tell the ratios of counts apart"


def test_one_score_that_is_not_finite_keeps_a_site_silent(five: Scene) -> None:
    """A model that makes only the perplexity of some sites infinite must not show the perplexity of the others."""
    vector = ScoreVector(five.clients()[0].trainer.job)
    everything = [True] * len(vector.figures)
    names = [name for model, part, name in vector._names if (model, part) == ("global", "test")]
    for broken in names:
        values = {name: torch.tensor([math.inf if name == broken else 0.5]) for name in names}
        assert not vector.is_whole({("global", "test"): values}, SIZES, everything), broken
    assert vector.is_whole({("global", "test"): {name: torch.tensor([0.5]) for name in names}}, SIZES, everything)


def test_the_recall_of_a_rare_class_is_in_no_sum(tmp_path: Path) -> None:
    """With one sample of a class at each site, the sum over sites of different sizes shows every recall."""
    task = {"metrics": ["recall"]}
    experiment = parse(document({"algorithm": "fedavg"}, data={"source": "sklearn"}, task=task))
    job, _ = make_job(experiment.methods[0].setting, experiment.partition(experiment.source.load(), 0))
    vector, place = ScoreVector(job), 3 * [key[2] for key in ScoreVector(job)._names].index("recall[benign]")
    part = vector._names[place // 3][1]
    sizes, seen = (20, 23, 29, 31, 47), set[int]()
    for recalls in itertools.product((0.0, 1.0), repeat=len(sizes)):
        encoded = [
            vector.encode(
                {("global", part): {"recall[benign]": torch.tensor([r])}}, (n, n, n), [True] * len(vector.figures)
            )[place]
            for n, r in zip(sizes, recalls, strict=False)
        ]
        seen.add(int(np.sum(encoded, dtype=np.uint64)))
    assert len(seen) == 2 ** len(sizes), "each sum is of one combination of recalls"
    for count in (0, 1, MIN_SCORED_CLASS_SAMPLES - 1, MIN_SCORED_CLASS_SAMPLES):
        y = torch.tensor([0] * 12 + [1] * count)
        there = SimpleNamespace(gather=lambda *_, y=y: (torch.arange(len(y)), None), targets=lambda _, y=y: y)
        bits = ScoreVector(replace(job, eval_fed=there)).find_definable_figures(0)
        found = {name for k, (_, name) in enumerate(vector.figures) if bits >> k & 1}
        assert ("recall[benign]" in found, "recall[malignant]" in found) == (count >= MIN_SCORED_CLASS_SAMPLES, True)


def test_sums_with_different_weights_that_isolate_a_site_stay_closed() -> None:
    """A model and a control that follow from each other: one sum less a multiple of the other."""
    means, shares = (1.0, 2.0, 2.0), (1.0, 1.0, 1.0)
    check_summands(dict(enumerate(zip(means, means, strict=True))), range(3), 3, 0.8)
    with pytest.raises(ProtocolBroken, match="contains only the clients 0"):
        check_summands(dict(enumerate(zip(means, shares, strict=True))), range(3), 3, 0.8)
    distinct, alike = (1.0, 2.0, 4.0, 7.0, 11.0), (1.0,) * 5
    check_summands(dict(enumerate(zip(distinct, alike, strict=True))), range(5), 3, 0.8)
    with pytest.raises(ProtocolBroken, match="contains only the clients 3, 4"):
        check_summands(dict(enumerate(zip((1.0, 1.0, 1.0, 7.0, 11.0), alike, strict=True))), range(5), 3, 0.8)
    nearly = (1.0, 2.0, 2.0001, 2.0002, 2.0003)
    with pytest.raises(ProtocolBroken, match="almost only one client"):
        check_summands(dict(enumerate(zip(nearly, alike, strict=True))), range(5), 3, 0.8)


def test_two_weightings_of_one_upload_are_refused_before_the_run() -> None:
    """SCAFFOLD's model is averaged, and its controls are added up over rounds."""
    uniform = {"aggregation_weights": {"kind": "uniform"}}
    with pytest.raises(Refused, match="weights the two sums differently") as caught:
        check_maskable(parse(document({"algorithm": "scaffold"}, **uniform)).methods[0].setting)
    assert caught.value.rule == "masks-need-one-weighting"
    check_maskable(parse(document({"algorithm": "fedavg"}, **uniform)).methods[0].setting)
    check_maskable(parse(document({"algorithm": "scaffold"})).methods[0].setting)


def test_no_sum_of_scores_is_of_one_or_two_sites(tmp_path: Path) -> None:
    """A digit's recall is summed where three of any four sites have enough of it; elsewhere not even its count is."""
    cut = {"kind": "dirichlet", "clients": 5, "alpha": 0.5, "max_train_per_client": 200}
    changes = {"rounds": 1, "evaluate": {"every": 1}, "task": {"metrics": ["recall", "precision"]}, "partition": cut}
    here = secured(tmp_path, "fedavg", 4, **changes)
    experiment, totals = here.experiment, list[Any]()
    fed = experiment.partition(experiment.source.load(), 0)
    counts = {p: [fed.targets(fed.indices(p, c)).bincount(minlength=10) for c in range(5)] for p in ("train", "test")}
    decode = ScoreVector.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ScoreVector, "decode", lambda self, total, n: totals.append((self, total)) or decode(self, total, n)
        )
        grid = here.grid()
        assert here.serve(grid) is Stop.DONE
    vector, total = totals[-1]
    sums = dict(zip(vector._names, total.reshape(-1, NUMBERS_PER_SCORE).tolist(), strict=True))
    kinds = set()
    for (model, part, name), row in sums.items():
        if model == "global" and part in counts and name.startswith("recall"):
            having = sum(int(count[int(name[7:-1])]) >= MIN_SCORED_CLASS_SAMPLES for count in counts[part])
            assert row[1] == (having if having >= 4 else 0), (part, name)
            assert any(row) == (having >= 4)
            kinds.add(having >= 4)
        if name.startswith("precision"):
            assert not any(row)
    assert kinds == {True, False}
    table = figures(pq.read_table(here.server.results / "metrics.parquet"), total=True)
    assert ("recall[0]/weighted" in {k[3] for k in table}) == any(
        row[1] for k, row in sums.items() if k[2] == "recall[0]"
    )
    terms = [terms_of(m) for m in grid.sent if kind_of(m) in ("masked", "tally")]
    assert {len(t.figures) for t in terms if t.scored >= 0} == {5}


def test_figures_that_samples_define() -> None:
    """AUROC needs both classes, F1 a positive sample, the loss a sample. No sample defines a calibration slope."""
    task = {"metrics": ["calibration_slope", "precision"]}
    experiment = parse(document({"algorithm": "fedavg"}, data={"source": "sklearn"}, task=task))
    job, _ = make_job(experiment.methods[0].setting, experiment.partition(experiment.source.load(), 0))
    figures_of_data = ScoreVector(job).figures
    wanted = ("loss", "f1", "auroc", "calibration_slope", "precision[benign]")
    for negative, positive, names in (
        (12, 12, {"loss", "f1", "auroc"}),
        (12, 3, {"loss", "f1", "auroc"}),
        (12, 0, {"loss"}),
        (0, 12, {"loss", "f1"}),
        (0, 0, set[str]()),
    ):
        y = torch.tensor([0] * negative + [1] * positive, dtype=torch.long)
        there = SimpleNamespace(
            gather=lambda part, ids, y=y: (torch.arange(len(y)), None), targets=lambda index, y=y: y
        )
        bits = ScoreVector(replace(job, eval_fed=there)).find_definable_figures(0)
        found = {name for k, (part, name) in enumerate(figures_of_data) if bits >> k & 1 and part == "test"}
        assert found & {*wanted} == names


def terms_of(message: Message) -> SessionTerms:
    return read_terms(arrays_of(message)[kind_of(message) == "masked"])


def test_a_sum_of_the_last_scores_that_is_never_opened_costs_the_figures_only(tmp_path: Path) -> None:
    """The run waits for it three times. Another sum would reveal the difference."""
    here, seen = secured(tmp_path, "fedavg", rounds=1), list[str]()

    def fault(_node: int, message: Message, reply: Message) -> Message | None:
        seen.append(kind_of(message))
        return None if "tally" in seen and kind_of(message) == "unmask" else reply

    stops = [here.serve(here.grid(fault)) for _ in range(4)]
    assert stops == [Stop.TOO_FEW] * 3 + [Stop.DONE]
    [line] = here.audit("scores given up")
    assert line["round"] == 1
    assert not [k for k in figures(pq.read_table(here.server.results / "metrics.parquet"), total=True) if k[0] == 1]


def test_scores_of_a_round_in_which_a_site_has_none_are_given_up_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the session of the next training, and in that of the last scores; uploads and models stay what they are."""
    changes: dict[str, Any] = {"rounds": 3, "evaluate": {"every": 1}}
    whole, here = secured(tmp_path / "whole", "ditto", **changes), secured(tmp_path / "here", "ditto", **changes)
    score = Trainer._score

    def diverged(trainer: Trainer, job: Any, models: Any, t: int, common: bool) -> Any:
        scores = score(trainer, job, models, t, common)
        return {} if trainer.site.client == 4 and t in (1, 3) and here.folder in trainer.site.state.parents else scores

    monkeypatch.setattr(Trainer, "_score", diverged)
    assert (whole.serve(), here.serve()) == (Stop.DONE, Stop.DONE)
    assert torch.equal(here.model(), whole.model())
    lines = here.audit("scores given up")
    assert [line["round"] for line in lines] == [1, 3]
    assert all("because 1 of 5 sites have no finite score, or one" in line["reason"] for line in lines)
    tables = [figures(pq.read_table(one.server.results / "metrics.parquet"), total=True) for one in (whole, here)]
    assert {key[0] for key in tables[0]} - {key[0] for key in tables[1]} == {1, 3}
    assert {key: value for key, value in tables[0].items() if key[0] not in (1, 3)} == tables[1]


PRIVATE = {"kind": "private-mean", "clip": 0.5, "sigma": 2.0, "delta": 1e-5}


def test_every_site_adds_its_share_of_the_noise(tmp_path: Path) -> None:
    """The noise of five of at least three sites has 5/3 of the variance of the central one; epsilon is the same."""
    local = {"lr": 1e-12, "epochs": 1, "batch_size": 200}  # uploads that are next to nothing: all that moves is noise
    here = secured(tmp_path, "fedavg", rounds=1, aggregator=PRIVATE, local=local, agreed={"norm_bound": 1e-20})
    clients = here.clients()
    assert here.serve(here.grid(None, clients)) is Stop.DONE
    for one in clients:
        kept = one._memory.read(1)
        assert kept is not None
        assert not kept.tensors["reply"][-3:].any()  # no count of work is summed
    noise, n, d = here.model(), 5, 650
    variance = (PRIVATE["sigma"] * PRIVATE["clip"] / n) ** 2 * n / 3
    assert noise.shape == (d,)
    assert abs(float(noise.var()) / variance - 1) < 5 * (2 / d) ** 0.5
    [central] = [r["value"] for r in here.simulate().table().to_pylist() if r["metric"] == "epsilon" and r["round"]]
    noise_of = PrivateMean(**{**PRIVATE, "accountant": "rdp"})
    assert read_status(here.server)["epsilon"] == pytest.approx(epsilon(noise_of, 1))
    assert read_status(here.server)["epsilon"] >= central - 1e-9
    alone = epsilon(noise_of.with_(sigma=PRIVATE["sigma"] / 3**0.5), 1)  # two of three sites know their shares
    assert read_status(here.server)["epsilon_sites"] == pytest.approx(alone)
    assert f"{alone:.4g} against all other sites" in " ".join(status_lines(read_status(here.server)))
    findings = " ".join(f.sentence for f in check_site(here.sites[0], offline=True))
    assert f"{alone:.3g} against all other sites" in findings
    for site in here.sites:
        [ledger] = site.state.rglob("ledger.jsonl")
        entry = json.loads(ledger.read_text())
        assert entry["epsilon"] == pytest.approx(epsilon(noise_of, 1))
        assert entry["epsilon_sites"] == pytest.approx(alone)
    assert not [*here.server.checkpoints.rglob("ledger.jsonl")]


def test_shares_of_noise_are_clipped_uploads_in_exact_arithmetic() -> None:
    """The sum is that of clipped uploads and noise of the grid; a sum beyond all noise is refused."""
    mean = SharedMean(**{**PRIVATE, "survivors": 3})
    rows = 3 * torch.randn(4, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    steps = [mean.share(row).view(np.uint64) for row in rows]
    total = mean.total(np.sum(steps, axis=0, dtype=np.uint64), 4)
    clipped = sum(row * min(1.0, 0.5 / np.linalg.norm(row)) for row in rows)
    assert np.abs(total - clipped).max() < 6 * (4 / 3) ** 0.5
    assert np.std(total - clipped) == pytest.approx((4 / 3) ** 0.5, rel=0.2)
    with pytest.raises(Refused, match="out of range"):
        mean.total(np.full(500, 1 << 62, dtype=np.uint64), 4)


def test_training_that_fails_is_no_answer_under_shared_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = secured(tmp_path, "fedavg", rounds=1, aggregator=PRIVATE)
    make = node_module.run_clients

    def fails(job: Any, down: Any, task: Any) -> Any:
        if int(task.ids) == 1:
            raise Refused("the loss of patient 7 is not finite")
        return make(job, down, task)

    monkeypatch.setattr(node_module, "run_clients", fails)
    assert here.serve() is Stop.DONE
    assert not here.audit("rejected")
    assert len([x for x in here.audit("accepted") if x["kind"] == "masked"]) == 5


def test_a_state_that_is_too_long_is_no_answer_under_a_sites_noise(tmp_path: Path) -> None:
    """What stays at a site has no noise: that it passes `engine.norm_bound` is not told by a refusal."""
    noise = {"upload_transform": {"kind": "gaussian-noise", "clip": 1e-3, "sigma": 1.0, "delta": 1e-5}}
    short = {"engine": {"dtype": "float64", "gradient_engine": "loop", "norm_bound": 0.1}}
    here = secured(tmp_path, "scaffold", rounds=2, **noise, **short)
    clients = here.clients()
    assert here.serve(here.grid(None, clients)) is Stop.DONE
    kept = clients[0]._memory.read(2)
    assert kept is not None
    assert any(float(row.norm()) > 0.1 for row in kept.group("rows").values())
    assert not here.audit("rejected")


def refusal(name: str, **changes: Any) -> str:
    from fedloom.lab.experiment import parse

    given = {"algorithm": name, **({"layers": ["head.bias"]} if name == "fedbn" else {})}
    if name in PRESETS and "clusters" in REGISTRY[name].options:
        given["clusters"] = 2
    try:
        check_maskable(parse(document(given, **changes)).methods[0].setting)
    except Refused as error:
        return str(error)
    return ""


SINGLE = {
    **dict.fromkeys(("afl", "gifair-fl", "fiaelt", "ifca", "cfl", "fedas", "fedpac"), "the rows of single clients"),
    **dict.fromkeys(("fedacs", "fedamp", "heurfedamp", "fedskip", "fedfomo"), "mixes the kept rows of single clients"),
    **dict.fromkeys(("equitable-fl", "fairfed"), "queries single clients"),
    **dict.fromkeys(("power-of-choice", "clustered-sampling"), "reads single clients"),
    "centralized": "pools the data",
}
"""Methods whose server needs single uploads, and why."""


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_is_masked_or_refused_at_init_with_the_reason(name: str, experiment) -> None:
    from fedloom_sites.deploy.ops.plan import plan_deployment

    given = {"algorithm": name, **({"layers": ["head.bias"]} if name == "fedbn" else {})}
    if name in PRESETS and "clusters" in REGISTRY[name].options:
        given["clusters"] = 2
    made = experiment(given)
    if name in SINGLE:
        with pytest.raises(ConfigError, match=SINGLE[name]):
            plan_deployment(made, norm_bound=1.0, secure_aggregation=True)
    else:
        assert plan_deployment(made, norm_bound=1.0, secure_aggregation=True).threshold == 3


def test_what_needs_single_uploads_is_refused() -> None:
    for name in METHODS + FURTHER:
        assert not refusal(name)
    for kind in ({"kind": "median"}, {"kind": "multi-krum", "f": 1}):
        assert "compares single uploads" in refusal("fedavg", aggregator=kind)
    for mixer in MIXERS:
        assert f"personalized_aggregation '{mixer}' mixes the models of single clients" in refusal(
            "flame", personalized_aggregation={"kind": mixer}
        )
    assert "mixes the kept rows of single clients" in refusal("fedacs")
    assert "aggregation_weights 'equitable' queries single clients" in refusal(
        "fedavg", aggregation_weights={"kind": "equitable"}
    )
    assert "may draw a client twice" in refusal("fedavg", sampler={"kind": "size-weighted", "fraction": 1.0})
    assert not refusal("fedavg", aggregator=PRIVATE)
    assert "too little noise to be shared" in refusal("fedavg", aggregator={**PRIVATE, "sigma": 1e-7})
    without = {"kind": "private-mean", "clip": 0.5, "sigma": 0.0}
    assert "with sigma 0 has too little noise to be shared" in refusal("fedavg", aggregator=without)


def test_the_threshold_is_a_majority() -> None:
    keys = tuple(m.signing_key for m in secured_keys())
    for threshold in (1, 2, 6):
        with pytest.raises(ValueError, match="threshold"):
            SecureSettings(threshold=threshold, keys=keys)
    for threshold in (1, 2):
        with pytest.raises(ValueError, match="threshold"):
            SecureSettings(threshold=threshold, keys=keys[:3])


def test_thresholds_by_the_number_of_sites() -> None:
    """At least three and a majority; by default room for fewer than a third of the sites on the server's side."""
    for n in range(3, 101):
        least, usual = secure.min_threshold(n), secure.safe_threshold(n)
        assert 3 <= least <= usual <= n
        assert 2 * least > n
        assert 3 * usual > 2 * n
        assert secure.max_colluders(n, usual) >= n // 3 - (n % 3 == 0)
        for threshold in range(least, n + 1):
            c = secure.max_colluders(n, threshold)
            one_sum, two_others = [2 * threshold > n + k for k in (c, c + 1)], [threshold - k > 1 for k in (c, c + 1)]
            assert one_sum[0]
            assert two_others[0]
            assert not (one_sum[1] and two_others[1])


def secured_keys() -> Any:
    from fedloom_sites.deploy.settings import Member
    from tests.deploy.scene import PAIRS

    return [
        Member(site=f"s{i}", client=i, node_key=b.public, signing_key=a.public) for i, (a, b) in enumerate(PAIRS[:5])
    ]


def test_init_writes_one_agreement_for_all(experiment, tmp_path: Path) -> None:
    from fedloom_sites.deploy.ops.directory import Location, write_directory
    from fedloom_sites.deploy.ops.plan import plan_deployment
    from fedloom_sites.deploy.setting_files import read_server, read_site

    write_directory(
        plan_deployment(experiment("flame"), secure_aggregation=True, threshold=3), tmp_path / "out", Location()
    )
    server = read_server(tmp_path / "out" / "server" / "server.toml")
    assert server.secure is not None
    assert (server.secure.threshold, server.quorum, server.secure.norm_bound) == (3, 3, server.norm_bound)
    for member in server.sites:
        site = read_site(tmp_path / "out" / "sites" / member.site / "site.toml")
        assert site.secure == server.secure
    with pytest.raises(ValueError, match=r"secure\.keys"):
        server.with_(secure=server.secure.with_(keys=server.secure.keys[::-1]))


def test_init_refuses_what_cannot_be(experiment) -> None:
    from fedloom_sites.deploy.ops.plan import plan_deployment

    def refused(sentence: str, *methods: Any, tables: dict[str, Any] | None = None, **options: Any) -> None:
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            plan_deployment(experiment(*methods, **(tables or {})), norm_bound=1.0, **options)

    refused("aggregation. Add --secure-aggregation", threshold=2)
    for threshold in (1, 2, 4):  # of a sum of two, each would know the other's upload
        sentence = f"--threshold must be from 3 to 3 for 3 sites (more than half of the sites), got {threshold}"
        refused(sentence, secure_aggregation=True, threshold=threshold)
    refused("works with 3 to 100 sites, got 2", tables={"clients": 2}, secure_aggregation=True)
    refused("mixes the kept rows", "fedamp", secure_aggregation=True)
    mixed = {"personalized_aggregation": {"kind": "attention"}}
    refused("'attention' mixes the models of single clients", tables=mixed, secure_aggregation=True)
    half = {"clients": 4, "sampler": {"kind": "uniform", "fraction": 0.5}}
    refused("draws 2 of 4 sites, but the threshold is 3. Draw more sites", tables=half, secure_aggregation=True)
    refused("--changes needs secure aggregation. Add", changes=3)
    most = {"clients": 4, "rounds": 8, "sampler": {"kind": "uniform", "fraction": 0.75}}
    refused(
        "draws 3 of 4 sites in round 1, and two sums over different sites can reveal one",
        tables=most,
        secure_aggregation=True,
    )
    with_noise = {**most, "aggregator": PRIVATE}
    assert plan_deployment(experiment(**with_noise), norm_bound=1.0, secure_aggregation=True).threshold == 3
    assert plan_deployment(experiment(**most), norm_bound=1.0, secure_aggregation=True, changes=8).changes == 8


@pytest.mark.parametrize(
    "changes", [{"upload_transform": {"kind": "gaussian-noise", "clip": 1.0, "sigma": 1.0, "delta": 1e-5}}, {}]
)
def test_noise_of_the_sites_and_methods_that_send_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    """Local noise goes under the masks; a method that uploads nothing sends masked counts only."""
    here = secured(tmp_path, "fedavg" if changes else "local", rounds=2, **changes)
    assert here.serve() is Stop.DONE
    assert not here.audit("rejected")
    for site in here.sites:
        assert bool([*site.state.rglob("ledger.jsonl")]) == bool(changes)


def without(message: bytes, *lost: int) -> bytes:
    return secure.write_adverts([a for a in secure.read_adverts(message) if a.client not in lost])


REFUSED: dict[str, tuple[str, Any]] = {
    "its own keys are left out": (
        "own keys are missing",
        lambda s: s.sites[0].shares(1, s.nonce, without(s.adverts, 0)),
    ),
    "too few sites": (
        "2 sites advertised keys, but 3 are required",
        lambda s: s.sites[0].shares(1, s.nonce, without(s.adverts, 1, 2, 3)),
    ),
    "other sites in a second message": (
        "cannot change",
        lambda s: (s.shared(), s.sites[0].shares(1, s.nonce, without(s.adverts, 1))),
    ),
    "shares before the step": (
        "has not reached this step",
        lambda s: s.sites[0].receive(1, s.nonce, b"", TERMS, EQUAL),
    ),
    "shares of a site that did not advertise": (
        "shares came from sites that did not advertise",
        lambda s: (
            s.sites[0].shares(1, s.nonce, without(s.adverts, 4)),
            s.sites[0].receive(
                1, s.nonce, secure.join_parts({c: bytes(shares.SEALED_SHARE_BYTES) for c in (1, 2, 4)}), TERMS, EQUAL
            ),
        ),
    ),
    "its own share from the server": (
        "shares came from sites that did not advertise",
        lambda s: (
            s.shared(),
            s.sites[0].receive(
                1, s.nonce, secure.join_parts({c: bytes(shares.SEALED_SHARE_BYTES) for c in (0, 1, 2)}), TERMS, EQUAL
            ),
        ),
    ),
    "too few shares": ("2 sites sent shares, but 3 are required", lambda s: s.receive(0, [0, 1])),
    "another question under the same masks": (
        "cannot change",
        lambda s: (s.receive(0, range(5)), s.receive(0, range(5), TERMS.with_(sizes=((8, 3, 3),) * 5))),
    ),
    "another inbox": ("cannot change", lambda s: (s.receive(0, range(5)), s.receive(0, range(4)))),
    "a vector before the shares": ("has not reached this step", lambda s: (s.shared(), s.masked(0))),
    "another vector under the same masks": (
        "cannot change",
        lambda s: (s.receive(0, range(5)), s.masked(0), s.masked(0, 8)),
    ),
    "a sum before its vector": ("has not reached this step", lambda s: (s.receive(0, range(5)), s.reveal(0, range(5)))),
    "a sum of too few": (
        "the sum contains 2 sites",
        lambda s: (s.receive(0, range(5)), s.masked(0), s.reveal(0, [0, 1])),
    ),
    "a sum without it": (
        "this site",
        lambda s: (s.receive(0, range(5)), s.masked(0), s.reveal(0, [1, 2, 3])),
    ),
    "a sum of sites without masks": (
        "contains a site that sent no shares",
        lambda s: (s.receive(0, range(4)), s.masked(0), s.reveal(0, range(5))),
    ),
    "a sum that too few have signed": (
        "2 sites have signed this sum, but 3 are required",
        lambda s: (s.receive(0, range(5)), s.masked(0), s.reveal(0, range(4), [0, 1])),
    ),
    "a sum after another was signed": (
        "has signed a sum over different sites",
        lambda s: (
            *(s.receive(0, range(5)), s.masked(0)),
            s.sites[0].agree(1, s.nonce, secure.join_parts(dict.fromkeys(range(4), b""))),
            s.reveal(0, range(5)),
        ),
    ),
    "a second list to sign": (
        "cannot change",
        lambda s: (
            *(s.receive(0, range(5)), s.masked(0)),
            *(s.sites[0].agree(1, s.nonce, secure.join_parts(dict.fromkeys(range(k), b""))) for k in (4, 3)),
        ),
    ),
    "a list to sign after the shares were said": (
        "has not reached this step",
        lambda s: (
            *(s.receive(0, range(5)), s.masked(0), s.reveal(0, range(5))),
            s.sites[0].agree(1, s.nonce, secure.join_parts(dict.fromkeys(range(4), b""))),
        ),
    ),
    "an accusation that nobody signed": (
        "is not signed by client 1",
        lambda s: (s.shared(), s.sites[0].open(1, s.nonce, secure.join_parts({1: bytes(64)}))),
    ),
    "a second sum": (
        "cannot change",
        lambda s: (s.receive(0, range(5)), s.masked(0), s.reveal(0, range(5)), s.reveal(0, range(4))),
    ),
    "a session that is over": (
        "this session is over",
        lambda s: (s.sites[0].keys(2, s.nonce), s.sites[0].keys(1, s.nonce)),
    ),
    "a session whose sum is open, after damage": (
        "this session is over",
        lambda s: (
            *(s.receive(0, range(5)), s.masked(0), s.reveal(0, range(5))),
            next(s.settings[0].state.rglob("session.json")).write_bytes(b"damaged"),
            s.sites[0].keys(1, s.nonce),
        ),
    ),
    "an earlier session": (
        "belongs to a different session",
        lambda s: (s.receive(0, range(5)), s.sites[0].keys(2, s.nonce), s.masked(0)),
    ),
}


def told(here: Scene, kind: Kind, *arrays: bytes, **fields: Any) -> tuple[str, str]:
    """What a site answers to a message that its own server would not send."""
    blank: dict[type, Any] = {int: 0, float: 0.0, bool: False, bytes: b"", str: "", list: []}
    head = {name: blank[type_] for name, type_ in (COMMON_FIELDS | REQUEST_FIELDS[kind]).items()}
    head |= {"protocol": PROTOCOL_VERSION, "release": __version__, "experiment": here.server.fingerprint, "kind": kind}
    message = Message(
        seal_message(head | {"digest": digest_arrays(arrays)} | fields, arrays), dst_node_id=1, message_type="query"
    )
    answer = here.clients()[0].answer(message).content["head"]
    return str(answer["status"]), str(answer["reason"])


@pytest.mark.parametrize("kind", ["train", "ask", "score"])
def test_a_site_under_masks_answers_no_plain_question(kind: Kind, five: Scene) -> None:
    assert told(five, kind) == (
        "refused",
        f"site site-0 does not answer messages of kind {kind}, because the agreement has secure aggregation",
    )


def test_sums_of_counts_that_cannot_be_are_rejected(five: Scene) -> None:
    """Those of work and of scores, as those of uploads are: a mask is still on them."""
    trainer = five.clients()[0].trainer
    uploads, scores = UploadVector(trainer.job, trainer.forms.idle), ScoreVector(trainer.job)
    total = np.zeros(uploads.length, dtype=np.uint64)
    assert uploads.decode(total, 3, 1.0)[1].tolist() == [0, 0, 0]
    total.view(np.int64)[-2] = -1
    with pytest.raises(ProtocolBroken, match="the sum of work is negative: a mask was not removed"):
        uploads.decode(total, 3, 1.0)
    total[-2:] = 0, 4
    with pytest.raises(ProtocolBroken, match="the counter of clipped uploads is out of range"):
        uploads.decode(total, 3, 1.0)
    for sites in (-1, 4):
        total = np.zeros(scores.length, dtype=np.int64)
        assert scores.decode(total.view(np.uint64), 3) == {}
        total[1:3] = sites
        with pytest.raises(ProtocolBroken, match="the sum of scores is out of range"):
            scores.decode(total.view(np.uint64), 3)


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return secured(tmp_path_factory.mktemp("five"), "fedavg")


@pytest.mark.parametrize("case", REFUSED)
def test_a_site_refuses_by_itself_whatever_the_server_asks(case: str, five: Scene) -> None:
    """Each guard of the protocol at a site alone: a server that does not keep to it learns nothing."""
    sentence, ask = REFUSED[case]
    for site in five.sites:
        shutil.rmtree(site.state / "alone", ignore_errors=True)
    with pytest.raises(ProtocolBroken, match=sentence):
        ask(Steps(five))


def test_the_steps_without_training_give_the_sum(five: Scene) -> None:
    """What the guards above are tried on works where nothing is wrong."""
    for site in five.sites:
        shutil.rmtree(site.state / "alone", ignore_errors=True)
    steps = Steps(five)
    for c in range(5):
        steps.receive(c, range(5))
    total = sum(np.frombuffer(steps.masked(c), dtype="<u8", offset=64) for c in range(4))
    told = {c: secure.split_parts(steps.reveal(c, range(4)), secure.KEY_BYTES) for c in range(3)}
    session, salt = steps.session(), secure.session_binding(steps.session(), TERMS.digest, range(5))
    secrets, wrong = shares.restore_secrets(session, range(5), range(4), told)
    assert not wrong
    assert secure.unmask_sum(session, salt, range(4), total, secrets).tolist() == [28, 28, 28]


@pytest.mark.parametrize(("spoilt", "ends"), [((1,), Stop.DONE), ((0, 1), Stop.DONE), ((0, 1, 2), Stop.NEUTRAL)])
@pytest.mark.parametrize("name", ["fedavg", "flame", "scaffold"])
def test_a_result_that_is_not_finite_is_a_neutral_upload(
    name: str, spoilt: tuple[int, ...], ends: Stop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes neither the site's state nor what the server has of it, and a counter shows how many there are."""
    here, make = secured(tmp_path, name, rounds=2), node_module.run_clients

    def spoils(job: Any, down: Any, task: Any) -> Any:
        output = make(job, down, task)
        if task.round == 2 and int(task.ids) in spoilt:
            output = output._replace(upload=type(output.upload)(*(field / 0 for field in output.upload)))
        return output

    monkeypatch.setattr(node_module, "run_clients", spoils)
    clients = here.clients()
    assert here.serve(here.grid(None, clients)) is ends
    assert not here.audit("rejected")
    told = f"round 2: {len(spoilt)} of 5 sites with samples sent a neutral upload"
    if ends is Stop.DONE:
        [line] = here.audit("neutral uploads")
        assert told in line["reason"]
        assert any(told in sentence for sentence in status_lines(read_status(here.server)))
    else:
        assert told in here.summary()["detail"]
        assert "a sum needs 3 others, so no site decrypts it" in here.summary()["detail"]
    for c, client in enumerate(clients):
        one, two = client._memory.read(1), client._memory.read(2)
        assert one is not None
        assert two is not None
        kept = [torch.equal(one.tensors[k], two.tensors[k]) for k in one.tensors if k != "reply"]
        assert all(kept) if c in spoilt else name == "fedavg" or not all(kept)
        if c in spoilt:
            assert not two.tensors["reply"][:-4].any()  # a difference of zero, and no change of a kept row
            assert two.tensors["reply"][-4:-1].tolist() == one.tensors["reply"][-4:-1].tolist()  # the same work
