"""Sites that verify the server: they open the sums, replay the server's steps, and detect a server that cheats."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import Message
from pydantic import ValidationError
from safetensors.torch import load_file

from fedloom.data import Federation
from fedloom.engine.checks.notes import GLOBAL_DRAWS_NOTE
from fedloom.engine.state import initial_state
from fedloom.errors import ConfigError, Refused, Stop
from fedloom_sites.deploy import relay
from fedloom_sites.deploy import replay as replays
from fedloom_sites.deploy.audit import SENT_FILE, Audit
from fedloom_sites.deploy.ops import amend
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.replay import ModelReplay, make_server_job
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure import sites as server_sites
from fedloom_sites.deploy.secure import sums
from fedloom_sites.deploy.secure.member import SessionMember, check_maskable
from fedloom_sites.deploy.secure.opened import write_checked
from fedloom_sites.deploy.secure.protocol import SIGNATURE_BYTES, ProtocolBroken
from fedloom_sites.deploy.secure.terms import read_terms
from fedloom_sites.deploy.server import run as server_run
from fedloom_sites.deploy.settings import SecureSettings, Site
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.local_data import make_blank_federation
from fedloom_sites.deploy.site.state import latest_models
from tests.deploy.scene import FIRST, Scene, signing_key_of
from tests.deploy.sessions import arrays_of, kind_of, secured

VERIFIED = {"verify": True}
SHORT: dict[str, Any] = {"rounds": 2, "evaluate": {"every": 1}}
THREE: dict[str, Any] = {"rounds": 3, "evaluate": {"every": 2}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def rows_of(here: Scene) -> list[torch.Tensor]:
    """The models at the server and at the sites."""
    shared = [here.model()] if (here.server.results / "global.safetensors").exists() else []
    return shared + [load_file(one.path)["rows"] for site in here.sites for one in latest_models(site.state)]


def check_equal(one: Scene, other: Scene) -> None:
    """Two runs have the same models at the server and at every site, bit for bit."""
    for mine, theirs in zip(rows_of(one), rows_of(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def blank(site: Site) -> Federation:
    """No samples at a site."""
    return make_blank_federation(site.samples, torch.zeros(site.clients, 3, dtype=torch.long))


def alarms_of(here: Scene, c: int) -> list[str]:
    return [x["reason"] for x in Audit(here.sites[c].folder / SENT_FILE).lines() if x["what"] == "alarm"]


@pytest.mark.parametrize("name", ["flame", "fedopt"])
def test_an_honest_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    plain = secured(tmp_path / "plain", name, **SHORT)
    verified = secured(tmp_path / "verified", name, agreed=VERIFIED, **SHORT)
    assert plain.serve() is verified.serve() is Stop.DONE
    check_equal(plain, verified)
    assert not verified.audit("rejected")
    assert not any(alarms_of(verified, c) for c in range(5))


# -------------------------------------------------------------------------------------------- a server that cheats


def send_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server changes the numbers of the models that it sends by up to 1."""
    make = server_run.make_server_job

    def crafted(*args: Any) -> Any:
        job, server, forms = make(*args)
        honest = forms.write_down

        def write(down: Any, state: Any = None) -> bytes:
            return honest(type(down)(*(field + torch.linspace(0, 1, len(field)) for field in down)), state)

        monkeypatch.setattr(forms, "write_down", write)
        return job, server, forms

    monkeypatch.setattr(server_run, "make_server_job", crafted)


def swap_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server adds a number to the first integer of the masked vectors of site 4."""
    read, key = sums.read_vector, signing_key_of(4).public_key()

    def change(*args: Any) -> Any:
        signature, vector, counts, part = read(*args)
        if args[3] == key:
            vector = vector + np.eye(1, len(vector), dtype=np.uint64)[0] * np.uint64(1 << 33)
            part = part[:SIGNATURE_BYTES] + vector.tobytes() if part else part
        return signature, vector, counts, part

    monkeypatch.setattr(sums, "read_vector", change)


def claim_another_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server claims another sum than the sum of the vectors."""
    honest = sums.SecureSums._open

    def claim(self: Any, pending: Any) -> Any:
        total, *rest = honest(self, pending)
        return (total + np.eye(1, len(total), dtype=np.uint64)[0] * np.uint64(1 << 33), *rest)

    monkeypatch.setattr(sums.SecureSums, "_open", claim)
    monkeypatch.setattr(relay.Relays, "acknowledge", lambda *_: True)


def alter_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server claims another sum, and relays shares from which no site can open the true sum."""
    claim_another_sum(monkeypatch)
    honest = relay.Relays.complete

    def spoil(self: Any, t: int, answers: Any, *rest: Any) -> None:
        honest(self, t, {c: {o: bytes(32) for o in one} for c, one in answers.items()}, *rest)

    monkeypatch.setattr(relay.Relays, "complete", spoil)


def repeat_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server uses the sum of round 1 again in round 2, and relays it again."""
    honest, read, totals = sums.SecureSums._open, relay.Relays.read, list[Any]()

    def repeat(self: Any, pending: Any) -> Any:
        totals.append(honest(self, pending))
        return totals[0] if len(totals) == 2 else totals[-1]

    monkeypatch.setattr(sums.SecureSums, "_open", repeat)
    monkeypatch.setattr(relay.Relays, "read", lambda self, t: read(self, 1))


def lie_about_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server claims that the sum does not contain site 4."""
    honest, keep = server_sites.make_result, relay.Relays.keep_vectors

    def claim(job: Any, ids: Any, clients: Collection[int], *rest: Any) -> Any:
        return honest(job, ids, [c for c in clients if c != 4], *rest)

    def record(self: Any, t: int, nonce: bytes, terms: Any, adverts: bytes, signed: Any, vectors: Any) -> None:
        keep(self, t, nonce, terms, adverts, signed, {c: v for c, v in vectors.items() if c != 4})

    monkeypatch.setattr(server_sites, "make_result", claim)
    monkeypatch.setattr(relay.Relays, "keep_vectors", record)


CHEATS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    send_another_model: "the model that the server sent differs",
    swap_a_vector: "is not the vector that the client signed",
    claim_another_sum: "asks about sums that this site did not open",
    alter_a_share: "fits the committed value",
    repeat_a_round: "the relayed sum belongs to round 1",
    lie_about_survivors: "has not signed this sum",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_every_site_detects_a_server_that_cheats(
    cheat: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, honest: Scene
) -> None:
    """Without verify nobody notices another model; with it, every site raises an alarm and no site uses that model."""
    cheat(monkeypatch)
    plain = secured(tmp_path / "plain", "fedavg", **SHORT)
    assert plain.serve() is Stop.DONE
    assert any(float((a - b).abs().max()) > 1e-6 for a, b in zip(rows_of(plain)[1:], rows_of(honest)[1:], strict=True))
    assert not any(alarms_of(plain, c) for c in range(5))
    verified = secured(tmp_path / "verified", "fedavg", agreed=VERIFIED, **SHORT)
    stop = verified.serve()
    for c in range(5):
        assert any(CHEATS[cheat] in reason for reason in alarms_of(verified, c)), alarms_of(verified, c)
    if cheat is send_another_model:  # which nobody uses
        assert stop is Stop.DONE
        check_equal(honest, verified)
    else:
        assert stop is Stop.TOO_FEW
        assert any(CHEATS[cheat] in x["reason"] for x in verified.audit("rejected"))  # no code with samples wrote it


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A run of an honest server, without verify."""
    here = secured(tmp_path_factory.mktemp("honest"), "fedavg", **SHORT)
    assert here.serve() is Stop.DONE
    return here


def test_sites_that_are_shown_different_vectors_have_no_common_session(tmp_path: Path) -> None:
    """A dishonest site signs two vectors, and the server shows each to some sites: the next session finds it."""
    here, records = secured(tmp_path, "fedavg", agreed=VERIFIED, **SHORT), dict[int, tuple[bytes, list[bytes]]]()

    def look(node: int, message: Message, reply: Message) -> Message:
        if kind_of(message) == "relay":
            head = message.content["head"]
            records[int(head["round"])] = bytes(head["session"]), arrays_of(message)
        return reply

    assert here.serve(here.grid(look)) is Stop.DONE
    nonce, parts = records[1]
    terms, adverts, signed, vectors, shares = parts
    agreed = here.sites[0].secure
    assert agreed is not None
    bytes_of = secure.split_parts(vectors, len(vectors) // 5 - 4)
    name = secure.session_name(
        agreed.digest(here.server.fingerprint), 1, nonce, bytes.fromhex(read_terms(terms).download)
    )
    session = secure.build_session(name, agreed.threshold, secure.read_adverts(adverts))
    bound = secure.session_binding(session, read_terms(terms).digest, range(5))
    numbers = np.frombuffer(bytes_of[4][SIGNATURE_BYTES:], dtype="<u8") + np.uint64(1)
    second = signing_key_of(4).sign(relay.encode_vector_statement(bound, numbers.tobytes())) + numbers.tobytes()
    shown = {c: vectors if c < 3 else secure.join_parts(bytes_of | {4: second}) for c in range(5)}
    fresh = [site.with_(state=tmp_path / f"fresh-{site.client}") for site in here.sites]
    links, members = list[bytes](), list[SessionMember]()
    for c, site in enumerate(fresh):
        replay = ModelReplay(site, lambda: here.experiment, lambda _line: None)
        links.append(replay.add(1, nonce, [terms, adverts, signed, shown[c], shares]))  # accepted: all is signed
        before = bytes.fromhex(read_terms(terms).download)
        replay.check_link(2, links[c])
        replay.check_link(1, before)  # a server that has lost its newest checkpoint
        with pytest.raises(ProtocolBroken, match="sums that this site did not open"):
            replay.check_link(2, before)  # a server that leaves out an opened round
        members.append(SessionMember(site, signing_key_of(c), site.folder))
    assert len({*links}) == 2
    new = os.urandom(16)
    everyone = secure.write_adverts(
        [secure.read_adverts(one.keys(2, new, link))[0] for one, link in zip(members, links, strict=True)]
    )
    for one in members:
        with pytest.raises(ProtocolBroken, match="has opened other sums than this site"):
            one.shares(2, new, everyone)


def test_a_server_cannot_choose_among_the_opened_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No older model in a later round, no session whose models the memory of sums would not see, no reordered round."""
    here, records = secured(tmp_path, "fedavg", agreed=VERIFIED, rounds=1, evaluate={"every": 1}), dict[str, Any]()

    def look(node: int, message: Message, reply: Message) -> Message:
        if kind_of(message) in ("relay", "masked"):
            records[kind_of(message)] = bytes(message.content["head"]["session"]), arrays_of(message)
        return reply

    assert here.serve(here.grid(look)) is Stop.DONE
    nonce, parts = records["relay"]
    trains, (download, _, _, *before) = read_terms(parts[0]), records["masked"][1]
    replay = ModelReplay(here.sites[0], lambda: here.experiment, lambda _line: None)
    link, first = relay.Relays(here.server, here.experiment.methods[0].setting, 0).find_link(1).hex(), trains.download
    assert replay.compute_messages(trains, download, before) == (download, before)
    alone = trains.with_(models=(), scored=-1)
    scores = alone.with_(trains=False, download="", scored=1, common=True)
    model = replay.compute_messages(scores.with_(models=(link,)), None, before)[1]
    assert len(model) == len(before) == 1
    assert model != before
    for terms, sent, scored in (
        (scores.with_(models=(first,)), None, model),  # the model before the round, as the model after it
        (scores, None, model),
        (scores, None, []),
        (trains.with_(download=""), download, before),
        (trains.with_(models=()), download, before),
        (trains.with_(scored=1), download, before),
        (alone.with_(round=2), download, []),  # which leaves out round 1
        (alone.with_(download=link), download, []),
    ):
        with pytest.raises(ProtocolBroken, match="the terms must"):
            replay.compute_messages(terms, sent, scored)
    unopened, states = here.sites[0].with_(state=tmp_path / "unopened"), list[Any]()

    def begin(*args: Any) -> Any:
        states.append(initial_state(*args))
        return states[-1]

    monkeypatch.setattr(replays, "initial_state", begin)
    other = ModelReplay(unopened, lambda: here.experiment, lambda _line: None)
    for sizes in (trains.sizes, (trains.sizes[0], *trains.sizes[:-1])):  # whose initial state is never the other's
        other.compute_messages(alone.with_(sizes=sizes), download, [])
    assert len(states) == 2
    links = here.sites[0].folder / "verified" / relay.LINKS_FILE
    write_checked(links, {"links": {"2": first}})
    with pytest.raises(ProtocolBroken, match="which is already opened"):
        replay.add(1, nonce, parts)
    monkeypatch.setattr(amend, "server_file", lambda folder: folder)
    monkeypatch.setattr(amend, "read_server", lambda _folder: here.server)
    with pytest.raises(ConfigError, match="no site could open these rounds"):
        amend.rotate(tmp_path, "site-1")


class Relayed(NamedTuple):
    """A run of two rounds, and the nonce and arrays that its server relays of each round."""

    here: Scene
    rounds: dict[int, tuple[bytes, list[bytes]]]


def relay_rounds(folder: Path, **changes: Any) -> Relayed:
    here, rounds = secured(folder, "fedavg", 4, agreed=VERIFIED, **SHORT, **changes), dict[int, Any]()

    def look(node: int, message: Message, reply: Message) -> Message:
        if kind_of(message) == "relay":
            rounds[int(message.content["head"]["round"])] = (
                bytes(message.content["head"]["session"]),
                arrays_of(message),
            )
        return reply

    assert here.serve(here.grid(look)) is Stop.DONE
    return Relayed(here, rounds)


@pytest.fixture(scope="module")
def relayed(tmp_path_factory: pytest.TempPathFactory) -> Relayed:
    return relay_rounds(tmp_path_factory.mktemp("relayed"))


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Relayed:
    """Another experiment of the same sites on the same data, whose arrays have the same lengths."""
    return relay_rounds(tmp_path_factory.mktemp("other"), local={"lr": 0.01, "epochs": 1, "batch_size": 200})


def edit(place: int, change: Callable[[dict[int, bytes]], dict[int, bytes]]) -> Callable[[Any, Any], list[bytes]]:
    """Return a forgery that changes the parts of the sites in one array of a record."""

    def forge(own: list[bytes], _other: list[bytes]) -> list[bytes]:
        head = own[place][:2] if place == 4 else b""
        rest = own[place][len(head) :]
        parts = change(secure.split_parts(rest, len(rest) // 5 - 4))
        return [*own[:place], head + secure.join_parts(parts), *own[place + 1 :]]

    return forge


def from_other(*places: int) -> Callable[[Any, Any], list[bytes]]:
    """Return a forgery that takes arrays of another record."""
    return lambda own, other: [(other if k in places else own)[k] for k in range(5)]


FORGERIES: dict[str, tuple[Callable[[Any, Any], list[bytes]], str]] = {
    "vectors of the other round": (from_other(3), "is not the vector that the client signed"),
    "vectors and shares of the other round": (from_other(3, 4), "is not the vector that the client signed"),
    "shares of the other round": (from_other(4), "fits the committed value"),
    "keys of the other round": (from_other(1), "not signed by that client for this session"),
    "consents of the other round": (from_other(2), "has not signed this sum"),
    "terms of the other round": (from_other(0), "the relayed sum belongs to round"),
    "all arrays of the other round": (from_other(*range(5)), "the relayed sum belongs to round"),
    "two vectors exchanged": (edit(3, lambda v: v | {0: v[1], 1: v[0]}), "is not the vector that the client signed"),
    "a site more": (edit(2, lambda v: v | {5: v[4]}), "contains sites that did not share masks"),
    "a site less": (edit(2, lambda v: {c: v[c] for c in range(4)}), "has not signed this sum"),
    "a vector less": (edit(3, lambda v: {c: v[c] for c in range(4)}), "do not belong to the sites that"),
    "consents of three sites": (edit(2, lambda v: v | dict.fromkeys((3, 4), bytes(64))), "only 3 sites have signed"),
    "shares of three sites": (edit(4, lambda v: {c: v[c] for c in range(3)}), "only 3 sites sent their shares"),
    "shares of one site for all": (edit(4, lambda v: dict.fromkeys(v, v[0])), "fits the committed value"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_site_opens_a_forged_record(forgery: str, relayed: Relayed, tmp_path: Path) -> None:
    """Each forgery is made of arrays that the sites have signed; the true records are opened after it."""
    forge, sentence = FORGERIES[forgery]
    (nonce, own), (after, other) = relayed.rounds[1], relayed.rounds[2]
    replay = ModelReplay(
        relayed.here.sites[0].with_(state=tmp_path), lambda: relayed.here.experiment, lambda _line: None
    )
    with pytest.raises(ProtocolBroken, match=sentence):
        replay.add(1, nonce, forge(own, other))
    assert replay.add(1, nonce, own)
    with pytest.raises(ProtocolBroken, match=sentence):
        replay.add(2, after, forge(other, own))
    assert replay.add(2, after, other)


def test_no_site_opens_a_record_of_another_agreement(relayed: Relayed, other_run: Relayed, tmp_path: Path) -> None:
    """Another experiment, another threshold, other names, and two keys exchanged."""
    site, foreign = relayed.here.sites[0], other_run.rounds[1]
    agreed = site.secure
    assert agreed is not None
    keys = agreed.keys
    for k, (value, (nonce, parts)) in enumerate(
        (
            (agreed, foreign),
            (agreed.with_(threshold=3), relayed.rounds[1]),
            (agreed.with_(names=("slte-0", *agreed.names[1:])), relayed.rounds[1]),
            (agreed.with_(keys=(keys[1], keys[0], *keys[2:])), relayed.rounds[1]),
        )
    ):
        here = site.with_(state=tmp_path / f"{k}", secure=value)
        replay = ModelReplay(here, lambda: relayed.here.experiment, lambda _line: None)
        with pytest.raises(ProtocolBroken, match="not signed by that client for this session"):
            replay.add(1, nonce, parts)
    for name in ("s\u0131te-0", "\u0455ite-0", "site-0\u200b", "site-0\n", "\uff53ite-0"):  # dotless i, Cyrillic s
        with pytest.raises(ValidationError, match="names"):
            SecureSettings.model_validate(agreed.model_dump() | {"names": (name, *agreed.names[1:])})


# ------------------------------------------------------------------------------------------------ faults and absence


class Killed(BaseException):
    """The server's process ends."""


def kill(node: int, message: Message, reply: Message, *, stop: tuple[str, int, int]) -> Message:
    """End the server at the reply of a client to a message of a kind and round."""
    if (kind_of(message), int(message.content["head"]["round"]), node - FIRST) == stop:
        raise Killed
    return reply


def test_a_server_that_is_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, honest: Scene) -> None:
    """Killed before and after each kind of message of round 2, server and sites continue with the same bits."""
    here, discard = secured(tmp_path, "fedavg", agreed=VERIFIED, **SHORT), relay.delete_files

    def cut(*paths: Path) -> None:
        discard(*paths[:1])
        if paths:
            raise Killed

    for kind, t in (("relay", 1), ("keys", 2), ("masked", 2), ("count", 2), ("unmask", 2)):
        for client in (1, 4):
            with pytest.raises(Killed):
                here.serve(here.grid(partial(kill, stop=(kind, t, client))))
    with monkeypatch.context() as patch:  # after the first of two deletions
        patch.setattr(relay, "delete_files", cut)
        with pytest.raises(Killed):
            here.serve()
    assert here.serve() is Stop.DONE
    check_equal(honest, here)
    assert not any(alarms_of(here, c) for c in range(5))


def test_a_site_that_was_away_replays_the_missing_rounds(tmp_path: Path) -> None:
    """Site 0 drops out within round 2 and misses round 3; when it is back, it replays both rounds and takes part."""

    def away(here: Scene) -> Any:
        newest = [0]

        def fault(node: int, message: Message, reply: Message) -> Message | None:
            kind, t = kind_of(message), int(message.content["head"]["round"])
            if kind == "unmask":
                newest[0] = max(newest[0], t + 1)
            is_away = newest[0] == 3 or (newest[0] == 2 and kind == "masked")
            return None if node == FIRST and is_away and kind not in ("hello", "unmask") else reply

        return here.grid(fault)

    longer = {**SHORT, "rounds": 5, "evaluate": {"every": 5}}
    plain = secured(tmp_path / "plain", "scaffold", **longer)
    verified = secured(tmp_path / "verified", "scaffold", agreed=VERIFIED, **longer)
    assert plain.serve(away(plain)) is Stop.DONE
    assert verified.serve(away(verified)) is Stop.DONE
    assert len(verified.audit("other sites")) == len(plain.audit("other sites")) == 2
    check_equal(plain, verified)
    assert not any(alarms_of(verified, c) for c in range(5))


def test_a_round_that_is_given_up_does_not_extend_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sums.SecureSums._open

    def fail(self: Any, pending: Any) -> Any:
        if pending.round == 2:
            raise ProtocolBroken("no shares")
        return honest(self, pending)

    monkeypatch.setattr(sums.SecureSums, "_open", fail)
    plain = secured(tmp_path / "plain", "fedavg", **THREE)
    verified = secured(tmp_path / "verified", "fedavg", agreed=VERIFIED, **THREE)
    assert plain.serve() is verified.serve() is Stop.DONE
    assert len(verified.audit("given up")) == 1
    check_equal(plain, verified)
    assert not any(alarms_of(verified, c) for c in range(5))
    assert {p.name for p in (verified.server.checkpoints / "relayed").iterdir()} == {
        "links.json", "round-000003.vectors", "round-000003.shares"
    }  # fmt: skip


def test_a_site_that_has_lost_its_chain_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    here = secured(tmp_path, "fedavg", agreed=VERIFIED, **THREE)
    with pytest.raises(Killed):
        here.serve(here.grid(partial(kill, stop=("masked", 3, 1))))
    shutil.rmtree(here.sites[0].folder / "verified")
    assert here.serve() is Stop.DONE
    assert any("Restore the site's folder" in x["reason"] for x in here.audit("rejected", site="site-0"))
    [line] = here.audit("other sites")
    assert "without site-0" in line["reason"]


def test_what_cannot_be_verified_is_refused_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = secured(tmp_path, "fedavg", aggregator={"kind": "private-mean", "clip": 1.0, "sigma": 1.0, "delta": 1e-5})
    setting = noisy.experiment.methods[0].setting
    check_maskable(setting)
    with pytest.raises(Refused, match="with a delta") as caught:
        check_maskable(setting, verify=True)
    assert caught.value.rule == "verify-needs-scores"
    agreed = noisy.server.secure
    assert agreed is not None
    with pytest.raises(ValidationError, match="verify needs scores = 'masked'"):
        SecureSettings.model_validate(agreed.model_dump() | {"scores": "per-site", "verify": True})
    site = noisy.sites[0].model_dump() | {"secure": agreed.with_(verify=True), "epsilon": 1.0}
    with pytest.raises(ValidationError, match="epsilon needs uploads with noise"):
        Site.model_validate(site)
    with pytest.raises(ConfigError, match="--verify needs secure aggregation"):
        plan_deployment(noisy.experiment, verify=True)
    idle = secured(tmp_path / "idle", "fedavg", agreed=VERIFIED, **SHORT)
    with pytest.raises(Refused, match="every site needs training samples, but client 2 has none"):
        idle.serve(idle.grid(clients=[Client(s, None if s.client != 2 else blank(s)) for s in idle.sites]))
    small = secured(tmp_path / "small", "fedavg", agreed=VERIFIED, **SHORT)
    with pytest.raises(Refused, match="Raise message_limit"):
        small.serve(message_limit=20_000)
    assert not small.audit("accepted", kind="keys")

    def make(*args: Any) -> Any:
        job, *rest = make_server_job(*args)
        return replace(job, notes=(GLOBAL_DRAWS_NOTE,)), *rest

    monkeypatch.setattr(server_run, "make_server_job", make)
    with pytest.raises(Refused, match="every site repeats the server's step, but server code draws"):
        small.serve()


def test_experiments_with_the_same_initial_model_have_the_same_first_link(tmp_path: Path) -> None:
    """So all sums for this model cover the same sites, as without verify."""
    one, other = secured(tmp_path / "one", "fedavg"), secured(tmp_path / "other", "fedprox", name="other", rounds=9)
    third = secured(tmp_path / "third", "fedavg", seeds=[1])
    links = [relay.compute_first_link(here.server, here.experiment.methods[0].setting) for here in (one, other, third)]
    assert one.server.fingerprint != other.server.fingerprint
    assert links[0] == links[1] != links[2]
    started = [here.server.with_(start="a" * 64) for here in (one, third)]  # which leaves nothing to the seed
    links = [
        relay.compute_first_link(server, here.experiment.methods[0].setting)
        for server, here in zip(started, (one, third), strict=True)
    ]
    assert links[0] == links[1] != relay.compute_first_link(one.server, one.experiment.methods[0].setting)
